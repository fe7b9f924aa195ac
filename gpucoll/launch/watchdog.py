"""The deadline of MPI's start: at the deadline a helper process names the missing ranks, and this process ends.

MPI_Init returns when all ranks have called MPI_Init, and cannot be interrupted. mpi4py holds the interpreter's lock
meanwhile, so that no Python thread, signal handler or exception can run in this process. Two means remain: the
interpreter's own watchdog (`faulthandler`), a C thread that prints the stack and ends the process; and a second
process, the witness. The witness runs this file as a script, without the package. Witnesses also show the ranks to each
other: a rank with a witness has come to MPI's start.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import sys
from collections.abc import Iterator, Mapping

LONGEST_TIMER = 1e8  # seconds: longer timeouts, such as infinity, overflow the system's timers
WITNESS_TIME = 1.0  # seconds between the deadline and the end of the process, for the witness to name the missing ranks


@contextlib.contextmanager
def starting(seconds: float, variable: str, size: int, local_size: int | None) -> Iterator[None]:
    """Guard the start of MPI inside this context: after `seconds`, the process ends with status 1.

    `variable` is the environment variable with this rank's number; `local_size` of the `size` ranks are on this host.
    """
    seconds = min(seconds, LONGEST_TIMER)
    # Isolated and without `site`: the witness starts fast, and runs no user code.
    command = [sys.executable, "-I", "-S", __file__, repr(seconds), variable, str(size), str(local_size or 0)]
    import subprocess

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # if no process can be started, the deadline still holds, without names
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        faulthandler.dump_traceback_later(seconds + WITNESS_TIME, exit=True, file=2)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


class _Process:
    """A process as shown by /proc; `rank` is "" for a process without a rank, or with unreadable variables."""

    def __init__(self, number: str, variable: str) -> None:
        # The name of the program, in parentheses, may contain spaces: split after it.
        with open(f"/proc/{number}/stat") as file:
            self.state, self.parent = file.read().rpartition(")")[2].split()[:2]
        self.rank, self.is_witness = "", False
        with contextlib.suppress(OSError), open(f"/proc/{number}/environ", "rb") as file:
            named = [one for one in file.read().split(b"\0") if one.startswith(variable.encode() + b"=")]
            self.rank = named[0].partition(b"=")[2].decode(errors="replace") if named else ""
            with open(f"/proc/{number}/cmdline", "rb") as file:
                self.is_witness = os.fsencode(__file__) in file.read().split(b"\0")


def _job(variable: str) -> list[_Process]:
    """Return the processes of this job's ranks on this host: all descendants of the launcher with a rank."""
    there: dict[str, _Process] = {}
    for number in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # the process has just ended
            if number.isdecimal():
                there[number] = _Process(number, variable)

    def above(number: str) -> Iterator[str]:
        while number in there:
            number = there[number].parent
            yield number

    # The launcher is the nearest ancestor without a rank. Ranks of other jobs have the same variables, but another
    # launcher. A process without an entry in `there` (just ended, or number 0) ends the walk as well.
    launcher = next(number for number in above(str(os.getpid())) if number not in there or not there[number].rank)
    return [process for number, process in there.items() if process.rank and launcher in above(number)]


def missing(variable: str, size: int, local_size: int) -> Mapping[int, str]:
    """Return the visible ranks of this host that have not come to MPI's start, each with the reason."""
    job = _job(variable)
    # If all ranks are on this host, a rank without a process has ended.
    ranks = {process.rank for process in job} | ({*map(str, range(size))} if local_size == size else set())
    found: dict[int, str] = {}
    for rank in ranks:
        own = [process for process in job if process.rank == rank]
        # T and t: stopped by a signal or by a debugger. A stopped rank may have a witness, so test this first.
        if any(process.state in "Tt" for process in own):
            found[int(rank)] = "is stopped"
        elif not any(process.is_witness for process in own):
            found[int(rank)] = "has not come to it" if own else "has ended"
    return dict(sorted(found.items()))


def _main(given: list[str]) -> None:
    # Standard input is a pipe from the rank: it becomes readable, at its end, when the rank closes it or dies.
    seconds, variable, size, local_size = float(given[0]), given[1], int(given[2]), int(given[3])
    if select.select([sys.stdin], [], [], seconds)[0]:
        return  # MPI has started, or the rank has died
    try:
        found = missing(variable, size, local_size)
    except (OSError, StopIteration, ValueError):  # no /proc, or another format: report without names
        found = {}
    names = "; ".join(f"rank {rank} {why}" for rank, why in found.items()) or "another rank has not come to it"
    sys.stderr.write(f"rank {os.environ.get(variable)}: [GC-TIMEOUT] init: waited {seconds:g} s for MPI's start, which "
                     f"waits for all {size} ranks: {names}. It cannot be interrupted, so that this process ends with "
                     "status 1; timeout= sets the deadline\n")
    sys.stderr.flush()
    sys.stdin.read()  # stay until the rank has ended: the witnesses of other ranks must find this witness


if __name__ == "__main__":
    _main(sys.argv[1:])
