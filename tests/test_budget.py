"""The budgets of code lines in docs/budgets.md: no room grows beyond its budget, and no sum of rooms beyond its own."""

import os
import re
from collections import Counter
from pathlib import Path

from harness.sources import ROOT, code_lines

TABLE = ROOT / "docs" / "budgets.md"
FOLDERS = ("gpucoll", "tests", "bench", "scripts")
CPP = ("kernels/emulation",)  # rooms of C++ with a budget
BESIDE_THE_CORE = re.compile(r"gpucoll/(dask|distributed|mpi|ray|torch|block_scaled|lab|precheck|training|calibration|"
                             r"cli|doctor)")
EMULATION = "gpucoll/emulation"  # has a sum of its own
ROOM = re.compile(r"^\| `([\w/]+)` \| ([\d,]+) \| ([^|]+) \|$", re.MULTILINE)
SUM = re.compile(r"^\| ([\w ]+) \| ([\d,]+) \| ([\d,]+) \| ([^|]+) \|$", re.MULTILINE)


def cpp_lines(text):
    """Return the number of lines of C++ that are neither empty nor only a comment."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.lstrip().startswith("//"))


def is_command(path):
    """Return whether a file without an ending is a program in Python."""
    return not path.suffix and re.match(rb"#!.*python", path.read_bytes()[:60]) is not None


def room_of(path):
    """Return the room of a file: a package of gpucoll/, gpucoll/ itself, or another folder; each executor is a room."""
    folder, *rest = path.relative_to(ROOT).parts
    if not path.suffix:
        return "commands"
    deep = 2 if rest[0] == "executors" and len(rest) > 2 else 1
    return "/".join((folder, *rest[:deep])) if folder == "gpucoll" and len(rest) > 1 else folder


def spent():
    """Return the code lines of each room."""
    lines = Counter()
    for folder in FOLDERS:
        for place, below, names in os.walk(ROOT / folder):
            below[:] = [name for name in below if name != "__pycache__" and not name.startswith(".")]
            for path in (Path(place, name) for name in names):
                if path.suffix == ".py" or is_command(path):
                    lines[room_of(path)] += code_lines(path.read_text())
    for room in CPP:
        lines[room] = sum(cpp_lines(path.read_text()) for path in (ROOT / room).iterdir())
    return lines


def number(text):
    return int(text.replace(",", ""))


def budgets():
    return {name: number(lines) for name, lines, _ in ROOM.findall(TABLE.read_text())}


def test_code_lines_are_counted_by_tokens():
    """A string of two lines, and a function of four: no docstrings, comments or empty lines inside of parentheses."""
    assert code_lines('"""A docstring\nof two lines."""\n\n# A comment.\nx = """a string,\nnot a docstring"""  # 2\n\n'
                      'def f(a,\n      b):\n    """Return."""\n\n    return (a +\n\n            b)\n') == 6


def test_lines_of_cpp_are_counted_without_comments():
    assert cpp_lines("// A comment.\n\nint x = 1;  // 1\n    // another one\n#define Y 2\n") == 2


def test_every_room_keeps_its_budget():
    allowed, lines = budgets(), spent()
    assert {*lines} == {*allowed}, "docs/budgets.md has a row for each room"
    over = {name: (lines[name], allowed[name]) for name in lines if lines[name] > allowed[name]}
    assert not over, f"code lines and budgets, docs/budgets.md: {over}"


def test_the_rooms_of_a_sum_are_allowed_no_more():
    allowed = budgets()
    package = [name for name in allowed if name.startswith("gpucoll") and name != EMULATION]
    rooms = {"all of gpucoll": package, "core": [name for name in package if not BESIDE_THE_CORE.fullmatch(name)],
             "beside the core": [name for name in package if BESIDE_THE_CORE.fullmatch(name)]}
    sums = {name: (number(lines), number(aim), text) for name, lines, aim, text in SUM.findall(TABLE.read_text())}
    assert len(sums) == 10
    for name, (lines, aim, text) in sums.items():
        parts = rooms.get(name) or re.findall(r"`([\w/]+)`", text)
        assert sum(allowed[part] for part in parts) <= lines, name
        assert lines >= aim, f"{name}: the aim is reached; the sum can fall to it"


def test_every_row_has_a_reason():
    assert all(len(reason.split()) >= 3 for *_, reason in ROOM.findall(TABLE.read_text()))
