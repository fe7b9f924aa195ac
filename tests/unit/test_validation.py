"""docs/validation.md has the rows that scripts/validation.py computes."""

import pytest

import validation

pytestmark = pytest.mark.usefixtures("own_algorithms")
PAGE = validation.PAGE.read_text()


@pytest.mark.parametrize("case", [case for case in validation.cases() if case.is_quick], ids=lambda case: case.name)
def test_a_quick_row_of_the_page_is_what_is_computed(case):
    assert validation.row_of(case) in validation.standing(PAGE)[validation.PARTS[case.part].title]


def test_the_page_has_every_case_once_and_nothing_else():
    rows = validation.standing(PAGE)
    assert [*rows] == [part.title for part in validation.PARTS.values()]
    for name, part in validation.PARTS.items():
        names = [f"| {case.name}" for case in validation.cases() if case.part == name]
        assert not names or [row.split(" | ")[0] for row in rows[part.title]] == names
    assert "not yet computed" not in PAGE


def test_the_script_computes_the_rows_asked_for_and_keeps_the_others(tmp_path, monkeypatch, capsys):
    copy = tmp_path / "validation.md"
    copy.write_text(PAGE.replace("| dgx1, bound | 171.429 (1200/7) | 171.429", "| dgx1, bound | 171.429 (1200/7) | 1"))
    monkeypatch.setattr(validation, "PAGE", copy)
    monkeypatch.setattr("sys.argv", ["validation", "-k", "dgx1, bound"])
    assert validation.main() == 0
    assert capsys.readouterr().out.count("\n") == 1
    assert copy.read_text() == PAGE
