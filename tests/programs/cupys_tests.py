"""CuPy's own tests on emulated GPUs, from a checkout of CuPy, against the numbers of the page on emulation.

    python tests/programs/cupys_tests.py CHECKOUT [NAME...]

For each row of the page's table a process of pytest loads this file as a plugin: `cupy.testing` is the checkout's, and
what the tests import of CuPy's inside is replaced. A file whose numbers differ is named, and the program returns 1.
"""

import importlib.util
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import types
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "emulation.md"
PLACES = {"core_tests": "cupy_tests", "cuda_tests": "cupy_tests", "distributed_tests": "cupyx_tests"}
ROW = re.compile(r"^\| `(\w+)/(test_\w+)` \| (\d+) \| (\d+) \| (\d+) \|", re.MULTILINE)


def module(name, **names):
    found = sys.modules[name] = types.ModuleType(name)
    vars(found).update(names, __path__=[])
    if "." in name:
        parent, _, last = name.rpartition(".")
        setattr(sys.modules[parent], last, found)
    return found


def substitutes(cupy, numpy):
    """Make the modules of CuPy's inside that its tests import."""
    nothing = {f"{verb}_{what}_accelerators": list if verb == "get" else lambda given: None
               for verb in ("get", "set") for what in ("reduction", "routine")}
    core = module("cupy._core", elementwise_copy=lambda a, b: cupy.copyto(b, a), **nothing)
    core.create_reduction_func = lambda name, types, routine, identity=None: cupy.ReductionKernel(
        "T in0", "T out0", *routine[:3], str(identity), name)
    core.__getattr__ = lambda name: getattr(cupy, name)
    module("cupy._core._accelerator", ACCELERATOR_CUB=1, ACCELERATOR_CUTENSOR=2, **nothing)
    module("cupy._core._cub_reduction")
    module("cupy._core._routines_statistics")
    module("cupy._core.internal", prod=math.prod)
    module("cupy._util", ENABLE_SLICE_COPY=False, clear_memo=lambda: None, CUDA_ARRAY_INTERFACE_EXPORT_VERSION=3,
           PerformanceWarning=cupy._operands.PerformanceWarning)
    module("cupy.exceptions", **{name: one for name, one in vars(numpy.exceptions).items() if name[:2] != "__"})
    module("cupy.cuda.cub", available=False)
    backend = type("Backend", (), {"__init__": lambda self, path: None})
    module("cupy.cuda._compiler_cache", DiskKernelCacheBackend=backend)
    vars(cupy.cuda.compiler).update(_kernel_cache_backend=None, _empty_file_preprocess_cache={}, _get_arch=lambda: "80",
                                    _get_bool_env_variable=None, _run_cc=lambda command, *_: " ".join(command))
    cupy.cuda.device.get_compute_capability = lambda: "80"
    vars(cupy.cuda.memory).update(SingleDeviceMemoryPool=cupy.cuda.MemoryPool, PooledMemory=cupy.cuda.Memory,
                                  MemoryAsync=cupy.cuda.Memory, _allocation_unit_size=512,
                                  _round_size=lambda size: -(-size // 512) * 512)
    cupy.cuda.MemoryPool._arena = lambda pool, stream: None
    cupy.cuda.runtime.deviceGetAttribute, cupy.cuda.runtime.cudaDevAttrMemoryPoolsSupported = lambda *which: 1, 115
    cupy.cuda.driver._is_cuda_python = lambda: False
    cupy.cuda.get_nvcc_path = lambda: "echo release 13.0, V13.0.0"
    cupy.cuda.driver.get_build_version = cupy.cuda.runtime.runtimeGetVersion
    cupy.cuda.stream.get_default_stream_ptr = lambda: 1
    sys.modules["cupy._creation.from_data"] = cupy._creation.from_data = cupy
    module("cupy_backends")
    module("cupy_backends.cuda", stream=cupy.cuda.stream)
    module("cupy_backends.cuda.api", runtime=cupy.cuda.runtime, driver=cupy.cuda.driver)
    module("cupy_backends.cuda.libs")
    module("cupy_backends.cuda.libs.nvrtc", getVersion=lambda: (13, 0))
    for name, one in (("stream", cupy.cuda.stream), ("api.runtime", cupy.cuda.runtime),
                      ("api.driver", cupy.cuda.driver)):
        sys.modules[f"cupy_backends.cuda.{name}"] = one


def begin():
    """Install emulated GPUs and the modules of CuPy's inside, also in the programs that the tests start."""
    from gpucoll import emulation

    emulation.install(gpus=2, temper="quick")
    import cupy
    import cupyx
    import numpy

    substitutes(cupy, numpy)
    cupyx.distributed.__path__ = []
    module("cupyx.distributed._nccl_comm", _mpi_available=False, **vars(cupyx.distributed))
    module("cupyx.distributed._store", ExceptionAwareProcess=Process)
    place = os.path.join(os.environ["CUPY_CHECKOUT"], "cupy", "testing")
    for name in [name for name in sys.modules if name.startswith("cupy.testing")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location("cupy.testing", f"{place}/__init__.py",
                                                  submodule_search_locations=[place])
    sys.modules["cupy.testing"] = cupy.testing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cupy.testing)


class Process(multiprocessing.Process):
    """A process that ends with an error of its own is an error."""

    def join(self):
        super().join()
        assert self.exitcode == 0


def pytest_configure():
    begin()
    python = os.path.join(tempfile.mkdtemp(), "python")
    with open(python, "w") as file:
        file.write(f"#!{sys.executable}\nimport cupys_tests, runpy, sys\ncupys_tests.begin()\ndel sys.argv[0]\n"
                   "runpy.run_path(sys.argv[0], run_name='__main__')\n")
    os.chmod(python, 0o700)
    sys.executable = python


def pytest_runtest_setup():
    sys.modules["cupy"]._machine.MACHINE.fault = None  # of an earlier test


def counted(checkout, path):
    """Return the numbers of passed, failed and skipped tests of a file."""
    job = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "cupys_tests", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-m", "not slow", "--tb=no", "-c", os.devnull, "--rootdir", f"{checkout}/tests", "--timeout", "60", path],
        cwd=f"{checkout}/tests", text=True, capture_output=True,
        env={**os.environ, "CUPY_CHECKOUT": checkout, "PYTHONPATH": os.path.dirname(os.path.abspath(__file__))})
    last = (job.stdout.strip().splitlines() or [""])[-1]
    return tuple(int((re.search(rf"(\d+) {word}", last) or [0, 0])[1]) for word in ("passed", "failed", "skipped"))


def main(checkout, *names):
    differ = 0
    for folder, name, *numbers in ROW.findall(PAGE.read_text()):
        if names and name not in names:
            continue
        path, expected = f"{PLACES[folder]}/{folder}/{name}.py", (*map(int, numbers),)
        found = counted(os.path.abspath(checkout), path)
        differ += found != expected
        print(path, *found, "" if found == expected else f"expected {expected}", flush=True)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
