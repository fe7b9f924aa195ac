"""The repository's Python files, each parsed once in a process for all tests that read the source."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpucoll"


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
