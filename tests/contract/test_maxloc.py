"""Greatest and least values with their ranks or indices: equal to NumPy on every executor."""

import itertools

import numpy
import pytest

import gpucoll as gc
from harness.grids import sampled
from harness.thread_ranks import on_threads
from oracles.oracle import kind
from programs.collectives import program

FLOATS = "float16 bfloat16 float32 float64 float8_e4m3fn".split()
SHAPES = [(), (0,), (1,), (5, 7), (4099,)]


def data(dtype, size, shape, number):
    """Return a block for each rank, with ties, and for floats with NaN and zeros of both signs."""
    draw = numpy.random.default_rng(number)
    blocks = draw.integers(0, 2 if dtype == "bool" else 6, (size, *shape)).astype("f4")
    if dtype in FLOATS:
        blocks[draw.random(blocks.shape) < 0.1] = numpy.nan
        blocks[(blocks == 0) & (draw.random(blocks.shape) < 0.5)] = -0.0
    return blocks.astype(kind(dtype))


def check(found, blocks, indices, function):
    """Compare with `function`, NumPy's argmax or argmin over the ranks' blocks in the order of `indices`."""
    order = numpy.argsort(indices, axis=0, kind="stable")
    at = function(numpy.take_along_axis(blocks, order, 0).astype("f8"), axis=0)[None]
    values, places = found
    wanted = numpy.take_along_axis(numpy.take_along_axis(blocks, order, 0), at, 0)[0]
    assert (values.dtype, values.shape) == (blocks.dtype, blocks.shape[1:])
    numpy.testing.assert_array_equal(values.astype("f8"), wanted.astype("f8"))
    assert (places.dtype, places.shape) == (indices.dtype, blocks.shape[1:])
    numpy.testing.assert_array_equal(places, numpy.take_along_axis(numpy.sort(indices, 0), at, 0)[0])


@program
def located(comm, dtype):
    for number, shape in enumerate(SHAPES):
        blocks = data(dtype, comm.size, shape, number)
        ranks = numpy.broadcast_to(numpy.arange(comm.size).reshape(-1, *[1] * len(shape)), blocks.shape)
        given = numpy.random.default_rng(number).permuted(3 * ranks - 4, axis=0).astype(("i4", "i8", "i2")[number % 3])
        x, before = blocks[comm.rank, ...], blocks[comm.rank].tobytes()
        for call, function in ((comm.maxloc, numpy.argmax), (comm.minloc, numpy.argmin)):
            check(call(x), blocks, ranks.astype("i8"), function)
            check(call(x, given[comm.rank, ...]), blocks, given, function)
        strided = numpy.repeat(x[..., None], 2, -1)[..., 0]
        check(comm.maxloc(strided, index=given[comm.rank, ...]), blocks, given, numpy.argmax)
        assert x.tobytes() == before


@program
def refused(comm):
    x, index = numpy.arange(3.0), numpy.arange(3)
    for code, arguments in {"GC-OP-DTYPE": (x + 1j,), "GC-SHAPE": (x, index[:2]), "GC-DTYPE": (x, x),
                            "GC-ARRAY": (x, comm.rank)}.items():
        with pytest.raises((gc.ArgumentError, gc.DtypeError), match=code):
            comm.maxloc(*arguments)
    with pytest.raises(gc.UsageError, match="GC-GROUP"), comm.group():
        comm.minloc(x)
    with pytest.raises(gc.GpucollError) as error:
        comm.maxloc(x, index[:2] if comm.rank == comm.size - 1 else index)
    assert error.value.code == ("GC-SHAPE" if comm.rank == comm.size - 1 else "GC-PEER")
    assert comm.maxloc(x)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("int8", marks=pytest.mark.nightly)])
def test_on_every_executor(executor, dtype):
    executor.run(3, located, dtype)


@pytest.mark.parametrize(("dtype", "size"), sampled(itertools.product(
    ("bool", "uint64", "float16", "float64", "bfloat16", "float8_e4m3fn"), (1, 2, 5)), keep=6, seed=7))
def test_every_dtype_and_size(dtype, size):
    on_threads(size, located, dtype)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_refused(size):
    on_threads(size, refused)
