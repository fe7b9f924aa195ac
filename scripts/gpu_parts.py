"""What scripts/gpu_check runs on the GPU, each part in a process of its own: `python gpu_parts.py PART [ARGUMENT]`.

Every line that a part prints is a finding: a JSON object with "name", "status" and more. A part that is stopped has
printed what it found until then.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, MISSING, SHORT = "passed", "failed", "missing", "below target"
SHARE = 0.9  # of the device's own copy bandwidth
CALL_MICROSECONDS = 10.0  # of the host, for one eager all_reduce
REPEATS, BURST = 15, 4  # measurements of each kernel, and launches in each

Finding = dict[str, Any]


def finding(name: str, status: str, **more: Any) -> Finding:
    """Return one line of a report."""
    return {"name": name, "status": status, **more}


def say(found: Finding) -> None:
    print(json.dumps(found), flush=True)


# ---------------------------------------------------------------- the host's facts


def facts() -> Iterator[Finding]:
    """What this host has: every fact, or the reason why it is not known."""
    yield finding("system", PASSED, value=f"{platform.system()} {platform.release()}, {os.cpu_count()} processors")
    yield finding("Python", PASSED, value=platform.python_version())
    for package in ("numpy", "ml_dtypes", "mpi4py", "sklearn", "pytest"):
        yield _fact(package, lambda package=package: _version_of(package))  # type: ignore[misc]
    for name, look in (("MPI", _mpi), ("CuPy", _cupy), ("CUDA", _cuda), ("NVRTC", _nvrtc), ("NCCL", _nccl)):
        yield _fact(name, look)
    yield _fact("driver", _driver)
    yield _fact("GPUs", _gpus)


def _fact(name: str, look: Callable[[], Any]) -> Finding:
    try:
        return finding(name, PASSED, value=look())
    except Exception as error:  # whatever it is, it is the reason
        return finding(name, MISSING, reason=f"{type(error).__name__}: {error}")


def _version_of(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        raise ImportError(f"{package} is not installed")
    return importlib.metadata.version({"sklearn": "scikit-learn"}.get(package, package))


def _mpi() -> str:
    from mpi4py import MPI

    return MPI.Get_library_version().splitlines()[0].strip("\0 ")


def _cupy() -> str:
    import cupy

    return str(cupy.__version__)


def _cuda() -> str:
    import cupy

    runtime = cupy.cuda.runtime
    return f"runtime {runtime.runtimeGetVersion()}, driver {runtime.driverGetVersion()}"


def _nvrtc() -> str:
    import cupy

    from gpucoll.device.nvrtc import version

    return ".".join(map(str, version(cupy.cuda.runtime.runtimeGetVersion() // 1000)))


def _nccl() -> str:
    from cupy.cuda import nccl

    return str(nccl.get_version())


def _driver() -> str:
    import pynvml

    pynvml.nvmlInit()
    return str(pynvml.nvmlSystemGetDriverVersion())


def _gpus() -> list[str]:
    import cupy

    from gpucoll.bootstrap import describe_gpu

    count = cupy.cuda.runtime.getDeviceCount()
    return [_described(cupy, number, describe_gpu(number).name) for number in range(count)]


def _described(cupy: Any, number: int, name: str) -> str:
    device = cupy.cuda.Device(number)
    own = cupy.cuda.runtime.getDeviceProperties(number)["name"].decode()
    told = own if name.startswith("GPU (") else name  # pynvml's name, or the runtime's where that is missing
    memory = device.mem_info[1] / 2**30
    return f"{told}, sm_{device.compute_capability}, {memory:.0f} GiB, {device.attributes['MultiProcessorCount']} SMs"


# ---------------------------------------------------------------- the cases of tests/gpu, without pytest


def cases(keyword: str = "") -> Iterator[Finding]:
    """The cases one after the other; pytest runs the same ones where it is installed."""
    sys.path.insert(0, str(ROOT / "tests" / "gpu"))
    import cases as found  # type: ignore[import-not-found]

    absent = found.missing("ml_dtypes")
    for name, case in found.CASES.items():
        if keyword not in name:
            continue
        yield finding(name, MISSING, reason=absent) if absent else _tried(name, case, found.Skipped)


def _tried(name: str, case: Callable[[], None], skipped: type[Exception]) -> Finding:
    started = time.monotonic()
    try:
        case()
    except skipped as error:
        return finding(name, MISSING, reason=str(error))
    except Exception:
        return finding(name, FAILED, reason=traceback.format_exc()[-2000:])
    return finding(name, PASSED, seconds=round(time.monotonic() - started, 2))


# ---------------------------------------------------------------- bandwidth and host time


def bandwidth(megabytes: int) -> Iterator[Finding]:
    """How fast the kernels move memory, against how fast the device copies it: bytes read and written per second."""
    import cupy

    from gpucoll.device.cuda import CudaDevice

    device = CudaDevice(0)
    device.use()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        arrays = [cupy.zeros(megabytes << 20, "uint8") for _ in range(3)]
        works = _works(device.kernels, arrays, stream)
        rates = _measured(cupy, works, stream)
    own = rates.pop("cudaMemcpyAsync")
    yield finding("device copy", PASSED, gigabytes_per_second=round(own, 1))
    for name, rate in rates.items():
        yield finding(name, PASSED if rate >= SHARE * own else SHORT, gigabytes_per_second=round(rate, 1),
                      share=round(rate / own, 3))


def _works(kernels: Any, arrays: list[Any], stream: Any) -> dict[str, tuple[int, Callable[[], None]]]:
    """Return for each kernel how many bytes it reads and writes, and its launch on the memory of three arrays."""
    from cupy.cuda import runtime

    from gpucoll.dtypes import DTYPES
    from gpucoll.ops import OPS

    (a, b, c), nbytes = (array.data.ptr for array in arrays), arrays[0].nbytes
    float32, half = DTYPES["float32"], DTYPES["bfloat16"]
    count, rows = nbytes // 4, nbytes // 4096
    inside, total = runtime.memcpyDeviceToDevice, OPS["sum"]
    return {
        "cudaMemcpyAsync": (2 * nbytes, lambda: runtime.memcpyAsync(c, a, nbytes, inside, stream.ptr)),
        "copy": (2 * nbytes, lambda: kernels.copy(a, c, count, 4, stream)),
        "reduce": (3 * nbytes, lambda: kernels.reduce(total, float32, (a, b), c, count, stream)),
        "pack": (2 * nbytes, lambda: kernels.pack(a, (2, rows, 2048), (2048, 4096, 1), 1, c, stream)),
        "cast": (nbytes + nbytes // 2, lambda: kernels.cast(float32, half, a, c, count, stream)),
        "scale": (2 * nbytes, lambda: kernels.scale("multiply", float32, a, c, count, 0.5, stream)),
    }


def _measured(cupy: Any, works: dict[str, tuple[int, Callable[[], None]]], stream: Any) -> dict[str, float]:
    """Return GB/s: the medians of repeats that take turns, so that a slow moment meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(REPEATS + 2):
        for name, (_, launch) in works.items():
            taken = _timed(cupy, launch, stream)
            if repeat >= 2:  # the first ones load the kernels, and warm up
                seconds[name].append(taken)
    return {name: works[name][0] / statistics.median(times) / 1e9 for name, times in seconds.items()}


def _timed(cupy: Any, launch: Callable[[], None], stream: Any) -> float:
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record(stream)
    for _ in range(BURST):
        launch()
    last.record(stream)
    last.synchronize()
    return float(cupy.cuda.get_elapsed_time(first, last)) / 1e3 / BURST


def host_time() -> Iterator[Finding]:
    """How long the host is busy with one eager all_reduce of a lone rank, on the same arrays every time."""
    import cupy

    import gpucoll as gc

    with gc.init(timeout=60) as comm:
        cupy.cuda.Device(comm.device).use()
        x, out = cupy.ones(1 << 10, "float32"), cupy.empty(1 << 10, "float32")
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for algorithm in ("native", "ring"):
                taken = statistics.median(_calls(comm, x, out, algorithm, stream) for _ in range(REPEATS))
                yield finding(f"all_reduce, {algorithm}", PASSED if taken <= CALL_MICROSECONDS else SHORT,
                              microseconds=round(taken, 2))


def _calls(comm: Any, x: Any, out: Any, algorithm: str, stream: Any, count: int = 200) -> float:
    """Return microseconds per call, and then wait for the GPU."""
    began = time.perf_counter()
    for _ in range(count):
        comm.all_reduce(x, out, algorithm=algorithm)
    taken = time.perf_counter() - began
    stream.synchronize()
    return taken / count * 1e6


def peer(name: str, *arguments: int) -> Iterator[Finding]:
    """A part of `gpu_peer`."""
    import gpu_peer

    yield from getattr(gpu_peer, name)(*arguments)


PARTS: dict[str, Callable[..., Iterator[Finding]]] = {
    "facts": facts, "cases": cases, "bandwidth": bandwidth, "host time": host_time,
    "peer bandwidth": lambda megabytes: peer("peer_bandwidth", megabytes),
    "peer latency": lambda: peer("peer_latency"),
}


def main(arguments: list[str]) -> int:
    """Print what a part finds; an error in the midst of it is a finding too."""
    sys.path.insert(0, str(ROOT))
    name, *more = arguments
    try:
        for found in PARTS[name](*(int(one) if one.isdecimal() else one for one in more)):
            say(found)
    except Exception as error:
        missing = isinstance(error, ImportError)
        say(finding(name, MISSING if missing else FAILED, reason=f"{type(error).__name__}: {error}"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
