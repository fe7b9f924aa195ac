"""Planted faults: each text to be changed stands in the source exactly once."""

import re
from pathlib import Path

import pytest

import faults
from peer import mutants

SPIN = Path(faults.__file__).with_name("spin")


def test_all_faults_can_be_planted():
    assert list(faults.misplaced(faults.faults())) == []


def test_the_sources_of_every_check_of_peer_kernels_are_known():
    assert {mutant.check for mutant in mutants.MUTANTS.values()} <= mutants.NEEDED.keys()


def test_no_two_faults_of_a_kind_have_one_name():
    names = [(fault.kind, fault.name) for fault in faults.faults()]
    assert len({*names}) == len(names) > 280


@pytest.mark.parametrize(("old", "new", "said"), [
    ("static const uint64_t PATIENCE_", "", "stands 0 times in kernels/"),
    ("#pragma once", "", "times in kernels/"),
    ("static const uint64_t COPY_BYTES", "static const uint64_t COPY_BYTES", "nothing")])
def test_a_text_that_is_not_there_once_is_told(old, new, said):
    line, = faults.misplaced([faults.Fault("engine", "planted", ((old, new),))])
    assert line.startswith("engine: planted: ")
    assert said in line


def test_the_models_have_the_macros_that_plant_their_faults():
    for words, _ in mutants.MODELS:
        model, *options = words.split()
        text = (SPIN / model).read_text()
        for macro in (option.removeprefix("-D").partition("=")[0] for option in options):
            assert re.search(rf"#if(n?def| defined).*\b{macro}\b", text), (model, macro)
