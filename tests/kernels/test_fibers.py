"""The CPU's half of the dialect: barriers, votes, shared memory, and the faults that a GPU would not let pass."""

import itertools
import threading

import numpy
import pytest
from emulation import CANARY, Fault, Memory, address, run, shared_object

from gpucoll.device.sources import Instance, text

pytestmark = pytest.mark.kernel

ARGUMENTS = numpy.dtype([("data", "u8"), ("choice", "u4")], align=True)
PREFACE = "struct Arguments { u32* data; u32 choice; };\n"

# Each thread writes its number where its neighbour's is expected, twice over, so that both barriers count.
ROTATE = PREFACE + """
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
GC_ENTRY(kernel, Arguments, rotate)
"""
VOTE = PREFACE + """
GC_DEV void vote(const Arguments& a) {
    const int all = __syncthreads_and(threadIdx.x != a.choice), none = __syncthreads_and(threadIdx.x < 5);
    const int certain = __syncthreads_and(1);
    a.data[threadIdx.x] = all + 2 * none + 4 * certain;
}
GC_ENTRY(kernel, Arguments, vote)
"""
UNWRITTEN = PREFACE + """
GC_DEV void unwritten(const Arguments& a) {
    GC_SHARED(u32, slots, 64);
    a.data[blockIdx.x * blockDim.x + threadIdx.x] = slots[threadIdx.x];
    slots[threadIdx.x] = 1;
}
GC_ENTRY(kernel, Arguments, unwritten)
"""
EARLY = PREFACE + """
GC_DEV void early(const Arguments& a) {
    if (threadIdx.x == a.choice) return;
    __syncthreads();
    a.data[threadIdx.x] = 1;
}
GC_ENTRY(kernel, Arguments, early)
"""
MISALIGNED = PREFACE + """
GC_DEV void misaligned(const Arguments& a) {
    if (threadIdx.x == 3 && blockIdx.x == 1) store<Word>(address_of(a.data) + 4, load<Word>(address_of(a.data)));
}
GC_ENTRY(kernel, Arguments, misaligned)
"""
GREEDY = PREFACE + """
GC_DEV void greedy(const Arguments& a) {
    GC_SHARED(u32, one, 8000);
    GC_SHARED(u32, two, 8000);
    one[0] = two[0] = 1;
}
GC_ENTRY(kernel, Arguments, greedy)
"""


def source(lines, *, portable=False):
    dialect = text(Instance("", "dialect.h", ""))
    return "#define GC_UCONTEXT\n" * portable + dialect + lines


def launch(lines, blocks, threads, choice=1 << 30, *, change=lambda source: source, portable=False, room=None):
    data = numpy.zeros(room or blocks * threads, numpy.uint32)
    run(shared_object(change(source(lines, portable=portable))), "kernel", blocks, threads,
        numpy.array([(address(data), choice)], ARGUMENTS))
    return data.reshape(blocks, -1)


def check_rotation(change=lambda source: source, portable=False):
    for blocks, threads in itertools.product((1, 3), (1, 2, 64, 1024)):
        data = launch(ROTATE, blocks, threads, change=change, portable=portable)
        expected = (numpy.arange(threads) + 2) % threads + 10000 * numpy.arange(blocks)[:, None]
        assert (data == expected).all()


@pytest.mark.parametrize("portable", [False, True], ids=["switch", "ucontext"])
def test_barriers_and_shared_memory(portable):
    check_rotation(portable=portable)


@pytest.mark.parametrize("portable", [False, True], ids=["switch", "ucontext"])
def test_a_vote_counts_every_thread(portable):
    assert (launch(VOTE, 1, 64, portable=portable) == 1 + 4).all()
    assert (launch(VOTE, 1, 64, choice=63, portable=portable) == 4).all()
    assert (launch(VOTE, 1, 4, portable=portable) == 7).all()


def test_shared_memory_begins_with_rubbish_in_every_block():
    assert (launch(UNWRITTEN, 3, 64) == 0xCBCBCBCB).all()


def test_a_barrier_that_one_thread_does_not_come_to_is_a_fault():
    with pytest.raises(Fault, match="barrier"):
        launch(EARLY, 2, 64, choice=7)
    assert (launch(EARLY, 1, 64) == 1).all()


def test_an_access_that_is_not_aligned_is_a_fault_that_says_where():
    with pytest.raises(Fault, match=r"not aligned \(block 1, thread 3, address 0x[0-9a-f]+\)"):
        launch(MISALIGNED, 2, 64)


def test_shared_memory_is_no_more_than_a_gpus():
    with pytest.raises(Fault, match="shared memory"):
        launch(GREEDY, 1, 1)


def test_several_threads_of_the_host_launch_at_once():
    failures = []

    def work():
        try:
            for _ in range(20):
                check_rotation()
        except BaseException as error:
            failures.append(error)

    check_rotation()
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


def test_memory_fills_with_a_canary():
    memory = Memory()
    memory.place(numpy.dtype("u1"), 10)
    assert (memory.bytes == CANARY).all()
