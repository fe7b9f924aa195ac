"""The reference for results: facts about the host, and the copy bandwidth of its memory in the same run."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy

import gpucoll
from gpucoll import Communicator
from gpucoll.calibration.measure import ranks_of
from gpucoll.device.gpus import describe_gpu
from gpucoll.tuner.table import facts as host_facts
from gpucoll.tuner.table import processor

from .cases import BenchCase, least_traffic
from .devices import BenchDevice

COPY_REPEATS = 7
NODE_BYTES, GPU_BYTES = 256 << 20, 256 << 20  # beyond any cache; the ranks of a node share NODE_BYTES
MOST_COPIED = 64 << 20  # per rank on the host


class CopySpeed(NamedTuple):
    """GB/s read and written by all ranks together while each copies `nbytes` bytes, and by each rank."""

    bandwidth: float
    nbytes: int
    per_rank: tuple[float, ...]


def copy_bandwidth(comm: Communicator, device: BenchDevice) -> CopySpeed:
    """Measure the copy bandwidth of memory, all ranks at once; collective, the same result on every rank."""
    nbytes = GPU_BYTES if device.name == "cuda" else min(MOST_COPIED, NODE_BYTES // comm.local_size)
    nbytes = min(ranks_of(comm).allgather(nbytes))
    source, target = (device.empty((nbytes,), "uint8") for _ in range(2))
    device.write(source, numpy.ones(nbytes, numpy.uint8))
    device.write(target, numpy.zeros(nbytes, numpy.uint8))
    seconds = []
    for _ in range(COPY_REPEATS):
        ranks_of(comm).Barrier()
        seconds.append(device.timed(lambda: device.copy(target, source))[0])
    everyone = numpy.array(ranks_of(comm).allgather(seconds))
    moved = 2 * nbytes / 1e9
    return CopySpeed(comm.size * moved / float(numpy.median(everyone.max(axis=0))), nbytes,
                     tuple((moved / numpy.median(everyone, axis=1)).tolist()))


def bound(case: BenchCase, count: int, copy: CopySpeed) -> float | None:
    """Return the busbw in GB/s at the copy bandwidth if no byte moves needlessly; None if no bytes move.

    Only the memory bounds: between nodes the network has a lower bound, and data in a cache can be faster.
    """
    traffic = least_traffic(case.test, case.ranks) * case.nbytes(count)
    return copy.bandwidth * case.moved(count) * case.factor / traffic if traffic else None


class RankPlace(NamedTuple):
    """The place of a rank; `device` is a CUDA ordinal, -1 on the host."""

    pid: int
    host: str
    node: int
    device: int
    identity: str  # nccl-tests' domain:bus:device, or the name of the device
    info: str


def place(comm: Communicator, device: BenchDevice) -> RankPlace:
    """Return the place of this rank."""
    if device.name != "cuda":
        return RankPlace(os.getpid(), socket.gethostname(), comm.node, -1, device.name, processor())
    gpu = describe_gpu(comm.device or 0)
    pci = gpu.pci.partition(".")[0].lower()
    return RankPlace(os.getpid(), socket.gethostname(), comm.node, gpu.ordinal, pci, gpu.name)


def versions(known: Mapping[str, Any]) -> dict[str, str]:
    """Return the versions of all software involved, from the `facts`."""
    name, _, version = known["mpi"].rpartition(" ")
    return {"gpucoll": gpucoll.__version__, name: version, "mpi4py": known["mpi4py"], "NumPy": known["numpy"]}


def facts(comm: Communicator, device: BenchDevice, places: Sequence[RankPlace]) -> dict[str, Any]:
    """Return the facts about the machine for JSON: no paths, no names of people."""
    clock, host = time.get_clock_info("perf_counter"), host_facts(by_mpi=comm.mpi is not None)
    cupy_version, nccl_version = None, 0
    if device.name == "cuda":
        import cupy
        from cupy.cuda import nccl

        cupy_version, nccl_version = cupy.__version__, nccl.get_version()
    return {"host": host["name"], "cpu": host["processor"], "cores": host["cores"],
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
            "python": platform.python_version(), "numpy": host["numpy"], "mpi": host["mpi"],
            "mpi4py": getattr(sys.modules.get("mpi4py"), "__version__", None), "cupy": cupy_version,
            "nccl": nccl_version, "gpus": sorted({spot.info for spot in places if spot.device >= 0}),
            "clock": f"{clock.implementation}, {clock.resolution:g} s"}


def revision(folder: Path = Path(gpucoll.__file__).parent) -> str:
    """Return git's short name of the library's state, "" outside a checkout."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
