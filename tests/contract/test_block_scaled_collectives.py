"""Collectives in block-scaled formats: an oracle's bits on every executor, bounds that hold, errors on every rank."""

import functools
import itertools

import numpy
import pytest

import gpucoll as gc
from gpucoll import block_scaled
from gpucoll.block_scaled import FORMATS, BlockScaledCollectives
from harness.grids import SEED
from harness.thread_ranks import on_threads
from oracles import oracle
from oracles.scaled_oracle import quantised

DTYPES = ("float32", "float64", "float16", "bfloat16")


def given(rank, shape, dtype, seed):
    """Return this rank's numbers, of magnitudes from 2^-8 to 2^8, with some zeros."""
    random = numpy.random.default_rng([SEED, seed, rank, *shape])
    x = random.standard_normal(shape) * 2.0 ** random.integers(-8, 9, shape) * (random.random(shape) < 0.9)
    return x.astype(oracle.kind(dtype))


def wide(x):
    return x if x.dtype == numpy.float64 else x.astype("f4")


def rounded(name, rows):
    """Return rows of numbers after a rounding to the format, padded to whole blocks."""
    block = FORMATS[name].block
    padded = numpy.zeros((len(rows), -(-rows.shape[1] // block) * block), rows.dtype)
    padded[:, :rows.shape[1]] = rows
    return quantised(name, block, padded)[-1]


def summed(name, everyone, size, divisor):
    """Return the shares of all ranks after the first step: rounded, added in rank order, divided."""
    share = -(-everyone[0].size // (size * FORMATS[name].block)) * FORMATS[name].block
    tables = numpy.zeros((len(everyone), size, share), wide(everyone[0]).dtype)
    for table, x in zip(tables, everyone, strict=True):
        table.reshape(-1)[:x.size] = wide(x).ravel()
    return added([rounded(name, table) for table in tables], divisor)


def added(tables, divisor):
    """Return the sum in rank order over `divisor`; it begins with the first table, as -0 + 0 would be 0."""
    return functools.reduce(numpy.add, tables) / tables[0].dtype.type(divisor)


def reduces(comm, name, dtype, shape, op):
    """The bits of `all_reduce` are the oracle's on every rank, and the bound holds against the exact result."""
    everyone = [given(rank, shape, dtype, 1) for rank in range(comm.size)]
    divisor = comm.size if op == "avg" else 1
    shares = rounded(name, summed(name, everyone, comm.size, divisor))
    expected = shares.ravel()[:everyone[0].size].reshape(shape).astype(everyone[0].dtype)
    collectives = BlockScaledCollectives(comm, name)
    x = everyone[comm.rank].copy()
    for out in (None, numpy.empty_like(x), x):
        result, bound = collectives.all_reduce(x, op, out)
        assert out is None or result is out
        assert (result.view("u1") == expected.view("u1")).all()
        exact = sum(one.astype("f8") for one in everyone) / divisor
        assert numpy.abs(result.astype("f8") - exact).max() <= bound < numpy.inf
        assert (comm.all_gather(bound) == bound).all()


def moves(comm, name, dtype, shape, op):
    """The bits of `reduce_scatter` and `all_gather` are the oracle's, and the bounds hold."""
    collectives, divisor = BlockScaledCollectives(comm, name), comm.size if op == "avg" else 1
    everyone = [given(rank, (comm.size, *shape), dtype, 2) for rank in range(comm.size)]
    result, bound = collectives.reduce_scatter(everyone[comm.rank], op)
    total = added([rounded(name, wide(one).reshape(comm.size, -1)) for one in everyone], divisor)
    total = total[comm.rank, :result.size].reshape(shape).astype(result.dtype)
    assert (result.view("u1") == total.view("u1")).all()
    exact = sum(one[comm.rank].astype("f8") for one in everyone) / divisor
    assert numpy.abs(result.astype("f8") - exact).max() <= bound < numpy.inf
    result, bound = collectives.all_gather(everyone[comm.rank][0])
    rows = numpy.stack([wide(one[0]).ravel() for one in everyone])
    found = rounded(name, rows)[:, :rows.shape[1]].reshape(result.shape).astype(result.dtype)
    assert (result.view("u1") == found.view("u1")).all()
    assert numpy.abs(result.astype("f8") - numpy.stack([one[0] for one in everyone]).astype("f8")).max() <= bound


@pytest.mark.parametrize("name", FORMATS)
def test_bits_and_bounds(executor, name):
    random = numpy.random.default_rng([SEED, len(name), len(executor.name)])
    for program in (reduces, moves):
        size, dtype, op = int(random.integers(1, 5)), str(random.choice(DTYPES)), str(random.choice(("sum", "avg")))
        shape = tuple(int(one) for one in random.integers(1, 40, random.integers(1, 3)))
        executor.run(size, program, name, dtype, shape, op)


@pytest.mark.parametrize(("size", "nodes"), [(4, (0, 1, 0, 1)), (6, (0, 0, 1, 1, 2, 2)), (3, (0, 1, 1))])
def test_sums_of_a_host_travel_between_hosts(size, nodes):
    """Every rank has the same bits, one rounding for a direction, and a bound that holds, in place or not."""
    def program(comm):
        link = comm._core.link
        local = [rank for rank in range(size) if nodes[rank] == nodes[comm.rank]]
        link.place = link.place._replace(nodes=nodes, local_rank=local.index(comm.rank), local_size=len(local))
        for turn, (name, dtype, op) in enumerate(itertools.product(FORMATS, DTYPES, ("sum", "avg"))):
            everyone = [given(rank, (turn % 3 + 1, 2 * turn + 64), dtype, turn) for rank in range(size)]
            x, exact = everyone[comm.rank], sum(one.astype("f8") for one in everyone) / (size if op == "avg" else 1)
            with BlockScaledCollectives(comm, name) as collectives:
                assert (collectives._inner is None) == (size == 3)
                result, bound = collectives.all_reduce(x, op, x if turn % 4 == 0 else None)
            assert (comm.all_gather(result.view("u1")) == result.view("u1")).all()
            assert (comm.all_gather(bound) == bound).all()
            assert numpy.abs(result.astype("f8") - exact).max() <= bound < numpy.inf
        if size > 3:  # large numbers cancel out inside the host, and leave the small numbers their digits
            with BlockScaledCollectives(comm, "mxfp8_e4m3") as collectives:
                x = numpy.full(64, 2.0**-9, "f4")
                x[::32] = (-1) ** local.index(comm.rank) * 2.0**20
                assert (collectives.all_reduce(x).result[1:32] > 0).all()

    on_threads(size, program)


@pytest.mark.parametrize("nodes", [(0, 0, 0), (0, 1, 1)])
def test_segments_have_the_bits_of_the_whole(nodes, monkeypatch):
    """Between hosts a segment is on the way while the next is converted; `nvfp4` has a scale for a share of it."""
    def program(comm):
        comm._core.link.place = comm._core.link.place._replace(nodes=nodes)
        x = given(comm.rank, (1200,), "float32", 3)
        found = []
        for name in FORMATS:
            result, bound = BlockScaledCollectives(comm, name).all_reduce(x.copy())
            exact = comm.all_reduce(x.astype("f8"))
            assert numpy.abs(result - exact).max() <= bound
            found += [] if name == "nvfp4" else [result]
        return numpy.stack(found)

    whole = on_threads(3, program)
    monkeypatch.setattr(block_scaled, "SEGMENT", 512)
    assert (numpy.stack(on_threads(3, program)) == numpy.stack(whole)).all()


def test_strided_and_empty_arrays_and_one_number():
    def program(comm):
        collectives = BlockScaledCollectives(comm, "mxfp8_e4m3")
        x = (numpy.arange(64, dtype="f4") % 8).reshape(8, 8)
        result, _ = collectives.all_reduce(x.T[::2])
        assert (result == 2 * x.T[::2]).all()
        room = numpy.zeros((8, 8), "f4")
        assert collectives.all_reduce(x, out=room.T).result.base is room
        assert (room == 2 * x.T).all()
        assert collectives.all_reduce(numpy.zeros((0, 3), "f8"))[1] == 0
        result, bound = collectives.all_reduce(numpy.array(3, "f4"))
        assert result.shape == () == bound.shape
        assert result == 6
        assert (collectives.all_reduce(x, gc.ReduceOp.SUM).result == 2 * x).all()
        assert collectives.reduce_scatter(numpy.ones(6, "f4")).result.tolist() == [2, 2, 2]

    on_threads(2, program)


def test_no_bound_holds_for_what_is_no_number():
    def program(comm):
        for name in FORMATS:
            for first in ((numpy.nan, numpy.inf), (numpy.inf, 1), (1, numpy.nan)):
                x = numpy.ones(300, "f4")
                x[0] = first[comm.rank]
                result, bound = BlockScaledCollectives(comm, name).all_reduce(x)
                assert numpy.isnan(result[0])
                assert bound == numpy.inf
        large = numpy.full(32, 60000, "f2")
        assert BlockScaledCollectives(comm, "mxfp8_e4m3").all_reduce(large).bound == numpy.inf
        sums = numpy.full((2, 64), 3e38, "f4")  # the sum leaves the range, the mean would not
        assert BlockScaledCollectives(comm, "mxfp8_e4m3").reduce_scatter(sums, "avg").bound == numpy.inf

    on_threads(2, program)


@pytest.mark.parametrize("alter", [
    lambda comm: BlockScaledCollectives(comm, "mxfp8_e5m2").all_reduce(numpy.ones(64, "f4")),
    lambda comm: BlockScaledCollectives(comm, "mxfp8_e4m3").all_reduce(numpy.ones(64, "f4"), "avg"),
    lambda comm: BlockScaledCollectives(comm, "mxfp8_e4m3").all_reduce(numpy.ones(64, "f2")),
    lambda comm: BlockScaledCollectives(comm, "mxfp8_e4m3").all_reduce(numpy.ones(65, "f4")),
    lambda comm: comm.all_reduce(numpy.ones(64, "f4"))])
def test_ranks_that_differ(alter):
    def program(comm):
        with pytest.raises(gc.MismatchError):
            alter(comm) if comm.rank == 2 else \
                BlockScaledCollectives(comm, "mxfp8_e4m3").all_reduce(numpy.ones(64, "f4"))
        assert comm.all_reduce(numpy.ones(3))[0] == comm.size

    on_threads(3, program)


def test_a_group_takes_no_call_of_several_steps():
    def program(comm):
        with pytest.raises(gc.UsageError, match="GC-GROUP"), comm.group():
            BlockScaledCollectives(comm, "int8").all_reduce(numpy.ones(3, "f4"))
        assert BlockScaledCollectives(comm, "int8").all_reduce(numpy.ones(3, "f4")).result[0] == comm.size

    on_threads(2, program)


def test_an_unknown_format_is_an_error_on_every_rank_and_names_the_nearest():
    def program(comm):
        with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError, match="mxfp8_e4m3"):
            BlockScaledCollectives(comm, "mxfp8_e4m2" if comm.rank == 1 else "int8")
        assert comm.all_reduce(numpy.ones(3))[0] == comm.size

    on_threads(3, program)


def test_a_closed_object_takes_no_call():
    def program(comm):
        collectives = BlockScaledCollectives(comm, "int8")
        if comm.rank == 1:
            collectives.close()
            collectives.close()
        with pytest.raises(gc.ClosedError if comm.rank == 1 else gc.PeerError):
            collectives.all_reduce(numpy.ones(3, "f4"))
        assert comm.all_reduce(numpy.ones(3))[0] == comm.size

    on_threads(2, program)
