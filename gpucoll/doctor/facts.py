"""What there is: versions, MPI and its launcher, and of this host GPUs, shared memory, compiler; MPI is not started."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import gpucoll
from gpucoll.arguments import LAUNCHERS
from gpucoll.errors import GpucollError
from gpucoll.launch import find_mpiexec

REMEDIES = {"cupy": "pip install 'gpucoll[cuda13]' or 'gpucoll[cuda12]'", "pynvml": "pip install 'gpucoll[nvml]'",
            "ml_dtypes": "pip install 'gpucoll[dtypes]'", "mpi4py": "pip install mpi4py"}
# A file is known by its own name; the folders, but for the system's, say who runs this.
FOLDERS = re.compile(r"(?<![\w.~])/(?!dev/|proc/|sys/)(?:[^\s/:;,'\"()]+/)+")


class Findings(NamedTuple):
    """What was looked for: `facts` by name; for those that are None, `missing` has the reason."""

    facts: dict[str, Any]
    missing: dict[str, str]


def look(**looks: Callable[[], Any]) -> Findings:
    """Look for everything; what raises, whatever it raises, is missing, and the others do not suffer.

    >>> look(half=lambda: 1 // 2, nothing=lambda: 1 // 0)
    Findings(facts={'half': 0, 'nothing': None}, missing={'nothing': 'integer division or modulo by zero'})
    """
    found = Findings(dict.fromkeys(looks), {})
    for name, find in looks.items():
        try:
            found.facts[name] = find()
        except Exception as error:
            found.missing[name] = reason(error)
    return found


def reason(error: BaseException) -> str:
    """Return what an exception says, in one line that names no folders.

    >>> reason(ModuleNotFoundError(name="ml_dtypes"))
    "ml_dtypes is not installed: pip install 'gpucoll[dtypes]'"
    >>> reason(OSError("cannot open /opt/site/lib/libmpi.so: /dev/shm is full"))
    'cannot open libmpi.so: /dev/shm is full'
    """
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = REMEDIES.get(error.name.partition(".")[0])
        return f"{error.name} is not installed" + (f": {remedy}" if remedy else "")
    said = error.args[0] if isinstance(error, GpucollError) else str(error)
    return FOLDERS.sub("", " ".join(str(said).split())) or type(error).__name__


# ---------------------------------------------------------------- versions


def versions() -> Findings:
    """Find the versions of all packages and libraries, as text."""
    packages = {name: functools.partial(_package, name) for name in ("numpy", "mpi4py", "ml_dtypes", "cupy")}
    return look(gpucoll=lambda: gpucoll.__version__, python=platform.python_version, **packages, nccl=_nccl,
                nvrtc=_nvrtc, cuda_runtime=_cuda_runtime, cuda_driver=_cuda_driver, nvidia_driver=_nvidia_driver)


def _package(name: str) -> str:
    return str(importlib.import_module(name).__version__)


def _nccl() -> str:
    from cupy.cuda import nccl

    if not getattr(nccl, "available", True):
        raise LookupError("CuPy finds no libnccl; pip install nvidia-nccl-cu13 or nvidia-nccl-cu12, after CuPy's CUDA")
    number = nccl.get_version()
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def _nvrtc() -> str:
    from gpucoll.device import nvrtc

    return ".".join(map(str, nvrtc.version()))


def _cuda_runtime() -> str:
    import cupy

    return _cuda(getattr(cupy.cuda, "get_local_runtime_version", cupy.cuda.runtime.runtimeGetVersion)())


def _cuda_driver() -> str:
    import cupy

    number = cupy.cuda.runtime.driverGetVersion()
    if number == 0:
        raise LookupError("no NVIDIA driver is loaded")
    return _cuda(number)


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _nvidia_driver() -> str:
    with nvml() as library:
        return str(library.nvmlSystemGetDriverVersion())


# ---------------------------------------------------------------- MPI

# Launchers and libraries of one family can work together: MPICH's descendants share its way to start ranks.
FAMILIES = (("Open MPI", ("Open MPI", "OpenRTE", "PRRTE")), ("MPICH", ("MPICH", "HYDRA", "Intel(R) MPI", "MVAPICH")))


def mpi(environment: Mapping[str, str] = os.environ) -> Findings:
    """Find which MPI mpi4py uses, who launched this process or would, and whether the two belong together."""
    name, size = launcher(environment) or (None, None)
    found = look(library=lambda: short(mpi_module().Get_library_version()),
                 mpiexec=_mpiexec if name is None else lambda: None)
    library, mpiexec = found.facts["library"], found.facts["mpiexec"]
    own, other = family(library or ""), family(name or mpiexec or "")
    match = own == other if own and other else None
    found.facts.update(launcher=name, launched=size, match=match, mismatch=None, threads=None)
    if match is False:
        what = f"{name} started {size} ranks, but mpi4py uses {library}" if name else \
            f"the mpiexec that comes first is {mpiexec}, but mpi4py uses {library}: each rank would be alone"
        found.facts["mismatch"] = f"{what}; launch with {own}'s own mpiexec"
    return found


def family(text: str) -> str | None:
    """Return whose a library or a launcher is, after what it says of its version; None for an unknown one.

    >>> family("HYDRA build details:"), family("Open MPI v5.0.11"), family("slurm 24.05")
    ('MPICH', 'Open MPI', None)
    """
    return next((name for name, marks in FAMILIES if any(mark in text for mark in marks)), None)


def launcher(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return who launched this process, and how many ranks; None for nobody.

    >>> launcher({"PMI_SIZE": "4", "PMI_RANK": "0"})
    ("MPICH's mpiexec", 4)
    """
    for size, rank, name in LAUNCHERS:
        if environment.get(size, "").isdigit() and environment.get(rank, "").isdigit():
            # srun --mpi=pmi2 speaks like MPICH's mpiexec, which also numbers the ranks of a node.
            slurm = size == "PMI_SIZE" and "SLURM_PROCID" in environment and "MPI_LOCALNRANKS" not in environment
            return "Slurm's srun" if slurm else name, int(environment[size])
    return None


def short(library: str) -> str:
    """Return name and version of an MPI library: not who built it, where and with which options.

    >>> short("Open MPI v5.0.11, package: Open MPI somebody@host"), short("MPICH Version:      5.0.2\\nMPICH configure:")
    ('Open MPI 5.0.11', 'MPICH 5.0.2')
    """
    line = library.strip("\0").strip().partition("\n")[0].partition(",")[0]
    return " ".join(re.sub(r"\bversion\b\s*:?|\bv(?=\d)", " ", line, flags=re.IGNORECASE).split())


def _mpiexec() -> str:
    """Return whose the mpiexec is that a job would be launched with, and its version."""
    path = find_mpiexec()
    if path is None:
        raise LookupError("no mpiexec beside this Python or on the PATH; pip install 'gpucoll[mpich]'")
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    number = re.search(r"\d+(\.\d+)+", text)
    return f"{family(text) or 'unknown'}'s, {number.group() if number else 'of unknown version'}"


def mpi_module() -> Any:
    """Return mpi4py's MPI, not started where this is its first import: a library under another's launcher may die."""
    if "mpi4py.MPI" not in sys.modules:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    return MPI


def start_mpi(found: Findings) -> None:
    """MPI is started, and `found` has what threads may do."""
    mpi = mpi_module()
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    levels = {mpi.THREAD_SINGLE: "single", mpi.THREAD_FUNNELED: "funneled", mpi.THREAD_SERIALIZED: "serialized"}
    found.facts["threads"] = levels.get(mpi.Query_thread(), "multiple")


# ---------------------------------------------------------------- this host and its GPUs

READ, BY_NVLINK = 0, 2  # NVML's; pynvml's own NVML_P2P_CAPS_INDEX_READ is, by a comma too many, a tuple


def host() -> Findings:
    """Find this host's shared memory in bytes, the compiler of its engine, and the GPUs by NVML."""
    found = look(shm=_shared_memory, compiler=_compiler, gpus=_gpus)
    found.facts.update(found.facts["gpus"] or {"p2p": None})
    return found


def _shared_memory() -> dict[str, int]:
    found = os.statvfs("/dev/shm")
    return {"size": found.f_frsize * found.f_blocks, "free": found.f_frsize * found.f_bavail}


def _compiler() -> str:
    """Return the compiler once it has made what short calls on the host need; raise what says why it cannot."""
    from gpucoll.device import gxx
    from gpucoll.executors.shared.slots import built

    built()
    return gxx.recipe().splitlines()[0]


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield pynvml with its library started."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> dict[str, Any]:
    """Return `gpus`, in NVML's order, and `p2p`: by what each of them reads each other's memory."""
    with nvml() as library:
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        return {"gpus": [{"index": index, **_gpu(library, handle).facts} for index, handle in enumerate(handles)],
                "p2p": [[_way(library, one, two) for two in handles] for one in handles]}


def _gpu(library: Any, handle: Any) -> Findings:
    return look(name=lambda: str(library.nvmlDeviceGetName(handle)),
                pci=lambda: str(library.nvmlDeviceGetPciInfo(handle).busId),
                memory_bytes=lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total),
                memory_free_bytes=lambda: int(library.nvmlDeviceGetMemoryInfo(handle).free),
                nvlinks=lambda: _nvlinks(library, handle))


def _nvlinks(library: Any, handle: Any) -> dict[str, int]:
    """Return how many NVLinks are up and how many down; a GPU has fewer than NVML has numbers for, or none."""
    states = []
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(library.NVMLError_InvalidArgument, library.NVMLError_NotSupported):
            states.append(bool(library.nvmlDeviceGetNvLinkState(handle, link)))
    return {"up": sum(states), "down": len(states) - sum(states)}


def _way(library: Any, one: Any, two: Any) -> str:
    if one is two:
        return "self"
    try:
        ways = [name for name, index in (("NVLink", BY_NVLINK), ("PCI", READ))
                if library.nvmlDeviceGetP2PStatus(one, two, index) == 0]
    except library.NVMLError:
        return "unknown"
    return ways[0] if ways else "none"
