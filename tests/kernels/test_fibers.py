"""The CPU's half of the dialect: barriers, votes, shared memory, and actions not allowed on a GPU as faults."""

import itertools

import numpy
import pytest
from emulation import Fault, address, libraries, run

from gpucoll.device.sources import Instance, text

pytestmark = pytest.mark.kernel

ARGUMENTS = numpy.dtype([("data", "u8"), ("choice", "u4")], align=True)
NAMES = ("rotate", "vote", "unwritten", "early", "misaligned", "greedy")
# Each thread writes a number to the neighbour's slot, twice, so that both barriers count.
KERNELS = """
struct Arguments { u32* data; u32 choice; };
GC_DEV void rotate(const Arguments& a) {
    GC_SHARED(u32, slots, 1024);
    GC_SHARED(u32, others, 1024);
    const u32 me = threadIdx.x, size = blockDim.x;
    slots[me] = blockIdx.x * 10000 + me;
    __syncthreads();
    others[me] = slots[(me + 1) % size];
    __syncthreads();
    a.data[blockIdx.x * size + me] = others[(me + 1) % size];
}
GC_DEV void vote(const Arguments& a) {
    const int all = __syncthreads_and(threadIdx.x != a.choice), none = __syncthreads_and(threadIdx.x < 5);
    const int certain = __syncthreads_and(1);
    a.data[threadIdx.x] = all + 2 * none + 4 * certain;
}
GC_DEV void unwritten(const Arguments& a) {
    GC_SHARED(u32, slots, 64);
    a.data[blockIdx.x * blockDim.x + threadIdx.x] = slots[threadIdx.x];
    slots[threadIdx.x] = 1;
}
GC_DEV void early(const Arguments& a) {
    if (threadIdx.x == a.choice) return;
    __syncthreads();
    a.data[threadIdx.x] = 1;
}
GC_DEV void misaligned(const Arguments& a) {
    if (threadIdx.x == 3 && blockIdx.x == 1) store<Word>(address_of(a.data) + 4, load<Word>(address_of(a.data)));
}
GC_DEV void greedy(const Arguments& a) {
    GC_SHARED(u32, one, 8000);
    GC_SHARED(u32, two, 8000);
    one[0] = two[0] = 1;
}
""" + "\n".join(f"GC_ENTRY(entry_{name}, Arguments, {name})" for name in NAMES)
SOURCES = {name: f"{define}{text(Instance('', 'device/dialect.h', ''))}{KERNELS}"
           for name, define in (("switch", ""), ("ucontext", "#define GC_UCONTEXT\n"))}


@pytest.fixture(scope="module", params=SOURCES)
def library(request):
    """Return the kernels with fibers by gpucoll's own switch, and by the C library's."""
    return libraries(SOURCES.values())[list(SOURCES).index(request.param)]


def launch(library, kernel, blocks, threads, choice=1 << 30):
    data = numpy.zeros(blocks * threads, numpy.uint32)
    run(library, f"entry_{kernel}", blocks, threads, numpy.array([(address(data), choice)], ARGUMENTS))
    return data.reshape(blocks, -1)


def test_barriers_votes_and_shared_memory(library):
    """A vote counts every thread; shared memory begins with garbage in every block."""
    for blocks, threads in itertools.product((1, 3), (1, 2, 64, 1024)):
        data = launch(library, "rotate", blocks, threads)
        expected = (numpy.arange(threads) + 2) % threads + 10000 * numpy.arange(blocks)[:, None]
        assert (data == expected).all()
    assert (launch(library, "vote", 1, 64) == 1 + 4).all()
    assert (launch(library, "vote", 1, 64, choice=63) == 4).all()
    assert (launch(library, "vote", 1, 4) == 7).all()
    assert (launch(library, "unwritten", 3, 64) == 0xCBCBCBCB).all()


def test_what_a_gpu_would_not_let_pass_is_a_fault(library):
    with pytest.raises(Fault, match="barrier"):
        launch(library, "early", 2, 64, choice=7)
    assert (launch(library, "early", 1, 64) == 1).all()
    with pytest.raises(Fault, match=r"not aligned \(block 1, thread 3, address 0x[0-9a-f]+\)"):
        launch(library, "misaligned", 2, 64)
    with pytest.raises(Fault, match="shared memory"):
        launch(library, "greedy", 1, 1)
