"""A stand-in for CuPy: as much of it as gpucoll uses, and as strict, on the CPU.

    STAND_IN_GPUS   how many GPUs this process sees (1); 0 is a host without any
    STAND_IN_BUS    the PCI bus of the first one (10)
    STAND_IN_SEED   in which order streams go on where no event says it
    GPUCOLL_STAND_IN, STAND_IN_NCCL, STAND_IN_CAPABILITY, STAND_IN_PROCESSORS   see hostile.py

The "cubins" that it loads are shared objects: importing it makes our compiler of GPU code g++.
"""

from gpucoll.device import driver, gxx, nvrtc

from . import _capture, _machine, cuda
from ._array import (
    abs,
    add,
    arange,
    argpartition,
    array,
    asarray,
    ascontiguousarray,
    asfortranarray,
    asnumpy,
    clip,
    concatenate,
    copyto,
    empty,
    empty_like,
    exp,
    from_dlpack,
    full,
    isfinite,
    log,
    ndarray,
    ones,
    rint,
    split,
    sqrt,
    stack,
    tanh,
    where,
    zeros,
    zeros_like,
)
from ._raw import RawKernel, RawModule

__version__ = _machine.VERSION
__all__ = ["RawKernel", "RawModule", "abs", "add", "arange", "argpartition", "array", "asarray", "ascontiguousarray",
           "asfortranarray", "asnumpy", "clip", "concatenate", "copyto", "cuda", "empty", "empty_like", "exp",
           "from_dlpack", "full", "isfinite", "log", "ndarray", "ones", "rint", "split", "sqrt", "stack", "tanh",
           "where", "zeros", "zeros_like"]

driver.exchange_capture_mode = _capture.exchange
nvrtc.compile_cubin = lambda source, arch, major=None: (gxx.compile_shared(source), "")
nvrtc.recipe = lambda arch, major=None: f"stand-in\n{gxx.recipe()}"  # the same for every arch
