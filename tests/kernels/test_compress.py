"""Gradients in 16 bits: on a GPU's grid, on one CPU thread, and by NumPy, against one oracle."""

import itertools

import numpy
import pytest
from emulation import Memory
from expected import kept, random_array, same, total_of

from gpucoll.training.compression import shorten
from oracles.oracle import kind

pytestmark = pytest.mark.kernel

REAL = ("float32", "float64", "float16", "bfloat16")
COUNTS = (0, 1, 7, 64, 1000, 4099)


@pytest.mark.parametrize(("name", "target"), list(itertools.product(REAL, REAL[2:])))
def test_what_is_sent_and_what_is_lost_are_the_sum(way, name, target):
    memories = [Memory() for _ in range(4)]
    for count, shift in [*itertools.product(COUNTS, (0,)), (100, kind(name).itemsize)]:
        x, before = random_array(name, count, 1), random_array(name, count, 2)
        held = memories[0].hold(x, shift), memories[1].hold(before, shift)
        after, out = memories[2].place(kind(name), count, shift), memories[3].place(kind(target), count)
        shorten(*held, after, out)
        total = total_of(x, before)
        with numpy.errstate(all="ignore"):
            expected = total.astype(kind(target))
            lost = kept(total - expected.astype(total.dtype), kind(name))
        assert same(out, expected), (count, shift)
        assert same(after, lost, zeros_free=True), (count, shift)
        assert all(memory.is_clean() for memory in memories)
