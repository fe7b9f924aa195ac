"""Errors of streams and memory in CuPy programs, each beside the right program; run by `gpucoll emulate`.

    gpucoll emulate --gpus 2 stream_errors.py FIRST LAST

Every program runs in a forked child, once for each seed in FIRST..LAST. A line for each run that is not as expected
goes to the output, and a last line with the numbers of wrong and right programs that were seen.
"""

import os
import random
import re
import sys
import traceback

import cupy  # noqa: F401  imported once, before the forks
from cupy._machine import MACHINE

HEAD = '''
import cupy, cupyx, numpy, threading
from cupy.cuda import nccl
twice = cupy.RawKernel(r"""extern "C" __global__ void twice(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2 * x[i];
}""", "twice")
n, h = 1000, numpy.arange(1000, dtype=numpy.float32)
a, b = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
def launch(kernel, x, y): kernel((4,), (256,), (x, y, numpy.int32(n)))
def same(x, y):
    cupy.cuda.Device().synchronize() if isinstance(x, cupy.ndarray) else None
    numpy.testing.assert_array_equal(cupy.asnumpy(x), y)
'''
READS, WRITES = "reads memory that .* writes on another stream", "writes memory that .* reads on another stream"

# A program, with a mark in place of what is right or wrong; the right text; the wrong text; the error.
# The line that the error names ends with "# fails"; other errors have no line.
PROGRAMS = {
    "no event": ("""
with a:
    x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
    launch(twice, x, y)
@
with b:
    z = y + 1  # fails
same(z, 2 * h + 1)
""", "b.wait_event(a.record())", "", READS),
    "an event too early": ("""
early = @
with a:
    x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
    event = a.record() if early else None
    launch(twice, x, y)
    event = event or a.record()
b.wait_event(event)
with b:
    z = y + 1  # fails
same(z, 2 * h + 1)
""", "False", "True", READS),
    "an array dropped too early": ("""
with a:
    y = cupy.asarray(h) * 2
b.wait_event(a.record())
with b:
    z = y * 3
    del y
@
with a:
    w = cupy.full(n, 7, numpy.float32)  # fails
same(z, h * 6)
""", "a.wait_event(b.record())", "", WRITES),
    "memory of another stream": ("""
with a:
    x = cupy.asarray(h)
@
gate = threading.Event()
a.launch_host_func(lambda _: gate.wait(), None)  # what comes after does not begin
with a:
    del x
    y = cupy.empty(n, numpy.float32)
with b:
    twice((4,), (256,), (cupy.asarray(h), y, numpy.int32(n)))  # fails
b.synchronize()
gate.set()
same(y, 2 * h)
""", "a.synchronize()", "", "writes memory that .* writes on another stream"),
    "two writers": ("""
x = cupy.empty(n, numpy.float32)
cupy.cuda.Device().synchronize()
with a:
    x[:] = 1
@
with b:
    x[:] = 2  # fails
same(x, numpy.full(n, 2, numpy.float32))
""", "b.wait_event(a.record())", "", "writes memory that .* writes on another stream"),
    "a generated kernel": ("""
square = cupy.ElementwiseKernel("float32 x", "float32 y", "y = x * x", "square")
with a:
    x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
b.wait_event(a.record())
with b:
    square(x, y)
@
with a:
    r = y.sum()  # fails
same(r, (h * h).sum())
""", "a.wait_event(b.record())", "", READS),
    "the null stream and one that does not block": ("""
x = cupy.asarray(h)
@
with a:
    y = x + 1  # fails
same(y, h + 1)
""", "cupy.cuda.Stream.null.synchronize()", "", READS),
    "a copy by address": ("""
with a:
    y = cupy.asarray(h) * 2
z = cupy.empty(n, numpy.float32)
@
cupy.cuda.runtime.memcpyAsync(z.data.ptr, y.data.ptr, y.nbytes, 3, b.ptr)  # fails
same(z, 2 * h)
""", "b.wait_event(a.record())", "", READS),
    "a copy from another GPU": ("""
with cupy.cuda.Device(0):
    s0 = cupy.cuda.Stream(non_blocking=True)
    with s0:
        x = cupy.asarray(h) * 2
    event = s0.record()
with cupy.cuda.Device(1):
    s1 = cupy.cuda.Stream(non_blocking=True)
    with s1:
        y = cupy.empty(n, numpy.float32)
        @
        y.data.copy_from_device_async(x.data, x.nbytes, s1)  # fails
    same(y, 2 * h)
""", "s1.wait_event(event)", "pass", READS),
    "a collective of NCCL": ("""
comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
with a:
    x, y = cupy.asarray(h) * 2, cupy.empty(n, numpy.float32)
@
comm.allReduce(x.data.ptr, y.data.ptr, n, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, b.ptr)  # fails
same(y, 2 * h)
""", "b.wait_event(a.record())", "", READS),
    "a result of another stream": ("""
def made():
    with cupy.cuda.Stream(non_blocking=True) as stream:
        return stream, cupy.asarray(h) * 2 + 1
stream, u = made()
@
same(cupy.sqrt(u), numpy.sqrt(2 * h + 1))  # fails
""", "stream.synchronize()", "", READS),
    "pinned memory read too early": ("""
pinned = cupyx.empty_pinned(n, numpy.float32)
with a:
    x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
    launch(twice, x, y)
    y.get(stream=a, out=pinned, blocking=False)
@
same(pinned, 2 * h)
""", "a.synchronize()", "", "AssertionError"),
    "pinned memory filled too early": ("""
pinned = cupyx.empty_pinned(n, numpy.float32)
x = [cupy.empty(n, numpy.float32) for _ in range(3)]
for number in range(3):
    pinned[:] = h + number
    x[number].set(pinned, stream=a)
    @
a.synchronize()
for number in range(3):
    same(x[number], h + number)
""", "a.synchronize()", "pass", "the host has changed pinned memory before the copy of .* has ended"),
    "memory that nothing has written": ("""
x = cupy.@(n, numpy.float32)
y = x + 1  # fails
same(y, numpy.ones(n, numpy.float32))
""", "zeros", "empty", "reads memory that nothing has written since its allocation at"),
    "an address kept too long": ("""
x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
address = x.data.ptr
@
w = cupy.zeros(n, numpy.float32)
twice((4,), (256,), (numpy.uint64(address), y, numpy.int32(n)))
same(y, 2 * h)
""", "", "del x", "AssertionError"),
    "memory of another GPU": ("""
with cupy.cuda.Device(1):
    x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
with cupy.cuda.Device(@):
    launch(twice, x, y)
    cupy.cuda.Device().synchronize()
same(y, 2 * h)
""", "1", "0", "memory of GPU 1"),
    "a graph whose array was dropped": ("""
a.use()
x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
a.synchronize()
a.begin_capture()
launch(twice, x, y)
graph = a.end_capture()
@
graph.launch(a)  # fails
same(y, 2 * h)
""", "", "del x", "launches a graph that reads memory of an array that was dropped"),
    "a write out of bounds": ("""
over = cupy.RawKernel(r'''extern "C" __global__ void over(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < @) y[i] = 2 * x[i];
}''', "over")
x, y, gate = cupy.asarray(h), cupy.empty(n, numpy.float32), threading.Event()
cupy.cuda.get_current_stream().launch_host_func(lambda _: gate.wait(), None)
launch(over, x, y)
z = y + 0
del y
shorter = cupy.zeros(n - 9, numpy.float32)
gate.set()
same(z, 2 * h)
""", "n", "n + 1", "kernel over writes out of bounds"),
    "no barrier": ("""
turned = cupy.RawKernel(r'''extern "C" __global__ void turned(const float* x, float* y) {
    __shared__ float s[256];
    s[threadIdx.x] = x[threadIdx.x];
    @
    y[threadIdx.x] = s[255 - threadIdx.x];
}''', "turned")
x, y = cupy.asarray(h[:256]), cupy.empty(256, numpy.float32)
turned((1,), (256,), (x, y))
same(y, h[:256][::-1])
""", "__syncthreads();", "", "AssertionError"),
    "parts of an array by number": ("""
part = cupy.RawKernel(r'''extern "C" __global__ void part(const float* x, float* y, int first) {
    y[first + threadIdx.x] = 2 * x[first + threadIdx.x];
}''', "part")
x, y = cupy.asarray(h), cupy.empty(n, numpy.float32)
cupy.cuda.Device().synchronize()
for number, stream in enumerate((a, b)):
    with stream:
        part((1,), (500,), (x, y, numpy.int32(500 * number)))
@
z = y + 1  # fails
same(z, 2 * h + 1)
""", "a.synchronize(); b.synchronize()", "a.synchronize()", READS),
    "a kernel by address": ("""
with a:
    x = cupy.asarray(h)
    y = cupy.empty(n, numpy.float32)
    launch(twice, x, y)
@
with b:
    z = cupy.empty(n, numpy.float32)
    twice((4,), (256,), (y.data.ptr, z.data.ptr, numpy.int32(n)))  # fails
b.synchronize()
same(z, 4 * h)
""", "b.wait_event(a.record())", "", READS),
    "use after free by address": ("""
address = cupy.cuda.runtime.malloc(4 * n)
memory = cupy.cuda.UnownedMemory(address, 4 * n, None, 0)
x = cupy.ndarray(n, numpy.float32, cupy.cuda.MemoryPointer(memory, 0))
x[:] = cupy.asarray(h)
cupy.cuda.Device().synchronize()
y = cupy.empty(n, numpy.float32)
@
launch(twice, x, y)
same(y, 2 * h)
""", "", "cupy.cuda.runtime.free(address)", "cudaErrorIllegalAddress"),
    "dynamic shared memory too small": ("""
k = cupy.RawKernel(r'''extern "C" __global__ void k(const float* x, float* y) {
    extern __shared__ float s[];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[255 - threadIdx.x];
}''', "k")
x, y = cupy.asarray(h[:256]), cupy.empty(256, numpy.float32)
k((1,), (256,), (x, y), shared_mem=@)
same(y, h[:256][::-1])
""", "1024", "512", "a write behind the dynamic shared memory"),
}


def outcome(name, text, seed):
    """Run a program in a child; return its error, "" without one."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        error = ""
        try:
            MACHINE.order = random.Random(seed)
            exec(compile(text, name, "exec"), {"__name__": "__main__"})
            error = repr(MACHINE.fault_at_the_end() or "")
        except BaseException:
            error = traceback.format_exc()
        os.write(writer, error.encode()[-4000:])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        found = told.read()
    os.waitpid(child, 0)
    return found.strip("'\"")


def wanted(name, text, error):
    """Return the pattern of the error of a wrong program."""
    numbers = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith("# fails")]
    return re.escape(f"[GC-EMULATION] {name}:{numbers[0]} ") + error if numbers else error


def main(first, last):
    seen = [0, 0]
    for name, (program, right, wrong, error) in PROGRAMS.items():
        for seed in range(first, last + 1):
            for is_right, part in ((False, wrong), (True, right)):
                text = HEAD + program.replace("@", part)
                found = outcome(name, text, seed)
                expected = not found if is_right else re.search(wanted(name, text, error), found)
                seen[is_right] += bool(expected)
                if not expected:
                    print(f"{name}, {'right' if is_right else 'wrong'}, seed {seed}: {found or 'no error'}")
    print(f"{seen[0]} errors found, {seen[1]} right programs without one")


main(*map(int, sys.argv[1:]))
