"""Ranks on a grid: coordinates, shifts and exchanges with neighbours, against an oracle with the whole grid."""

import itertools
import math

import numpy
import pytest

import gpucoll as gc
from harness.thread_ranks import on_threads
from programs.collectives import program

GRIDS = {1: [(1,), (1, 1)], 4: [(4,), (2, 2), (1, 4), (3,)], 6: [(3, 2), (2, 1, 3), (5,)]}


def neighbour(coords, axis, step, dims, periods):
    """Return the rank at this step by brute force, None beyond an edge."""
    there = list(coords)
    there[axis] += step
    if periods[axis]:
        there[axis] %= dims[axis]
    places = [*itertools.product(*map(range, dims))]
    return places.index(tuple(there)) if tuple(there) in places else None


def sent(rank, block):
    return numpy.arange(3) + 100 * rank + 10 * block


@program
def exchanged(comm):
    for dims in GRIDS[comm.size]:
        for number in range(2 ** len(dims)):
            periods = [bool(number >> axis & 1) for axis in range(len(dims))]
            grid = comm.cart(dims, periods)
            assert (grid is None) == (comm.rank >= math.prod(dims))
            if grid is None:
                continue
            with grid:
                check(grid, dims, periods)
    assert comm.all_reduce(numpy.ones(1))[0] == comm.size


def check(grid, dims, periods):
    places = [*itertools.product(*map(range, dims))]
    coords = places[grid.rank]
    assert (grid.dims, grid.periods, grid.coords) == (dims, tuple(periods), coords)
    assert [grid.rank_of(place) for place in places] == [*range(grid.size)]
    assert [grid.coords_of(rank) for rank in range(grid.size)] == places
    around = [neighbour(coords, axis, step, dims, periods) for axis in range(len(dims)) for step in (-1, 1)]
    assert grid.neighbours == tuple(gc.PROC_NULL if rank is None else rank for rank in around)
    far = [gc.PROC_NULL if rank is None else rank for rank in (neighbour(coords, 0, step, dims, periods)
                                                               for step in (-2, 2))]
    assert grid.shift(0, 2) == tuple(far)
    for strided in (False, True):
        memory = numpy.full((2 * len(dims), 6 if strided else 3), -5)
        out = memory[:, ::2] if strided else memory
        assert grid.neighbor_all_gather(sent(grid.rank, 0), out) is out
        for rank, block in zip(around, out, strict=True):
            assert (block == (-5 if rank is None else sent(rank, 0))).all()
        assert not strided or (memory[:, 1::2] == -5).all()
    x = numpy.array([sent(grid.rank, block) for block in range(2 * len(dims))])
    found = grid.neighbor_all_to_all(x)
    for number, (rank, block) in enumerate(zip(around, found, strict=True)):
        # A block from below was sent upwards by the neighbour, and vice versa, even if both neighbours are equal
        assert (block == (0 if rank is None else sent(rank, number ^ 1))).all(), (dims, periods, number)


@program
def apart(comm):
    """User messages do not match the neighbours' messages, a split grid is no grid, and scalars have neighbours."""
    with comm.cart([comm.size], True) as ring:
        right = ring.shift(0)[1]
        work = ring.send(numpy.full(3, 7), right, async_op=True)
        assert ring.neighbor_all_gather(numpy.array(ring.rank)).tolist() == [*ring.neighbours]
        out = numpy.zeros(3, int)
        assert (ring.recv(out, ring.shift(0)[0]) == 7).all()
        work.wait()
        part = ring.split(ring.rank % 2)
        assert type(part) is gc.Communicator
        part.close()
    assert ring.closed
    assert ring._halo.closed


@program
def refused(comm):
    last = comm.rank == comm.size - 1
    for wrong in ([comm.size + 1], [0], 3, [True], ["2"]):
        with pytest.raises(gc.ArgumentError if last else gc.PeerError) as error:
            comm.cart(wrong if last else [comm.size])
        assert error.value.code == ("GC-CART" if last else "GC-PEER")
    with pytest.raises(gc.MismatchError, match="periods"):
        comm.cart([comm.size], [last])
    for periods in ([True, False], 3, "x", ["x"], [None]):
        with pytest.raises(gc.ArgumentError, match="periods"):
            comm.cart([comm.size], periods)
    with comm.cart([comm.size]) as row:
        x = numpy.zeros((2, 3))
        assert row.shift(numpy.int64(0), numpy.int64(0)) == (row.rank, row.rank)
        for call in (lambda: row.shift(1), lambda: row.shift(False), lambda: row.shift(0, "x"), lambda: row.rank_of(0),
                     lambda: row.rank_of([comm.size]), lambda: row.rank_of([0.0]), lambda: row.rank_of([0, 0]),
                     lambda: row.coords_of(comm.size), lambda: row.neighbor_all_to_all(numpy.zeros((3, 2))),
                     lambda: row.neighbor_all_to_all(x, x), lambda: row.neighbor_all_gather(x, numpy.zeros((2, 3))),
                     lambda: row.neighbor_all_gather([1])):
            with pytest.raises(gc.ArgumentError):
                call()
        with pytest.raises(gc.DtypeError):
            row.neighbor_all_to_all(x, numpy.zeros((2, 3), "f4"))


@pytest.mark.parametrize(("size", "ndims", "dims"), [
    (1, 1, (1,)), (6, 2, (3, 2)), (12, 2, (4, 3)), (16, 3, (4, 2, 2)), (7, 2, (7, 1)), (64, 3, (4, 4, 4)),
    (30, 3, (5, 3, 2)), (5, 3, (5, 1, 1))])
def test_dims_are_as_even_as_they_can_be(size, ndims, dims):
    assert gc.dims_create(size, ndims) == dims


@pytest.mark.parametrize("wrong", [(0, 1), (4, 0), (True, 1), (2.0, 1)])
def test_dims_are_refused(wrong):
    with pytest.raises(gc.ArgumentError, match="positive"):
        gc.dims_create(*wrong)


@pytest.mark.parametrize("size", [1, 4, 6])
def test_between_threads(size):
    on_threads(size, exchanged)


@pytest.mark.parametrize("program", [apart, refused], ids=lambda program: program.__name__)
def test_on_threads(program):
    on_threads(3, program)
