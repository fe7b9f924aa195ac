"""The contract of all executors: the same programs on threads, compared with a single oracle, bit for bit.

By default every algorithm of every collective runs on each executor with some number of ranks and a few ops, dtypes,
lengths and roots, drawn by the seed of the run. The whole grid is nightly.
"""

import itertools

import pytest

import mixture
from gpucoll.algorithms import registry
from gpucoll.core.collectives import COLLECTIVES
from harness.grids import generator, naming, sampled
from harness.thread_ranks import on_threads
from oracles import oracle
from programs import collectives
from programs.collectives import MOVEMENTS, REDUCTIONS

FEW = {"nccl": 4, "peer": 2}  # calls of an algorithm by default, where the kernels run on the CPU; else 6
ALL_REDUCE = [name for name in collectives.algorithms("all_reduce") if name != "native"]


@pytest.mark.parametrize("collective", [*REDUCTIONS, *MOVEMENTS])
def test_every_algorithm(executor, collective):
    """Every algorithm is right; pairs of op and dtype, lengths and sizes come in turn from shuffled lists."""
    random = generator(f"{executor.name}/{collective}")
    pairs, sizes = (itertools.cycle(random.sample(some, len(some))) for some in (executor.pairs, executor.sizes))
    for algorithm in executor.algorithms(collective):
        size = next(sizes)
        lengths = [*collectives.counts(size), 13, 65537]
        calls = [(collective, algorithm, *next(pairs), length, random.random())
                 for length in random.sample(lengths, FEW.get(executor.name, 6))]
        executor.run(size, mixture.called, calls)


@pytest.mark.parametrize("share", [
    1, pytest.param(8, marks=pytest.mark.slow), pytest.param(45, marks=pytest.mark.nightly)])
def test_random_programs(executor, share):
    """Random programs are right: 1,620 in the nightly tier; tests/multirank runs 400 on processes."""
    count = {"mpi": 12, "shared": 12, "nccl": 8, "peer": 4}[executor.name] * share
    mixture.given(count, lambda size, steps: executor.run(size, mixture.run, steps), executor.sizes, executor.pairs)


@pytest.mark.nightly
@pytest.mark.parametrize("size", oracle.SIZES)
@pytest.mark.parametrize("collective", [*REDUCTIONS, *MOVEMENTS])
def test_the_whole_grid(request, executor, collective, size):
    """The whole grid is right; the peer executor, slow with fibers, runs a single algorithm drawn every night."""
    algorithms = list(executor.algorithms(collective))
    if executor.name == "peer":
        request.getfixturevalue("every_peer_kernel")
        algorithms = generator(f"{collective}/{size}").sample(algorithms, 1)
    for algorithm in algorithms:
        with naming(algorithm):
            if collective in MOVEMENTS:
                executor.run(size, collectives.copies, collective, algorithm)
            else:
                executor.run(size, collectives.every_op_and_dtype, collective, algorithm)
                executor.run(size, collectives.every_count, collective, algorithm)


@pytest.mark.parametrize(("body", "algorithm"), sampled(
    itertools.product(("shapes_and_strides", "special_values", "carriers"), ALL_REDUCE), keep=8, seed=2))
def test_other_arrays(executor, body, algorithm):
    for size in (1, 3):
        executor.run(size, getattr(collectives, body), algorithm)


def test_special_values(executor):
    """Not drawn: each executor has arithmetic of its own."""
    executor.run(3, collectives.special_values, "auto")


def test_averages_do_not_overflow(executor):
    for size, algorithm in ((1, "auto"), (3, "auto"), (3, "ring"), (5, "one_shot")):
        executor.run(size, collectives.large_averages, algorithm)


def test_shapes_of_the_other_collectives(executor):
    assert {*REDUCTIONS, *MOVEMENTS, "barrier"} == {*COLLECTIVES}
    for size in (1, 2, 5):
        executor.run(size, collectives.shapes_of_the_others)


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize(("collective", "algorithm", "name"), sampled(
    [(*pair, name) for pair in registry() if pair[0] in ("all_reduce", "reduce_scatter")
     for name in ("float32", "bfloat16")], 4, 4, ("all_reduce", "one_shot", "float32")))
def test_the_same_bits_on_every_rank_and_in_every_run(executor, collective, algorithm, name):
    found = executor.run(4, collectives.digests, collective, algorithm, name)
    assert len({digest for one in found for digest in one}) == 1


@pytest.mark.parametrize(("size", "name"), sampled(itertools.product((2, 3, 5, 8), ("float32", "float16")), 1, seed=5))
def test_the_bits_are_those_of_messages(executor, size, name, monkeypatch):
    """Sums of random floats, sensitive to order and rounding, equal those of messages."""
    found = executor.run(size, collectives.rounded, name)
    monkeypatch.delenv("GPUCOLL_DEVICE", raising=False)
    assert found == on_threads(size, collectives.rounded, name, executor="mpi")


@pytest.mark.parametrize(("collective", "algorithm"), sampled(
    [pair for pair in registry() if pair[0] in ("all_reduce", "reduce", "broadcast")], keep=2, seed=6))
def test_long_arrays_in_many_segments(executor, collective, algorithm):
    executor.run(3, collectives.segmented, collective, algorithm)
