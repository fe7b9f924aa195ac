"""Every row of the catalogue of faults has a test, or a reason for having none, and a planted fault of its own."""

import ast
import collections
from pathlib import Path

import faults
from catalogue import ROWS

TESTS = Path(__file__).parents[1]


def test_every_row_has_a_test_or_a_reason():
    assert list(ROWS) == list(range(1, 76))
    names: dict[str, set[str]] = {}
    for number, row in ROWS.items():
        assert row.tests or row.open, number
        for test in row.tests:
            file, _, name = test.partition("::")
            if file not in names:
                tree = ast.parse((TESTS / file).read_text())
                names[file] = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
            assert name.startswith("test_"), (number, test)
            assert name.partition("[")[0] in names[file], (number, test)


def test_every_row_has_a_planted_fault_of_its_own():
    named = [name for row in ROWS.values() for name in row.mutants]
    assert [number for number, row in ROWS.items() if not row.mutants] == []
    assert [name for name, times in collections.Counter(named).items() if times > 1] == []
    known = collections.Counter(fault.name for fault in faults.faults())
    assert [name for name in named if known[name] != 1] == []
