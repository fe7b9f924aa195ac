"""Collectives by every algorithm, on ops, dtypes and sizes in all pairs, against an oracle, bit for bit."""

import pytest

from gpucoll.algorithms import registry
from grids import in_pairs, sampled
from programs import (
    MOVEMENTS,
    REDUCTIONS,
    algorithms,
    carriers,
    copies,
    digests,
    every_count,
    every_op_and_dtype,
    grid,
    in_place_here_and_there,
    segmented,
    shapes_and_strides,
    shapes_of_the_others,
    share_of,
    special_values,
    whole_range,
)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(REDUCTIONS), 2), keep=24, seed=2))
def test_every_op_and_dtype(ranks, collective, algorithm, size):
    ranks(every_op_and_dtype, size, collective, algorithm, share_of(size), timeout=120)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(REDUCTIONS), 3), keep=24, seed=3))
def test_every_count(ranks, collective, algorithm, size):
    ranks(every_count, size, collective, algorithm, timeout=120)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(MOVEMENTS), 4), keep=30, seed=4))
def test_copies(ranks, collective, algorithm, size):
    ranks(copies, size, collective, algorithm, timeout=120)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "scan"])
def test_integers_wrap_over_their_whole_range(ranks, collective):
    for algorithm in algorithms(collective):
        ranks(whole_range, 4, collective, algorithm)


@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
@pytest.mark.parametrize("size", [2, 5])
def test_in_place_on_some_ranks_only(ranks, algorithm, size):
    assert len(set(ranks(in_place_here_and_there, size, algorithm))) == 1


@pytest.mark.parametrize("size", [1, 3])
def test_carriers_and_subclasses(ranks, size):
    for algorithm in algorithms("all_reduce"):
        ranks(carriers, size, algorithm)


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_shapes_and_strides(ranks, algorithm, size):
    ranks(shapes_and_strides, size, algorithm)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_shapes_of_the_other_collectives(ranks, size):
    ranks(shapes_of_the_others, size)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_special_values(ranks, algorithm, size):
    ranks(special_values, size, algorithm)


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [3, 8])
def test_the_same_bits_on_every_rank_and_in_every_run(ranks, collective, name, size):
    for algorithm in algorithms(collective):
        found = ranks(digests, size, collective, algorithm, name)
        assert len({digest for one in found for digest in one}) == 1, algorithm


@pytest.mark.parametrize("size", [2, 5])
@pytest.mark.parametrize("algorithm", ["tree", "ring", "star"])
def test_pipelined(ranks, algorithm, size):
    for collective in ("all_reduce", "reduce", "broadcast"):
        if (collective, algorithm) in registry():
            ranks(segmented, size, collective, algorithm)
