"""Rows of threads moving 128 bytes together, and actions not allowed on a GPU as faults."""

import numpy
import pytest

from gpucoll.device.sources import Instance, text
from peer.world import Fault, library, run_kernel, zeros

pytestmark = pytest.mark.kernel

ARGUMENTS = numpy.dtype([("data", "u8"), ("choice", "u4")], align=True)
NAMES = ("rows", "skewed", "split")
KERNELS = """
struct Arguments { u32* data; u32 choice; };
GC_DEV void rows(const Arguments& a) {
    const u64 place = address_of(a.data) + threadIdx.x * sizeof(Word);
    const Word word = load_row(place);
    const bool all = row_all(threadIdx.x != a.choice);
    store_row(place, {word.x + 1, word.y + 1, all, threadIdx.x});
}
GC_DEV void skewed(const Arguments& a) {
    store_row(address_of(a.data) + (threadIdx.x + 1) * sizeof(Word), {0, 0, 0, 0});
}
GC_DEV void split(const Arguments& a) {
    if (threadIdx.x == 3)
        row_all(true);
    else
        load_row(address_of(a.data) + threadIdx.x * sizeof(Word));
}
""" + "\n".join(f"GC_ENTRY(entry_{name}, Arguments, {name})" for name in NAMES)


@pytest.fixture(scope="module")
def made():
    return library(text(Instance("", "device/peer.h", "")) + KERNELS)


def launch(made, kernel, threads, choice=1 << 30):
    """Return 16 bytes for each thread, from an address divisible by 128."""
    data = zeros(16 * threads + 128).view(numpy.uint32)
    run_kernel(made, f"entry_{kernel}", 1, threads, numpy.array([(data.ctypes.data, choice)], ARGUMENTS))
    return data[:4 * threads].reshape(threads, 4)


def test_a_row_moves_128_bytes_and_votes(made):
    """The vote of a thread counts in the thread's own row."""
    data = launch(made, "rows", 24, choice=9)
    assert (data[:, :2] == 1).all()
    assert data[:, 2].tolist() == [1] * 8 + [0] * 8 + [1] * 8
    assert data[:, 3].tolist() == [*range(24)]


@pytest.mark.parametrize(("kernel", "threads", "fault"), [
    ("skewed", 8, "not 128 bytes"), ("split", 8, "different instructions"),
    ("rows", 11, "barrier")])  # three threads are no row
def test_what_a_gpu_would_not_let_pass_is_a_fault(made, kernel, threads, fault):
    with pytest.raises(Fault, match=fault):
        launch(made, kernel, threads)
