"""The deadline of MPI's start: a process beside this one says which ranks are missing, and this one ends.

MPI_Init returns when all ranks have called it, and cannot be interrupted. mpi4py holds the interpreter's lock
meanwhile, so that no thread, signal handler or exception of Python's can run in this process. Two things do: the
interpreter's own watchdog (`faulthandler`), which ends the process and shows its stack, and another process, the
witness. The witness runs this file as a script, without the package. It is also how ranks see each other: a rank that
has a witness has come to MPI's start.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Mapping

LONGEST = 1e8  # seconds: more than that the system's clocks do not take
GRACE = 1.0  # seconds after the deadline in which the missing ranks are found and named


@contextlib.contextmanager
def starting(seconds: float, variable: str, size: int, local_size: int | None) -> Iterator[None]:
    """Inside, MPI starts: where that lasts more than so many seconds, the process ends with status 1.

    `variable` of the environment is this rank's number; `local_size` is how many of the `size` ranks are on this host.
    """
    seconds = min(seconds, LONGEST)
    command = [sys.executable, "-I", "-S", __file__, repr(seconds), variable, str(size), str(local_size or 0)]
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # without another process there are no names, but still an end
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=2)
        stack.callback(faulthandler.cancel_dump_traceback_later)
        yield


class _Process:
    """A process as the system shows it; `rank` is "" where it has none, or where its variables may not be read."""

    def __init__(self, number: str, variable: str) -> None:
        with open(f"/proc/{number}/stat") as file:
            self.state, self.parent = file.read().rpartition(")")[2].split()[:2]
        self.rank, self.is_witness = "", False
        with contextlib.suppress(OSError):
            with open(f"/proc/{number}/environ", "rb") as file:
                named = [one for one in file.read().split(b"\0") if one.startswith(variable.encode() + b"=")]
            self.rank = named[0].partition(b"=")[2].decode(errors="replace") if named else ""
            with open(f"/proc/{number}/cmdline", "rb") as file:
                self.is_witness = os.fsencode(__file__) in file.read().split(b"\0")


def _job(variable: str) -> list[_Process]:
    """Return the processes of this host's ranks: all below the launcher, the nearest process above without a rank."""
    there: dict[str, _Process] = {}
    for number in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it has just ended
            if number.isdecimal():
                there[number] = _Process(number, variable)

    def above(number: str) -> Iterator[str]:
        while number in there:
            number = there[number].parent
            yield number

    launcher = next(number for number in above(str(os.getpid())) if number not in there or not there[number].rank)
    return [process for number, process in there.items() if process.rank and launcher in above(number)]


def missing(variable: str, size: int, local_size: int) -> Mapping[int, str]:
    """Return the ranks of this host that have not come to MPI's start, as far as that can be seen, and why."""
    job = _job(variable)
    ranks = {process.rank for process in job} | ({*map(str, range(size))} if local_size == size else set())
    found: dict[int, str] = {}
    for rank in ranks:
        own = [process for process in job if process.rank == rank]
        if any(process.state in "Tt" for process in own):
            found[int(rank)] = "is stopped"
        elif not any(process.is_witness for process in own):
            found[int(rank)] = "has not come to it" if own else "has ended"
    return dict(sorted(found.items()))


def _main(given: list[str]) -> None:
    seconds, variable, size, local_size = float(given[0]), given[1], int(given[2]), int(given[3])
    if select.select([sys.stdin], [], [], seconds)[0]:
        return  # the rank has closed its end: MPI has started, or the rank is no more
    try:
        found = missing(variable, size, local_size)
    except (OSError, StopIteration, ValueError):  # no such system
        found = {}
    names = "; ".join(f"rank {rank} {why}" for rank, why in found.items()) or "another rank has not come to it"
    sys.stderr.write(f"rank {os.environ.get(variable)}: [GC-TIMEOUT] init: waited {seconds:g} s for MPI's start, which "
                     f"waits for all {size} ranks: {names}. It cannot be interrupted, so that this process ends with "
                     "status 1; timeout= sets the deadline\n")
    sys.stderr.flush()
    sys.stdin.read()  # until the rank has ended: the other ranks' witnesses must find this one


if __name__ == "__main__":
    _main(sys.argv[1:])
