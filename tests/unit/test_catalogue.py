"""Every row of the catalogue of faults has a test, or says why it has none."""

import ast
from pathlib import Path

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
            assert name in names[file], (number, test)
