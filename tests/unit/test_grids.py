"""Samples of large grids have the stated size and all promised values, and are the same in every session."""

import itertools

import pytest

from grids import batches, naming, sampled

GRID = list(itertools.product(range(8), "abc", (True, False)))


def test_a_sample_has_the_stated_size_and_every_value_and_is_the_same_each_time():
    cases = sampled(GRID, keep=12, seed=1)
    kept = [case.values for case in cases if not case.marks]
    assert [case.values for case in cases] == GRID
    assert len(kept) == 12
    assert [set(values) for values in zip(*kept, strict=True)] == [set(range(8)), set("abc"), {True, False}]
    assert kept == [case.values for case in sampled(GRID, keep=12, seed=1) if not case.marks]
    assert kept != [case.values for case in sampled(GRID, keep=12, seed=2) if not case.marks]


def test_batches_hold_every_case_once():
    found = batches(GRID, 5, keep=12, seed=1)
    lists = [case.values[0] for case in found]
    assert sorted(itertools.chain(*lists)) == sorted(GRID)
    assert max(map(len, lists)) == 5
    often = [case for one in found if not one.marks for case in one.values[0]]
    assert often == [case.values for case in sampled(GRID, keep=12, seed=1) if not case.marks]


def test_an_error_names_its_case():
    with pytest.raises(ZeroDivisionError) as found, naming(("ring", 3)):
        _ = 1 / 0
    assert found.value.__notes__ == ["in case ('ring', 3)"]
