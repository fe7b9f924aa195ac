"""A job whose rank 1 dies, stops or raises in place of a call: `python guard_job.py FOLDER HOW EXECUTOR`.

Every rank writes the outcome of the last call to FOLDER/RANK, as JSON: the seconds of the call, the seconds of
`comm.close()`, the name of the error, the culprits, the message.
"""

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy
from mpi4py import MPI

import gpucoll as gc
from gpucoll import training
from gpucoll.communicator import links
from gpucoll.health import processes
from gpucoll.launch import bootstrap

TIMEOUT = 3.0
PHASES = ("before", "after_send", "after")  # the phases of a call at which GPUCOLL_FAULT can act
# Asked before the fault: the first question makes and deletes a file, which a rank killed in between would leave behind
TEMPORARY = tempfile.gettempdir()


def end(number):
    os.kill(os.getpid(), number)


def fails(how):
    raise KeyError(how)


def goes(how, comm, folder):
    """Let rank 1 fail in place of the call, in the way named `how`."""
    match how:
        case "kill":
            end(signal.SIGKILL)
        case "stop":
            end(signal.SIGSTOP)
        case "late":  # stopped until rank 0 has reached the deadline and sends SIGCONT
            Path(folder, "process").write_text(str(os.getpid()))
            end(signal.SIGSTOP)
        case "idle":
            signal.pause()
        case "interrupt":
            threading.Timer(0.3, end, [signal.SIGINT]).start()
            comm.recv(numpy.zeros(1), 0)
        case "segv":
            end(signal.SIGSEGV)
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
            numpy.ones(1 << 24)
        case "exit":
            sys.exit(0)
        case "leave":
            os._exit(0)
        case "long":  # exits in the middle of one of many long calls
            threading.Timer(0.3, os._exit, [0]).start()
        case "with":
            with contextlib.suppress(KeyError), comm:
                raise KeyError(how)
            signal.pause()
        case "raise":
            fails(how)
        case "gradient":  # fails between two collectives, as an optimizer could
            trainer = training.DataParallel({"w": numpy.zeros(9)}, comm)
            trainer.ready("w", numpy.ones(9))
            fails(how)
        case "term":
            gc.on_terminate(lambda: Path(folder, "saved").write_text("[]"))
            end(signal.SIGTERM)
            signal.pause()
        case "thread":
            threading.Thread(target=fails, args=[how]).start()
            signal.pause()


def named_memory():
    """Return the paths of the named shared-memory files mapped by this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    shared = {line.split(maxsplit=5)[-1] for line in lines if line.split()[1].endswith("s")}
    return sorted(name for name in shared if name.startswith(("/dev/shm", "/tmp", TEMPORARY)))


def pretend_two_hosts():
    """Place the ranks on two pretended hosts in turn, unable to see each other's processes."""
    of, mine = bootstrap.place, bootstrap.world().rank % 2
    bootstrap.place = lambda comm: of(comm)._replace(nodes=tuple(rank % 2 for rank in range(comm.size)))
    links.process_namespace = processes.process_namespace = lambda: f"host {mine}"


def call(how, comm, x):
    if how == "gradient":
        trainer = training.DataParallel({"w": numpy.zeros(9)}, comm)
        trainer.ready("w", numpy.ones(9))
        trainer.finish()
    while how == "long":
        comm.all_reduce(numpy.ones(2_000_000), algorithm="ring")
    assert (comm.all_reduce(x) == comm.size * x).all()


def main():
    folder, how, executor = sys.argv[1:]
    if "TWO_HOSTS" in os.environ:
        pretend_two_hosts()
    MPI.COMM_WORLD.Barrier()  # no deadline: on a busy machine ranks start many seconds apart
    comm = gc.init(timeout=TIMEOUT, executor=None if executor == "auto" else executor)
    x, error = numpy.ones(100), None
    mapped = comm.zeros(100_000, "f4")
    try:
        for array in (x, x, x, mapped):
            began = time.monotonic()
            comm.all_reduce(array)
        if comm.rank == 1:
            goes(how, comm, folder)
        began = time.monotonic()
        call(how, comm, x)
    except gc.GpucollError as raised:
        error = raised
    lasted = time.monotonic() - began
    comm.close()
    more = [error.ranks, str(error)] if error else [(), ""]
    found = [lasted, time.monotonic() - began - lasted, type(error).__name__, *more]
    Path(folder, f"{comm.rank}.memory").write_text(json.dumps(named_memory()))
    draft = Path(folder, f"{comm.rank}.draft")
    draft.write_text(json.dumps(found))
    draft.rename(Path(folder, str(comm.rank)))  # atomic: the launcher may end this rank at any time
    deadline = time.monotonic() + 3 * TIMEOUT
    if how == "late" and comm.rank == 0:
        os.kill(int(Path(folder, "process").read_text()), signal.SIGCONT)
    alive = comm.size - (how != "late")
    while len([path for path in Path(folder).iterdir() if path.name.isdecimal()]) < alive \
            and time.monotonic() < deadline:
        time.sleep(0.01)  # MPI's launcher ends all ranks as soon as one rank leaves by `os._exit`
    os._exit(0)


if __name__ == "__main__":
    main()
