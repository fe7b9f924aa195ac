"""What ranks are told if one rank fails, hangs, dies or stays away while the others wait for it in a meeting for GPUs.

    python -m gpu.meetings NAME...

Rank 1 is the rank at fault. Every rank prints, for each of the programs, a line of JSON: what the rank was told, and
after how many seconds. Runs on emulated GPUs, by MPI, or without at the address in STORE.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from unittest.mock import patch

import cupy
import numpy
from cupy.cuda import nccl
from mpi4py import MPI  # the emulated NCCL needs MPI, also where the ranks are joined by a store

import gpucoll as gc
from gpucoll.device import gpus

SICK = "Cuda failure 401 'the operation cannot be performed in the present state'"
BOUND = "Failed to bind NVLink SHARP (NVLS) Multicast memory : CUDA error 401.\nDisable NVLS (NCCL_NVLS_ENABLE=0)"
EXCHANGE = "cuMemImportFromShareableHandle failed"
TIMEOUT = 20.0  # seconds, of all programs but `hung`


def told(comm, make):
    """Return what `make(comm)` raises, and after how many seconds."""
    began, error = time.monotonic(), None
    try:
        make(comm)
    except Exception as found:
        error = found
    return {"rank": comm.rank, "error": type(error).__name__, "ranks": list(getattr(error, "ranks", ())),
            "text": str(error), "seconds": time.monotonic() - began, "revoked": comm._core.waits.failure is not None}


def first(comm):
    comm.all_reduce(cupy.ones(10, "float32"), algorithm="native")


def failing(owner, name, error, *, says=""):
    """Replace a function by one that fails; NCCL's text of the error is `says`."""
    def function(*arguments, **options):
        nccl._last_error = says
        raise error

    return patch.object(owner, name, function)


def at_fault(make, *, before=lambda comm: None, good=first):
    """Return a program: `make(comm)` on rank 1, `good(comm)` on the others."""
    return lambda comm: (before(comm), make(comm) if comm.rank == 1 else good(comm))


def init_fails(says="", call=first):
    def make(comm):
        with failing(nccl.NcclCommunicator, "__init__", nccl.NcclError(1), says=says):
            call(comm)

    return make


def gpu_fails(comm):
    with failing(gpus, "describe_gpu", cupy.cuda.runtime.CUDARuntimeError(802)):
        first(comm)


def split_fails(comm):
    with failing(nccl.NcclCommunicator, "commSplit", nccl.NcclError(1)):
        comm.split(0)


def window(comm):
    comm.empty(10, "float32", device="cuda")


def window_fails(comm):
    from gpucoll.device import nccl as binding

    with failing(binding._library(), "ncclCommWindowRegister", nccl.NcclError(1)):
        window(comm)


def call_fails(comm):
    with failing(nccl.NcclCommunicator, "_collective", nccl.NcclError(1), says="out of memory"):
        first(comm)


def handshake_fails(comm):
    from gpucoll.executors.peer import memory

    with failing(memory, "_memory", RuntimeError("a fault of this rank alone")):
        first(comm)


def dies(comm):
    def end(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with patch.object(nccl.NcclCommunicator, "__init__", end):
        first(comm)


def hung(comm):
    """Rank 1 comes to NCCL's init after the deadline of the others: what is made then is aborted on every rank."""
    real = nccl.NcclCommunicator.__init__

    def late(*arguments):
        time.sleep(6)
        real(*arguments)

    with patch.object(nccl.NcclCommunicator, "__init__", late) if comm.rank == 1 else contextlib.nullcontext():
        first(comm)


def all_aborted():
    """Return whether every communicator of NCCL is aborted by now, or soon."""
    give_up = time.monotonic() + TIMEOUT
    while time.monotonic() < give_up:
        made = list(nccl._communicators.values())
        if made and all(one.comm == 0 for one in made):
            return True
        time.sleep(0.01)
    return False


PROGRAMS = {
    "init": at_fault(init_fails()), "multicast": at_fault(init_fails(SICK)), "bound": at_fault(init_fails(BOUND)),
    "exchange": at_fault(init_fails(EXCHANGE)),
    "points": at_fault(init_fails(call=lambda comm: comm.send(cupy.ones(10), 0)), before=first,
                       good=lambda comm: comm.recv(cupy.empty(10), 1)),
    "gpu": at_fault(gpu_fails), "handshake": at_fault(handshake_fails),
    "split": at_fault(split_fails, before=first, good=lambda comm: comm.split(0)),
    "window": at_fault(window_fails, before=first, good=window),
    "host": at_fault(lambda comm: comm.all_reduce(numpy.ones(10))),
    "host_barrier": at_fault(lambda comm: comm.barrier()),
    "empty": at_fault(window), "host_split": at_fault(lambda comm: comm.split(0)),
    "call": at_fault(call_fails, before=lambda comm: [first(comm) for _ in range(5)], good=lambda comm: (
        first(comm), comm.barrier())),
    "close": at_fault(lambda comm: comm.close()),
    "later_close": at_fault(lambda comm: comm.close(), before=first, good=lambda comm: (
        first(comm), comm.barrier())),
    "dies": at_fault(dies), "hung": hung}
NEEDS = {"split": {"nccl": {"split_share": 1}}, "window": {"nccl": {"windows": 1}}, "handshake": {"executor": "peer"}}


def end_together(folder, comm):
    """Return once the other survivors have printed their lines: MPICH may end all ranks as soon as one rank ends."""
    (folder / str(comm.rank)).touch()
    late = time.monotonic() + TIMEOUT
    while len([*folder.iterdir()]) < comm.size - 1 and time.monotonic() < late:
        time.sleep(0.01)


def main(names):
    for name in names:
        options = {"timeout": 3 if name == "hung" else TIMEOUT, **NEEDS.get(name, {})}
        comm = gc.Communicator.from_mpi(MPI.COMM_WORLD, **options) if "STORE" not in os.environ else \
            gc.init(store=os.environ["STORE"], **options)
        cupy.cuda.Device(comm.device).use()
        found = told(comm, PROGRAMS[name])
        if name == "hung":
            found["aborted"] = all_aborted()
        sys.stdout.write(json.dumps({"program": name, **found}) + "\n")
        sys.stdout.flush()
        with contextlib.suppress(gc.GpucollError):
            comm.close()
        if "dies" in names:
            end_together(Path(os.environ["SURVIVORS"]), comm)
        else:
            MPI.COMM_WORLD.Barrier()


if __name__ == "__main__":
    main(sys.argv[1:])
    # Threads of the emulated NCCL still wait for ranks that never came, inside MPI: leave without MPI's end.
    os._exit(0)
