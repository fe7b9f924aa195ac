"""CuPy programs on emulated GPUs: results equal to NumPy's, refusals, and the errors that name a missing order."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpucoll as gc
from gpucoll import emulation
from harness.jobs import python
from harness.sources import ROOT

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]

PROGRAMS = {
    "arrays": """
x, h = cupy.arange(24, dtype=numpy.float32).reshape(2, 3, 4), numpy.arange(24, dtype=numpy.float32).reshape(2, 3, 4)
same(x.sum(axis=1) * 2 - 1, h.sum(axis=1) * 2 - 1)
same(cupy.einsum("ijk,ljk->il", x, x), numpy.einsum("ijk,ljk->il", h, h))
same(x[:, ::-1, 1:3].T, h[:, ::-1, 1:3].T)
same(x[x > 7], h[h > 7])
same(cupy.nonzero(x > 7)[0], numpy.nonzero(h > 7)[0])
same(cupy.where(x > 3, x, 0), numpy.where(h > 3, h, numpy.float32(0)))
same(cupy.linalg.norm(x), numpy.linalg.norm(h))
same(cupy.fft.fft(x), numpy.fft.fft(h))
same(cupy.concatenate([x, x], axis=2), numpy.concatenate([h, h], axis=2))
same(numpy.sqrt(x), numpy.sqrt(h))
same(numpy.sum(x), numpy.sum(h))
same(x.astype(numpy.int32) // 5 % 3, h.astype(numpy.int32) // 5 % 3)
same(cupy.arange(5)[cupy.array([0, 6, -1])], numpy.array([0, 1, 4]))
assert cupy.std(h) == numpy.std(h)
view = x[0]
view += 100
assert x[0, 0, 0].item() == 100 and float(x.max()) == 111
""",
    "random": """
cupy.random.seed(3)
one = cupy.random.normal(size=(3, 4)).get()
cupy.random.seed(3)
same(cupy.random.normal(size=(3, 4)), one)
assert cupy.random.random(5, dtype=numpy.float32).dtype == numpy.float32
""",
    "raw kernels": '''
total = cupy.RawKernel(r"""
extern "C" __global__ void total(const double* x, double* out, int n) {
    extern __shared__ double part[];
    int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
    part[t] = i < n ? x[i] : 0;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half >>= 1) {
        if (t < half) part[t] += part[t + half];
        __syncthreads();
    }
    if (t == 0) atomicAdd(out, part[0]);
}""", "total")
out = cupy.zeros(1)
total((8,), (128,), (cupy.arange(1000.0), out, 1000), shared_mem=1024)
same(out, numpy.array([499500.0]))
module = cupy.RawModule(code=r"""
__constant__ float factors[2];
template <class T, int N> __global__ void by_warp(const T* x, T* y) {
    T sum = x[threadIdx.x] * N * factors[1];
    for (int d = 16; d > 0; d /= 2) sum += __shfl_down_sync(0xffffffffu, sum, d);
    if (threadIdx.x % 32 == 0) y[threadIdx.x / 32] = sum;
    unsigned odd = __ballot_sync(0xffffffffu, threadIdx.x % 2);
    if (threadIdx.x == 5) y[2] = odd == 0xaaaaaaaau;
}
extern "C" __global__ void early(int* y) {
    if (threadIdx.x > 3) return;
    __syncthreads();
    atomicAdd(y, threadIdx.z * 100 + threadIdx.y * 10 + blockIdx.y);
}""", name_expressions=("by_warp<float, 3>",), options=("-std=c++14",))
cupy.ndarray((2,), numpy.float32, module.get_global("factors")).set(numpy.array([1, 2], numpy.float32))
y = cupy.zeros(3, numpy.float32)
module.get_function("by_warp<float, 3>")((1,), (64,), (cupy.arange(64, dtype=numpy.float32), y))
same(y, numpy.array([6 * sum(range(32)), 6 * sum(range(32, 64)), 1], numpy.float32))
z = cupy.zeros(1, numpy.int32)
module.get_function("early")((1, 2), (6, 2, 2), (z,))
same(z, numpy.array([sum(100 * c + 10 * b + a for a in (0, 1) for c in (0, 1) for b in (0, 1)) * 4], numpy.int32))
''',
    "element-wise and reduction kernels": """
x, y = cupy.arange(10, dtype=numpy.float32).reshape(2, 5), cupy.arange(5, dtype=numpy.float32)
difference = cupy.ElementwiseKernel("T x, T y", "T z", "z = (x - y) * (x - y)", "difference")
same(difference(x, y), (x.get() - y.get()) ** 2)
same(difference(x.T, 3), (x.get().T - numpy.float32(3)) ** 2)
turned = cupy.ElementwiseKernel("T x, raw T y", "T z", "if (i == 2) return; z = x + y[_ind.size() - i - 1]", "turned")
out = cupy.full(5, 5, numpy.float32) + 2
turned(y, y, out)
same(out, numpy.array([4, 4, 7, 4, 4], numpy.float32))
norm = cupy.ReductionKernel("T x", "T y", "x * x", "a + b", "y = sqrt(a)", "0", "norm")
same(norm(x, axis=1), numpy.sqrt((x.get() ** 2).sum(axis=1)))
same(norm(x, axis=0, keepdims=True), numpy.sqrt((x.get() ** 2).sum(axis=0, keepdims=True)))
largest = cupy.ReductionKernel("T x", "T y", "x", "max(a, b)", "y = a", None, "largest")
same(largest(-x), numpy.float32(0))
""",
    "two GPUs, streams and pools": """
import cupyx
with cupy.cuda.Device(1):
    x = cupy.arange(5)
    assert x.device.id == 1
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        begin = stream.record()
        y = cupy.arange(1000.0) * 2
        end = stream.record()
    stream.synchronize()
    assert cupy.cuda.get_elapsed_time(begin, end) >= 0
    same(y, numpy.arange(1000.0) * 2)
    with stream:
        stream.begin_capture()
        y -= 1
        graph = stream.end_capture()
        graph.launch()
        graph.launch()
    stream.synchronize()
    same(y, numpy.arange(1000.0) * 2 - 2)
pool = cupy.get_default_memory_pool()
before = pool.used_bytes()
z = cupy.empty(1000, numpy.uint8)
assert pool.used_bytes() - before == 1024
del z
assert pool.used_bytes() == before
pinned = cupyx.zeros_pinned((3, 4))
cupy.ones((3, 4)).get(out=pinned)
assert (pinned == 1).all()
a = cupy.zeros(3)
cupyx.scatter_add(a, cupy.array([1, 1, 2]), 1.0)
same(a, numpy.array([0.0, 2.0, 1.0]))
""",
}


@pytest.mark.parametrize("temper", emulation.TEMPERS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_numpys_results(emulate, name, temper):
    job = emulate(PROGRAMS[name], "--gpus", "2", "--temper", temper)
    assert (job.returncode, job.stderr) == (0, "")


REFUSED = {
    "numpy.asarray(cupy.ones(3))": "TypeError: Implicit conversion to a NumPy array is not allowed",
    "cupy.ones(3) + numpy.ones(3)": "TypeError: Unsupported type <class 'numpy.ndarray'>",
    "cupy.no_such_function": "AttributeError: module 'cupy' has no attribute 'no_such_function'",
    "cupy.RawKernel('extern \"C\" __global__ void f() { lacking(); }', 'f')((1,), (1,), ())": "CompileException",
    "cupy.RawKernel('extern \"C\" __global__ void f() { asm(\"trap;\"); }', 'f')((1,), (1,), ())": "GC-EMULATION.*PTX",
    "cupy.RawKernel('#include <cub/cub.cuh>\\n__global__ void f() {}', 'f')((1,), (1,), ())": "GC-EMULATION.*CUB",
    "cupy.get_default_memory_pool().set_limit(1000); cupy.empty(2000)": "OutOfMemoryError",
    "cupy.RawModule(path=__file__)": "GC-EMULATION.*compiled GPU binary",
    "cupy.RawKernel('extern \"C\" __global__ void f(int x) {}', 'f')((1,), (1,), ())":
        "GC-EMULATION.*1 parameters, and is given 0",
    "from cupyx import jit; jit.cub": r"\[GC-EMULATION\] cupyx\.jit\.cub has no counterpart on the host",
    "cupy.cuda.texture.TextureObject()":
        r"\[GC-EMULATION\] cupy\.cuda\.texture\.TextureObject has no counterpart on the host",
    "cupy.RawKernel('__global__ void f() { cooperative_groups::this_grid().sync(); }', 'f')((1,), (1,), ())":
        r"\[GC-EMULATION\] this_grid has no counterpart on the host",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cupy_refuses_and_what_has_no_counterpart(emulate, line):
    job = emulate(line)
    assert job.returncode == 1
    assert re.search(REFUSED[line], job.stderr), job.stderr


@pytest.mark.parametrize("last", [0, pytest.param(199, marks=[pytest.mark.nightly, pytest.mark.timeout(7200)])])
def test_errors_of_streams_and_memory_are_found_and_right_programs_have_none(emulated_kernels, last):
    """Whatever order the streams come in, so for every seed."""
    programs = Path(__file__).parents[1] / "programs" / "stream_errors.py"
    job = python("-m", "gpucoll", "emulate", "--gpus", "2", programs, "0", last, timeout=200 + 20 * last)
    count = 23 * (last + 1)
    assert job.stdout == f"{count} errors found, {count} right programs without one\n", (job.stdout, job.stderr)


def test_a_thread_that_does_the_work_at_once_waits_for_no_other(emulate):
    """An event is recorded while another thread does work and asks for the lock that the recording thread holds."""
    job = emulate("""
import threading
from cupy._machine import MACHINE
event = cupy.cuda.Event()
recording = threading.Thread(target=event.record, daemon=True)
with MACHINE.work_lock:
    recording.start()
    recording.join(20)
    assert not recording.is_alive()
event.synchronize()
""", "--temper", "quick")
    assert (job.returncode, job.stderr) == (0, "")


def test_the_work_of_a_gpu_runs_no_finalizer_of_the_program(emulate):
    """A finalizer that waits for the GPU, run by the thread that does the GPU's work, would wait for itself."""
    job = emulate("""
import gc
from cupy._machine import MACHINE
told, queue = [], MACHINE.queue(0)
MACHINE.submit(queue, lambda: lambda: told.append(gc.isenabled()) is None)
cupy.cuda.Device().synchronize()
assert told == [False] and gc.isenabled()
""")
    assert (job.returncode, job.stderr) == (0, "")


def test_a_barrier_without_mpi_lets_the_rank_that_answers_go_last(emulate):
    """The process of rank 0 may end as soon as it has passed the barrier, and the others still need its answer."""
    job = emulate("""
from types import SimpleNamespace
from cupyx.distributed import _serve
class Client:
    def __init__(self, *asked):
        self.recv, self.send = lambda: asked, lambda answer: passed.append(asked[1])
passed, asking = [], iter([Client("barrier", rank) for rank in (1, 0, 2)] + [Client("stop", 0)])
_serve(SimpleNamespace(accept=asking.__next__, close=int), 3, 7)
assert passed == [2, 1, 0, 0], passed
""")
    assert (job.returncode, job.stderr) == (0, "")


def test_the_faces_may_be_found_by_a_link(tmp_path):
    (tmp_path / "link").symlink_to(emulation.FACES)
    program = "from gpucoll.emulation import is_installed\nassert is_installed()\nimport cupy\nassert is_installed()"
    subprocess.run([sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": str(tmp_path / "link")}, check=True)


def test_programs_have_gpus_of_their_own():
    """Children, and ranks of one launcher, share GPUs; two programs do not."""
    say = "import cupy; print(cupy.cuda.Device(0).pci_bus_id, flush=True)"
    with_child = f"{say}; import subprocess, sys; subprocess.run([sys.executable, '-c', {say!r}])"

    def run(program, **variables):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("EMULATED_", "PMI_"))}
        clean["PYTHONPATH"] = f"{emulation.FACES}:{ROOT}"
        return subprocess.run([sys.executable, "-c", program], env=clean | variables, check=True, capture_output=True,
                              text=True).stdout.split()

    one, other = run(with_child), run(with_child)
    assert len(set(one)) == len(set(other)) == 1
    assert one != other
    assert run(say, PMI_RANK="0", PMI_SIZE="2") == run(say, PMI_RANK="1", PMI_SIZE="2") != one


@pytest.mark.parametrize("wrong", [{"gpus": 0}, {"gpus": True}, {"gpus": 4097}, {"temper": "lax"}, {"seed": 0.5}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(gc.ArgumentError, match="GC-EMULATION]"):
        emulation.install(**wrong)


def test_pytest_has_an_option(tmp_path, emulated_kernels):
    (tmp_path / "test_program.py").write_text("import cupy\n\ndef test_sum():\n    assert cupy.ones(3).sum() == 3\n"
                                              "    assert cupy.cuda.runtime.getDeviceCount() == 4\n")
    job = python("-m", "pytest", "-q", "--emulate-gpus", "4", "test_program.py", cwd=tmp_path, timeout=120)
    assert job.returncode == 0, job
