"""The `peer` executor under whole programs, on the emulated device: those of every executor, on processes."""

import functools
import random
from unittest import mock

import numpy
import pytest

import gpucoll as gc
import oracle
import peer_made
import programs
from grids import in_pairs, sampled
from multirank import test_async, test_distributed, test_emulated, test_points
from multirank import test_random_programs as drawn
from programs import MOVEMENTS, REDUCTIONS, algorithms

pytestmark = [pytest.mark.emulated, pytest.mark.kernel]

PEER = {"GPUCOLL_DEVICE": "emulated", "GPUCOLL_EXECUTOR": "peer"}
SIZES = (2, 3, 4, 8)
THIRDS = [peer_made.PAIRS[first::3] for first in range(3)]  # of the ops and dtypes, for ranks of different numbers


@pytest.fixture(scope="module")
def peer_kernels(emulated_kernels):
    """The kernels that most of these tests use, made on every core; others are made by the rank that comes first."""
    peer_made.make([*peer_made.PAIRS, *(("sum", name) for name in ("float32", "float64", "int32", "int64"))])


@pytest.fixture
def ranks(rank_pool, peer_kernels):
    """`ranks(program, size, *args)` on the emulated device, by this executor."""
    return functools.partial(rank_pool.run, env=PEER, timeout=120)


def schedules(collective):
    return [name for name in algorithms(collective) if name != "native"]


def grid(collectives):
    return [(collective, algorithm, size) for collective in collectives for algorithm in schedules(collective)
            for size in SIZES]


def of_pairs(mpi, pairs, *arguments):
    """The program of ops and dtypes, as if no others were legal."""
    with mock.patch.object(oracle, "legal", lambda *pair: pair in pairs):
        programs.every_op_and_dtype(mpi, *arguments)


# ---------------------------------------------------------------- the programs of every executor


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(REDUCTIONS), 31), keep=20, seed=31))
def test_ops_and_dtypes(ranks, collective, algorithm, size):
    third = THIRDS[(SIZES.index(size) + schedules(collective).index(algorithm)) % len(THIRDS)]
    ranks(of_pairs, size, third, collective, algorithm)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(REDUCTIONS), 32), keep=20, seed=32))
def test_every_count(ranks, collective, algorithm, size):
    ranks(programs.every_count, size, collective, algorithm)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(MOVEMENTS), 33), keep=20, seed=33))
def test_copies(ranks, collective, algorithm, size):
    ranks(programs.copies, size, collective, algorithm)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "tree", "auto"])
@pytest.mark.parametrize("body", ["shapes_and_strides", "special_values", "carriers"])
def test_other_arrays(ranks, body, algorithm):
    ranks(getattr(programs, body), 3, algorithm)


def test_shapes_of_the_others(ranks):
    ranks(programs.shapes_of_the_others, 3)


@pytest.mark.parametrize("algorithm", schedules("all_reduce"))
def test_in_place_on_some_ranks_only(ranks, algorithm):
    assert len(set(ranks(programs.in_place_here_and_there, 4, algorithm))) == 1


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_the_same_bits_on_every_rank_and_in_every_run(ranks, collective, name):
    for algorithm in schedules(collective):
        found = ranks(programs.digests, 4, collective, algorithm, name)
        assert len({digest for one in found for digest in one}) == 1, algorithm


@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", "one_shot"), ("all_reduce", "ring"),
                                                       ("reduce_scatter", "circulant"), ("scan", "linear")])
def test_integers_wrap_over_their_whole_range(ranks, collective, algorithm):
    ranks(programs.whole_range, 4, collective, algorithm)


@pytest.mark.parametrize(("collective", "algorithm"), [("all_reduce", "one_shot"), ("all_reduce", "two_shot"),
                                                       ("all_reduce", "ring"), ("all_reduce", "tree"),
                                                       ("broadcast", "tree"), ("reduce", "chain")])
def test_many_segments(ranks, collective, algorithm):
    ranks(programs.segmented, 4, collective, algorithm)


# ---------------------------------------------------------------- the bits of the other executors


def same_bits(mpi, name):
    """Random floats, whose sums depend on order and rounding: as by messages."""
    with gc.Communicator.from_mpi(mpi, timeout=60, executor="peer") as here, \
            gc.Communicator.from_mpi(mpi, timeout=60, executor="nccl") as there:
        for collective in ("all_reduce", "reduce", "reduce_scatter", "scan"):
            for algorithm in gc.algorithms(collective, size=mpi.size):
                shape = (mpi.size, 703) if collective == "reduce_scatter" else (2111,)
                x = numpy.random.default_rng(mpi.rank).standard_normal(shape).astype(oracle.kind(name))
                found = getattr(here, collective)(x, algorithm=algorithm)
                wanted = getattr(there, collective)(x, algorithm=algorithm)
                assert (found is None and wanted is None) or found.tobytes() == wanted.tobytes(), algorithm
    return True


@pytest.mark.parametrize(("size", "name"), [(3, "float32"), (4, "float16"), (8, "float32")])
def test_the_bits_are_those_of_the_nccl_executor(ranks, size, name):
    assert all(ranks(same_bits, size, name))


# ---------------------------------------------------------------- points, works, groups, parts, torch's calls


@pytest.mark.parametrize("body", [test_points.messages, test_points.nonblocking, test_points.groups,
                                  test_points.splits, test_async.strided_out, test_async.kept_alive,
                                  test_emulated.custom_ops, test_emulated.asynchronous, test_emulated.points,
                                  test_emulated.dropped, test_emulated.works_in_a_group])
@pytest.mark.parametrize("size", [2, 3])
def test_beside_other_calls(ranks, body, size):
    ranks(body, size)


def test_progress_while_python_computes(ranks):
    ranks(test_async.progress, 4, "ring")


def test_a_bad_expression_is_refused_with_the_compilers_line(ranks):
    for kind, code, words in ranks(test_emulated.bad_expressions, 2):
        assert kind in ("ArgumentError", "DtypeError"), words
        assert code.startswith("GC-OP")
        assert "complex64" in words


@pytest.mark.parametrize("async_op", [False, True])
def test_torchs_calls(ranks, async_op):
    for body in (test_distributed.reductions, test_distributed.movements):
        ranks(body, 3, "float32", async_op)
    for body in (test_distributed.into_tensors, test_distributed.uneven, test_distributed.all_to_all_alike):
        ranks(body, 3, async_op)
    ranks(test_distributed.in_groups, 3)


def as_made(name, options, rng):
    """The call by a schedule, its op and dtype among those of which there are kernels."""
    op, dtype = rng.choice([pair for pair in peer_made.PAIRS if pair[0] != "avg" or "scan" not in name])
    algorithm = "auto" if options["algorithm"] == "native" else options["algorithm"]
    return name, options | {"algorithm": algorithm, "op": op, "dtype": dtype}


@pytest.mark.parametrize("seed", [1, 2, 3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 30))])
def test_random_programs(ranks, seed):
    size = SIZES[seed % len(SIZES)]
    rng = random.Random(seed)
    calls = [as_made(name, options, rng) for name, options in drawn.draw(seed, size)]
    ranks(drawn.run, size, calls)
