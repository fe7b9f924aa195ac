"""Programs between processes fail with each fault planted in the engine for them."""

import ast

import pytest

from faults import tables
from harness import extension
from harness.ranks import RankError, RanksHung
from multirank import test_disagreements, test_eager, test_engine, test_mail, test_metadata, test_one_pass

HOMES = (test_disagreements, test_eager, test_engine, test_mail, test_metadata, test_one_pass)
MUTANTS = tables.of_kinds("engine", "mail", "eager")


def on_mutant(mpi, changes, program, arguments):
    with extension.serving(extension.built(extension.changed(changes))):
        return program(mpi, *arguments)


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(ranks, name):
    changes, (body, _, given) = MUTANTS[name].changes, MUTANTS[name].caught.partition("(")
    size, *arguments = ast.literal_eval(f"({given[:-1]},)")
    extension.changed(changes)  # raises unless the mutant can be planted
    program = next(vars(home)[body] for home in HOMES if body in vars(home))
    with pytest.raises((RankError, RanksHung)):
        ranks(on_mutant, size, changes, program, arguments, timeout=20)
