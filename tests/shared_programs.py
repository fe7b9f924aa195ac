"""Programs that ranks run on the `shared` executor, in each of the ways in which it reaches memory."""

import contextlib
import random
from unittest import mock

import numpy

import gpucoll as gc
import oracle
import programs
from gpucoll.arrays.segments import Copier
from gpucoll.dtypes import row_of
from gpucoll.executors import Task
from gpucoll.executors.shared import SharedExecutor, calls
from gpucoll.links import MpiLink

NOTHING = Task("barrier", "auto", None, None, None, row_of("uint8"))
WAYS = ("small", "copied", "shared", "mapped")


@contextlib.contextmanager
def way(name):
    """Whatever a call's size: `small` as it comes; `copied` by the system; `shared`, but inputs that several read are
    mapped; `mapped` as where the system copies nothing."""
    with contextlib.ExitStack() as stack:
        if name != "small":
            for size in ("TINY", "SMALL"):
                stack.enter_context(mock.patch.object(calls, size, -1))
        if name == "copied":
            stack.enter_context(mock.patch.object(calls, "COPIED", -1))
        if name == "mapped":
            stack.enter_context(mock.patch.object(Copier, "read", side_effect=PermissionError("not permitted")))
        yield


def in_way(mpi, name, body, *arguments):
    """One of the programs of `programs` on this executor."""
    with way(name):
        return getattr(programs, body)(mpi, *arguments)


def same_bits_as_messages(mpi, name, dtype):
    """Random floats, whose sums depend on order and rounding: the same bits as by messages."""
    with way(name), gc.Communicator.from_mpi(mpi, timeout=60, executor="shared") as here, \
            gc.Communicator.from_mpi(mpi, timeout=60, executor="mpi") as there:
        for collective in ("all_reduce", "reduce", "reduce_scatter", "scan"):
            for algorithm in gc.algorithms(collective, size=mpi.size):
                shape = (mpi.size, 703) if collective == "reduce_scatter" else (2111,)
                x = numpy.random.default_rng(mpi.rank).standard_normal(shape).astype(oracle.kind(dtype))
                found, wanted = (getattr(comm, collective)(x, algorithm=algorithm) for comm in (here, there))
                assert (found is None and wanted is None) or found.tobytes() == wanted.tobytes(), algorithm
    return True


def reached(comm, rng, count):
    """An array somewhere: ordinary, symmetric, or part of a symmetric one."""
    kind = rng.choice(("ordinary", "symmetric", "part"))
    if kind == "ordinary":
        return numpy.empty(count, numpy.int64)
    return comm.empty(count, "int64") if kind == "symmetric" else comm.empty(count + 9, "int64")[5:5 + count]


def a_long_mixture(mpi, name, seed):
    """Calls of all kinds one after the other, without a barrier: nothing of one call is seen by another."""
    rng = random.Random(seed)
    with way(name), gc.Communicator.from_mpi(mpi, timeout=60, executor="shared") as comm:
        for number in range(100):
            mixed(comm, rng, number)
    return True


def mixed(comm, rng, number):
    collective = rng.choice(("all_reduce", "broadcast", "all_gather", "reduce", "scan"))
    algorithm = rng.choice(gc.algorithms(collective, size=comm.size))
    count, root = rng.choice((1, 30, 1000, 5000)), rng.randrange(comm.size)
    everyone = [numpy.arange(count) * (rank + 1) + number for rank in range(comm.size)]
    x = reached(comm, rng, count)
    x[...] = everyone[comm.rank]
    out = rng.choice(("none", "in place"))
    if collective == "broadcast":
        assert (comm.broadcast(x, root, algorithm=algorithm) == everyone[root]).all(), (algorithm, number)
    elif collective == "all_gather":
        assert (comm.all_gather(x, algorithm=algorithm) == everyone).all(), (algorithm, number)
    elif collective == "reduce":
        found = comm.reduce(x, root=root, algorithm=algorithm)
        assert comm.rank != root or (found == sum(everyone)).all(), (algorithm, number)
    else:
        found = getattr(comm, collective)(x, out=x if out == "in place" else None, algorithm=algorithm)
        ranks = everyone if collective == "all_reduce" else everyone[:comm.rank + 1]
        assert (found == sum(ranks)).all(), (collective, algorithm, number)


def many_broadcasts(mpi, count):
    """The root need not wait for anyone, and runs ahead as far as it can."""
    with gc.Communicator.from_mpi(mpi, timeout=60, executor="shared") as comm:
        for number in range(200):
            x = numpy.full(count, number if comm.rank == 0 else -1)
            assert (comm.broadcast(x, algorithm="linear") == number).all()
    return True


def async_and_grouped(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=60, executor="shared") as comm:
        works = [comm.all_reduce(numpy.full(1000, float(number)), async_op=True) for number in range(10)]
        assert [work.wait()[0] for work in works] == [comm.size * number for number in range(10)]
        with comm.group():
            one, other = comm.all_reduce(numpy.ones(3)), comm.all_gather(numpy.array([comm.rank]))
        assert one[0] == comm.size
        assert other.ravel().tolist() == list(range(comm.size))
        part = comm.split(comm.rank % 2)
        assert part.all_reduce(numpy.ones(1))[0] == part.size
        part.close()
    return True


def read_only_root(mpi, count):
    with gc.Communicator.from_mpi(mpi, timeout=60, executor="shared") as comm:
        x = numpy.arange(count)
        x.flags.writeable = comm.rank != 1
        assert (comm.broadcast(x, root=1, algorithm="linear") == numpy.arange(count)).all()
    return True


def on_two_nodes(mpi, executor):
    """A communicator whose ranks are told that they are on two nodes in turn."""
    link = MpiLink(mpi, 30.0)
    link.place = link.place._replace(nodes=tuple(rank % 2 for rank in range(mpi.size)))
    with mock.patch.object(MpiLink, "of", return_value=link):
        return gc.Communicator.from_mpi(mpi, timeout=60, executor=executor)


def refused_on_several_nodes(mpi):
    with on_two_nodes(mpi, "shared") as comm:
        try:
            comm.all_reduce(numpy.ones(3), algorithm="ring")
        except gc.ArgumentError as error:
            return error.code
    return None


def on_several_nodes(mpi, name):
    """The hybrid executor reads memory within a node: the bits are those of messages alone."""
    with way(name), on_two_nodes(mpi, None) as here, on_two_nodes(mpi, "mpi") as there:
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "scan", "broadcast"):
            for algorithm in gc.algorithms(collective, size=mpi.size):
                shape = (mpi.size, 703) if collective in ("reduce_scatter", "all_to_all") else (2111,)
                xs = [numpy.random.default_rng(mpi.rank).standard_normal(shape) for _ in range(2)]
                found, wanted = (getattr(comm, collective)(x, algorithm=algorithm)
                                 for comm, x in zip((here, there), xs, strict=True))
                assert found.tobytes() == wanted.tobytes(), (collective, algorithm)
        assert isinstance(here._host.executors[0], SharedExecutor)
        assert [one.name for one in here._host.executors] == ["hybrid", "mpi", "native"]
        assert here._host.executors[0].serves(NOTHING) is None
    return True
