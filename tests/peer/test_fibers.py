"""Worlds of fibers: who runs when, and the faults that a GPU would not let pass."""

import ctypes
import itertools

import numpy
import pytest

from gpucoll.device import sources
from gpucoll.device.peer import Room
from peer import mutants
from peer.world import Fault, World, library

pytestmark = pytest.mark.kernel

ARGUMENTS = numpy.dtype([("data", "u8"), ("choice", "u4")], align=True)
KERNELS = """
struct Arguments { u64* data; u32 choice; };
GC_DEV void early(const Arguments& a) {
    if (threadIdx.x == a.choice) return;
    __syncthreads();
}
GC_ENTRY(early, Arguments, early)
GC_DEV void misaligned(const Arguments& a) {
    if (blockIdx.x == 1 && threadIdx.x == 3) store_release(address_of(a.data) + 4, 1);
}
GC_ENTRY(misaligned, Arguments, misaligned)
// How many blocks are between their beginnings and their ends: data[1] is the most there ever were.
GC_DEV void crowd(const Arguments& a) {
    if (threadIdx.x == 0) {
        const u64 here = ++a.data[0];
        if (here > a.data[1]) a.data[1] = here;
        for (u32 i = 0; i < a.choice; ++i) rest();
        --a.data[0];
    }
    __syncthreads();
}
GC_ENTRY(crowd, Arguments, crowd)
// The order in which blocks begin.
GC_DEV void queue(const Arguments& a) {
    if (threadIdx.x == 0) a.data[1 + a.data[0]++] = blockIdx.x;
}
GC_ENTRY(queue, Arguments, queue)
GC_DEV void unwritten(const Arguments& a) {
    GC_SHARED(u64, slots, 64);
    a.data[blockIdx.x * blockDim.x + threadIdx.x] = slots[threadIdx.x];
    slots[threadIdx.x] = 1;
}
GC_ENTRY(unwritten, Arguments, unwritten)
"""


@pytest.fixture(scope="module")
def both():
    made = library(sources.text(sources.Instance("", "peer.h", "")) + KERNELS)
    return made, made


def launch(both, entry, blocks, threads, choice=0, **world):
    """Run one kernel in a world of its own; return its data."""
    data = numpy.zeros(64, numpy.uint64)
    where = World(Room(1, 1, packets=16, slot=16, staging=16), both, **world)
    where.launch(0, entry, numpy.array([(data.ctypes.data, choice)], ARGUMENTS), blocks, threads)
    where.run()
    return data


def test_a_barrier_that_one_thread_does_not_come_to_is_a_fault(both):
    with pytest.raises(Fault, match="barrier"):
        launch(both, "early", 2, 8, choice=7)
    launch(both, "early", 2, 8, choice=8)


def test_an_access_that_is_not_aligned_is_a_fault_that_says_where(both):
    with pytest.raises(Fault, match=r"not aligned \(stream 0, block 1, thread 3, address 0x[0-9a-f]+\)"):
        launch(both, "misaligned", 2, 8)


def test_so_many_blocks_are_under_way(both):
    for residency, seed in itertools.product((1, 2, 4), (0, 5)):
        data = launch(both, "crowd", 9, 2, choice=100, residency=residency, seed=seed)
        assert (data[0], data[1]) == (0, residency)


def test_blocks_begin_in_an_order_that_a_seed_draws(both):
    def order(seed):
        return tuple(launch(both, "queue", 6, 1, residency=1, seed=seed)[1:7].tolist())

    orders = {order(seed) for seed in range(12)}
    assert all(sorted(one) == list(range(6)) for one in orders)
    assert len(orders) > 6
    assert order(3) == order(3)
    assert order(0) == tuple(range(6))


def test_shared_memory_begins_with_rubbish_in_every_block(both):
    assert (launch(both, "unwritten", 3, 16)[:48] == 0xCBCBCBCBCBCBCBCB).all()


def test_a_kernel_runs_to_its_end_by_a_plain_call():
    """As other kernels do: name(blocks, threads, arguments)."""
    made = library(sources.text(*mutants.DIRECT, *mutants.STEPS))
    x, y = numpy.arange(100, dtype=numpy.int32), numpy.zeros(100, numpy.int32)
    world = World(Room(1, 2, packets=512, slot=16, staging=512), (made, made))
    function = made.packets_int32_sum
    function.restype = ctypes.c_char_p
    arguments = world.heaps[0].packets(x.ctypes.data, y.ctypes.data, x.size)
    assert function(2, 32, ctypes.c_void_p(arguments.ctypes.data)) is None
    assert (x == y).all()
    bad = world.heaps[0].packets(x.ctypes.data + 2, y.ctypes.data, x.size)
    assert b"not aligned" in function(2, 32, ctypes.c_void_p(bad.ctypes.data))
