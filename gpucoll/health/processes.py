"""The processes of the ranks of one host, watched: who has ended, and who is stopped.

A process descriptor (`pidfd_open`, Linux 5.3) is readable once its process has ended, whoever its parent is, and never
stands for a later process with the same number. A process keeps one for each of the others, whatever the
communicators. Where there is no such call, or ranks do not see each other's processes, nobody is watched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpucoll.health.remote import Watch

WAITS = "waiting for a device"  # which passes
STOPPED = {"T": "stopped", "t": "stopped by a debugger", "D": WAITS, "Z": "dead", "X": "dead"}
THREADS = "/proc/self/task"
PATIENCE = 10.0  # seconds in which another thread may go on for a rank whose thread has ended
_descriptors: dict[int, int] = {}  # by process; kept as long as this process lives


def process_namespace() -> str:
    """Return what tells apart the hosts, and containers of them, whose process numbers mean the same."""
    try:
        return _namespace()
    except OSError:
        return ""


@functools.cache
def _namespace() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def visible(everyone: Iterable[tuple[int, str]]) -> dict[int, int]:
    """Return the processes whose numbers mean the same here, by rank; one pair (number, namespace) a rank."""
    here = process_namespace()
    return {rank: number for rank, (number, namespace) in enumerate(everyone) if here and namespace == here}


class Processes:
    """The processes of ranks: this host's by their `numbers`, all by a `watch`, but for this one's own."""

    def __init__(self, numbers: Mapping[int, int], watch: Watch | None = None) -> None:
        self.numbers, self.watch = dict(numbers), watch
        self._ranks: dict[int, int] = {}
        for rank, number in self.numbers.items():
            if number != os.getpid() and (descriptor := _descriptor(number)) is not None:
                self._ranks[descriptor] = rank

    def ended(self, patience: float = 0.0) -> tuple[int, ...]:
        """Return the ranks whose processes have ended, or the first that does within so many seconds."""
        poll = select.poll()  # one of this thread's own: another may be looking, too
        for descriptor in self._ranks:
            poll.register(descriptor, select.POLLIN)
        news = None if self.watch is None else self.watch.fileno()
        if news is not None:
            poll.register(news, select.POLLIN)
        found = poll.poll(1000 * patience) if self._ranks or news is not None else ()
        ranks = {self._ranks[descriptor] for descriptor, _ in found if descriptor in self._ranks}
        return tuple(sorted(ranks if self.watch is None else ranks | self.watch.gone()))

    def state(self, rank: int) -> str:
        """Return in a word what the process of a rank is doing, "" where that is not known, or it runs."""
        if rank in self.ended():
            return "dead"
        if rank not in self.numbers:
            return ""
        try:
            with open(f"/proc/{self.numbers[rank]}/stat") as file:
                return STOPPED.get(file.read().rpartition(")")[2].split()[0], "")
        except OSError:
            return ""


class RankThreads(Processes):
    """Ranks that are threads of this process, by the system's numbers of the threads that made a rank's last calls.

    A rank has ended where no such thread is left, and within PATIENCE no other thread has made a call for it. `used`
    returns the numbers, by rank.
    """

    def __init__(self, used: Mapping[int, Callable[[], set[int]]]) -> None:
        super().__init__({})
        self._used = used
        self._since: dict[int, tuple[set[int], float]] = {}  # when a rank was first seen without a thread

    def ended(self, patience: float = 0.0) -> tuple[int, ...]:
        now, found = time.monotonic(), list[int]()
        for rank, used in list(self._used.items()):
            numbers = used()
            if not numbers or any(map(_is_running, numbers)):
                self._since.pop(rank, None)
            else:
                before, since = self._since.setdefault(rank, (numbers, now))
                if before != numbers:
                    self._since[rank] = numbers, now
                elif now > since + PATIENCE:
                    found.append(rank)
        return tuple(found)


def _is_running(thread: int) -> bool:
    """Return whether a thread of this process runs; True where the system does not say so."""
    return not os.path.isdir(THREADS) or os.path.exists(f"{THREADS}/{thread}")


def _descriptor(number: int) -> int | None:
    if number not in _descriptors:
        open_process: Any = getattr(os, "pidfd_open", None)
        if open_process is None:
            return None
        with contextlib.suppress(OSError):
            _descriptors[number] = open_process(number)
    return _descriptors.get(number)
