"""gpucoll: collective communication for NumPy and CuPy programs, with MPI or without.

Each package below is a room. A room imports only from rooms below its own line.

    cli           the verbs of the command, imported when used; the launcher `gpucoll run`
    doctor        checks of a machine and of a job
    calibration   measured times of algorithms, for the tuner
    precheck      the calls of a program, matched before a run
    emulation     GPUs on the host: what `import cupy` finds where there is no GPU
    distributed   the interface of torch.distributed
    dask          ranks on the workers of a Dask cluster
    ray           a backend of Ray's collective groups
    training      data parallel, ZeRO, parameter servers, compression, arrays over a mesh of ranks
    mpi           the interface of mpi4py
    torch         a backend of torch.distributed
    lab           graphs of links and algorithms made for them; drawings, proofs and predictions by command
    block_scaled  collectives in 8 or 4 bits per element, with an error bound
    internal      the one door for rooms above the core: what they use beside public names
    communicator  one method per collective; the links between its ranks
    call          the way of a call: prepared, compiled, kept for repetition
    tuner         the choice of the algorithm
    simulator     predicted times of schedules, for any number of ranks
    launch        how ranks find each other, at the start and after a failure
    health        detection of dead and disagreeing ranks; evidence after a crash
    executors     ways to run a schedule: engine, MPI, NCCL, kernels; MPI's and NCCL's own collectives
    device        a GPU, or its emulation on the CPU: kernels compiled and launched, streams, NCCL
    plan          a schedule on buffers of given lengths: the order of its steps
    arrays        accepted arrays, flat views, ops written by the user
    msccl         algorithms from Python files; MSCCL's XML, read and written
    algorithms    ring, tree, star, ...: one file each
    verify        proofs of schedules
    core          the vocabulary: schedules, chunks, ops, dtypes, collectives, signatures
    transport     messages between processes, and the key-value store of ranks without MPI
    progress      running operations, and the one loop that waits for them
    errors        typed errors
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gpucoll.algorithms import algorithm, algorithms, schedule
from gpucoll.communicator import Communicator, Transport, init, init_local, join, run_local
from gpucoll.communicator.points import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
from gpucoll.core.ops import ReduceOp, elementwise_op, premul_sum
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Send, Slice
from gpucoll.errors import (
    ArgumentError,
    BackendError,
    ClosedError,
    CollectiveTimeout,
    DtypeError,
    GpucollError,
    MismatchError,
    PeerError,
    RankFailedError,
    RevokedError,
    UsageError,
)
from gpucoll.health.termination import on_terminate
from gpucoll.progress.operations import Work
from gpucoll.version import __version__ as __version__

if TYPE_CHECKING:
    from gpucoll.lab.notebook import draw
    from gpucoll.msccl.files import load
    from gpucoll.precheck import precheck

__all__ = [
    "ANY_SOURCE", "ANY_TAG", "PROC_NULL", "ArgumentError", "BackendError", "ClosedError",
    "CollectiveTimeout", "Communicator", "Copy", "DtypeError", "GpucollError", "MismatchError", "PeerError",
    "RankFailedError", "Recv", "RecvReduce", "Reduce", "ReduceOp", "RevokedError", "Send", "Slice", "Status",
    "Transport", "UsageError", "Work", "algorithm", "algorithms", "draw", "elementwise_op", "init",
    "init_local", "join", "load", "on_terminate", "precheck", "premul_sum", "run_local", "schedule",
]

# What few programs use is imported at the first use: functions by their module, and rooms. The room
# `precheck` is callable, as the function of that name.
_LATER = {"draw": "gpucoll.lab.notebook", "load": "gpucoll.msccl.files"}
_ROOMS = ("block_scaled", "dask", "distributed", "mpi", "precheck", "ray", "torch", "training")


def __getattr__(name: str) -> Any:
    if name in _LATER:
        globals()[name] = value = getattr(importlib.import_module(_LATER[name]), name)
        return value
    if name in _ROOMS:
        return importlib.import_module(f"gpucoll.{name}")
    raise AttributeError(f"module 'gpucoll' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
