"""Algorithms of one or two rounds between processes of a node, for any order of arrival and early changes of memory."""

import itertools

import numpy
import pytest

import gpucoll as gc
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.executors.engine.neighbours import SMALL, TINY
from harness.node_ranks import on_shared
from oracles import oracle
from programs import collectives

SHOTS = ("one_shot", "two_shot")
SEGMENT, LONG = 1 << 18, 1 << 14  # bytes


@on_shared
def every_op_and_dtype(comm, algorithm):
    """Each op and dtype is right twice: the first call runs as an operation, the second at once in the engine."""
    for name, op in itertools.product(DTYPES, OPS):
        for count in (1, 3, 17, 1000) if oracle.legal(op, name) else ():
            everyone = collectives.inputs(op, name, comm.size, (count,))
            x, out = everyone[comm.rank], numpy.empty_like(everyone[0])
            for _ in range(2):
                found = comm.all_reduce(x, out, op=op, algorithm=algorithm)
                assert oracle.same_bits(found, oracle.reduced(op, name, everyone)), (name, op, count)
    assert comm._core.calls.engine.call_count  # the engine has run calls


@on_shared
def long_arrays(comm, algorithm):
    """Long arrays in ordinary, symmetric or mixed memory, in place and not, of lengths around all thresholds."""
    def memory(kind, alone):
        room = (numpy if kind == "ordinary" else comm).zeros(count, numpy.int64)
        return numpy.zeros_like(room) if kind == "mixed" and alone else room

    for count in (LONG // 8 - 1, TINY // 8, TINY // 8 + 1, SMALL // 8, SMALL // 8 + 9):
        everyone = [numpy.arange(count, dtype=numpy.int64) * (other + 1) + other for other in range(comm.size)]
        expected = sum(everyone)
        for here, there in itertools.product(("ordinary", "symmetric", "mixed"), repeat=2):
            x, out = memory(here, comm.rank % 2), memory(there, comm.rank == 0)
            for turn in range(2):
                x[:] = everyone[comm.rank]
                comm.all_reduce(x, out, algorithm=algorithm)
                assert oracle.same_bits(out, expected), (count, here, there, turn)
                assert oracle.same_bits(x, everyone[comm.rank])
                out[:] = -1  # no rank reads `out` any more
                comm.all_reduce(x, x, algorithm=algorithm)
                assert oracle.same_bits(x, expected), (count, here, turn)


@on_shared
def movements(comm):
    """Collectives with blocks or a root move data of any dtype, in place and not."""
    rank, size = comm.rank, comm.size
    for count, name, memory in itertools.product(
            (1, 7, LONG // 2, SEGMENT + 3), ("int16", "complex128"), (numpy.zeros, comm.zeros)):
        def values(*key, count=count, name=name):
            return (numpy.arange(count) * 3 + sum(1000 ** place * one for place, one in enumerate(key))).astype(name)

        x, blocks, root = memory(count, name), memory((size, count), name), size - 1
        out, into = memory((size, count), name), memory((size, count), name)
        for turn in range(3):
            x[:] = values(rank, turn)
            everyone = numpy.stack([values(other, turn) for other in range(size)])
            assert oracle.same_bits(comm.all_gather(x, out, algorithm="direct"), everyone), (count, name, turn)
            assert comm.broadcast(x, root, algorithm="linear") is x
            assert oracle.same_bits(x, values(root, turn)), (count, name, turn)
            blocks[:] = [values(rank, other, turn) for other in range(size)]
            swapped = numpy.stack([values(other, rank, turn) for other in range(size)])
            for target in (into, blocks):
                found = comm.all_to_all(blocks, target, algorithm="direct")
                assert oracle.same_bits(found, swapped), (count, name, turn)


@on_shared
def memory_changes_at_once(comm):
    """The first rank to return overwrites results and inputs, or makes the next call, while other ranks still read."""
    everyone = numpy.arange(comm.size)[:, None]
    for count, memory in itertools.product((3, LONG, TINY // 4), (numpy.zeros, comm.zeros)):
        x, out, blocks, into = (memory(shape, numpy.int64)
                                for shape in (count, count, (comm.size, count), (comm.size, count)))
        for turn in range(50):
            x[:], blocks[:] = comm.rank + turn, comm.rank - turn
            total = (everyone + turn).sum()
            for algorithm in SHOTS:
                assert (comm.all_reduce(x, out, algorithm=algorithm) == total).all(), (count, turn)
                out[:] = -turn
            gathered = comm.all_gather(x, into, algorithm="direct")
            x[:] = -1
            assert (gathered == everyone + turn).all(), (count, turn)
            swapped = comm.all_to_all(blocks, algorithm="direct")
            blocks[:] = -1
            assert (swapped == everyone - turn).all(), (count, turn)


@on_shared
def the_bits_of_messages(comm):
    """Results have the bits of messages, since the order of rounding is the same; NaN wins from any rank."""
    random, size = numpy.random.default_rng(comm.rank), comm.size
    with gc.Communicator.from_mpi(comm.mpi, executor="mpi") as messages:
        for name in ("float32", "float64"):
            x = random.standard_normal(301).astype(name) * 10.0 ** random.integers(-20, 20, 301)
            for op, algorithm in itertools.product(("sum", "prod", "min", "max"), SHOTS):
                expected = messages.all_reduce(x.astype(name), op=op, algorithm=algorithm)
                assert oracle.same_bits(comm.all_reduce(x.astype(name), op=op, algorithm=algorithm), expected)
        for count, memory, op in itertools.product((1, 1000, SEGMENT // 3), (numpy.zeros, comm.zeros), ("sum", "avg")):
            blocks = memory((size, count), "float32")
            blocks[:] = random.standard_normal(blocks.shape) * 1000
            expected = messages.reduce_scatter(blocks, op=op, algorithm="direct")
            for _ in range(2):
                assert oracle.same_bits(comm.reduce_scatter(blocks, op=op, algorithm="direct"), expected), (count, op)
    x[comm.rank] = numpy.nan
    for op in ("sum", "min", "max"):
        found = comm.all_reduce(x, op=op, algorithm="one_shot")
        assert numpy.isnan(found[:size]).all()
        assert not numpy.isnan(found[size:]).any()


@on_shared
def calls_that_look_alike(comm):
    """A known call is not confused with a call that differs in any detail."""
    x, out = numpy.arange(6.0), numpy.empty(6)
    for values in (x, x, x + 1):
        assert (comm.all_reduce(values, out, algorithm="one_shot") == values * comm.size).all()
    first, second = (comm.all_reduce(x, algorithm="one_shot") for _ in range(2))
    assert not numpy.shares_memory(first, second)
    assert comm.all_reduce(x, out, op="max", algorithm="one_shot").tolist() == x.tolist()
    crooked = numpy.frombuffer(bytearray(1 + x.nbytes), numpy.uint8)[1:].view(numpy.float64)  # not at a multiple of 8
    crooked[:] = x
    for other in (x.astype("f4"), x.astype("i8"), x.reshape(2, 3), x[:5].copy(), numpy.arange(12.0)[::2],
                  numpy.asfortranarray(x.reshape(2, 3)), x.view(numpy.uint64), crooked):
        expected = other * other.dtype.type(comm.size)
        assert numpy.array_equal(comm.all_reduce(other, algorithm="one_shot"), expected), other
        assert comm.all_reduce(other, other, algorithm="two_shot") is other
        assert numpy.array_equal(other, expected)


CASES = [  # a program, its arguments, and numbers of ranks: all but the first number are marked slow
    *((body, (shot,), (3, 2, 8)) for body in (every_op_and_dtype, long_arrays) for shot in SHOTS),
    (movements, (), (3, 2, 8)), (memory_changes_at_once, (), (3, 5)), (the_bits_of_messages, (), (5,)),
    (calls_that_look_alike, (), (3,))]


@pytest.mark.parametrize(("body", "arguments", "size"), [
    pytest.param(body, arguments, size, marks=pytest.mark.slow if number else (), id=f"{body.__name__}-{place}-{size}")
    for place, (body, arguments, sizes) in enumerate(CASES) for number, size in enumerate(sizes)])
def test_one_pass(ranks, body, arguments, size):
    ranks(body, size, *arguments)
