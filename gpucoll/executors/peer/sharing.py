"""The places of communicators on a GPU: ranks that share a GPU use the peer executor in one communicator at a time.

All blocks of a kernel must run at once, as they wait for the blocks of the other ranks. The blocks of ranks that share
a GPU fill the GPU: a second communicator's blocks may find no room, and all would wait until the deadline. Processes
see each other by a lock on a file of the temporary folder; the system releases the locks of a dead process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Sequence


class GpuSeat:
    """The place of a communicator on the GPU with a PCI number, taken by one rank for all its ranks on this GPU."""

    def __init__(self, gpu: int) -> None:
        self._file = os.path.join(tempfile.gettempdir(), f"gpucoll-{os.geteuid()}-{gpu:x}.lock")
        self._held = -1

    def take(self, *, alone: bool) -> bool:
        """Return whether the place is free, and take it; `alone`: several ranks of the communicator use the GPU."""
        try:
            self._held = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            self.leave()
            return False
        except OSError:  # a folder without files or locks tells nothing
            self.leave()
        return True

    def leave(self) -> None:
        """Free the place; idempotent."""
        if self._held >= 0:
            held, self._held = self._held, -1
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)  # a forked child may have inherited the file
            os.close(held)


def place_of(rank: int, gpus: Sequence[int]) -> tuple[GpuSeat | None, bool]:
    """Return the place to be taken by `rank`, or None, and whether it is free, and so taken now.

    `gpus` are the GPUs of all ranks. The first rank on a GPU takes the place for the others.
    """
    if len(gpus) == 1 or gpus.index(gpus[rank]) != rank:
        return None, True
    place = GpuSeat(gpus[rank])
    return place, place.take(alone=gpus.count(gpus[rank]) > 1)
