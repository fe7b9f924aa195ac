"""Parts of scripts/gpu_check, each in a separate process on the GPU: `python gpu_parts.py PART ARGUMENT`.

Every printed line is a finding: a JSON object with "name", "status" and more. A stopped part has already printed its
findings so far.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, MISSING, SHORT = "passed", "failed", "missing", "below target"
SHARE = 0.9  # of the device's own copy bandwidth
CALL_MICROSECONDS = 10.0  # of the host, for one eager all_reduce
WAIT = 0.5  # seconds after which a call counts as waiting
REPEATS, BURST = 15, 4  # measurements, and calls per measurement
PATIENCE = 60.0  # seconds

Finding = dict[str, Any]


def finding(name: str, status: str, **more: Any) -> Finding:
    """Return a line of a report."""
    return {"name": name, "status": status, **more}


def facts(_: str) -> Iterator[Finding]:
    """Yield the facts about this host, each with its value or the reason for not knowing."""
    from gpucoll.doctor import facts as doctor

    yield finding("system", PASSED, value=f"{platform.system()} {platform.release()}, {os.cpu_count()} processors")
    packages = {name: lambda name=name: importlib.metadata.version(name) for name in ("scikit-learn", "nvidia-ml-py")}
    for found in (doctor.versions(), doctor.mpi(), doctor.look(**packages, GPUs=_gpus)):
        yield from (finding(name, PASSED, value=value) for name, value in found.facts.items() if value)
        yield from (finding(name, MISSING, reason=why) for name, why in found.missing.items())


def _gpus() -> list[str]:
    import cupy

    devices = [cupy.cuda.Device(ordinal) for ordinal in range(cupy.cuda.runtime.getDeviceCount())]
    return [f"{cupy.cuda.runtime.getDeviceProperties(device.id)['name'].decode()}, sm_{device.compute_capability}, "
            f"{device.mem_info[1] / 2**30:.0f} GiB, {device.attributes['MultiProcessorCount']} SMs"
            for device in devices]


def cases(part: str) -> Iterator[Finding]:
    """Run the cases of a part of tests/gpu in order; for "kernels:word" only cases with the word in their names."""
    sys.path.insert(0, str(ROOT / "tests"))
    from gpu import cases  # type: ignore[import-not-found]

    name, _, keyword = part.partition(":")
    absent = cases.missing("ml_dtypes")
    if absent:
        yield finding(name, MISSING, reason=absent)
        return
    chosen = cases.PARTS[name]
    for name in filter(lambda name: keyword in name, chosen):
        started = time.monotonic()
        try:
            chosen[name]()
            yield finding(name, PASSED, seconds=round(time.monotonic() - started, 2))
        except cases.Skipped as error:
            yield finding(name, MISSING, reason=str(error))
        except Exception:
            yield finding(name, FAILED, reason=traceback.format_exc()[-2000:])


def bandwidth(megabytes: str) -> Iterator[Finding]:
    """Compare the memory speed of the kernels with the device's own copy: bytes read and written per second."""
    import cupy

    from gpucoll.device.cuda import CudaDevice

    device = CudaDevice(0)
    cupy.cuda.Device(0).use()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        arrays = [cupy.zeros(int(megabytes) << 20, "uint8") for _ in range(3)]
        works = _works(device.kernels, arrays, stream)
        rates = _in_turn({name: nbytes for name, (nbytes, _) in works.items()},
                         lambda name: _burst(stream, works[name][1]))
    own = rates.pop("device copy")
    yield finding("device copy", PASSED, gigabytes_per_second=round(own, 1))
    for name, rate in rates.items():
        yield finding(name, PASSED if rate >= SHARE * own else SHORT, gigabytes_per_second=round(rate, 1),
                      share=round(rate / own, 3))


def _works(kernels: Any, arrays: list[Any], stream: Any) -> dict[str, tuple[int, Callable[[], None]]]:
    """Return, for each kernel, the bytes read and written, and a launch on the memory of three arrays."""
    from cupy.cuda import runtime

    from gpucoll.core.dtypes import DTYPES
    from gpucoll.core.ops import OPS

    (a, b, c), nbytes = (array.data.ptr for array in arrays), arrays[0].nbytes
    float32, count, rows = DTYPES["float32"], nbytes // 4, nbytes // 4096
    inside, total = runtime.memcpyDeviceToDevice, OPS["sum"]
    return {
        "device copy": (2 * nbytes, lambda: runtime.memcpyAsync(c, a, nbytes, inside, stream.ptr)),
        "copy": (2 * nbytes, lambda: kernels.copy(a, c, count, 4, stream)),
        "reduce": (3 * nbytes, lambda: kernels.reduce(total, float32, (a, b), c, count, stream)),
        "pack": (2 * nbytes, lambda: kernels.pack(a, (2, rows, 2048), (2048, 4096, 1), 1, c, stream)),
        "scale": (2 * nbytes, lambda: kernels.scale("multiply", float32, a, c, count, 0.5, stream)),
    }


def _in_turn(nbytes: dict[str, float], seconds: Callable[[str], float]) -> dict[str, float]:
    """Return GB/s by name: medians of alternating repeats, so that a slow moment affects all alike."""
    taken = [{name: seconds(name) for name in nbytes} for _ in range(REPEATS + 2)][2:]  # the first two warm up
    return {name: moved / statistics.median(one[name] for one in taken) / 1e9 for name, moved in nbytes.items()}


def _burst(stream: Any, call: Callable[[], Any]) -> float:
    """Return the seconds per call for a burst of calls."""
    stream.synchronize()
    began = time.perf_counter()
    for _ in range(BURST):
        call()
    stream.synchronize()
    return (time.perf_counter() - began) / BURST


def host_time(_: str) -> Iterator[Finding]:
    """Measure the host's time for an eager all_reduce on the same arrays, on rank 0.

    Several ranks also compare their calls by messages of the host. The limit is for a single rank.
    """
    import cupy

    import gpucoll as gc

    def microseconds(algorithm: str, count: int = 200) -> float:
        began = time.perf_counter()
        for _ in range(count):
            comm.all_reduce(x, out, algorithm=algorithm)
        taken = time.perf_counter() - began
        stream.synchronize()
        return taken / count * 1e6

    with gc.init(timeout=60) as comm:
        cupy.cuda.Device(comm.device).use()
        x, out = cupy.ones(1 << 10, "float32"), cupy.empty(1 << 10, "float32")
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for algorithm in ("native", "ring"):
                taken = statistics.median(microseconds(algorithm) for _ in range(REPEATS))
                status = PASSED if comm.size > 1 or taken <= CALL_MICROSECONDS else SHORT
                if comm.rank == 0:
                    ranks = f"{comm.size} ranks" if comm.size > 1 else "a lone rank"
                    yield finding(f"all_reduce, {algorithm}, {ranks}", status, microseconds=round(taken, 2))


def waits(_: str) -> Iterator[Finding]:
    """Time calls of CUDA and NCCL while another thread copies to the host behind a kernel that holds its stream.

    The microseconds are None for a call that waits for the end of that copy: the watchdog may not make it.
    """
    import cupy
    import numpy
    from cupy.cuda import nccl

    from bench.devices import HOLD

    pinned, hold = cupy.cuda.alloc_pinned_memory(4), cupy.RawKernel(HOLD, "hold")
    opened, x = numpy.frombuffer(pinned, numpy.uint32, 1), cupy.zeros(1 << 20, "uint8")
    held, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    event, comm = cupy.cuda.Event(), nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    event.record(other)
    calls: dict[str, Callable[[], object]] = {
        "none": lambda: None, "event query": lambda: event.done, "event record": lambda: event.record(other),
        "compile and load": lambda: cupy.RawKernel(HOLD.replace("hold", "other"), "other").kernel,
        "ncclCommAbort": comm.abort, "ncclCommInitRank": lambda: nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)}
    for name, call in calls.items():
        opened[0] = 0
        hold((1,), (1,), (numpy.uint64(opened.ctypes.data), numpy.uint64(4e9 * WAIT)), stream=held)
        reader, caller = (threading.Thread(target=one) for one in (lambda: x.get(stream=held), call))
        reader.start()
        reader.join(WAIT / 10)  # by now it copies
        began = time.perf_counter()
        caller.start()
        caller.join(WAIT)
        taken = None if caller.is_alive() else round(1e6 * (time.perf_counter() - began))
        opened[0] = 1
        for one in (reader, caller):
            one.join()
        yield finding(name, PASSED, microseconds=taken)


PARTS: dict[str, Callable[[str], Iterator[Finding]]] = {
    "facts": facts, "cases": cases, "bandwidth": bandwidth, "host time": host_time, "waits": waits}


def main(name: str, argument: str) -> None:
    """Print the findings of a part; an error within the part becomes a finding."""
    sys.path.insert(0, str(ROOT))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception: a part out of time ends its ranks
    try:
        for found in PARTS[name](argument):
            print(json.dumps(found), flush=True)
    except Exception as error:
        status = MISSING if isinstance(error, ImportError) else FAILED
        print(json.dumps(finding(name, status, reason=f"{type(error).__name__}: {error}")), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
