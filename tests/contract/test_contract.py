"""One contract for all executors: the same programs on threads, held against one oracle, bit for bit.

By default every algorithm of every collective is called on each executor, on ranks of some number, with a few of all
ops, dtypes, lengths and roots, as the seed of the day has it; the whole grid is nightly.
"""

import itertools

import pytest

import oracle
import programs
from gpucoll.algorithms import registry
from gpucoll.collectives import COLLECTIVES
from grids import generator, naming, sampled
from programs import MOVED, MOVEMENTS, REDUCTIONS
from thread_ranks import on_threads

FEW = 8  # calls of an algorithm by default
SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 8)  # by default some numbers of ranks come more often
ALL_REDUCE = [name for name in programs.algorithms("all_reduce") if name != "native"]


def test_these_are_all_collectives():
    assert {*REDUCTIONS, *MOVEMENTS, "barrier"} == {*COLLECTIVES}


@pytest.mark.parametrize("collective", [*REDUCTIONS, *MOVEMENTS])
def test_every_algorithm(executor, collective):
    random = generator(f"{executor.name}/{collective}")
    pairs = itertools.cycle(random.sample(executor.pairs, len(executor.pairs)))
    sizes = itertools.cycle(random.sample(SIZES, len(SIZES)))
    for algorithm, size in zip(executor.algorithms(collective), sizes, strict=False):
        calls = list(itertools.islice(drawn(collective, size, pairs, random), FEW))
        executor.run(size, called, collective, algorithm, calls)


def drawn(collective, size, pairs, random):
    """Arguments of `programs.reduction`, or of one of the programs of `MOVED`; lengths come in turn."""
    lengths = itertools.cycle(random.sample([*programs.counts(size), 13, 65537], len(programs.counts(size)) + 2))
    for (op, name), count in zip(pairs, lengths, strict=False):
        if collective in REDUCTIONS:
            yield op, name, count, random.random() < 0.5
        else:
            long = programs.long_count(name) if count == 65537 else count
            yield name, long, random.randrange(size) if COLLECTIVES[collective].rooted else 0


def called(comm, collective, algorithm, calls):
    for call in calls:
        with naming((collective, algorithm, comm.size, call)):
            if collective in REDUCTIONS:
                programs.reduction(comm, collective, algorithm, *call)
            else:
                MOVED[collective](comm, algorithm, *call)


@pytest.mark.nightly
@pytest.mark.parametrize("size", oracle.SIZES)
@pytest.mark.parametrize("collective", [*REDUCTIONS, *MOVEMENTS])
def test_the_whole_grid(executor, collective, size):
    for algorithm in executor.algorithms(collective):
        with naming(algorithm):
            if collective in MOVEMENTS:
                executor.run(size, programs.copies, collective, algorithm)
            else:
                executor.run(size, programs.every_op_and_dtype, collective, algorithm)
                executor.run(size, programs.every_count, collective, algorithm)


@pytest.mark.parametrize(("body", "algorithm"), sampled(
    itertools.product(("shapes_and_strides", "special_values", "carriers"), ALL_REDUCE), keep=16, seed=2))
def test_other_arrays(executor, body, algorithm):
    for size in (1, 3):
        executor.run(size, getattr(programs, body), algorithm)


def test_shapes_of_the_other_collectives(executor):
    for size in (1, 2, 5):
        executor.run(size, programs.shapes_of_the_others)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "scan"])
def test_integers_wrap_over_their_whole_range(executor, collective):
    """The peer executor's kernels are only a few by default."""
    whole = len(executor.pairs) > 100
    names, ops = (programs.INTEGERS, ("sum", "prod", "max", "bxor")) if whole else (("int32", "int64"), ("sum",))
    for algorithm in generator(f"wrap/{executor.name}").sample(executor.algorithms(collective), 3):
        executor.run(4, programs.whole_range, collective, algorithm, names, ops)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("algorithm", sampled(ALL_REDUCE, keep=8, seed=3))
def test_whether_a_rank_works_in_place_changes_no_bit(executor, algorithm):
    assert len(set(executor.run(3, programs.in_place_here_and_there, algorithm))) == 1


@pytest.mark.parametrize(("collective", "algorithm", "name"), sampled(
    [(*pair, name) for pair in registry() if pair[0] in ("all_reduce", "reduce_scatter")
     for name in ("float32", "bfloat16")], keep=19, seed=4))
def test_the_same_bits_on_every_rank_and_in_every_run(executor, collective, algorithm, name):
    found = executor.run(4, programs.digests, collective, algorithm, name)
    assert len({digest for one in found for digest in one}) == 1


@pytest.mark.parametrize(("size", "name"), sampled(itertools.product((3, 4, 8), ("float32", "float16")), 2, seed=5))
def test_the_bits_are_those_of_messages(executor, size, name, monkeypatch):
    """Of random floats, whose sums depend on order and rounding."""
    found = executor.run(size, programs.rounded, name)
    monkeypatch.delenv("GPUCOLL_DEVICE", raising=False)
    assert found == on_threads(size, programs.rounded, name, executor="mpi")


@pytest.mark.parametrize(("collective", "algorithm"), sampled(
    [pair for pair in registry() if pair[0] in ("all_reduce", "reduce", "broadcast")], keep=5, seed=6))
def test_long_arrays_in_many_segments(executor, collective, algorithm):
    executor.run(3, programs.segmented, collective, algorithm)
