"""Programs for ranks: every collective on exact data, compared with the oracle; on the host or on a device."""

import functools
import hashlib
import itertools

import numpy

import gpucoll as gc
from gpucoll.algorithms import registry
from gpucoll.core.collectives import COLLECTIVES
from harness.pace import seconds
from oracles import oracle

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "reduce_scatter_v")
MOVEMENTS = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_gather_v", "gather_v", "scatter_v",
             "all_to_all_v")


def algorithms(collective):
    return [name for kind, name in registry() if kind == collective] + ["native", "auto"]


def grid(collectives):
    return [(collective, algorithm, size) for collective in collectives for algorithm in algorithms(collective)
            for size in oracle.SIZES]


def program(test):
    """Let `test` run on threads with a communicator each, and on ranks of MPI, creating a communicator first."""

    @functools.wraps(test)
    def run(ranks, *arguments, **options):
        if isinstance(ranks, gc.Communicator):
            return test(ranks, *arguments, **options)
        with gc.Communicator.from_mpi(ranks, timeout=seconds(60)) as comm:
            return test(comm, *arguments, **options)

    return run


def inputs(op, name, size, shape):
    count = int(numpy.prod(shape))
    return [oracle.values(op, name, rank, count).reshape(shape) for rank in range(size)]


def counts(size):
    return sorted({0, 1, size - 1, size, size + 1, 1000})


def long_count(name):
    """Return a number of elements with more than 64 KiB: from there on MPIs send in other ways."""
    return (1 << 16) // oracle.kind(name).itemsize + 1


SHARES = 3


def check(found, expected, *context):
    assert isinstance(found, numpy.ndarray), context
    assert oracle.same_bits(found, expected), (context, found, expected)


def reduction(comm, collective, algorithm, op, name, count, in_place=False):
    """Make a call of a reduction on exact data and compare with the oracle."""
    if op == "avg" and "scan" in collective:
        return
    root, rows = count % comm.size, [(count + rank) % 3 for rank in range(comm.size)]
    shape = {"reduce_scatter": (comm.size, count), "reduce_scatter_v": (sum(rows), 5)}.get(collective, (count,))
    everyone = inputs(op, name, comm.size, shape)
    mine = everyone[comm.rank].copy()
    arguments = {"op": op, "algorithm": algorithm} | ({"root": root} if collective == "reduce" else {})
    if collective == "reduce_scatter_v":
        found = comm.reduce_scatter_v(mine, counts=rows, **arguments)
    else:
        if in_place and collective != "reduce_scatter" and (collective != "reduce" or comm.rank == root):
            arguments["out"] = mine
        found = getattr(comm, collective)(mine, **arguments)
    expected = oracle.outcome(collective, everyone, comm.rank, root, op, rows)
    if expected is None:
        assert found is None
    else:
        check(found, expected, op, name, count)
        assert found is arguments.get("out", found)
    if "out" not in arguments:
        check(mine, everyone[comm.rank], "the input has changed", op, name, count)


@program
def every_op_and_dtype(comm, collective, algorithm, share=None):
    """All ops on all dtypes, or a third of the pairs, selected by `share`; each third has every op and every dtype."""
    pairs = [pair for pair in itertools.product(oracle.OPS, oracle.DTYPES) if oracle.legal(*pair)]
    for op, name in pairs if share is None else pairs[share::SHARES]:
        reduction(comm, collective, algorithm, op, name, 13, in_place=(len(op) + len(name)) % 2 == 0)


@program
def every_count(comm, collective, algorithm):
    apart = collective.startswith("reduce_scatter")  # these calls are never in place
    for count in (*counts(comm.size), 65537):
        for in_place in (False,) if apart else (False, True):
            reduction(comm, collective, algorithm, "sum", "int32", count, in_place)


@program
def copies(comm, collective, algorithm):
    roots = {0, comm.size // 2, comm.size - 1} if COLLECTIVES[collective].rooted else {0}
    for name in ("uint8", "bfloat16", "complex128"):
        for count, root in itertools.product((*counts(comm.size), long_count(name)), roots):
            MOVED[collective](comm, algorithm, name, count, root)


def rooted(collective, root):
    return {"root": root} if COLLECTIVES[collective].rooted else {}


def moved(comm, algorithm, name, count, root, collective):
    """Make a call of a movement with blocks of one length; with an odd length into `out`, an all-to-all in place."""
    shape = (comm.size, count) if COLLECTIVES[collective].input.blocks else (count,)
    everyone = inputs("sum", name, comm.size, shape)
    x, out, options = everyone[comm.rank].copy(), {}, {"algorithm": algorithm, **rooted(collective, root)}
    expected = oracle.outcome(collective, everyone, comm.rank, root)
    if collective != "broadcast" and count % 2 and expected is not None:
        out = {"out": x if collective == "all_to_all" else numpy.empty_like(expected)}
    given = None if collective == "scatter" and comm.rank != root else x
    found = getattr(comm, collective)(given, **out, **options)
    if expected is None:
        assert found is None
    else:
        check(found, expected, name, count, root)
        assert found is out.get("out", found)
    in_place = collective == "broadcast" or out.get("out") is x
    assert (found is x) == in_place
    assert in_place or oracle.same_bits(x, everyone[comm.rank])


def ragged(comm, algorithm, name, count, root, collective):
    """Blocks with different lengths for every pair of ranks; some are empty."""
    blocks = [[oracle.values("sum", name, source, (source * 3 + target * 5 + count) % 7 * 2).reshape(-1, 2)
               for target in range(comm.size)] for source in range(comm.size)]
    given, expected = {
        "gather_v": lambda: (blocks[comm.rank][0], [row[0] for row in blocks] if comm.rank == root else None),
        "all_gather_v": lambda: (blocks[comm.rank][0], [row[0] for row in blocks]),
        "scatter_v": lambda: (blocks[root] if comm.rank == root else None, blocks[root][comm.rank]),
        "all_to_all_v": lambda: (blocks[comm.rank], [row[comm.rank] for row in blocks])}[collective]()
    found = getattr(comm, collective)(given, algorithm=algorithm, **rooted(collective, root))
    if collective == "scatter_v":
        found, expected = [found], [expected]
    assert (found is None) == (expected is None)
    for one, wanted in zip(found or (), expected or (), strict=True):
        check(one, wanted)


MOVED = {name: functools.partial(ragged if name.endswith("_v") else moved, collective=name) for name in MOVEMENTS}


@program
def shapes_and_strides(comm, algorithm):
    """Strided, negative-stride, 0-stride, Fortran-ordered, 0-d and multi-dimensional arrays; gaps of out are kept."""
    plain = numpy.arange(24, dtype=numpy.int64).reshape(4, 6) + 100 * comm.rank
    total = comm.size * numpy.arange(24).reshape(4, 6) + 100 * sum(range(comm.size))
    wide, gaps = numpy.zeros((4, 12), numpy.int64), numpy.full((4, 12), -1, numpy.int64)
    wide[:, ::2] = plain
    flat, scalar, fortran = numpy.broadcast_to(plain[0], (3, 6)), plain[0, 0], numpy.asfortranarray(plain)
    for x, expected in ((plain, total), (fortran, total), (wide[:, ::2], total), (plain[::-1], total[::-1]),
                        (flat, numpy.broadcast_to(total[0], (3, 6))), (numpy.array(scalar), total[0, 0, ...])):
        found = comm.all_reduce(x, algorithm=algorithm)
        check(found, expected.copy(), x.strides)
        assert found.flags.c_contiguous
    for x, out in ((plain, gaps[:, ::2]), (wide[:, ::2], wide[:, ::2]), (fortran, fortran)):
        assert comm.all_reduce(x, out=out, algorithm=algorithm) is out
        check(numpy.ascontiguousarray(out), total)
    assert (gaps[:, 1::2] == -1).all()


@program
def shapes_of_the_others(comm):
    block = numpy.arange(6).reshape(2, 3)
    check(comm.all_gather(numpy.asfortranarray(block + comm.rank)),
          numpy.stack([block + rank for rank in range(comm.size)]))
    check(comm.all_gather(numpy.array(comm.rank)), numpy.arange(comm.size))
    stack = numpy.stack([block * rank for rank in range(comm.size)])
    check(comm.reduce_scatter(stack), block * comm.rank * comm.size)
    check(comm.reduce_scatter(numpy.arange(comm.size)), numpy.array(comm.rank * comm.size))
    gaps = numpy.zeros((4, 4), numpy.int64)
    gaps[::2, ::2] = comm.rank + 5
    comm.broadcast(gaps[::2, ::2], root=comm.size - 1)
    assert (gaps[::2, ::2] == comm.size + 4).all()
    assert gaps.sum() == 4 * (comm.size + 4)
    for empty in (numpy.empty((comm.size, 0)), numpy.empty((comm.size, 3, 0))):  # NumPy gives these arrays strides of 0
        assert comm.all_gather(empty[0], out=empty) is empty
        assert comm.all_reduce(empty, out=empty) is empty
    fixed = numpy.arange(5)
    fixed.flags.writeable = comm.rank != 0
    check(comm.broadcast(fixed, root=0), numpy.arange(5))


@program
def special_values(comm, algorithm):
    """NaN wins, infinities and overflow follow IEEE, integers wrap, carriers get their dtype."""
    last = comm.rank == comm.size - 1
    x = numpy.array([numpy.nan if last else 1, -numpy.inf if last else 2, 3], numpy.float32)
    low, high = (comm.all_reduce(x, op=op, algorithm=algorithm) for op in ("min", "max"))
    assert numpy.isnan(low[0])
    assert numpy.isnan(high[0])
    assert low[1] == -numpy.inf
    assert comm.all_reduce(x, algorithm=algorithm)[1] == -numpy.inf
    wrapped = comm.all_reduce(numpy.array([2**31 - 1], numpy.int32), algorithm=algorithm)
    assert wrapped[0] == numpy.array([(2**31 - 1) * comm.size]).astype(numpy.int32)[0]
    big = comm.all_reduce(numpy.array([60000], numpy.float16), algorithm=algorithm)
    assert big[0] == (numpy.inf if comm.size > 1 else 60000)
    tiny = numpy.array([numpy.finfo(numpy.float32).smallest_subnormal])
    assert comm.all_reduce(tiny, algorithm=algorithm)[0] == tiny[0] * comm.size
    carrier = numpy.ones(4, oracle.kind("float8_e4m3fn")).view(numpy.uint8)
    as_float8 = comm.all_reduce(carrier, dtype="float8_e4m3fn", algorithm=algorithm)
    assert as_float8.dtype == numpy.uint8
    assert (as_float8.view(oracle.kind("float8_e4m3fn")) == comm.size).all()


@program
def large_averages(comm, algorithm):
    """The average of values; the sum of two of the values already overflows."""
    for name, large in (("float16", 40960), ("float8_e5m2", 32768), ("float8_e4m3fn", 256)):
        row = numpy.full(5, large, oracle.kind(name))
        dtype = None if name == "float16" else name
        try:
            mean = comm.all_reduce(row if dtype is None else row.view(numpy.uint8), op="avg", dtype=dtype,
                                   algorithm=algorithm)
        except gc.ArgumentError:
            if dtype is None or algorithm != "native":  # NCCL's own refuses float8 below sm_90
                raise
            continue
        assert (mean.view(row.dtype) == large).all(), name
    if algorithm == "auto":
        blocks = numpy.full((comm.size, 3), 40960, numpy.float16)
        assert (comm.reduce_scatter(blocks, op="avg") == 40960).all()
        mean = comm.reduce(blocks, op="avg", root=comm.size - 1)
        assert (mean is None) if comm.rank < comm.size - 1 else (mean == 40960).all()


@program
def digests(comm, collective, algorithm, name):
    """Return the digests of six repeats on random floats, in place or not, as chosen by each rank."""
    values = numpy.random.default_rng(comm.rank).standard_normal(4099).astype(oracle.kind(name))
    if collective == "reduce_scatter":
        values = numpy.stack([values] * comm.size)
    found = []
    for repeat in range(6):
        x = values.copy()
        in_place = repeat > 3 or (repeat + comm.rank) % 2
        y = comm.all_reduce(x, out=x if in_place else None, algorithm=algorithm) if collective == "all_reduce" \
            else comm.all_gather(comm.reduce_scatter(x, algorithm=algorithm))
        found.append(hashlib.sha256(y.tobytes()).hexdigest())
    return found


@program
def rounded(comm, name):
    """Return the results of every algorithm on random floats."""
    results = {}
    for collective in ("all_reduce", "reduce", "reduce_scatter", "scan"):
        for algorithm in gc.algorithms(collective, size=comm.size):
            shape = (comm.size, 703) if collective == "reduce_scatter" else (2111,)
            x = numpy.random.default_rng(comm.rank).standard_normal(shape).astype(oracle.kind(name))
            result = getattr(comm, collective)(x, algorithm=algorithm)
            results[collective, algorithm] = None if result is None else result.tobytes()
    return results


@program
def segmented(comm, collective, algorithm):
    """Arrays long enough for several segments: many in a tree, two in a ring."""
    count = (1 << 20) + 7
    mine = (numpy.arange(count, dtype=numpy.float32) + comm.rank) % 97
    everyone = [(numpy.arange(count, dtype=numpy.float32) + rank) % 97 for rank in range(comm.size)]
    if collective == "broadcast":
        check(comm.broadcast(mine.copy(), comm.size - 1, algorithm=algorithm), everyone[-1])
    else:
        found = getattr(comm, collective)(mine, algorithm=algorithm)
        assert found is None or (found == sum(everyone)).all()


@program
def carriers(comm, algorithm):
    """uint8 and uint16 read as other dtypes, also with strided results."""
    for name in ("float8_e5m2", "float16", "bfloat16"):
        x = oracle.values("sum", name, comm.rank, 6)
        total = oracle.reduced("sum", name, inputs("sum", name, comm.size, (6,)))
        carrier, room = x.view(f"u{x.itemsize}"), numpy.zeros(12, f"u{x.itemsize}")
        comm.all_reduce(carrier, out=room[::2], dtype=name, algorithm=algorithm)
        assert room[::2].tobytes() == total.tobytes()
        assert not room[1::2].any()
