"""A child of a rank is no rank: a child inherits the launcher's variables, but not the launcher's connection.

A started rank marks the environment, and all descendants inherit the mark. A process with the mark of another process,
and with the same launcher's variables, is a child of a rank. A launcher started inside a rank on purpose changes the
variables, so that the new ranks are no children.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
from collections.abc import Iterable

from gpucoll.errors import UsageError
from gpucoll.launch.launchers import LAUNCHERS, RUN, started

# The variable with process, start time, rank, connection, digest of the variables, and the names from LATER among them.
MARK = "_GPUCOLL_PROCESS"
# Variables that tell one job from another, and one rank of a job from another.
DECISIVE = (*(name for launcher in LAUNCHERS for name in launcher[2:4]), "PMIX_NAMESPACE", "SLURM_JOB_ID",
            "SLURM_STEP_ID", RUN, "TORCHELASTIC_RESTART_COUNT")
# gpucoll itself may set these variables after the mark: only variables set before the mark count.
LATER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PDEATHSIG = 1  # prctl's number of PR_SET_PDEATHSIG


def end_with(parent: int) -> None:
    """Let the system kill this process at the end of its parent, the process `parent`."""
    ctypes.CDLL(None).prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent had ended before `prctl`: no signal will come


def mark_rank(rank: int) -> None:
    """Mark this process, rank `rank` of a launcher's job, for its descendants."""
    later = [name for name in LATER if name in os.environ]
    os.environ[MARK] = f"{os.getpid()} {_start()} {rank} {_connection()} {_digest(later)} {','.join(later)}"


def refuse_children() -> None:
    """Raise UsageError in a descendant of a rank, unless another launcher has started this process meanwhile."""
    process, start, rank, connection, digest, later = (os.environ.get(MARK, "").split(" ") + 6 * [""])[:6]
    is_marked_here = (process, start) == (str(os.getpid()), _start())
    is_same_job = digest == _digest(later.split(",")) and _connection() in ("-", connection)
    if process and is_same_job and not is_marked_here:
        raise _refusal(f"rank {rank} (process {process})")


def refuse_without_connection() -> None:
    """Raise UsageError, before MPI starts, if the environment names MPICH's connection, but the connection is closed.

    MPI's start would end this process by errors of C. The parent is a rank without a mark: gpucoll has not started MPI
    there.
    """
    if os.environ.get("PMI_FD", "").isdecimal() and _connection() == "-":
        raise _refusal("a rank")


def _refusal(whose: str) -> UsageError:
    process = started()
    by = "" if process is None else f" of {process.launcher.name}"
    return UsageError(f"init: this process ({os.getpid()}) is a child of {whose}{by}; a child of a rank is no rank, "
                      "though it inherits the launcher's variables. Call gpucoll in the rank only (in a program whose "
                      "children import it: under `if __name__ == '__main__':`), or give the child a world of its own "
                      "by store=, rank= and size=", code="GC-FORK")


def _start() -> str:
    """Return the start time of this process: later processes may have the same number."""
    with contextlib.suppress(OSError, IndexError), open("/proc/self/stat") as file:
        # The name of the program, in parentheses, may contain spaces: split after it.
        return file.read().rpartition(")")[2].split()[19]
    return "0"


def _connection() -> str:
    """Return the name of the connection to MPICH's launcher; "-" without, and where a child has not inherited it."""
    with contextlib.suppress(OSError, ValueError):
        found = os.readlink(f"/proc/self/fd/{int(os.environ.get('PMI_FD', ''))}")
        return found if found.startswith("socket:") else "-"
    return "-"


def _digest(later: Iterable[str]) -> str:
    text = "\0".join(f"{name}={os.environ[name]}" for name in (*DECISIVE, *later) if name in os.environ)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
