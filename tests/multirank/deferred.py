"""The deferred check on a grid of cases: rank 1 makes another call than the other ranks, and all ranks raise soon."""

import itertools

import numpy

import gpucoll as gc
from gpucoll.core.collectives import COLLECTIVES
from harness.grids import generator
from harness.pace import seconds
from multirank.disagreements import CULPRIT, LENGTHS, REFUSALS, Case, cases, made

TOLD = (gc.MismatchError, gc.PeerError, gc.RevokedError)
DEADLINE = 20  # seconds on the reference machine: every rank must learn of the mismatch earlier


def cells(names=tuple(COLLECTIVES)):
    """Yield all cells of the grid: a `Case`, the number of elements, and another algorithm for the culprit."""
    for name in names:
        algorithms = ["auto", *[*gc.algorithms(name, size=3, op="sum", dtype="float64")][:2]]
        for case, count in itertools.product(cases(name, algorithms), LENGTHS.values()):
            yield case, count, next(one for one in ("linear", *algorithms[::-1]) if one not in (case.algorithm, "auto"))


def outcomes(comm, calls):
    """Make the calls; return the error raised by each call on this rank, or None."""
    found = []
    for call in calls:
        try:
            call()
            found.append(None)
        except gc.GpucollError as error:
            found.append(error)
    return found


def check_cell(mpi, executor, case: Case, count, other, earlier):
    """Check one cell on a new communicator: the error, its culprit, and that the next call has raised at the latest."""
    mpi.Barrier()
    with gc.Communicator.from_mpi(mpi, executor=executor, check="deferred", timeout=seconds(DEADLINE)) as comm:
        expected = sum(range(comm.size)) + comm.size * numpy.arange(5)

        def later():
            assert (comm.all_reduce(numpy.arange(5) + comm.rank) == expected).all()

        for _ in range(earlier):
            later()
        found = outcomes(comm, [lambda: made(comm, case, count, other), later, later])
        where = case, count, comm.rank, found
        if not case.code:
            assert found == [None] * 3, where
            return
        own = REFUSALS if comm.rank == CULPRIT else ()
        for error in found:
            assert error is None or isinstance(error, (*TOLD, *own)), where
            assert not isinstance(error, TOLD) or error.ranks == (CULPRIT,), where
        assert isinstance(found[1], TOLD) or isinstance(found[0], TOLD), where


def check_cells(mpi, executor, start, step):
    """Check every `step`-th cell from `start` on, in a seeded random order."""
    drawn = list(cells())
    generator("deferred cells").shuffle(drawn)
    for number, (case, count, other) in enumerate(drawn[start::step]):
        check_cell(mpi, executor, case, count, other, earlier=1 + 2 * (number % 2))
