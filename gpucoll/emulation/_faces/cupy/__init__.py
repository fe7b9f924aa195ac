"""CuPy on emulated GPUs, as strict as the real package.

The modules imitate CuPy 14.2, CUDA's runtime and driver, and NCCL. Device memory is host memory, streams are queues,
NCCL's messages travel by MPI or as files. A misuse raises the error of CUDA or NCCL, with the real number.

    EMULATED_GPUS   number of GPUs seen by this process (1); 0 is a host without GPUs; formerly STAND_IN_GPUS
    EMULATED_BUS    PCI bus of the first GPU, of all ranks of a program (a number of their launcher's process)
    EMULATED_SEED   seed of the order of progress among streams, where events leave the order open
    EMULATED_RULES, EMULATED_NCCL, EMULATED_CAPABILITY, EMULATED_PROCESSORS   see hostile.py

The "cubins" are shared objects for the CPU: importing this package makes gpucoll compile GPU code by g++.
"""

import functools
import importlib
import os
import sys
import types

import numpy

from gpucoll.device import gpus, nvrtc, store

from . import _capture, _creation, _generic, _machine, cuda, fft, linalg, random, testing
from ._array import ndarray
from ._kernels import ElementwiseKernel, ReductionKernel, fuse
from ._memory import get_default_memory_pool, get_default_pinned_memory_pool
from ._raw import RawKernel, RawModule

__version__ = _machine.VERSION
globals().update({name: one for name, one in vars(_creation).items()
                  if getattr(one, "__module__", None) == _creation.__name__})
fromDlpack, is_available = _creation.from_dlpack, cuda.is_available


def __getattr__(name):
    """Return a function, dtype or constant of NumPy under its name: see `_generic`."""
    return _generic.found_in(numpy, name)


def get_array_module(*args):
    """Return this module if an argument is an array of the GPU, else NumPy."""
    return sys.modules[__name__] if any(isinstance(one, _creation.ndarray) for one in args) else numpy


def show_config(*, _full=False):
    print(f"CuPy {__version__}, emulated by gpucoll on the host")


def numpy_device(ordinal):
    """Return a GPU as gpucoll's device for NumPy arrays."""
    from . import _numpy_device

    if __name__ != "cupy":
        from ..cuda.bindings import driver

        gpus.use({"driver": driver})
        # The number of the GPU is unlike those of the other ranks. Its work is done where the host waits for it.
        _machine.MACHINE.bus, _machine.MACHINE.has_thread = os.getpid(), False
    return _numpy_device.EmulatedDevice(ordinal)


def memoize(for_each_device=False):
    return functools.cache


_before = [(gpus, "joined", gpus.joined), (nvrtc, "compile_cubin", nvrtc.compile_cubin),
           (nvrtc, "recipe", nvrtc.recipe), (gpus, "_given", gpus._given)]
gpus._given = dict(gpus._given)


def leave():
    """Let gpucoll's device code work on real GPUs again."""
    for owner, name, value in _before:
        setattr(owner, name, value)


gpus.use({"cupy": sys.modules[__name__],
              "libcuda.so.1": types.SimpleNamespace(cuThreadExchangeStreamCaptureMode=_capture.exchanged)})
if __name__ == "cupy":  # a program's CuPy, and not only the machine of its NumPy arrays
    gpus.joined = lambda numbers: True  # no NVML here; all GPUs of the machine are joined
    nvrtc.compile_cubin = lambda source, arch, major=None: (store.compile_shared(source), "")
    nvrtc.recipe = lambda arch, major=None: f"emulated\n{store.recipe()}"  # equal for every arch
