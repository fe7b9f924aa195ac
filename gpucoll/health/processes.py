"""Detection of dead and stopped processes among the ranks of one host.

A process descriptor (`pidfd_open`, Linux 5.3) becomes readable when the process ends, for any process, not only for
children, and never refers to a later process with the same number. Each process keeps one descriptor per other rank,
shared by all communicators. Without the system call, or between separate process namespaces, no rank is watched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import time
from collections.abc import Callable, Iterable, Mapping

from gpucoll.health.remote import Watch
from gpucoll.transport.connections import is_readable

DEVICE_WAIT = "waiting for a device"  # not a reason for blame: the state passes by itself
# States of /proc/PID/stat that explain a missing rank.
STOPPED = {"T": "stopped", "t": "stopped by a debugger", "D": DEVICE_WAIT, "Z": "dead", "X": "dead"}
TASKS = "/proc/self/task"
# Seconds between two looks in a wait: a look polls processes or threads and receives farewells, too dear for each poll.
LOOK_INTERVAL = 0.05
# Seconds before a rank whose thread has ended counts as dead: a program may hand a rank from one thread to the next.
THREAD_GRACE = 10.0
NEWS = 0.02  # seconds between two looks for news of other hosts, in a wait for the first death
# Process descriptors by process number, shared by all communicators and open as long as this process lives.
_descriptors: dict[int, int] = {}


@functools.cache
def process_namespace() -> str:
    """Return the identity of the namespace (host boot and container) of valid process numbers, "" if unknown."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def visible(everyone: Iterable[tuple[int, str]]) -> dict[int, int]:
    """Return the process numbers valid on this host, by rank, from one pair (number, namespace) per rank."""
    here = process_namespace()
    return {rank: number for rank, (number, namespace) in enumerate(everyone) if here and namespace == here}


class Processes:
    """The processes of the other ranks: those on this host by `numbers`, those on other hosts by `watch`, if given."""

    def __init__(self, numbers: Mapping[int, int], watch: Watch | None = None) -> None:
        self.numbers: dict[int, int] = dict(numbers)
        self.watch: Watch | None = watch
        self._ranks: dict[int, int] = {}
        self._ended = dict[int, None]()  # ranks whose processes have ended, in the order in which this rank saw it
        for rank, number in self.numbers.items():
            if number == os.getpid():
                continue
            try:
                descriptor = _descriptor(number)
            except ProcessLookupError:
                self._ended[rank] = None
                continue
            if descriptor is not None:
                self._ranks[descriptor] = rank

    def ended(self, patience: float = 0.0) -> tuple[int, ...]:
        """Return the ranks whose processes have ended, in the order in which this rank has learnt of it.

        If none has, wait up to `patience` seconds for the first.
        """
        poll = select.poll()  # a new object per call: two threads may not use one at the same time
        for descriptor in self._ranks:
            poll.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + patience
        while True:
            late = time.monotonic() >= deadline
            # No descriptor tells of other hosts: look again after a short time.
            wait = 0 if late or self._ended else 1000 * min(NEWS, deadline - time.monotonic())
            found = poll.poll(wait)
            if self.watch is not None:
                self._ended.update(dict.fromkeys(self.watch.gone()))
            self._ended.update((self._ranks[descriptor], None) for descriptor, _ in found if descriptor in self._ranks)
            if late or self._ended:
                return tuple(self._ended)

    def state(self, rank: int) -> str:
        """Return "dead", or why a rank's process is not running (see STOPPED); "" if the process runs or is unknown."""
        if rank in self.ended():
            return "dead"
        if rank not in self.numbers:
            return ""
        try:
            # The state follows the program's name, whose parentheses may enclose spaces and further parentheses.
            with open(f"/proc/{self.numbers[rank]}/stat") as file:
                return STOPPED.get(file.read().rpartition(")")[2].split()[0], "")
        except OSError:
            return ""


class RankThreads(Processes):
    """Ranks that are threads of this process.

    `used` returns, by rank, the system's numbers of the threads that made the rank's last calls. A rank counts as dead
    if all these threads have ended and no other thread has made a call for the rank within THREAD_GRACE seconds. The
    ranks share the object: all wait and ask, so the answer is kept for LOOK_INTERVAL seconds.
    """

    def __init__(self, used: Mapping[int, Callable[[], set[int]]]) -> None:
        super().__init__({})
        self._used = used
        self._since: dict[int, tuple[set[int], float]] = {}  # ranks without a thread: the old numbers, and since when
        self._looked, self._found = 0.0, tuple[int, ...]()

    def ended(self, patience: float = 0.0) -> tuple[int, ...]:
        now = time.monotonic()
        if now >= self._looked + LOOK_INTERVAL:
            self._looked, running = now, _running()
            # Copy first: a rank's thread removes its entry when it closes the communicator.
            self._found = tuple(rank for rank, used in list(self._used.items())
                                if self._has_ended(rank, used(), running, now))
        return self._found

    def _has_ended(self, rank: int, numbers: set[int], running: set[int] | None, now: float) -> bool:
        if not numbers or running is None or not numbers.isdisjoint(running):
            self._since.pop(rank, None)
            return False
        before, since = self._since.get(rank, (numbers, now))
        # Where other threads have made calls, and ended, since: begin the wait again.
        self._since[rank] = numbers, since if before == numbers else now
        return now > self._since[rank][1] + THREAD_GRACE


def _running() -> set[int] | None:
    """Return the numbers of this process's threads; None if the system does not tell."""
    return {*map(int, os.listdir(TASKS))} if os.path.isdir(TASKS) else None


def _descriptor(number: int) -> int | None:
    """Return a descriptor of the process, None if there can be none; ProcessLookupError if the process has ended."""
    known = _descriptors.get(number)
    # The system gives the number of an ended process to a later one. The old descriptor stays: older objects hold it.
    if known is not None and not is_readable(known):
        return known
    try:
        _descriptors[number] = os.pidfd_open(number)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # the system call is forbidden or unknown, or no descriptor is free
        return None
    return _descriptors[number]
