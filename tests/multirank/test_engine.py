"""The engine: schedules between processes of a node, run in C++."""

import contextlib
import itertools
import os
import signal
from unittest import mock

import numpy
import pytest

import engine_mutants
import gpucoll as gc
import oracle
import programs
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.executors.engine.neighbours import TINY
from gpucoll.executors.engine.tables import FAILURE
from gpucoll.health import guard
from multirank.test_metadata import roots_of_scatter_that_differ, scattered  # noqa: F401 (mutants are planted into them)
from multirank.test_one_pass import (  # noqa: F401 (a fixture, and what mutants are planted into)
    long_arrays,
    memory_changes_at_once,
    movements,
    on_shared,
    ranks,
)
from pace import seconds
from ranks import RankError

COLLECTIVES = ("all_reduce", "reduce", "broadcast", "gather", "all_gather", "all_to_all", "reduce_scatter", "scan",
               "barrier")


def values(count, *key):
    """Return values unique to this key of ranks and turns."""
    return numpy.arange(count) * 3 + sum(1000 ** place * one for place, one in enumerate(key))


class Case:
    """Calls of a collective on the same arrays, with new content in every turn."""

    def __init__(self, comm, collective, algorithm, count, root):
        self._comm, self._collective, self._root = comm, collective, root
        options = {"algorithm": algorithm}
        if collective in ("reduce", "gather", "broadcast"):
            options["root"] = root
        self._options, self._count = options, count
        blocks = collective in ("all_to_all", "reduce_scatter")
        self.x = numpy.empty((comm.size, count) if blocks else count, numpy.int64)
        self._shape = {"gather": (comm.size, count), "all_gather": (comm.size, count),
                       "all_to_all": (comm.size, count)}.get(collective, (count,))
        has_result = collective not in ("reduce", "gather") or comm.rank == root
        self.out = numpy.empty(self._shape, numpy.int64) if has_result else None

    def call(self, x):
        if self._collective == "barrier":
            return self._comm.barrier(**self._options)
        where = {} if self._collective == "broadcast" else {"out": self.out}
        return getattr(self._comm, self._collective)(x, **where, **self._options)

    def given(self, rank, turn):
        if self.x.ndim == 1:
            return values(self._count, rank, turn)
        return numpy.stack([values(self._count, rank, other, turn) for other in range(self._comm.size)])

    def expected(self, turn):
        everyone = numpy.stack([self.given(rank, turn) for rank in range(self._comm.size)])
        rank, is_root = self._comm.rank, self._comm.rank == self._root
        return {"all_reduce": lambda: everyone.sum(0), "reduce": lambda: everyone.sum(0) if is_root else None,
                "broadcast": lambda: everyone[self._root], "gather": lambda: everyone if is_root else None,
                "all_gather": lambda: everyone, "all_to_all": lambda: everyone[:, rank],
                "reduce_scatter": lambda: everyone.sum(0)[rank], "scan": lambda: everyone[:rank + 1].sum(0),
                "barrier": lambda: None}[self._collective]()

    def turn(self, number, x=None):
        x = self.x if x is None else x
        x[...] = self.given(self._comm.rank, number)
        found = self.call(x)
        expected = self.expected(number)
        if expected is None:
            assert found is None
        else:
            assert oracle.same_bits(found, expected), (self._options, self._count, number)
        if self._collective != "broadcast":
            assert self._collective == "barrier" or oracle.same_bits(x, self.given(self._comm.rank, number))
            x[...] = -1  # no rank reads `x` any more
        if found is not None:
            found[...] = -2


def cases(comm, collectives=COLLECTIVES):
    for collective in collectives:
        for place, algorithm in enumerate((*gc.algorithms(collective, size=comm.size), "auto")):
            yield collective, algorithm, place % comm.size


@on_shared
def fresh_data(comm):
    """Repeated calls of three lengths, in both halves of a segment, give new results; inputs may change at once."""
    for collective, algorithm, root in cases(comm):
        for count in (1, 700, TINY // 8 // comm.size):
            case = Case(comm, collective, algorithm, count, root)
            for turn in range(6):
                case.turn(turn)
            for turn in range(6, 9):  # arrays of other addresses
                case.turn(turn, numpy.empty_like(case.x))
    assert comm._core.engine.call_count > 1000


@on_shared
def every_kind(comm):
    """Every dtype and op gives the exact bits, also of averages."""
    for algorithm, name, op in itertools.product(("ring", "tree", "recursive_doubling"), DTYPES, OPS):
        if oracle.legal(op, name):
            everyone = programs.inputs(op, name, comm.size, (37,))
            expected = oracle.reduced(op, name, everyone)
            for _ in range(3):
                found = comm.all_reduce(everyone[comm.rank].copy(), op=op, algorithm=algorithm)
                assert oracle.same_bits(found, expected), (algorithm, name, op)


@on_shared
def beside_python(comm):
    """Run a call in C++ on some ranks and in Python on others (strided arrays), between long and asynchronous calls."""
    rank, size = comm.rank, comm.size
    long, total = (comm.zeros(TINY // 4, numpy.int64) for _ in range(2))
    long[:] = 1
    for collective, algorithm, root in cases(comm, ("all_reduce", "broadcast", "all_gather", "scan")):
        case = Case(comm, collective, algorithm, 50, root)
        for turn in range(8):
            wide = numpy.empty((*case.x.shape[:-1], 2 * 50), numpy.int64)
            case.turn(turn, wide[..., ::2] if turn > 2 and (turn + rank) % 2 else None)
            if turn % 3 == 2 or turn % 5 == 3:
                assert (comm.all_reduce(long, total, algorithm="ring") == size).all()  # read in place
            if turn % 4 == 3:
                work = comm.all_reduce(long[:9], algorithm="tree", async_op=True)
                assert (work.wait() == size).all()


@on_shared
def the_bits_of_messages(comm):
    """Engine and Python give the same bits: rounding depends on the schedule's order of additions."""
    random = numpy.random.default_rng(comm.rank)
    with mock.patch("gpucoll.executors.engine.library", return_value=None), \
            gc.Communicator.from_mpi(comm.mpi, executor="mpi") as messages:  # Python's walker, not the engine
        for algorithm in gc.algorithms("all_reduce", size=comm.size):
            x = random.standard_normal(301).astype("f4") * 10.0 ** random.integers(-20, 20, 301).astype("f4")
            expected = [messages.all_reduce(x, op=op, algorithm=algorithm) for op in ("sum", "avg")]
            for _, (op, one) in itertools.product(range(3), zip(("sum", "avg"), expected, strict=True)):
                assert oracle.same_bits(comm.all_reduce(x, op=op, algorithm=algorithm), one), (algorithm, op)


def roots_return(mpi):
    """Under the deferred check a root, reading from no rank, returns from a mismatch and raises in a later call."""
    x, out = numpy.arange(12.0), numpy.zeros(12)
    with gc.Communicator.from_mpi(mpi, executor="shared", check="deferred", timeout=seconds(60)) as comm:
        for _ in range(3):
            comm.scan(x, out)
            comm.broadcast(x, 0, algorithm="chain")
            comm.all_reduce(x, out, algorithm="ring")
        kept = x.copy()
        if comm.rank == 0:
            comm.broadcast(x, 0, algorithm="chain")
        with pytest.raises(gc.MismatchError):
            comm.all_reduce(x, out, algorithm="ring")
        assert (x == kept).all()


def another_root_is_told_later(mpi):
    """If a second rank acts as the root of a broadcast, the call ends on all ranks, and the next common call raises."""
    x, out = numpy.arange(12.0), numpy.zeros(12)
    with gc.Communicator.from_mpi(mpi, executor="shared", check="deferred", timeout=seconds(60)) as comm:
        for _ in range(3):
            comm.broadcast(x, 0, algorithm="chain")
            comm.all_reduce(x, out, algorithm="ring")
        last = comm.size - 1
        comm.broadcast(x, last if comm.rank == last else 0, algorithm="chain")
        with pytest.raises(gc.MismatchError):
            comm.all_reduce(x, out, algorithm="ring")


LOOKS = 3


def one_fails_later(mpi):
    """A call ends well if all ranks have done their parts, although a rank has failed since.

    The guard's grace outlasts any delay of rank 1 on a loaded machine, so that only the engine is tested.
    """
    with (mock.patch.object(guard, "GRACE", seconds(60)),
          gc.Communicator.from_mpi(mpi, executor="shared", check="deferred", timeout=seconds(60)) as comm):
        x = numpy.zeros(5)
        for _ in range(3):
            comm.broadcast(x, 0, algorithm="chain")
        x[:] = comm.rank + 7
        failed, looks = comm._core.host.executors[0]._node_ranks.words[0], itertools.count()

        def look():
            """Count the polls of the waiting rank after the failure of rank 0; wake rank 1 at poll number LOOKS."""
            if failed[FAILURE] and next(looks) == LOOKS:
                mpi.send(None, 1)

        if comm.rank == 2:  # rank 2 polls the other ranks between sleeps
            comm._core.waits.hooks.append(look)
        if comm.rank == 1:  # late
            mpi.recv(source=2)
        comm.broadcast(x, 0, algorithm="chain")
        assert (x == 7).all()
        if comm.rank == 0:
            comm._core.host.fail(gc.UsageError("on purpose"))
        comm._core.waits.failure = gc.UsageError("on purpose")


class Interrupt(Exception):
    """The exception raised by the signal handler."""


def interruptible(mpi, comm, x):
    mpi.Barrier()  # afterwards the other rank sends the signal
    comm.all_reduce(x, algorithm="ring")
    while True:  # the signal may also arrive after the call
        os.sched_yield()


def interrupted(mpi):
    """An exception raised by a signal handler during a wait is not lost, even if the awaited rank arrives meanwhile."""
    def handler(*_):
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    for _ in range(20):
        comm = gc.Communicator.from_mpi(mpi, executor="shared", timeout=seconds(60))
        x = numpy.ones(5)
        for _ in range(3):
            comm.all_reduce(x, algorithm="ring")
        process = mpi.bcast(os.getpid())
        if mpi.rank:
            mpi.Barrier()
            os.kill(process, signal.SIGUSR1)
            with contextlib.suppress(gc.GpucollError):
                comm.all_reduce(x, algorithm="ring")
        else:
            with pytest.raises(Interrupt):
                interruptible(mpi, comm, x)
        comm._core.waits.failure = comm._core.waits.failure or gc.UsageError("on purpose")
        comm.close()
        mpi.Barrier()
    signal.signal(signal.SIGUSR1, before)


def one_is_missing(mpi):
    """A missing rank is awaited until the deadline, and no longer."""
    comm = gc.Communicator.from_mpi(mpi, executor="shared", timeout=2)
    x = numpy.ones(5)
    for _ in range(2):
        comm.all_reduce(x, algorithm="ring")
    if mpi.rank:
        with pytest.raises(gc.CollectiveTimeout):
            comm.all_reduce(x, algorithm="ring")
    mpi.Barrier()
    comm._core.waits.failure = comm._core.waits.failure or gc.UsageError("left")
    comm.close()


CASES = [(fresh_data, (), (3, 2, 8)), (every_kind, (), (3,)), (beside_python, (), (3, 4)),
         (the_bits_of_messages, (), (3,)), (one_is_missing, (), (2,)), (one_fails_later, (), (3,)),
         (roots_return, (), (3,)), (another_root_is_told_later, (), (3,)), (interrupted, (), (2,))]


@pytest.mark.parametrize(("body", "arguments", "size"), [
    pytest.param(body, arguments, size, marks=pytest.mark.slow if number else (),
                 id="-".join([body.__name__, *arguments, str(size)]))
    for body, arguments, sizes in CASES for number, size in enumerate(sizes)])
def test_engine(ranks, body, arguments, size):  # noqa: F811 (the fixture)
    ranks(body, size, *arguments)


def on_mutant(mpi, changes, body, arguments=()):
    with engine_mutants.planted(changes):
        return globals()[body](mpi, *arguments)


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", engine_mutants.CALLS)
def test_mutants_are_caught(ranks, name):  # noqa: F811 (the fixture)
    changes, body, arguments, size = engine_mutants.CALLS[name]
    engine_mutants.changed(changes)  # raises unless the mutant can be planted
    with pytest.raises(RankError):
        ranks(on_mutant, size, changes, body, arguments)


@pytest.mark.nightly
def test_ten_million_calls_leave_nothing_behind(ranks):  # noqa: F811 (the fixture)
    ranks(many, 2, timeout=1200)


def many(mpi, parts=10, turns=200_000):
    """Ten million calls leave no memory, descriptor or thread behind. Takes minutes if ranks share cores."""
    def litter():
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1])
        return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    with gc.Communicator.from_mpi(mpi, executor="shared", timeout=seconds(60)) as comm:
        x, out = numpy.ones(1), numpy.empty(1)
        planned = comm.plan("all_reduce", x, out=out)
        for part in range(1 + parts):
            for _ in range(turns):
                comm.all_reduce(x, out, algorithm="ring")
                comm.broadcast(out, 1)
                comm.scan(x, out)
                comm.barrier()
                planned()
            if not part:
                before = litter()
        after = litter()
        assert after[1:] == before[1:]
        assert after[0] <= before[0] + 64  # pages
