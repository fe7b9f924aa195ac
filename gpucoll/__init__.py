"""gpucoll: collective communication for NumPy and CuPy programs, with MPI or without.

    cli                         the command's verbs, imported when used
    doctor                      is this machine, and this job, fit for collectives
    distributed, launch         torch.distributed's names for it all; `gpucoll run`
    mpi                         mpi4py's names
    torch                       a backend of torch.distributed
    training                    data parallel, ZeRO, parameter servers, compression, arrays over a mesh of ranks
    communicator                one method per collective
    links, mail                 what joins ranks: MPI or a store between processes, memory between threads
    bootstrap, tuner            who am I; which algorithm
    executors                   run a schedule: MPI messages, NCCL and our kernels; MPI's and NCCL's own collectives
    device                      a GPU, or what stands for it: kernels compiled and launched, streams, NCCL
    arrays, waits               what is accepted, flat views, NumPy's reductions; deadlines and progress
    analysis                    a schedule proved, predicted and drawn: verify, simulate, draw
    loading, msccl              algorithms from files: users' Python, MSCCL's XML, which is written too
    algorithms                  ring, tree, star, ...: one file each; users' own
    proved, proof               a user's schedule, proved before its first use; all ranks run together and proved
    plan                        a schedule on buffers of given lengths: what waits for what
    collectives, topology       what each collective promises; shapes of rings and trees
    schedule, chunks, ops, dtypes     the vocabulary
    errors, arguments, parsing  typed errors; command lines under mpiexec; CPython's parser, one thread at a time
    store                       connections to rank 0, and the store by which ranks meet without MPI
    launchers, rendezvous       who started this process, whose MPI; waiting for all ranks, rank 0 for all
    watchdog                    the deadline of MPI's start
"""

from gpucoll.algorithms import algorithm, algorithms, schedule
from gpucoll.analysis.notebook import draw
from gpucoll.communicator import Cartesian, Communicator, init, init_local, run_local
from gpucoll.communicator.cartesian import dims_create
from gpucoll.communicator.messages import ANY_SOURCE, ANY_TAG, PROC_NULL, Status
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
from gpucoll.guard.termination import on_terminate
from gpucoll.loading import load
from gpucoll.ops import ReduceOp, elementwise_op, premul_sum
from gpucoll.schedule import Copy, Recv, RecvReduce, Reduce, Send, Slice
from gpucoll.version import __version__ as __version__
from gpucoll.work import Work

__all__ = [
    "ANY_SOURCE", "ANY_TAG", "PROC_NULL", "ArgumentError", "BackendError", "Cartesian", "ClosedError",
    "CollectiveTimeout", "Communicator", "Copy", "DtypeError", "GpucollError", "MismatchError", "PeerError",
    "RankFailedError", "Recv", "RecvReduce", "Reduce", "ReduceOp", "RevokedError", "Send", "Slice", "Status",
    "UsageError", "Work", "algorithm", "algorithms", "dims_create", "draw", "elementwise_op", "init", "init_local",
    "load", "on_terminate", "premul_sum", "run_local", "schedule",
]
