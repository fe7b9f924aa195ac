"""`gpucoll precheck` for programs of CuPy: arrays and streams without a GPU, results like CuPy's, faults by place."""

import importlib
import sys

import pytest

import gpucoll as gc
from gpucoll.precheck.script import check_script

RANKS = 3
BEGIN = """
import sys
import cupy
import numpy
import gpucoll as gc
from cupy.cuda import Stream

comm = gc.init()
assert comm.device == comm.rank and cupy.cuda.runtime.getDeviceCount() == comm.size
cupy.cuda.Device(comm.device).use()
x = cupy.arange(6, dtype="float32") + comm.rank
"""
ALL = """
def is_sum(found):
    expected = comm.size * numpy.arange(6) + sum(range(comm.size))
    return isinstance(found, cupy.ndarray) and found.get().tolist() == expected.tolist()

out = cupy.empty_like(x)
for _ in range(3):
    assert is_sum(comm.all_reduce(x)) and is_sum(comm.all_reduce(x, out)) and is_sum(out)
with Stream(non_blocking=True) as stream:
    assert is_sum(comm.all_reduce(x, stream=stream)) and is_sum(comm.all_reduce(x, async_op=True).wait())
    stream.record().synchronize()
step = comm.plan("all_reduce", x, out)
out[...] = 0
assert is_sum(step()) and is_sum(step())
room = comm.zeros(6, "float32", device="cuda")
assert isinstance(room, cupy.ndarray) and room.sum() == 0
blocks = cupy.ones((comm.size, 2), "f4") if comm.rank == 0 else None
for found in (comm.scatter(blocks), *comm.all_gather_v(x[:comm.rank]), comm.scan(x), comm.exscan(x), comm.all_gather(x),
              comm.scatter_v([x] * comm.size if comm.rank == 1 else None, root=1)):
    assert isinstance(found, cupy.ndarray), type(found)
comm.sendrecv(x, out, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
assert (out == cupy.arange(6) + (comm.rank - 1) % comm.size).all()
comm.split(comm.rank % 2).broadcast(x)
comm.barrier(stream=stream)
"""
SHAPES = """
times = cupy.ElementwiseKernel("T x, T y", "T z, int32 n", "z = x * y", "times")
z, n = times(x, x[:, None])
assert z.shape == (6, 6) and z.dtype == x.dtype and n.dtype == "int32"
total = cupy.ReductionKernel("T x", "T y", "x", "a + b", "y = a", "0", "total")
assert total(z).shape == () and total(z, axis=1).shape == (6,)
twice = cupy.RawKernel("extern \\"C\\" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }", "twice")
y = x.copy()
twice((1,), (6,), (y,))
assert (y == 2 * x).all() and (z == x * x[:, None]).all()
assert x.mean().shape == () and x[0].shape == () and x.argmax().get() == 5 and float(x.max()) == 5 + comm.rank
assert isinstance(cupy.linalg.norm(z), cupy.ndarray) and isinstance(cupy.random.default_rng(1).random(3), cupy.ndarray)
assert cupy.get_array_module(x) is cupy and cupy.get_array_module(x.get()) is numpy
assert type(cupy.asnumpy(x)) is numpy.ndarray and cupy.cuda.Device().id == comm.rank
comm.all_reduce(z)
"""
FAULTS = {
    "comm.all_reduce(x.get() if comm.rank == 1 else x)": ("device", [1], "on devices"),
    "comm.all_reduce(x, numpy.empty(6, 'f4'))": ("raised", [0, 1, 2], "GC-DEVICE"),
    "comm.all_reduce(x[:3] if comm.rank == 2 else x)": ("shape", [2], ""),
    "cupy.cuda.Stream().begin_capture()": ("unsupported", [0, 1, 2], "GC-PRECHECK"),
    "import cupy.cuda.nccl": ("unsupported", [0, 1, 2], "cupy.cuda.nccl is not followed"),
    "cupy.no_such_function(x)": ("unsupported", [0, 1, 2], "cupy.no_such_function is not followed"),
}


@pytest.fixture
def found(tmp_path):
    # The device code of this process has used the GPU of its NumPy arrays: a program's CuPy stays apart.
    importlib.import_module("gpucoll.emulation.host_arrays")
    importlib.import_module("gpucoll.device.cuda")

    def run(text):
        path = tmp_path / "program.py"
        path.write_text(BEGIN + text)
        before = {name for name in sys.modules if name.startswith("cupy")}
        found = check_script(str(path), [], RANKS)[0]
        assert {name for name in sys.modules if name.startswith("cupy")} == before
        return found

    return run


@pytest.mark.parametrize("text", [ALL, SHAPES], ids=["calls", "shapes"])
def test_a_program_of_cupy_has_right_values(found, text):
    assert found(text) == []


@pytest.mark.parametrize("text", FAULTS)
def test_a_fault_is_found(found, text):
    kind, ranks, words = FAULTS[text]
    (one,) = found(text)
    assert (one["kind"], one["ranks"]) == (kind, ranks), one
    assert words in one["message"]
    assert one["places"][0].endswith(f"program.py:{(BEGIN + text).count(chr(10)) + 1}")


@pytest.mark.skipif("cupy" in sys.modules, reason="a function keeps the CuPy that its process has imported")
def test_a_function_may_import_cupy():
    def program(comm):
        import cupy

        assert isinstance(comm.all_reduce(cupy.ones(2)), cupy.ndarray)

    assert gc.precheck(program, RANKS) == []
    assert "cupy" not in sys.modules
