"""Planted faults: each text to be changed stands in the source exactly once; rows of the catalogue and their tests."""

import ast
import functools
import re
from pathlib import Path

import pytest

from faults import tables
from peer import mutants

TESTS = Path(tables.__file__).parents[1]


@functools.cache
def names_of(file):
    """Return the names of the tests in a file; none for a file that is not there."""
    tree = ast.parse((TESTS / file).read_text() if (TESTS / file).exists() else "")
    return {one.name for one in tree.body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_")}


def missing(tests):
    """Return the tests, as `file::name[case]` below tests/, that are not there."""
    return [test for test in tests
            if test.partition("::")[2].partition("[")[0] not in names_of(test.partition("::")[0])]


def test_all_faults_can_be_planted():
    assert list(tables.misplaced(tables.planted())) == []
    assert tables.written(tables.planted()) == tables.PLANTED.read_text()


def test_the_recorded_catchers_are_there():
    assert missing(fault.caught for fault in tables.planted() if "::" in fault.caught) == []


def test_every_row_of_the_catalogue_has_tests_or_a_reason_and_a_fault():
    rows = tables.rows()
    assert list(rows) == list(range(1, 76))
    assert all(rows.values())
    assert missing(test for row in rows.values() for test in tables.tests_of(row)) == []
    assert {tables.row_of(fault) for fault in tables.planted()} - {0} == {*rows}


def test_the_sources_of_every_check_of_peer_kernels_are_known():
    assert {*map(mutants.check_of, mutants.MUTANTS.values())} <= mutants.NEEDED.keys()


def test_no_two_faults_of_a_kind_have_one_name():
    names = [(fault.kind, fault.name) for fault in tables.planted()]
    assert len({*names}) == len(names) > 280


@pytest.mark.parametrize(("old", "new", "said"), [
    ("static const uint64_t PATIENCE_", "", "stands 0 times in kernels/"),
    ("uint64_t", "", "times in kernels/"),
    ("static const uint64_t COPY_BYTES", "static const uint64_t COPY_BYTES", "nothing")])
def test_a_text_that_is_not_there_once_is_told(old, new, said):
    line, = tables.misplaced([tables.Fault("engine", "planted", ((old, new),), "kernels/engine/memory.h")])
    assert line.startswith("engine: planted: ")
    assert said in line


def test_the_models_have_the_macros_that_plant_their_faults():
    for words, _ in mutants.MODELS:
        model, *options = words.split()
        text = (TESTS / "spin" / model).read_text()
        for macro in (option.removeprefix("-D").partition("=")[0] for option in options):
            assert re.search(rf"#if(n?def| defined).*\b{macro}\b", text), (model, macro)
