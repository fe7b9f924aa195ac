"""A rank that goes away, or makes another call than the others: `python guard_job.py FOLDER HOW EXECUTOR`.

Every rank writes what came of its last call to FOLDER/RANK: seconds, the error's name, its ranks, its words.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy

import gpucoll as gc

TIMEOUT = 3.0


def goes(how, comm):
    """What rank 1 does in place of the call."""
    match how:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            sys.exit(0)
        case "crash":
            os._exit(1)
        case "with":
            with contextlib.suppress(KeyError), comm:
                raise KeyError(how)
            signal.pause()
        case "raise":
            raise KeyError(how)
        case "term":
            gc.on_terminate(lambda: Path(sys.argv[1], "saved").write_text("[]"))
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        case "thread":
            import threading

            def fails():
                raise KeyError(how)

            threading.Thread(target=fails).start()
            signal.pause()


def main():
    folder, how, executor = sys.argv[1:]
    comm = gc.init(timeout=TIMEOUT, executor=None if executor == "auto" else executor)
    x = numpy.ones(100)
    for _ in range(3):
        comm.all_reduce(x)
    if comm.rank == 1:
        goes(how, comm)
    began, error = time.monotonic(), None
    try:
        comm.all_reduce(x)
    except gc.GpucollError as raised:
        error = raised
    lasted = time.monotonic() - began
    comm.close()
    more = [error.ranks, str(error)] if error else [(), ""]
    found = [lasted, time.monotonic() - began - lasted, type(error).__name__, *more]
    Path(folder, str(comm.rank)).write_text(json.dumps(found))
    deadline = time.monotonic() + 3 * TIMEOUT
    while len(list(Path(folder).iterdir())) < comm.size - 1 and time.monotonic() < deadline:
        time.sleep(0.01)  # MPI's launcher ends all when one ends like this
    os._exit(0)


if __name__ == "__main__":
    main()
