"""Programs between processes fail with each fault planted in the engine for them."""

import pytest

from faults import engine_mutants
from harness.ranks import RankError, RanksHung
from multirank import test_disagreements, test_eager, test_engine, test_mail, test_metadata, test_one_pass

pytestmark = pytest.mark.usefixtures("engine")

HOMES = (test_disagreements, test_eager, test_engine, test_mail, test_metadata, test_one_pass)
MUTANTS = engine_mutants.CALLS | engine_mutants.MAIL | engine_mutants.EAGER


def on_mutant(mpi, changes, program, arguments):
    with engine_mutants.planted(changes):
        return program(mpi, *arguments)


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(ranks, name):
    changes, body, arguments, size = MUTANTS[name]
    engine_mutants.changed(changes)  # raises unless the mutant can be planted
    program = next(vars(home)[body] for home in HOMES if body in vars(home))
    with pytest.raises((RankError, RanksHung)):
        ranks(on_mutant, size, changes, program, arguments, timeout=20)
