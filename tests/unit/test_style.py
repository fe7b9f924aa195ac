"""The house's budgets, lint, types and layers."""

import ast
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("gpucoll", "bench", "kernels", "scripts")
DOUBLED = ("Work",)  # torch's handle is another than ours: its `wait` is true, its `result` is called
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def functions(node):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from functions(child)


def lengths():
    for path in SOURCES:
        for function in functions(ast.parse(path.read_text())):
            body = function.body[bool(ast.get_docstring(function)):] or function.body
            yield body[-1].end_lineno - body[0].lineno + 1, f"{path.name}:{function.name}"


def code_lines(path):
    text = path.read_text()
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    skipped = {line for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)
               for line in range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return sum(bool(line.strip()) for number, line in enumerate(text.splitlines(), 1) if number not in skipped)


def test_functions_are_short():
    found = sorted(lengths())
    lines = [length for length, _ in found]
    assert [name for length, name in found if length > 50] == []
    assert statistics.median(lines) <= 7


def test_files_are_short():
    assert [path for path in SOURCES if code_lines(path) > 300] == []
    tests = (ROOT / "tests").rglob("*.py")
    assert [path.name for path in tests if len(path.read_text().splitlines()) > 400] == []


def test_no_two_public_classes_have_one_name():
    trees = [ast.parse(path.read_text()) for path in (ROOT / "gpucoll").rglob("*.py")]
    homes = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    public = {name: count for name, count in homes.items() if not name.startswith("_")}
    assert [name for name, count in public.items() if count > 1 and name not in DOUBLED] == []


def tool(*command):
    path = Path(sys.executable).with_name(command[0])
    if not path.exists():
        pytest.skip(f"{command[0]} is not installed beside this Python: pip install gpucoll[test]")
    job = subprocess.run([path, *command[1:]], cwd=ROOT, capture_output=True, text=True,
                         env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"})
    assert job.returncode == 0, job.stdout + job.stderr


@pytest.mark.parametrize("command", ["ruff check .", "lint-imports", pytest.param("mypy", marks=pytest.mark.slow)])
def test_lint_types_and_layers(command):
    tool(*command.split())
