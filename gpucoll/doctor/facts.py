"""Facts on the installation and this host: versions, MPI and launcher, GPUs, shared memory, engine.

Only `start_mpi` initialises MPI.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.device import nvrtc
from gpucoll.device.gpus import BY_NVLINK
from gpucoll.errors import GpucollError
from gpucoll.executors.engine import extension
from gpucoll.launch.bootstrap import start_deadline
from gpucoll.launch.launchers import find_mpiexec, library_name, started, vendor_of

REMEDIES = {"cupy": "pip install 'gpucoll[cuda13]' or 'gpucoll[cuda12]'", "pynvml": "pip install 'gpucoll[nvml]'",
            "ml_dtypes": "pip install 'gpucoll[dtypes]'", "mpi4py": "pip install mpi4py"}
# Absolute folders, except system folders, are cut from error texts: folder names may reveal the user's name.
FOLDERS = re.compile(r"(?<![\w.~])/(?!dev/|proc/|sys/)(?:[^\s/:;,'\"()]+/)+")


class Findings(NamedTuple):
    """The results of queries: `facts` by name, and in `missing` the reason for each fact that is None by an error."""

    facts: dict[str, Any]
    missing: dict[str, str]


def look(**looks: Callable[[], Any]) -> Findings:
    """Run all queries; a query that raises any exception becomes a missing fact with the reason."""
    findings = Findings(dict.fromkeys(looks), {})
    for name, find in looks.items():
        try:
            findings.facts[name] = find()
        except Exception as error:
            findings.missing[name] = reason(error)
    return findings


def reason(error: BaseException) -> str:
    """Return the text of an exception in one line, without folder names."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = REMEDIES.get(error.name.partition(".")[0])
        return f"{error.name} is not installed" + (f": {remedy}" if remedy else "")
    said = error.args[0] if isinstance(error, GpucollError) else str(error)
    return FOLDERS.sub("", " ".join(str(said).split())) or type(error).__name__


def versions() -> Findings:
    """Return the versions of packages and libraries, as text."""
    packages = {name: lambda name=name: importlib.import_module(name).__version__
                for name in ("gpucoll", "numpy", "mpi4py", "ml_dtypes", "cupy")}
    return look(python=platform.python_version, **packages, nccl=_nccl,
                nvrtc=lambda: ".".join(map(str, nvrtc.version())),
                cuda_runtime=lambda: _cuda("runtimeGetVersion"), cuda_driver=lambda: _cuda("driverGetVersion"))


def _nccl() -> str:
    from cupy.cuda import nccl

    if not getattr(nccl, "available", True):
        raise LookupError("CuPy finds no libnccl; pip install nvidia-nccl-cu13 or nvidia-nccl-cu12, after CuPy's CUDA")
    number = nccl.get_version()
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _cuda(ask: str) -> str:
    import cupy

    number = getattr(cupy.cuda.runtime, ask)()
    if number == 0:
        raise LookupError("no NVIDIA driver is loaded")
    return f"{number // 1000}.{number % 1000 // 10}"


# ---------------------------------------------------------------- MPI

def mpi(environment: Mapping[str, str] = os.environ) -> Findings:
    """Return the MPI library used by mpi4py, the launcher of this process or the first mpiexec, and a mismatch."""
    process = started(environment)
    findings = look(library=lambda: library_name(mpi_module().Get_library_version()),
                    mpiexec=lambda: None if process else _mpiexec())
    library, mpiexec = findings.facts["library"], findings.facts["mpiexec"]
    own, other = family(library), process.launcher.family if process else family(mpiexec)
    match = own == other if own and other else None
    what = f"{process.launcher.name} started {process.size} ranks, but mpi4py uses {library}" if process else \
        f"the mpiexec that comes first is {mpiexec}, but mpi4py uses {library}: each rank would be alone"
    findings.facts.update(store=False, launcher=process and process.launcher.name,
                          launched=process and process.size, match=match,
                          mismatch=f"{what}; launch with {own}'s own mpiexec" if match is False else None)
    return findings


def family(version: str | None) -> str | None:
    """Return the MPI family of a library or launcher, by the version text; None if unknown."""
    vendor = vendor_of(version or "")
    return vendor and vendor.family


def _mpiexec() -> str:
    path = find_mpiexec()
    if path is None:
        raise LookupError("no mpiexec next to this Python or on the PATH; pip install 'gpucoll[mpich]'")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    number = re.search(r"\d+(\.\d+)+", text)
    return f"{family(text) or 'unknown'}'s, {number.group() if number else 'of unknown version'}"


def mpi_module() -> Any:
    """Return the module `mpi4py.MPI`; a first import here does not initialise MPI."""
    # An MPI library initialised under the launcher of another MPI may abort the process.
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    return MPI


def start_mpi(timeout: float) -> None:
    """Start MPI within `timeout` seconds; otherwise the process ends, for example because a rank has not come."""
    mpi = mpi_module()
    if not mpi.Is_initialized():
        with start_deadline(timeout):
            mpi.Init_thread(mpi.THREAD_MULTIPLE)


# ---------------------------------------------------------------- this host and its GPUs

# NVML's values, not pynvml's names: pynvml's NVML_P2P_CAPS_INDEX_READ is a tuple because of a stray comma.
READ = 0


def host() -> Findings:
    """Return the free bytes of shared memory on this host, the presence of the engine, and the GPUs found by NVML."""
    return look(shm_free=lambda: shutil.disk_usage("/dev/shm").free, engine=lambda: extension.library() and "installed",
                gpus=_gpus)


def _gpus() -> list[dict[str, Any]]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [_gpu(pynvml, own, handles).facts for own in handles]
    finally:
        pynvml.nvmlShutdown()


def _gpu(library: Any, own: Any, handles: Sequence[Any]) -> Findings:
    return look(name=lambda: str(library.nvmlDeviceGetName(own)),
                pci=lambda: str(library.nvmlDeviceGetPciInfo(own).busId),
                free_bytes=lambda: int(library.nvmlDeviceGetMemoryInfo(own).free),
                nvlinks=lambda: _nvlinks(library, own),
                reaches=lambda: [_way(library, own, other) for other in handles])


def _nvlinks(library: Any, handle: Any) -> dict[str, int]:
    """Return the number of NVLinks up and down."""
    states = []
    # NVML numbers more links than a GPU has; the calls for missing links fail.
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(library.NVMLError_InvalidArgument, library.NVMLError_NotSupported):
            states.append(bool(library.nvmlDeviceGetNvLinkState(handle, link)))
    return {"up": sum(states), "down": len(states) - sum(states)}


def _way(library: Any, own: Any, other: Any) -> str:
    if own is other:
        return "itself"
    for name, index in (("NVLink", BY_NVLINK), ("PCI", READ)):
        with contextlib.suppress(library.NVMLError):
            if library.nvmlDeviceGetP2PStatus(own, other, index) == 0:
                return name
    return "none"
