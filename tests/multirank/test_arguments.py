"""Every wrong argument: a typed error on the rank that is wrong, nothing moved or written, the communicator usable."""

import numpy
import pytest

import gpucoll as gc


def read_only(size):
    array = numpy.zeros(4)
    array.flags.writeable = False
    return array


class GpuArray:
    """What any array on a GPU shows of itself."""

    __cuda_array_interface__ = {"shape": (4,), "typestr": "<f8", "data": (0, False), "version": 3}  # noqa: RUF012


FOUR = numpy.arange(4.0)
MEMORY = numpy.arange(9.0)
# name of the case: (collective, arguments made from the communicator's size, error, code, words)
CASES = {
    "scalar": ("all_reduce", lambda n: (3.0,), gc.ArgumentError, "GC-ARRAY", "float"),
    "list": ("all_reduce", lambda n: ([1, 2],), gc.ArgumentError, "GC-ARRAY", "numpy.asarray"),
    "numpy scalar": ("all_reduce", lambda n: (numpy.float64(1),), gc.ArgumentError, "GC-ARRAY", "float64"),
    "masked": ("all_reduce", lambda n: (numpy.ma.masked_equal(FOUR, 2),), gc.ArgumentError, "GC-ARRAY", "mask"),
    "on a GPU": ("all_reduce", lambda n: (GpuArray(),), gc.ArgumentError, "GC-ARRAY", "GPU array"),
    "object": ("all_reduce", lambda n: (numpy.array([None]),), gc.DtypeError, "GC-DTYPE", "object"),
    "string": ("all_gather", lambda n: (numpy.array(["a"]),), gc.DtypeError, "GC-DTYPE", "U1"),
    "structured": ("all_gather", lambda n: (numpy.zeros(2, [("a", "f4")]),), gc.DtypeError, "GC-DTYPE", "supported"),
    "long double": ("all_reduce", lambda n: (numpy.zeros(2, numpy.longdouble),), gc.DtypeError, "GC-DTYPE", "float128"),
    "big endian": ("all_reduce", lambda n: (numpy.zeros(2, ">f4"),), gc.DtypeError, "GC-DTYPE", "byte order"),
    "unknown op": ("all_reduce", lambda n: (FOUR, None, "summ"), gc.ArgumentError, "GC-OP", "did you mean sum"),
    "op is None": ("all_reduce", lambda n: (FOUR, None, None), gc.ArgumentError, "GC-OP", "known: sum"),
    "band on floats": ("all_reduce", lambda n: (FOUR, None, "band"), gc.DtypeError, "GC-OP-DTYPE", "float64"),
    "max on complex": ("reduce", lambda n: (FOUR * 1j, None, "max"), gc.DtypeError, "GC-OP-DTYPE", "complex128"),
    "avg on integers": ("all_reduce", lambda n: (numpy.arange(3), None, "avg"), gc.DtypeError, "GC-OP-DTYPE", "avg"),
    "avg on bool": ("all_reduce", lambda n: (FOUR > 1, None, "avg"), gc.DtypeError, "GC-OP-DTYPE", "bool"),
    "out of other shape": ("all_reduce", lambda n: (FOUR, numpy.zeros(5)), gc.ArgumentError, "GC-SHAPE", r"\(5,\)"),
    "out too small": ("all_gather", lambda n: (FOUR, numpy.zeros(4)), gc.ArgumentError, "GC-SHAPE", "expected"),
    "out of other dtype": ("all_reduce", lambda n: (FOUR, numpy.zeros(4, "f4")), gc.DtypeError, "GC-DTYPE", "float32"),
    "out is a list": ("all_reduce", lambda n: (FOUR, [0] * 4), gc.ArgumentError, "GC-ARRAY", "list"),
    "out read-only": ("all_reduce", lambda n: (FOUR, read_only(n)), gc.ArgumentError, "GC-READONLY", "read-only"),
    "out with shared elements": ("all_reduce", lambda n: (FOUR, numpy.lib.stride_tricks.as_strided(
        numpy.zeros(1), (4,), (0,))), gc.ArgumentError, "GC-OVERLAP", "share memory"),
    "overlap in part": ("all_reduce", lambda n: (MEMORY[:8], MEMORY[1:]), gc.ArgumentError, "GC-OVERLAP", "in part"),
    "reversed in place": ("all_reduce", lambda n: (MEMORY, MEMORY[::-1]), gc.ArgumentError, "GC-OVERLAP", "in part"),
    "root too large": ("reduce", lambda n: (FOUR, None, "sum", n), gc.ArgumentError, "GC-ROOT", "not in 0"),
    "root negative": ("broadcast", lambda n: (FOUR.copy(), -1), gc.ArgumentError, "GC-ROOT", "-1"),
    "root bool": ("broadcast", lambda n: (FOUR.copy(), True), gc.ArgumentError, "GC-ROOT", "True"),
    "root float": ("broadcast", lambda n: (FOUR.copy(), 0.0), gc.ArgumentError, "GC-ROOT", "0.0"),
    "root None": ("broadcast", lambda n: (FOUR.copy(), None), gc.ArgumentError, "GC-ROOT", "None"),
    "blocks missing": ("reduce_scatter", lambda n: (numpy.zeros((n + 1, 2)),), gc.ArgumentError, "GC-SHAPE",
                       "first axis"),
    "no blocks at all": ("reduce_scatter", lambda n: (numpy.array(1.0),), gc.ArgumentError, "GC-SHAPE", "first axis"),
    "dtype of other width": ("all_reduce", lambda n: (FOUR, None, "sum", {"dtype": "float32"}), gc.DtypeError,
                             "GC-DTYPE", "float32"),
    "unknown algorithm": ("all_reduce", lambda n: (FOUR, None, "sum", {"algorithm": "rng"}), gc.ArgumentError,
                          "GC-ALGO", "did you mean ring"),
    "algorithm of another collective": ("all_gather", lambda n: (FOUR, None, {"algorithm": "tree"}), gc.ArgumentError,
                                        "GC-ALGO", "known: bruck, circulant, direct"),
    "algorithm is a number": ("barrier", lambda n: ({"algorithm": 3},), gc.ArgumentError, "GC-ALGO", "3"),
}
# What every call with an array, an op, a root or a list of blocks refuses alike.
ROOTED = ("reduce", "broadcast", "gather", "scatter", "gather_v", "scatter_v")
WITH_OP = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "reduce_scatter_v")
WITH_ARRAY = ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "reduce_scatter", "all_to_all",
              "scan", "exscan", "all_gather_v", "gather_v")
WITH_OUT = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scan", "exscan")
WITH_LIST = ("scatter_v", "all_to_all_v")


def blocks(n):
    return numpy.arange(n * 4.0).reshape(n, 4)


for name in (*WITH_ARRAY, *WITH_LIST, "scatter", "reduce_scatter_v"):
    given = (lambda n: (blocks(n), [1] * n)) if name == "reduce_scatter_v" else (
        lambda n: ([blocks(n)] * n,)) if name in WITH_LIST else lambda n: (blocks(n),)
    CASES[f"{name}: unknown algorithm"] = (
        name, lambda n, given=given: (*given(n), {"algorithm": "rng"}), gc.ArgumentError, "GC-ALGO", "known")
    if name in ROOTED:
        for wrong in (True, 1.0, None, -1, 99, "0"):
            CASES[f"{name}: root {wrong!r}"] = (
                name, lambda n, given=given, wrong=wrong: (*given(n), {"root": wrong}), gc.ArgumentError, "GC-ROOT",
                "not in 0")
for name in WITH_ARRAY:
    for wrong, error, code in ((3, gc.ArgumentError, "GC-ARRAY"), ([1.0], gc.ArgumentError, "GC-ARRAY"),
                               (numpy.array(["text"]), gc.DtypeError, "GC-DTYPE"),
                               (numpy.zeros((2, 2), ">i4"), gc.DtypeError, "GC-DTYPE"),
                               (GpuArray(), gc.ArgumentError, "GC-ARRAY")):
        CASES[f"{name}: {type(wrong).__name__} {getattr(wrong, 'dtype', '')}"] = (
            name, lambda n, wrong=wrong: (wrong,), error, code, "array|dtype")
for name in WITH_OP:
    counts = (lambda n: ([1] * n,)) if name == "reduce_scatter_v" else lambda n: ()
    CASES[f"{name}: unknown op"] = (
        name, lambda n, counts=counts: (blocks(n), *counts(n), {"op": "summ"}), gc.ArgumentError, "GC-OP", "mean sum")
    CASES[f"{name}: band on floats"] = (
        name, lambda n, counts=counts: (blocks(n), *counts(n), {"op": "band"}), gc.DtypeError, "GC-OP-DTYPE", "band")
for name in ("scan", "exscan"):
    CASES[f"{name}: avg"] = (name, lambda n: (blocks(n), {"op": "avg"}), gc.ArgumentError, "GC-OP", "prefix")
for name in WITH_OUT:
    CASES[f"{name}: out of other shape"] = (
        name, lambda n: (blocks(n), numpy.zeros(3)), gc.ArgumentError, "GC-SHAPE", "expected")
    CASES[f"{name}: out is text"] = (name, lambda n: (blocks(n), "out"), gc.ArgumentError, "GC-ARRAY", "str")
CASES |= {
    "list too short": ("all_to_all_v", lambda n: ([blocks(n)] * (n - 1),), gc.ArgumentError, "GC-COUNTS", "list of"),
    "no list": ("all_to_all_v", lambda n: (3,), gc.ArgumentError, "GC-COUNTS", "list of"),
    "shapes differ in a list": ("all_to_all_v", lambda n: ([blocks(n)] + [blocks(n)[:, :1]] * (n - 1),),
                                gc.ArgumentError, "GC-SHAPE", "first axis"),
    "dtypes differ in a list": ("all_to_all_v", lambda n: ([blocks(n)] + [blocks(n).astype("f4")] * (n - 1),),
                                gc.DtypeError, "GC-DTYPE", "array 1"),
    "no first axis": ("all_gather_v", lambda n: (numpy.array(1.0),), gc.ArgumentError, "GC-SHAPE", "0-dim"),
    "counts do not add up": ("reduce_scatter_v", lambda n: (blocks(n), [3] * n), gc.ArgumentError, "GC-COUNTS", "sum"),
    "counts too short": ("reduce_scatter_v", lambda n: (blocks(n), [n]), gc.ArgumentError, "GC-COUNTS", "numbers"),
    "counts are no numbers": ("reduce_scatter_v", lambda n: (blocks(n), ["1"] * n), gc.ArgumentError, "GC-COUNTS",
                              "numbers"),
    "an mpi4py op of no such meaning": ("all_reduce", lambda n: (FOUR, None, mpi_op("MAXLOC")), gc.ArgumentError,
                                        "GC-OP", "known"),
    "factor on integers": ("all_reduce", lambda n: (numpy.arange(3), None, gc.premul_sum(0.5)), gc.DtypeError,
                           "GC-OP-DTYPE", "int64"),
    "expression of another dtype": ("all_reduce", lambda n: (numpy.arange(3), None, gc.elementwise_op("a / b")),
                                    gc.DtypeError, "GC-OP-DTYPE", "a / b"),
    "expression by MPI itself": ("all_reduce", lambda n: (FOUR, None, gc.elementwise_op("a + b"),
                                                          {"algorithm": "native"}),
                                 gc.ArgumentError, "GC-ALGO", "expression"),
}
COLLECTIVE_CASES = sorted(CASES)


def mpi_op(name):
    from mpi4py import MPI

    return getattr(MPI, name)


def call(comm, collective, arguments):
    options = arguments[-1] if arguments and isinstance(arguments[-1], dict) else {}
    return getattr(comm, collective)(*arguments[:len(arguments) - bool(options)], **options)


def wrong_everywhere(mpi, case):
    """Every rank is wrong: every rank has the same error, its arrays are as they were, the next call works."""
    collective, make, error, code, words = CASES[case]
    with gc.Communicator.from_mpi(mpi, timeout=20) as comm:
        arguments = make(comm.size)
        arrays = [argument for argument in arguments if isinstance(argument, numpy.ndarray)]
        before = [(array.dtype, array.tobytes()) for array in arrays]
        with pytest.raises(error, match=words) as refused:
            call(comm, collective, arguments)
        assert refused.value.code == code
        assert collective in str(refused.value) or code in ("GC-DTYPE", "GC-OP", "GC-ALGO")
        assert not isinstance(refused.value, gc.PeerError)
        assert [(array.dtype, array.tobytes()) for array in arrays] == before
        assert comm.all_reduce(numpy.array([1]))[0] == comm.size
    return code


def wrong_on_one(mpi):
    """One rank is wrong: it knows at once and can go on; its peers reach the deadline and are told what to look for."""
    comm = gc.Communicator.from_mpi(mpi, timeout=1.0)
    if comm.rank == 1:
        with pytest.raises(gc.ArgumentError):
            comm.all_reduce([1.0])
    else:
        x = numpy.ones(3)
        with pytest.raises(gc.CollectiveTimeout, match="is every rank in the same call") as late:
            comm.all_reduce(x, algorithm="ring")
        assert late.value.code == "GC-TIMEOUT"
        with pytest.raises(gc.RevokedError, match="failed earlier"):
            comm.all_reduce(x)
    comm.close()
    with pytest.raises(gc.ClosedError):
        comm.barrier()
    comm.close()
    return True


def a_refusal_is_told(mpi):
    """Where a host message goes before the data, it carries the refusal: the others have a PeerError at once."""
    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        good, bad = [numpy.ones(2)] * comm.size, [numpy.ones(2)]
        calls = {
            "scatter": lambda wrong: comm.scatter(numpy.zeros(7) if wrong else numpy.zeros(comm.size), root=1),
            "scatter_v": lambda wrong: comm.scatter_v(bad if wrong else good, root=1),
            "all_to_all_v": lambda wrong: comm.all_to_all_v(bad if wrong else good),
            "all_gather_v": lambda wrong: comm.all_gather_v(3 if wrong else numpy.ones(2)),
            "gather_v": lambda wrong: comm.gather_v(numpy.array(1.0) if wrong else numpy.ones(2), root=0)}
        for name, call in calls.items():
            with pytest.raises(gc.GpucollError) as refused:
                call(comm.rank == 1)
            assert type(refused.value) is (gc.ArgumentError if comm.rank == 1 else gc.PeerError), name
            assert comm.rank == 1 or refused.value.ranks == (1,)
        with pytest.raises(gc.MismatchError) as differ:
            comm.all_gather_v(numpy.ones((2, 3 + (comm.rank == 2))))
        assert differ.value.ranks == (2,)
        with pytest.raises(gc.MismatchError, match="float32"):
            comm.all_to_all_v([numpy.ones(2, "f4" if comm.rank == 1 else "f8")] * comm.size)
        assert comm.all_reduce(numpy.array([1]))[0] == comm.size
    return True


def test_a_refusal_is_told(ranks):
    ranks(a_refusal_is_told, 3)


def ops_of_mpi4py(mpi):
    from mpi4py import MPI

    with gc.Communicator.from_mpi(mpi) as comm:
        for name, op in (("sum", MPI.SUM), ("max", MPI.MAX), ("bxor", MPI.BXOR), ("land", MPI.LAND)):
            x = numpy.arange(4) + comm.rank
            assert (comm.all_reduce(x, op=op) == comm.all_reduce(x, op=gc.ReduceOp(name))).all()
            assert (comm.all_reduce(x, op=op) == comm.all_reduce(x, op=name)).all()
    return True


def test_ops_of_mpi4py(ranks):
    ranks(ops_of_mpi4py, 2)


@pytest.mark.parametrize("case", COLLECTIVE_CASES)
def test_a_wrong_argument_is_refused_before_data_moves(ranks, case):
    ranks(wrong_everywhere, 2, case)


def test_one_wrong_rank_does_not_hang_the_others(ranks):
    ranks(wrong_on_one, 3, timeout=30)


def options_program(mpi, options, environment_checks):
    with gc.Communicator.from_mpi(mpi, **options) as comm:
        found = (comm.timeout, comm.check, comm.executor)
        comm.all_reduce(numpy.ones(3))
        comm.barrier()
    return found


def test_options_and_their_environment(ranks):
    environment = {"GPUCOLL_TIMEOUT": "7", "GPUCOLL_CHECK": "deferred", "GPUCOLL_EXECUTOR": "mpi"}
    assert ranks(options_program, 2, {}, None, env=environment) == [(7.0, "deferred", "mpi")] * 2
    assert ranks(options_program, 2, {"timeout": 3, "executor": "native"}, None, env=environment) == \
        [(3.0, "deferred", "native")] * 2
    assert ranks(options_program, 2, {}, None) == [(300.0, None, None)] * 2


def named_executor(mpi):
    with gc.Communicator.from_mpi(mpi, executor="native") as comm:
        with pytest.raises(gc.ArgumentError, match="executor mpi") as refused:
            comm.all_reduce(numpy.ones(3), algorithm="ring")
        assert refused.value.code == "GC-EXECUTOR"
        assert comm.all_reduce(numpy.ones(3))[0] == comm.size
    with gc.Communicator.from_mpi(mpi, executor="mpi") as comm:
        with pytest.raises(gc.ArgumentError, match="GC-EXECUTOR"):
            comm.all_reduce(numpy.ones(3), algorithm="native")
        for x in (numpy.ones(3), numpy.ones(1 << 17)):
            assert comm.all_reduce(x)[0] == comm.size
            comm.broadcast(x)
            assert comm.all_gather(x).shape == (comm.size, len(x))
            comm.barrier()
    return True


def test_an_executor_by_name_or_an_error(ranks):
    ranks(named_executor, 3)
