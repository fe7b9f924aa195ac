"""Blocks of all ranks, stacked or concatenated, and gathers in place, by every algorithm of every executor."""

import pytest

from harness.grids import often
from programs import blocks


@pytest.mark.parametrize("collective", often(
    ["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"], "scatter", "reduce_scatter"))
def test_stacked_and_concatenated(executor, collective):
    for number, algorithm in enumerate(executor.algorithms(collective)):
        executor.run((3, 2, 4)[number % 3], blocks.either_layout, collective, algorithm)
    executor.run(1, blocks.either_layout, collective, "auto")


@pytest.mark.parametrize("collective", ["all_gather", "gather"])
def test_in_place(executor, collective):
    for number, algorithm in enumerate(executor.algorithms(collective)):
        executor.run((3, 2, 4)[number % 3], blocks.gathered_in_place, collective, algorithm)
    executor.run(1, blocks.gathered_in_place, collective, "auto")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_plans_and_refusals(executor, size):
    executor.run(size, blocks.others, check="off")


