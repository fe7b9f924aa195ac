"""Mismatched calls raise on all ranks at once, with difference and call site; harmless differences pass."""

import itertools
import time
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.executors.engine import between_nodes
from gpucoll.transport.tags import Tag
from harness.extension import by_python
from harness.grids import generator, sampled
from harness.node_ranks import on_two_nodes
from harness.pace import seconds
from harness.thread_ranks import on_threads
from multirank.deferred import outcomes
from multirank.disagreements import CULPRIT, LENGTHS, REFUSALS, call, cases, made

EXECUTORS = (None, "shared", "mpi", "native")
TOLD = 5.0  # seconds; an idle machine needs 0.5
SLOW = pytest.mark.slow


def algorithms(name, executor, size):
    """Return some algorithms of an executor: "auto", up to three schedules, and "native"."""
    schedules = [] if executor == "native" else [*gc.algorithms(name, size=size, op="sum", dtype="float64")]
    return ["auto", *schedules[:3], *(["native"] if executor in (None, "native") and schedules else [])]


def every_way(mpi, executor, names, share, check=None):
    """Check a random `share` of the cases: all ranks raise the same error in time, and the next call is right."""
    with gc.Communicator.from_mpi(mpi, executor=executor, check=check, timeout=seconds(9)) as comm:
        drawn_ways(comm, executor, names, share)


def drawn_ways(comm, executor, names, share):
    random = generator(f"disagreements {executor} {names}")
    for name in names:
        listed = algorithms(name, executor, comm.size)
        for case, (length, count) in itertools.product(cases(name, listed), LENGTHS.items()):
            if random.random() >= share:
                continue
            other = next((one for one in listed[::-1] if one not in ("auto", "native", case.algorithm)), None)
            if case.way == "algorithm" and other is None:
                continue
            _one(comm, case, length, count, other)


def _one(comm, case, length, count, other):
    """Check one case on this rank."""
    native = case.algorithm == "native"
    right = None
    try:
        right = call(comm, case.collective, case.algorithm, count)
    except gc.ArgumentError:
        assert native, case  # MPI lacks this collective, on all ranks
        return
    comm.mpi.Barrier() if comm.mpi else comm.barrier()
    began, told, result = time.monotonic(), None, None
    try:
        result = made(comm, case, count, other)
    except gc.GpucollError as error:
        told = error
    lasted = time.monotonic() - began
    words = f"{case} {length}: {told!r}"
    if not case.code:
        assert told is None, words
        assert _alike(result, right), words
    elif comm.rank == CULPRIT and isinstance(told, REFUSALS):
        assert case.code == "GC-PEER", words
    else:
        expected = gc.PeerError if case.code == "GC-PEER" else gc.MismatchError
        assert type(told) is expected, words
        assert told.ranks == (CULPRIT,), words
        assert told.code == case.code, words
        assert case.code == "GC-PEER" or "disagreements.py:" in str(told) or case.collective.endswith("_v"), words
        assert lasted < seconds(TOLD), (lasted, words)
    assert (comm.all_reduce(numpy.full(3, comm.rank)) == comm.size * (comm.size - 1) // 2).all(), words


def _alike(result, right):
    if isinstance(right, list):
        return all(map(_alike, result, right))
    return (result is None) == (right is None) and (right is None or (result == right).all())


PARTS = [tuple(COLLECTIVES)[part::4] for part in range(4)]


@pytest.mark.parametrize(("executor", "part"), sampled(list(itertools.product(EXECUTORS, range(4))), keep=8, seed=31))
def test_ranks_that_differ_are_told(ranks, executor, part):
    ranks(every_way, 3, executor, PARTS[part], 0.15)


@pytest.mark.parametrize("executor", ["nccl", *(pytest.param(name, marks=SLOW) for name in (None, "peer"))])
def test_ranks_with_devices_that_differ_are_told(ranks, executor):
    names = ("all_reduce", "broadcast", "all_gather_v", "scatter", "barrier")
    ranks(every_way, 2, executor, names, 0.3, "full", env={"GPUCOLL_DEVICE": "emulated"})


def left(mpi):
    """A mismatch in a call by messages leaves no call under way, and the next call works."""
    with gc.Communicator.from_mpi(mpi, executor="mpi", timeout=seconds(60)) as comm:
        for _ in range(2):
            with pytest.raises(gc.MismatchError):
                comm.all_reduce(numpy.ones(3 + comm.rank))
            assert comm._core.host._shared.under_way() == ""
        assert (comm.all_reduce(numpy.ones(3)) == 2).all()


def test_a_call_by_messages_that_differs_is_over(ranks):
    ranks(left, 2)


def test_threads_that_differ_are_told_by_messages_of_python_too():
    with by_python():
        on_threads(3, drawn_ways, "mpi", PARTS[0], 0.1, executor="mpi", timeout=seconds(9))


def words_come_late(mpi):
    """Rank 0 learns of a mismatch from rank 2, on the same node, and waits for the words of the calls."""
    with on_two_nodes(mpi, None) as comm:
        preflight, x, asked = comm._core.life.preflight, numpy.arange(3.0), []
        wire, explain = preflight._wire, preflight.explain
        comm.all_reduce(x)

        def receive(buffer, source, tag):
            request, waits = wire.Irecv(buffer, source, tag), tag == Tag.COMPARISON and comm.rank == 0
            looks = iter([False] * 4)  # a message comes after some looks of `explain`
            return SimpleNamespace(Test=lambda: not (waits and not (asked and next(looks, True))) and request.Test())

        def explained(patience):
            asked.append(patience)
            return explain(patience)

        preflight._wire = SimpleNamespace(Irecv=receive, Isend=wire.Isend)
        preflight.explain = explained
        comm._core.life.has_aborted = True  # nor does rank 0 receive abort messages
        with pytest.raises(gc.ArgumentError if comm.rank == CULPRIT else gc.PeerError) as told:
            comm.all_reduce(x, op="nonsense" if comm.rank == CULPRIT else "sum", algorithm="ring")
        assert told.value.code == ("GC-OP" if comm.rank == CULPRIT else "GC-PEER")
        assert comm.rank == CULPRIT or told.value.ranks == (CULPRIT,)
        assert bool(asked) == (comm.rank == 0)


def test_words_that_come_late_are_waited_for(ranks):
    ranks(words_come_late, 3, env={"GPUCOLL_CHECK": "deferred"}, timeout=20)


LONGER, ROOM, BEHIND = 1 << 18, 4, 1 << 18  # elements of a message, of its destination, of the memory behind


def longer_than_the_room(mpi, way):
    """A message longer than its destination writes nothing behind the destination."""
    with mock.patch.object(between_nodes, "overruns", return_value=way == "matched"), \
            gc.Communicator.from_mpi(mpi, executor=None if way == "device" else "mpi", timeout=seconds(60),
                                     check="full" if way == "recv" else "deferred") as comm:
        memory = numpy.full(ROOM + BEHIND, 7.0)
        out, x = memory[:ROOM], numpy.ones(LONGER)
        if way == "recv":
            if comm.rank == 0:
                comm.send(x, 1)
            else:
                with pytest.raises(gc.MismatchError, match="GC-SHAPE"):
                    comm.recv(out, 0)
        else:
            found = outcomes(comm, [lambda: comm.broadcast(x if comm.rank == 0 else out, algorithm="linear"),
                                    lambda: comm.all_reduce(numpy.ones(1))])
            assert isinstance(found[1], gc.MismatchError | gc.RevokedError), found
            assert {error.ranks for error in found if error} == {(1,)}
        assert (memory[ROOM:] == 7).all()
    mpi.Barrier()


@pytest.mark.parametrize("way", ["recv", "deferred", "matched", "device"])
def test_a_message_that_is_longer_writes_nothing_beyond(ranks, emulated_kernels, way):
    ranks(longer_than_the_room, 2, way, env={"GPUCOLL_DEVICE": "emulated"} if way == "device" else {})


@SLOW
@pytest.mark.parametrize("executor", EXECUTORS)
def test_eight_ranks_that_differ_are_told(ranks, executor):
    ranks(every_way, 8, executor, tuple(COLLECTIVES), 0.1)
