"""The repository's Python files, each parsed once in a process for all tests that read the source, and its pages."""

import ast
import functools
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpucoll"
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name != "gallery"]
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", PACKAGE / "MIGRATING.md", *PAGES]  # for readers
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@functools.cache
def files(*folders):
    """Return the Python files of folders of the repository, in order."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    """Return all nodes of a file's syntax tree, as `ast.walk` does."""
    return tuple(ast.walk(tree_of(path)))


def docstring_lines(tree):
    """Return the numbers of all lines that belong to docstrings."""
    places = (node.body[0] for node in ast.walk(tree)
              if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
              and ast.get_docstring(node, clean=False) is not None)
    return {line for place in places for line in range(place.lineno, place.end_lineno + 1)}


def code_lines(text):
    """Return the number of lines with a token that is neither a comment nor part of a docstring."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(ast.parse(text)))
