"""Guards of the prose: nouns as subjects in docstrings and documents, reasons in the hardest files.

A stranger reads a page once and can answer a question about it: that is the aim, and no test measures it. NumPy's
docstrings have 2.1 % pronouns and relative words, mpi4py's 1.1 %.
"""

import ast
import re

import pytest

from harness.sources import ROOT, nodes_of

PRONOUNS = frozenset(
    "who whom whose which what whatever whoever whichever that those such one ones there it its they them their theirs "
    "itself themselves he she him her his".split())
MOST, MOST_OF_A_FILE, MOST_WHO = 0.05, 0.07, 0.0003
SHORT = 100  # words; in a shorter file single words decide
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
HARD = [*(f"kernels/{name}" for name in (
            "engine/node.h", "engine/waits.h", "engine/walker.h", "engine/mail.h", "binding/engine.cc",
            "binding/calls.h", "binding/plans.h", "binding/messages.h", "device/walk.h", "device/peer.h",
            "device/peer_packets.cu", "device/peer_ll128.cu", "device/peer_shots.cu", "device/peer_steps.cu")),
        *(f"gpucoll/{name}.py" for name in (
            "plan/__init__", "executors/engine/instructions", "executors/engine/plans", "executors/engine/neighbours",
            "progress/waits", "health/guard", "health/preflight", "health/remote",
            "transport/connections", "communicator/lifecycle"))]
EXAMPLES = re.compile(r"```.*?```|^\s*(?:>>>|\.\.\.).*?$|\]\([^)]*\)", re.DOTALL | re.MULTILINE)


def docstrings(path):
    """Yield the docstrings of a Python file."""
    for node in nodes_of(path):
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def words_of(text):
    """Return the words of a text without its examples, names in backticks as single words."""
    return re.findall(r"[a-z][a-z'-]*", re.sub("`[^`]*`", "code", EXAMPLES.sub(" ", text)).lower())


def prose(folder):
    """Return the words of each file of a folder, of docstrings or of a document."""
    paths = [path for pattern in ("*.py", "*.md") for path in (ROOT / folder).rglob(pattern)]
    return {path: [word for text in (docstrings(path) if path.suffix == ".py" else [path.read_text()])
                   for word in words_of(text)] for path in paths}


def share(words):
    """Return the share of pronouns and relative words, and of "who"."""
    return sum(word in PRONOUNS for word in words) / len(words), words.count("who") / len(words)


@pytest.mark.parametrize("folder", ["gpucoll", "docs", "bench", "scripts", "tests"])
def test_subjects_are_nouns(folder):
    files = prose(folder)
    pronouns, who = share([word for words in files.values() for word in words])
    assert pronouns <= MOST
    assert who <= MOST_WHO
    assert {path.name: found for path, words in files.items()
            if len(words) > SHORT and (found := share(words)[0]) > MOST_OF_A_FILE} == {}


@pytest.mark.parametrize("path", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_subjects_of_documents_are_nouns(path):
    assert share(words_of((ROOT / path).read_text()))[0] <= MOST


@pytest.mark.parametrize("path", HARD)
def test_hard_files_give_reasons(path):
    lines = (ROOT / path).read_text().splitlines()
    comments = [line for line in lines if re.match(r"\s*(?://|# )", line)]
    assert len(comments) >= 5 * len(lines) / 100
