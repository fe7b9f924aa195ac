"""CuPy programs on emulated GPUs beyond arrays and plain kernels: sparse matrices, kernels in Python, NCCL without MPI,
cooperative groups, several GPUs in one process."""

import pytest

from gpucoll import emulation
from programs import cupys_tests

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]

PROGRAMS = {
    "sparse matrices": '''
import scipy.sparse
from cupyx.scipy import ndimage, sparse
from cupyx.scipy.sparse import linalg
a, h = (one.diags([-1.0, 2.0, -1.0], [-1, 0, 1], shape=(50, 50), format="csr") for one in (sparse, scipy.sparse))
assert isinstance(a, sparse.csr_matrix) and sparse.issparse(a)
x = cupy.arange(50.0)
for y in (a @ x, a.dot(x), a * x, x @ a):
    same(y, h @ numpy.arange(50.0))
same((2 * a + a).toarray(), 3 * h.toarray())
rows = cupy.RawKernel(r"""
extern "C" __global__ void rows(const double* data, const int* columns, const int* begins, const double* x, double* y) {
    y[threadIdx.x] = 0;
    for (int k = begins[threadIdx.x]; k < begins[threadIdx.x + 1]; ++k) y[threadIdx.x] += data[k] * x[columns[k]];
}""", "rows")
y = cupy.empty(50)
a.data *= 2
rows((1,), (50,), (a.data, a.indices, a.indptr, x, y))
same(y, 2 * h @ numpy.arange(50.0))
same(a @ x, 2 * h @ numpy.arange(50.0))
for operator in (a, linalg.LinearOperator((50, 50), matvec=lambda v: a @ v, dtype=float)):
    z, info = linalg.cg(operator, cupy.ones(50), tol=1e-10)
    assert info == 0 and float(abs(a @ z - 1).max()) < 1e-6
b = a @ a.T
z = linalg.spsolve(b.tocsr(), cupy.ones(50))
assert cupy.allclose(b @ z, numpy.ones(50))
same(cupy.fromfunction(lambda i, j: i + j, (2, 2)), numpy.fromfunction(lambda i, j: i + j, (2, 2)))
same(cupy.sqrt(numpy.float64(2)), numpy.sqrt(2.0))
same(cupy.apply_along_axis(lambda row: row.sum(), 0, x.reshape(5, 10)), numpy.arange(50.0).reshape(5, 10).sum(axis=0))
''',
    "a stream of its own": '''
x = cupy.arange(8.0)
cupy.cuda.Device().synchronize()
with cupy.cuda.Stream():
    same(cupy.fft.fft(x), numpy.fft.fft(numpy.arange(8.0)))
    same(cupy.sort(-x), numpy.arange(-7.0, 1.0))
''',
    "memory dropped before the work that uses it": '''
import threading
gate, twice = threading.Event(), cupy.RawKernel(
    'extern "C" __global__ void twice(const double* x, double* y) { y[threadIdx.x] = 2 * x[threadIdx.x]; }', "twice")
x, pooled, y, stream = cupy.arange(90.0), cupy.empty(90), cupy.zeros((2, 90)), cupy.cuda.get_current_stream()
pooled[:] = x
stream.synchronize()
stream.launch_host_func(lambda _: gate.wait(), None)
twice((1,), (90,), (x, y[0]))
twice((1,), (90,), (pooled, y[1]))
del x, pooled
cupy.get_default_memory_pool().free_all_blocks()
others = [numpy.full(size, -1.0) for size in 99 * [90, 300]]
gate.set()
same(y, numpy.array(2 * [numpy.arange(0.0, 180.0, 2.0)]))
''',
    "threads with streams of their own": '''
import threading
found, two = [], cupy.cuda.Stream(non_blocking=True)
def total(number):
    with cupy.cuda.Stream(non_blocking=True):
        found.append(float((cupy.full(90, number) ** 2).sum()))
def used():
    x = cupy.arange(90.0)
    two.wait_event(cupy.cuda.get_current_stream().record())
    with two:
        found.append(float((x * 2).sum()))
def other():
    found.append(float(cupy.ones(90).sum()))
for work, *given in 4 * [(total, 2), (total, 3), (used,), (other,)]:
    thread = threading.Thread(target=work, args=given)
    thread.start()
    thread.join()
assert found == 4 * [360, 810, 8010, 90]
''',
    "kernels in Python": '''
from cupyx import jit
@jit.rawkernel(device=True)
def halved(x):
    return x / 2
@jit.rawkernel()
def total(x, y, size):
    shared = jit.shared_memory(cupy.float32, 64)
    value = cupy.float32(0)
    for i in range(jit.grid(1), size, jit.gridsize(1)):
        value += halved(x[i])
    for distance in (16, 8, 4, 2, 1):
        value += jit.shfl_down_sync(0xffffffff, value, distance)
    shared[jit.threadIdx.x] = value
    jit.syncthreads()
    if jit.threadIdx.x == 0:
        jit.atomic_add(y, 0, shared[0] + shared[32])
x, y = cupy.arange(1000, dtype=cupy.float32), cupy.zeros(1, cupy.float32)
total[3, 64](x, y, 1000)
same(y, numpy.array([249750], numpy.float32))
total((3,), (64,), (x, y, 1000))
same(y, numpy.array([499500], numpy.float32))
''',
    "cooperative groups and atomic references": '''
total = cupy.RawKernel(r"""
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
#include <cuda/atomic>
namespace cg = cooperative_groups;
extern "C" __global__ void total(const float* x, float* out, int n) {
    auto block = cg::this_thread_block();
    auto tile = cg::tiled_partition<32>(block);
    __shared__ float part[32];
    int i = blockIdx.x * blockDim.x + block.thread_rank();
    float sum = cg::reduce(tile, i < n ? x[i] : 0, cg::plus<float>());
    if (tile.thread_rank() == 0) part[tile.meta_group_rank()] = sum;
    block.sync();
    if (block.thread_rank() > 0) return;
    for (unsigned k = 1; k < tile.meta_group_size(); ++k) sum += part[k];
    cuda::atomic_ref<float, cuda::thread_scope_device>(*out).fetch_add(sum, cuda::std::memory_order_relaxed);
}""", "total", options=("--std=c++17",), backend="nvcc")
out = cupy.zeros(1, numpy.float32)
total((8,), (128,), (cupy.arange(1000, dtype=numpy.float32), out, 1000))
same(out, numpy.array([499500], numpy.float32))
''',
    "NCCL in one process": '''
import threading
from cupy.cuda import nccl
assert nccl.get_unique_id() != nccl.get_unique_id()
comms, arrays = nccl.NcclCommunicator.initAll(2), []
for rank in range(2):
    with cupy.cuda.Device(rank):
        arrays.append(cupy.arange(10, dtype=cupy.float32) + rank)
nccl.groupStart()
for comm, x in zip(comms, arrays):
    comm.allReduce(x.data.ptr, x.data.ptr, 10, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, cupy.cuda.Stream.null.ptr)
nccl.groupEnd()
name, found = nccl.get_unique_id(), {}
def rank_of(rank):
    cupy.cuda.Device(rank).use()
    comm, x = nccl.NcclCommunicator(2, name, rank), cupy.full(10, rank + 1.0)
    comm.allReduce(x.data.ptr, x.data.ptr, 10, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, 0)
    found[rank] = x.get()
threads = [threading.Thread(target=rank_of, args=(rank,)) for rank in range(2)]
[one.start() for one in threads]
[one.join() for one in threads]
for rank in range(2):
    with cupy.cuda.Device(rank):
        same(arrays[rank], 2 * numpy.arange(10, dtype=numpy.float32) + 1)
    numpy.testing.assert_array_equal(found[rank], numpy.full(10, 3.0))
''',
    "captures": '''
stream = cupy.cuda.Stream(non_blocking=True)
x = cupy.arange(8.0)
cupy.cuda.Device().synchronize()
def refused(error, words, call):
    try:
        call()
    except error as told:
        assert words in str(told), told
    else:
        raise AssertionError(words)
with stream:
    stream.begin_capture()
    y = cupy.fft.fft(x + 1)
    refused(NotImplementedError, "cuBLAS", lambda: cupy.ones((2, 2)) @ cupy.ones((2, 2)))
    graph = stream.end_capture()
    graph.upload()
    graph.launch()
    stream.synchronize()
    same(y, numpy.fft.fft(numpy.arange(8.0) + 1))
    stream.begin_capture()
    refused(cupy.cuda.runtime.CUDARuntimeError, "cudaErrorStreamCaptureUnsupported", stream.synchronize)
    refused(cupy.cuda.runtime.CUDARuntimeError, "cudaErrorStreamCaptureInvalidated", stream.end_capture)
    assert not stream.is_capturing()
''',
    "what CuPy takes and refuses": '''
x, h = cupy.arange(12.0).reshape(3, 4), numpy.arange(12.0).reshape(3, 4)
same(x[numpy.array([2, 0])], h[[2, 0]])
same(x[[True, False, True]], h[[True, False, True]])
same(cupy.array([[x[0, 0], x[1, 1]], [x[2, 2], 7.0]]), numpy.array([[0.0, 5.0], [10.0, 7.0]]))
a = cupy.zeros(3)
assert cupy.size(x) == 12 and cupy.shape(x) == (3, 4) and cupy.ndim(x) == 2 and a[1:].base is a
cupy.add.at(a, numpy.array([1, 1, 2]), 1.0)
same(a, numpy.array([0.0, 2.0, 1.0]))
same(cupy.array([1 + 2j]).imag, numpy.array([2.0]))
with cupy.cuda.Device(1):
    y = x.copy()
    assert y.device.id == 1 and cupy.asarray(x).device.id == 1
    same(y, h)
    assert cupy.cuda.runtime.deviceCanAccessPeer(0, 1)
size = cupy.ElementwiseKernel("raw T x", "raw T y", "y[i] = 2 * x[n - i - 1]", "size")
same(size(cupy.arange(4.0), size=4), numpy.array([6.0, 4.0, 2.0, 0.0]))
total = cupy.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
for kind in (numpy.int8, numpy.int64):
    same(total(cupy.arange(5, dtype=kind)), kind(10))
for made, given in zip(cupy.mgrid[0:2:3j, 0:2], numpy.mgrid[0:2:3j, 0:2]):
    same(made, given)
same(cupy.vectorize(lambda v: v if v > 5 else 0.0)(x), numpy.where(h > 5, h, 0.0))
pool, given = cupy.cuda.MemoryPool(), []
with cupy.cuda.using_allocator(pool.malloc):
    z = cupy.arange(200, dtype=cupy.uint8)
    assert pool.used_bytes() == 512 and cupy.cuda.get_allocator() == pool.malloc
same(z, numpy.arange(200, dtype=numpy.uint8))
with cupy.cuda.using_allocator(lambda size: given.append(size) or pool.malloc(size)):
    cupy.zeros(10)
    assert given == [80] and (8 + x.data - 8).ptr == x.data.ptr
with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
    kernel = cupy.RawKernel("""extern \\"C\\" __global__ void a(float* x) {
        static __shared__ float y;
        y = 3;
        *x = y;
    }""", "a")
kernel((1,), (1,), (y := cupy.zeros(1, numpy.float32),))
import pickle
pickle.loads(pickle.dumps(kernel))((1,), (1,), (y,))
assert y.item() == 3 and kernel.attributes["max_threads_per_block"] == 1024
''',
}


@pytest.mark.parametrize("temper", emulation.TEMPERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_numpys_results(emulate, name, temper):
    job = emulate(PROGRAMS[name], "--gpus", "2", "--temper", temper)
    assert (job.returncode, job.stderr) == (0, "")


def test_processes_without_mpi_form_a_group(emulate):
    job = emulate("""
import multiprocessing, socket
def work(rank, port):
    from cupyx.distributed import init_process_group
    cupy.cuda.Device(rank).use()
    comm = init_process_group(2, rank, port=port)
    x, y = cupy.arange(4.0) + rank, cupy.empty(4)
    comm.all_reduce(x, y)
    same(y, 2 * numpy.arange(4.0) + 1)
    rows = cupy.empty((2, 2), numpy.complex64)
    comm.all_to_all(cupy.full((2, 2), rank + 1j, numpy.complex64), rows)
    same(rows, numpy.array([[1j, 1j], [1 + 1j, 1 + 1j]], numpy.complex64))
    comm.barrier()
if __name__ == "__main__":
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    ranks = [multiprocessing.Process(target=work, args=(rank, port)) for rank in range(2)]
    [one.start() for one in ranks]
    [one.join() for one in ranks]
    assert [one.exitcode for one in ranks] == [0, 0]
""", "--gpus", "2")
    assert (job.returncode, job.stderr) == (0, "")


def test_the_table_of_cupys_tests_is_read_from_the_page():
    rows = cupys_tests.ROW.findall(cupys_tests.PAGE.read_text())
    assert len({name for _, name, *_ in rows}) == len(rows) > 23
    assert {folder for folder, *_ in rows} == {*cupys_tests.PLACES}
