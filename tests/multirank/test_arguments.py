"""Every wrong argument: a typed error on the calling rank, no data moved or written, the communicator still usable."""

import asyncio
import copy
import re
import types
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from gpucoll.core.collectives import COLLECTIVES
from harness.grids import naming
from harness.pace import seconds
from harness.thread_ranks import on_threads

HABITS = Path(__file__).parents[2] / "docs" / "guide" / "habits.md"
ARGUMENT, DTYPE = gc.ArgumentError, gc.DtypeError
ROOTED = [name for name, row in COLLECTIVES.items() if row.rooted]
WITH_OP = [name for name, row in COLLECTIVES.items() if row.reduces]
WITH_OUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scan", "exscan")
WITH_LIST = ("scatter_v", "all_to_all_v")
WITH_ARRAY = [name for name in COLLECTIVES if name not in ("barrier", "scatter", "reduce_scatter_v", *WITH_LIST)]


def right_arguments(name, n):
    """Return valid positional arguments of the collective `name` on `n` ranks."""
    blocks = numpy.arange(n * 4.0).reshape(n, 4)
    special = {"reduce_scatter_v": (blocks, [1] * n), "barrier": ()} | dict.fromkeys(WITH_LIST, ([blocks] * n,))
    return special.get(name, (blocks,))


def wrong_calls(n):
    """Yield wrong calls on `n` ranks: collective, arguments, options, and the expected error, its code and words."""
    four, memory, read_only = numpy.arange(4.0), numpy.arange(9.0), numpy.zeros(4)
    read_only.flags.writeable = False
    blocks, one_cell = numpy.arange(n * 4.0).reshape(n, 4), numpy.lib.stride_tricks.as_strided(memory, (4,), (0,))
    on_gpu = types.SimpleNamespace(__cuda_array_interface__={"shape": (4,), "typestr": "<f8", "data": (0, False)})

    def reduce(*given, **options):
        return "all_reduce", given, options

    yield *reduce(3.0), ARGUMENT, "GC-ARRAY", "float.*asarray"
    yield *reduce({}), ARGUMENT, "GC-ARRAY", "dict, not an array$"
    yield *reduce([four, "MPI.DOUBLE"]), ARGUMENT, "GC-ARRAY", "pass one array"
    yield *reduce(numpy.ma.masked_equal(four, 2)), ARGUMENT, "GC-ARRAY", "mask"
    yield *reduce(four, "max"), ARGUMENT, "GC-ARRAY", "pass the op as op="
    yield *reduce(numpy.array([None])), DTYPE, "GC-DTYPE", "object"
    yield *reduce(numpy.zeros(2, ">f4")), DTYPE, "GC-DTYPE", "byte order"
    yield *reduce(four, op=None), ARGUMENT, "GC-OP", "known: sum"
    yield *reduce(four * 1j, op="max"), DTYPE, "GC-OP-DTYPE", "complex128"
    yield *reduce(numpy.arange(3), op="avg"), DTYPE, "GC-OP-DTYPE", "avg"
    yield *reduce(numpy.arange(3), op=gc.premul_sum(0.5)), DTYPE, "GC-OP-DTYPE", "int64"
    yield *reduce(four, numpy.zeros(4, "f4")), DTYPE, "GC-DTYPE", "float32"
    yield *reduce(four, dtype="float32"), DTYPE, "GC-DTYPE", "float32"
    yield *reduce(four, read_only), ARGUMENT, "GC-READONLY", "read-only"
    yield *reduce(four, one_cell), ARGUMENT, "GC-OVERLAP", "share memory"
    yield *reduce(memory, memory[::-1]), ARGUMENT, "GC-OVERLAP", "partly"
    yield "all_gather", (four,), {"algorithm": "tree"}, ARGUMENT, "GC-ALGO", "known: bruck, circulant, direct"
    yield "reduce_scatter", (numpy.zeros((n + 1, 2)),), {}, ARGUMENT, "GC-SHAPE", "first axis"
    yield "reduce_scatter_v", (blocks, [3] * n), {}, ARGUMENT, "GC-COUNTS", "sum"
    yield "reduce_scatter_v", (blocks, [n]), {}, ARGUMENT, "GC-COUNTS", "numbers"
    yield "all_gather_v", (numpy.array(1.0),), {}, ARGUMENT, "GC-SHAPE", "0-dim"
    yield "all_to_all_v", ([blocks] * (n - 1),), {}, ARGUMENT, "GC-COUNTS", "list of"
    yield "all_to_all_v", ([blocks] + [blocks[:, :1]] * (n - 1),), {}, ARGUMENT, "GC-SHAPE", "first axis"
    yield "all_to_all_v", ([blocks] + [blocks.astype("f4")] * (n - 1),), {}, DTYPE, "GC-DTYPE", "array 1"
    yield "split", (-1,), {}, ARGUMENT, "GC-SPLIT", "negative"
    yield "split", (0, "first"), {}, ARGUMENT, "GC-SPLIT", "whole number"
    yield "send", (four, n), {}, ARGUMENT, "GC-ROOT", "not in 0"
    yield "send", (four, 0, 1 << 15), {}, ARGUMENT, "GC-TAG", "not in 0"
    yield "recv", (read_only, 0), {}, ARGUMENT, "GC-READONLY", "read-only"
    yield "sendrecv", (four, four, 0, 0), {}, ARGUMENT, "GC-OVERLAP", "overlap"
    for name in COLLECTIVES:
        yield name, right_arguments(name, n), {"algorithm": "rng"}, ARGUMENT, "GC-ALGO", "known"
    for name in ROOTED:
        for root in (True, 1.0, None, -1, n, "0"):
            yield name, right_arguments(name, n), {"root": root}, ARGUMENT, "GC-ROOT", "not in 0"
    for name in WITH_ARRAY:
        yield name, ([1.0],), {}, ARGUMENT, "GC-ARRAY", "list, not an array"
        yield name, (on_gpu,), {}, ARGUMENT, "GC-ARRAY", "GPU array"
        yield name, (numpy.array(["text"]),), {}, DTYPE, "GC-DTYPE", "U4"
    for name in WITH_OP:
        yield name, right_arguments(name, n), {"op": "summ"}, ARGUMENT, "GC-OP", "did you mean sum"
        yield name, right_arguments(name, n), {"op": "band"}, DTYPE, "GC-OP-DTYPE", "band"
    for name in ("scan", "exscan"):
        yield name, (blocks,), {"op": "avg"}, ARGUMENT, "GC-OP", "prefix"
    for name in WITH_OUT:
        yield name, (blocks,), {"out": numpy.zeros(3)}, ARGUMENT, "GC-SHAPE", r"\(3,\), expected"


def all_refused(comm):
    """Make each wrong call on all ranks: every rank raises the same error, no array changes, the next call works."""
    x = numpy.arange(4.0)
    for _ in range(3):  # repeated calls skip checks: the short cut must not let a wrong call through
        comm.all_reduce(x, out=x.copy())
        comm.all_gather(x)
        comm.broadcast(x)
    for collective, arguments, options, error, code, words in wrong_calls(comm.size):
        arrays = [one for one in (*arguments, *options.values()) if isinstance(one, numpy.ndarray)]
        before = [(array.dtype, array.tobytes()) for array in arrays]
        with naming((collective, arguments, options)), pytest.raises(error, match=words) as refused:
            getattr(comm, collective)(*arguments, **options)
        assert refused.value.code == code
        assert collective in str(refused.value) or code in ("GC-DTYPE", "GC-OP", "GC-ALGO")
        assert [(array.dtype, array.tobytes()) for array in arrays] == before
        assert comm.all_reduce(numpy.array([1]))[0] == comm.size


def test_a_wrong_argument_is_refused_before_data_moves():
    on_threads(2, all_refused, timeout=seconds(60))


def between_processes(mpi):
    """Repeat `all_refused` on processes (repeated calls run in C++); check mpi4py's ops, and executors by name."""
    from mpi4py import MPI

    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        all_refused(comm)
        x = numpy.arange(4) + comm.rank
        for name, op in (("sum", MPI.SUM), ("max", MPI.MAX), ("bxor", MPI.BXOR), ("land", MPI.LAND)):
            assert (comm.all_reduce(x, op=op) == comm.all_reduce(x, op=gc.ReduceOp(name))).all()
        for given, words in (((x, None, MPI.MAXLOC), "known"), ((x, MPI.MAX), "op="), ((MPI.IN_PLACE, x), "out=x")):
            with pytest.raises(gc.ArgumentError, match=words):
                comm.all_reduce(*given)
        with pytest.raises(gc.ArgumentError, match=r"GC-ALGO.*expression"):
            comm.all_reduce(x, op=gc.elementwise_op("a + b"), algorithm="native")
    for executor, algorithm in (("native", "ring"), ("mpi", "native")):
        with gc.Communicator.from_mpi(mpi, timeout=seconds(60), executor=executor) as comm:
            with pytest.raises(gc.ArgumentError, match="GC-EXECUTOR"):
                comm.all_reduce(x, algorithm=algorithm)
            for nbytes in (8, 1 << 20):
                assert comm.all_reduce(numpy.ones(nbytes // 8))[0] == comm.size
            comm.barrier()


def test_between_processes(ranks):
    ranks(between_processes, 2, timeout=seconds(60))


def test_options(monkeypatch):
    monkeypatch.setenv("GPUCOLL_TIMEOUT", "7")
    one, = gc.init_local(1, deterministic=False, executor="mpi")
    assert (one.timeout, one.check, one.executor) == (7.0, None, "mpi")
    with pytest.raises(gc.ArgumentError, match=r"GC-OPTION\].*not known"):
        gc.init_local(2, check="often")


def test_habits_of_other_libraries():
    """Names of ops are taken, and a Work is awaited."""
    def program(comm):
        x = numpy.arange(3) + comm.rank
        for op, wanted in (("SUM", [1, 3, 5]), (numpy.add, [1, 3, 5]), (max, [1, 2, 3]), ("Product", [0, 2, 6])):
            assert comm.all_reduce(x, op=op).tolist() == wanted
        assert comm.all_reduce(x * 1.0, op="mean").tolist() == [0.5, 1.5, 2.5]

        async def result():
            work = comm.all_reduce(x, async_op=True)
            return (await work).tolist(), work.done(), repr(work)

        assert asyncio.run(result()) == ([1, 3, 5], True, "<Work of all_reduce: ended>")

    on_threads(2, program, timeout=seconds(60))


def test_the_page_of_habits_tells_what_each_gets():
    rows = re.findall(r"^\| `(.*)` \| `(.*)` \|$", HABITS.read_text().partition("## torch")[0], re.MULTILINE)
    names = {"comm": gc.init_local(1)[0], "x": numpy.ones(2), "numpy": numpy, "gc": gc, "copy": copy}
    for habit, told in rows:
        with naming(habit):
            try:
                found = repr(eval(habit, names))
            except (gc.GpucollError, AttributeError) as error:
                found = f"{type(error).__name__}: {error}"
            assert found.startswith(told)
    names["comm"].close()
    assert len(rows) == 15
