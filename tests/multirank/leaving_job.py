"""A job in which one rank leaves early: `python leaving_job.py FOLDER PLACE LEAVER`.

The leaver makes fewer calls than the others, and leaves the communicator in the way named by PLACE, one of PLACES. Each
rank writes to FOLDER/RANK, as JSON: the name of its error, the ranks named, the message, the seconds of the last call.
The line of this file at which the leaver leaves ends with `# leaves`.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import numpy

import gpucoll as gc
import gpucoll.distributed as dist

TIMEOUT = 60.0  # seconds: the deadline, far above the time to be told
LONG = 1 << 19  # elements of a message that does not fit any buffer


def grouped(comm, leaver):
    with comm.group():
        total = comm.all_reduce(numpy.ones(4), async_op=True)
        comm.barrier()
    return total


def messages_between_others(comm, leaver):
    """Exchange a message with each other rank but the leaver, then close: right, although the leaver waits in close."""
    others = [rank for rank in range(comm.size) if rank != leaver]
    mine, out = others.index(comm.rank), numpy.zeros(3)
    after, before = others[(mine + 1) % len(others)], others[mine - 1]
    for number in range(20):
        comm.sendrecv(numpy.full(3, comm.rank + number, float), out, after, before)
        assert (out == before + number).all()
    time.sleep(0.5)  # the leaver has waited in close for several looks
    comm.close()


# By name: how many calls come first, how the leaver leaves, what the others do instead.
PLACES = {
    "first call": (0, "with", lambda comm, leaver: comm.all_reduce(numpy.ones(4))),
    "middle": (3, "with", lambda comm, leaver: comm.all_reduce(numpy.ones(4))),
    "eager": (9, "with", lambda comm, leaver: comm.broadcast(numpy.ones(4), root=leaver)),
    "barrier": (3, "close", lambda comm, leaver: comm.barrier()),
    "gather": (3, "close", lambda comm, leaver: comm.gather(numpy.ones(4), root=(leaver + 1) % comm.size)),
    "scatter": (3, "close", lambda comm, leaver: comm.scatter(None, numpy.ones(4), root=leaver)),
    "long": (3, "close", lambda comm, leaver: comm.all_reduce(numpy.ones(LONG), algorithm="ring")),
    "recv": (3, "close", lambda comm, leaver: comm.recv(numpy.ones(4), leaver)),
    "send": (3, "close", lambda comm, leaver: comm.send(numpy.ones(LONG), leaver)),
    "sendrecv": (3, "close", lambda comm, leaver: comm.sendrecv(numpy.ones(LONG), numpy.ones(LONG), leaver, leaver)),
    "any source": (3, "all close", lambda comm, leaver: comm.recv(numpy.ones(4))),
    "group": (3, "with", grouped),
    "split": (3, "with", lambda comm, leaver: comm.split(comm.rank % 2)),
    "lengths": (3, "close", lambda comm, leaver: comm.all_gather_v(numpy.ones(comm.rank + 1))),
    "asynchronous": (3, "close", lambda comm, leaver: comm.all_reduce(numpy.ones(LONG), async_op=True).wait()),
    "empty": (3, "close", lambda comm, leaver: comm.empty(8, "f8")),
    "zeros": (3, "close", lambda comm, leaver: comm.zeros(8, "f8")),
    "objects": (3, "close", lambda comm, leaver: comm.all_gather_object("a")),
    "exception": (3, "raise", lambda comm, leaver: comm.all_reduce(numpy.ones(4))),
    "finally": (3, "finally", lambda comm, leaver: comm.all_reduce(numpy.ones(4))),
    "sys.exit": (3, "exit", lambda comm, leaver: comm.all_reduce(numpy.ones(4))),
    "end": (3, "end", lambda comm, leaver: comm.all_reduce(numpy.ones(4))),
    "destroy": (3, "destroy", lambda comm, leaver: dist.all_reduce(numpy.ones(4))),
    "computing": (3, "with", lambda comm, leaver: time.sleep(1.0)),
    "messages": (3, "with", messages_between_others),
}
RIGHT = {"computing", "messages"}  # places with a right program: no rank may be blamed


def leave(how, comm):
    """Leave the communicator; "with" and "end" leave by the return of this function."""
    match how:
        case "close" | "all close":
            comm.close()  # leaves
        case "raise":
            with comm:
                raise KeyError("no more batches")  # leaves
        case "finally":
            try:
                raise KeyError("no more batches")
            finally:
                comm.close()  # leaves
        case "exit":
            with comm:
                sys.exit(3)  # leaves
        case "destroy":
            dist.destroy_process_group()  # leaves
        case "with":
            with comm:  # leaves
                pass


def play(comm, place, leaver):
    """Make the calls of this rank; return the outcome."""
    count, how, act = PLACES[place]
    for _ in range(count):
        if place == "eager":
            comm.broadcast(numpy.ones(4), root=leaver)
        else:
            comm.all_reduce(numpy.ones(4))  # counts
    leaves = comm.rank == leaver or (how == "all close" and comm.rank != (leaver + 1) % comm.size)
    began, error = time.monotonic(), None
    try:
        with contextlib.suppress(KeyError, SystemExit):
            if leaves:
                leave(how, comm)
            else:
                act(comm, leaver)
                if how == "destroy":
                    dist.destroy_process_group()
    except gc.GpucollError as raised:
        error = raised
    seconds = time.monotonic() - began
    # After an error each rank closes; after none in right programs.
    with contextlib.suppress(gc.GpucollError):
        if how != "end" or not leaves:
            comm.close()
    return [type(error).__name__, list(error.ranks) if error else [], str(error or ""), seconds, leaves]


def main():
    folder, place, leaver = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if PLACES[place][1] == "destroy":
        dist.init_process_group(timeout=TIMEOUT)
    comm = gc.init(timeout=TIMEOUT)
    found = play(comm, place, leaver)
    draft = Path(folder, f"{comm.rank}.draft")
    draft.write_text(json.dumps(found))
    draft.rename(Path(folder, str(comm.rank)))
    if PLACES[place][1] != "end" or comm.rank != leaver:  # one rank ends by the end of its program
        late = time.monotonic() + TIMEOUT
        while sum(path.name.isdecimal() for path in Path(folder).iterdir()) < comm.size and time.monotonic() < late:
            time.sleep(0.01)
        os._exit(0)


if __name__ == "__main__":
    main()
