"""`gpucoll.bench.neighbours`: both contestants run the same collective, and the summary states the ratios."""

import numpy
import pytest
from gpucoll.bench import neighbours

from gpucoll import Communicator


def same_results(mpi, name, nbytes):
    """Return the arrays left by each contestant's call on this rank."""
    with Communicator.from_mpi(mpi) as comm:
        found = []
        for call in neighbours.contestants(comm, name, nbytes):
            call()
            rows = [cell.cell_contents for cell in call.__closure__]
            found.append([row.tolist() for row in rows if isinstance(row, numpy.ndarray)])
        return found


@pytest.mark.parametrize("name", neighbours.COLLECTIVES)
def test_contestants_do_the_same(ranks, name):
    for ours, mpi in ranks(same_results, 2, name, 64):
        assert ours == mpi


def test_summary():
    rows = [neighbours.Row(1, "scan", 8, 2.0, 1.0), neighbours.Row(1, "scan", 4096, 1.0, 8.0),
            neighbours.Row(2, "scan", 8, 1.0, 3.0)]
    assert neighbours.summary(rows) == ["# 1 neighbours: geometric mean 2.00, least 0.50",
                                        "# 2 neighbours: geometric mean 3.00, least 3.00"]
