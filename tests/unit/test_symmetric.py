"""Blocks of symmetric memory: at equal places on all ranks, never overlapping, reused after the drop by all ranks."""

import gc as collector
import os
import random
import weakref

import numpy
import pytest

from gpucoll.arrays import address
from gpucoll.arrays.segments import CACHE_LINE, Heap, Segment, at, attach
from gpucoll.executors.peer.memory import HostMemory

BYTE = numpy.dtype("uint8")


def tell_all(heaps):
    """Give every rank's dropped blocks to every rank, as the collective call does first."""
    news = [heap.dropped() for heap in heaps]
    for heap, mine in zip(heaps, news, strict=True):
        heap.reclaim(mine, [number for one in news for number in one])


def place(heap, array):
    key, offset = heap.find(address(array), array.nbytes)
    return [segment.key for segment in heap._slabs].index(key), offset


def test_blocks_are_at_the_same_place_on_all_ranks_and_apart():
    heaps, rng, kept = [Heap(3) for _ in range(3)], random.Random(5), []
    for _ in range(300):
        tell_all(heaps)
        shape = (rng.randrange(4), rng.randrange(5000))
        blocks = [heap.allocate(shape, numpy.dtype("float32")) for heap in heaps]
        assert len({place(*pair) for pair in zip(heaps, blocks, strict=True)}) == 1
        assert all(address(block) % CACHE_LINE == 0 and block.shape == shape for block in blocks)
        number = float(len(kept))
        for block in blocks:
            block[...] = number
        kept.append((number, blocks))
        if rng.random() < 0.6:
            kept.pop(rng.randrange(len(kept)))
        assert all((block == number).all() for number, blocks in kept for block in blocks)


def test_a_block_is_used_again_once_every_rank_has_dropped_it():
    heaps = [Heap(2), Heap(2)]
    first = [heap.allocate((1000,), BYTE) for heap in heaps]
    where = place(heaps[0], first[0])
    part = first[1][10:20].reshape(2, 5)  # a view keeps the block
    first[0] = first[1] = None
    collector.collect()
    tell_all(heaps)
    others = [heap.allocate((1000,), BYTE) for heap in heaps]
    assert place(heaps[0], others[0]) != where
    del part
    collector.collect()
    tell_all(heaps)
    assert [place(heap, heap.allocate((1000,), BYTE)) for heap in heaps] == [where, where]


def test_a_segment_is_mapped_by_its_key():
    segment = Segment(10_000)
    segment.row[:] = 9
    there = attach(os.getpid(), segment.key)
    assert (there == 9).all()
    there[3] = 1
    assert segment.row[3] == 1
    assert at(segment.start + 3, 1)[0] == 1
    segment.close()
    with pytest.raises(OSError, match="No such file"):
        attach(os.getpid(), segment.key)


def test_memory_that_another_thread_points_to_stays():
    mine, theirs = (HostMemory(4096) for _ in range(2))
    there, start = weakref.ref(theirs.slab), theirs.slab.start
    assert mine.reach(theirs.export(theirs.slab)) == start
    del theirs
    collector.collect()
    assert there() is not None
    mine.close()
    collector.collect()
    assert there() is None
