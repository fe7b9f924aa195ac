"""Blocks of symmetric memory used again while work on an old array is under way, by a heap without a GPU."""

import gc
from types import SimpleNamespace

import numpy

from gpucoll.arrays.segments import Heap

BYTES, UNIT = numpy.dtype("u1"), 64


class Uses:
    """Work that ends when the test says so; `awaited` has the events of each new array."""

    def __init__(self):
        self.now, self.awaited, self.made = "", [], {}

    def here(self):
        return self.now

    def ends(self, places):
        self.made[self.now] = SimpleNamespace(places=places, done=False)
        return [self.made[self.now]]

    def follow(self, events):
        self.awaited.append(events)


def test_a_new_array_waits_for_all_old_arrays_in_its_place():
    uses = Uses()
    heap = Heap(1, uses=uses)

    def empty(units, now):
        uses.now = now
        dropped = heap.dropped()
        heap.reclaim(dropped, dropped)
        return heap.allocate((units * UNIT,), BYTES)

    first, second, third = (empty(2, f"new {k}") for k in range(3))
    del first
    gc.collect()
    other = empty(4, "larger")  # in no old place
    assert uses.awaited == [[]] * 4
    assert uses.made["larger"].places == ["new 0", "new 2"]  # the streams of the new and of the dropped array
    del second
    gc.collect()
    joined = empty(4, "joined")
    assert uses.awaited[-1] == [uses.made["larger"], uses.made["joined"]]
    del joined
    gc.collect()
    uses.made["larger"].done = True
    behind = [empty(1, f"part {k}") for k in range(4)]
    assert uses.awaited[-4:] == [[uses.made["part 0"]]] * 2 + [[uses.made["joined"], uses.made["part 0"]]] * 2
    uses.made["joined"].done = uses.made["part 0"].done = True
    del behind
    gc.collect()
    again = empty(4, "again")
    assert sorted(event.places[0] for event in uses.awaited[-1]) == [f"part {k}" for k in range(4)]
    del third, other, again
    heap.close()


def test_heaps_of_the_host_wait_for_nothing():
    heap = Heap(1)
    for _ in range(3):
        x = heap.allocate((UNIT,), BYTES)
        place = x.ctypes.data
        del x
        gc.collect()
        heap.reclaim([0], heap.dropped())
        assert heap.allocate((UNIT,), BYTES).ctypes.data == place
        gc.collect()
        heap.reclaim([0], heap.dropped())
    heap.close()
