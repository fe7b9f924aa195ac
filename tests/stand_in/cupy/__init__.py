"""A stand-in for CuPy on the CPU: the parts used by gpucoll, as strict as the real package.

The modules imitate CuPy 14.2, CUDA's runtime and driver, and NCCL. Device memory is host memory, streams are queues,
NCCL's messages travel by MPI. A misuse raises the error of CUDA or NCCL, with the real number.

    STAND_IN_GPUS   number of GPUs seen by this process (1); 0 is a host without GPUs
    STAND_IN_BUS    PCI bus of the first GPU (10)
    STAND_IN_SEED   seed of the order of progress among streams, where events leave the order open
    STAND_IN_FOLDER a folder for the messages of NCCL, in place of MPI
    GPUCOLL_STAND_IN, STAND_IN_NCCL, STAND_IN_CAPABILITY, STAND_IN_PROCESSORS   see hostile.py

The "cubins" are shared objects for the CPU: importing the stand-in makes gpucoll compile GPU code by g++.
"""

from gpucoll.device import driver, gxx, nvlink, nvrtc

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
nvlink.joined = lambda numbers: True  # no NVML here; all GPUs of the stand-in are joined
nvrtc.compile_cubin = lambda source, arch, major=None: (gxx.compile_shared(source), "")
nvrtc.recipe = lambda arch, major=None: f"stand-in\n{gxx.recipe()}"  # equal for every arch
