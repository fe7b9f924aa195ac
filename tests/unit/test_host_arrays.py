"""NumPy arrays on an emulated GPU: a program's own CuPy stays what it is, and both are apart in a process."""


import pytest

from harness.jobs import python

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]
CUPY = """
class device_array:
    __cuda_array_interface__ = {"shape": (2,), "typestr": "<f4", "data": (4096, False), "version": 3, "strides": None}

empty = device_array

class cuda:
    Event = object
    runtime = type("runtime", (), {"getDeviceCount": lambda: 1, "getDevice": lambda: 0})
"""
REDUCES = """
import sys, numpy, gpucoll as gc
x, total = (lambda comm: numpy.arange(5.0) + comm.rank), 2 * numpy.arange(5) + 1
assert (gc.run_local(lambda comm: comm.all_reduce(x(comm), algorithm="ring") == total, 2)[0]).all()
"""
REFUSED = """
from gpucoll import emulation
with gc.init() as comm:
    for call in (lambda: comm.all_reduce(cupy.device_array()), lambda: emulation.install()):
        try:
            call()
        except gc.UsageError as error:
            print(error.code, "NumPy arrays" in str(error))
"""


@pytest.fixture
def run(tmp_path, emulated_kernels, monkeypatch):
    """Return a function that runs a program, beside a module `cupy` unless None, and returns its output."""
    monkeypatch.setenv("GPUCOLL_DEVICE", "emulated")

    def run(program, *words, cupy=CUPY):
        (tmp_path / "program.py").write_text(program)
        if cupy is not None:
            (tmp_path / "cupy.py").write_text(cupy)
        job = python(*words, tmp_path / "program.py")
        assert job.returncode == 0, job.stderr
        return job.stdout

    return run


def test_no_cupy_is_found_where_none_is(run):
    found = "\ntry:\n    import cupy\nexcept ImportError as error:\n    print(error, 'cupy' in sys.modules)"
    assert run(REDUCES + found, cupy="raise ImportError('none')") == "none False\n"


@pytest.mark.parametrize("before", [True, False])
def test_a_programs_cupy_is_its_own(run, before):
    parts = ["import cupy\n", REDUCES]
    assert run("".join(parts if before else parts[::-1]) + REFUSED) == 2 * "GC-EMULATION True\n"


def test_after_a_gpu_was_used_none_is_emulated(run):
    program = "import gpucoll as gc\nfrom gpucoll.device import cuda\ntry:\n    gc.init()\n" \
              "except gc.UsageError as error:\n    print(error.code)"
    assert run(program) == "GC-EMULATION\n"


def test_a_program_on_emulated_gpus_passes_arrays_of_both_kinds(run):
    program = "import cupy, numpy, gpucoll as gc\nwith gc.init() as comm:\n" \
              "    print(comm.all_reduce(numpy.arange(3.0)), comm.all_reduce(cupy.arange(3.0)), *comm._core.gpus)"
    assert run(program, "-m", "gpucoll", "emulate", "--gpus", "2", cupy=None) == "[0. 1. 2.] [0. 1. 2.] emulated cuda\n"
