"""gpucoll: collective communication for NumPy and CuPy programs under MPI.

    communicator                one method per collective
    links                       what joins ranks: MPI between processes, memory between threads
    bootstrap, tuner            who am I; which algorithm
    executors                   run a schedule: MPI messages, NCCL and our kernels; MPI's and NCCL's own collectives
    device                      a GPU, or what stands for it: kernels compiled and launched, streams, NCCL
    arrays, waits               what is accepted, flat views, NumPy's reductions; deadlines and progress
    analysis                    prove a schedule
    algorithms                  ring, tree, star, ...: one file each
    collectives, topology       what each collective promises; shapes of rings and trees
    schedule, chunks, ops, dtypes, errors     the vocabulary
"""

from gpucoll.algorithms import algorithms, schedule
from gpucoll.communicator import Communicator, init, init_local
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
from gpucoll.ops import ReduceOp, elementwise_op, premul_sum
from gpucoll.waits import Work

__version__ = "0.1.0"
__all__ = [
    "ArgumentError", "BackendError", "ClosedError", "CollectiveTimeout", "Communicator", "DtypeError", "GpucollError",
    "MismatchError", "PeerError", "RankFailedError", "ReduceOp", "RevokedError", "UsageError", "Work", "algorithms",
    "elementwise_op", "init", "init_local", "premul_sum", "schedule",
]
