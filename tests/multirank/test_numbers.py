"""Counters near their ends: calls go on where numbers come again, and are refused on all ranks after the last."""

import os
import sys

import numpy
import pytest

import gpucoll as gc
from gpucoll.executors.engine.tables import ROUNDS
from gpucoll.transport import ucx
from gpucoll.transport.tags import ENGINE_CALLS
from harness.jobs import python
from harness.node_ranks import on_shared
from harness.numbers import stand_at
from harness.pace import seconds

MOST_CALLS = (1 << 63 - ROUNDS) - 2


def goes_on(comm, turn):
    """Make calls of several kinds, short and long, and compare the results."""
    rank, everyone = comm.rank, range(comm.size)
    for count in (3, 100_000):
        x = numpy.arange(count) * (rank + 1) + turn
        assert (comm.all_reduce(x) == sum(numpy.arange(count) * (one + 1) + turn for one in everyone)).all()
        assert (comm.broadcast(x.copy(), 1) == numpy.arange(count) * 2 + turn).all()
    for again in range(7):  # the later ones are eager
        assert (comm.broadcast(numpy.full(2, 10 * rank + turn + again)) == turn + again).all()
    assert comm.all_gather_v(numpy.full(rank + 1, turn))[-1].tolist() == [turn] * comm.size


@on_shared
def until_the_last(comm):
    goes_on(comm, 0)
    comm.mpi.Barrier()
    stand_at(comm, MOST_CALLS - 60)
    comm.mpi.Barrier()
    for turn in range(3):
        goes_on(comm, turn)
        with pytest.raises(gc.MismatchError):
            comm.all_reduce(numpy.ones(3 + rank_of(comm, turn)))
    while comm._core.calls.engine.call_count < MOST_CALLS:
        comm.barrier()
    with pytest.raises(gc.BackendError, match="has made all of its"):
        comm.barrier()


def rank_of(comm, turn):
    return int(comm.rank == turn % comm.size)


def test_calls_go_on_until_the_last_number(ranks):
    ranks(until_the_last, 3, timeout=seconds(60))


def over_messages(mpi):
    with gc.Communicator.from_mpi(mpi, executor="mpi", timeout=seconds(60)) as comm:
        goes_on(comm, 0)
        mpi.Barrier()
        stand_at(comm, 5 * ENGINE_CALLS - 20)
        mpi.Barrier()
        for turn in range(4):
            goes_on(comm, turn)
        assert comm._core.calls.engine.call_count > 5 * ENGINE_CALLS


def test_tags_of_messages_come_again(ranks):
    ranks(over_messages, 3, timeout=seconds(60))


CONTEXTS = """
import os, numpy, gpucoll as gc
from types import SimpleNamespace
from gpucoll.transport import ucx
from gpucoll.transport.process import PROCESS
ranks = SimpleNamespace(rank=0, size=1, allgather=lambda value: [value])
process, most = ucx.UcxProcess(), 1 << ucx.library()[0].CONTEXT_BITS
PROCESS.ucx, process.contexts = process, most - 2
carriers = [one for number in range(2) for one in ucx.messages(ranks, str(number))]
rows = [numpy.zeros(1, numpy.uint8) for _ in carriers]
requests = [one.Irecv([row, "B"], 0, 32767) for one, row in zip(carriers, rows)]
requests += [one.Isend([numpy.full(1, place, numpy.uint8), "B"], 0, 32767) for place, one in enumerate(carriers)]
while not all([one.Test() for one in requests]):
    process.worker.progress()
assert [int(row[0]) for row in rows] == [0, 1, 2, 3]
for name in "ab":
    try:
        ucx.messages(ranks, name)
    except gc.BackendError as error:
        print(error.code, f"{most} communicators" in str(error))
"""


@pytest.mark.skipif(ucx.library()[0] is None, reason="UCX is not installed")
def test_ucx_refuses_a_communicator_after_the_last_number():
    job = python("-c", CONTEXTS, env={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert (job.returncode, job.stdout) == (0, "GC-BACKEND True\n" * 2), job.stderr
