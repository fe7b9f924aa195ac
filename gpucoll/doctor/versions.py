"""Versions of the packages and libraries that gpucoll uses, each with the reason where it is missing."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import platform
from typing import Any

import gpucoll
from gpucoll.doctor import gpus
from gpucoll.doctor.findings import Findings

# Keys of the report, and how people call them.
NAMES = {"gpucoll": "gpucoll", "python": "Python", "numpy": "NumPy", "mpi4py": "mpi4py", "ml_dtypes": "ml_dtypes",
         "cupy": "CuPy", "nccl": "NCCL", "nccl_build": "NCCL that CuPy was built for", "nvrtc": "NVRTC",
         "cuda_runtime": "CUDA runtime", "cuda_driver": "CUDA of the driver", "nvidia_driver": "NVIDIA driver",
         "nvidia_ml_py": "nvidia-ml-py (pynvml)"}


def versions() -> Findings:
    """Return the versions by name, as text."""
    found = Findings()
    found.look("gpucoll", lambda: gpucoll.__version__)
    found.look("python", platform.python_version)
    for package in ("numpy", "mpi4py", "ml_dtypes", "cupy"):
        found.look(package, functools.partial(_package, package))
    found.look("nccl", lambda: nccl_text(_nccl().get_version()))
    found.look("nccl_build", lambda: nccl_text(_nccl().get_build_version()))
    found.look("nvrtc", _nvrtc)
    found.look("cuda_runtime", lambda: cuda_text(_cuda_runtime()))
    found.look("cuda_driver", lambda: cuda_text(_cuda_driver()))
    found.look("nvidia_driver", _nvidia_driver)
    found.look("nvidia_ml_py", _pynvml)
    return found


def _package(name: str) -> str:
    return str(importlib.import_module(name).__version__)


def nccl_text(number: int) -> str:
    """Return NCCL's version as people write it; two digits for each part from 2.9 on.

    >>> nccl_text(23203), nccl_text(2804)
    ('2.32.3', '2.8.4')
    """
    major = 10000 if number >= 10000 else 1000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def cuda_text(number: int) -> str:
    """Return CUDA's version as people write it.

    >>> cuda_text(12090)
    '12.9'
    """
    return f"{number // 1000}.{number % 1000 // 10}"


def _nccl() -> Any:
    from cupy.cuda import nccl

    if not getattr(nccl, "available", True):
        raise LookupError("CuPy finds no libnccl; pip install nvidia-nccl-cu13 or nvidia-nccl-cu12, after CuPy's CUDA")
    return nccl


def _nvrtc() -> str:
    from gpucoll.device import nvrtc

    return ".".join(map(str, nvrtc.version()))


def _cuda_runtime() -> int:
    import cupy

    local = getattr(cupy.cuda, "get_local_runtime_version", cupy.cuda.runtime.runtimeGetVersion)
    return int(local())


def _cuda_driver() -> int:
    try:
        with gpus.nvml() as library:
            return int(library.nvmlSystemGetCudaDriverVersion())
    except Exception as first:
        number = _cupys_driver(first)
    if number == 0:
        raise LookupError("no NVIDIA driver is loaded")
    return number


def _cupys_driver(first: Exception) -> int:
    """Return what CuPy says where NVML says nothing; where there is no CuPy either, it is NVML that was missed."""
    try:
        import cupy
    except ImportError:
        raise first from None
    return int(cupy.cuda.runtime.driverGetVersion())


def _nvidia_driver() -> str:
    with gpus.nvml() as library:
        return gpus.text(library.nvmlSystemGetDriverVersion())


def _pynvml() -> str:
    import pynvml

    try:
        return importlib.metadata.version("nvidia-ml-py")
    except importlib.metadata.PackageNotFoundError:
        return str(getattr(pynvml, "__version__", "of unknown version"))
