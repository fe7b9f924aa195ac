"""Ranks of one host, started and watched without MPI: what ``gpucoll run --standalone`` is while its job runs.

Each rank is a session of its own, so that all that it starts ends with it. The first rank that ends with an error ends
the job with its status; a rank that an exception ends tells so before anybody can miss it, so that its traceback is the
only one. A signal is passed on to all ranks, and who has not ended some time after it, or gets a second one, is killed.
Where this process is killed, the system kills the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

from gpucoll import bootstrap
from gpucoll.errors import RankFailedError, RevokedError

GRACE = 5.0  # seconds that ranks have to end once one of them has failed, or the job is interrupted
SAVE = 30.0  # the same after SIGTERM, which batch systems send for that
DRAIN = 1.0  # seconds for what was written last to come, where something still has a rank's output open
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PDEATHSIG = 1  # of prctl


class Parent(NamedTuple):
    """How a rank reaches the process that watches it: its number, and a pipe to tell which rank ends the job.

    Who has taken the one byte of the pipe `ticket` shows its traceback, and nobody else does.
    """

    process: int
    pipe: int
    ticket: int


class Tagged:
    """What one stream of a rank has written, whose lines are passed on with the rank's number before them."""

    def __init__(self, rank: int, target: BinaryIO) -> None:
        self._tag, self._target, self._part = f"[{rank}] ".encode(), target, b""

    def take(self, came: bytes) -> None:
        """Pass on the lines that are whole; at the end, nothing has come and the rest is one."""
        *lines, self._part = (self._part + came).split(b"\n") if came else [*([self._part] if self._part else []), b""]
        with contextlib.suppress(OSError):  # nobody reads it any more
            self._target.write(b"".join(self._tag + line + b"\n" for line in lines))
            self._target.flush()


class Job:
    """The ranks of one job; `command` is given this process as a `Parent` in words, and `variables` are each rank's."""

    def __init__(self, command: Callable[[str], Sequence[str]], variables: Sequence[Mapping[str, str]], *,
                 tag: bool) -> None:
        self._status: int | None = None  # of the job, once it is known
        self._deadline = float("inf")  # when who is left is killed
        self._culprit: int | None = None  # who has told that it ends the job, and waits for its end
        self._events = selectors.DefaultSelector()
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}  # which have not ended
        self._outputs = 0  # which are still open
        told, tell = os.pipe()
        os.set_blocking(told, False)
        self._events.register(told, selectors.EVENT_READ, lambda: self._told(told))
        ticket, give = os.pipe()
        os.write(give, b"1")
        parent, outputs = f"{os.getpid()}:{tell}:{ticket}", subprocess.PIPE if tag else None
        try:
            for rank, own in enumerate(variables):
                process = subprocess.Popen(command(parent), env={**os.environ, **own}, start_new_session=True,
                                           stdin=None if rank == 0 else subprocess.DEVNULL, stdout=outputs,
                                           stderr=outputs, pass_fds=[tell, ticket])
                self._watch(rank, process)
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        finally:
            for end in (tell, ticket, give):
                os.close(end)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._ranks[rank] = process
        handle = os.pidfd_open(process.pid)
        self._events.register(handle, selectors.EVENT_READ, lambda: self._ended(rank, handle))
        for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if stream is not None:
                self._outputs += 1
                tagged = Tagged(rank, target.buffer)
                self._events.register(stream, selectors.EVENT_READ, self._reader(stream.fileno(), stream, tagged))

    def _reader(self, number: int, stream: object, tagged: Tagged) -> Callable[[], None]:
        def read() -> None:
            came = os.read(number, 1 << 16)
            tagged.take(came)
            if not came:
                self._events.unregister(number)
                self._outputs -= 1

        return read

    def run(self) -> int:
        """Return the status of the job, once all of its ranks have ended."""
        with self._signals():
            while self._ranks:
                self._look(None if self._deadline == float("inf") else max(0.01, self._deadline - time.monotonic()))
                if self._ranks.keys() == {self._culprit} or time.monotonic() > self._deadline:
                    self._signal(signal.SIGKILL)
            late = time.monotonic() + DRAIN
            while self._outputs and time.monotonic() < late:
                self._look(late - time.monotonic())
        return self._status or 0

    def _look(self, seconds: float | None) -> None:
        for key, _ in self._events.select(seconds):
            key.data()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Take signals in as events."""
        here, there = os.pipe()
        for end in (here, there):
            os.set_blocking(end, False)
        before = signal.set_wakeup_fd(there)
        handlers = {number: signal.signal(number, lambda *_: None) for number in SIGNALS
                    if signal.getsignal(number) is not signal.SIG_IGN}
        self._events.register(here, selectors.EVENT_READ, lambda: self._interrupted(os.read(here, 64)))
        try:
            yield
        finally:
            self._events.unregister(here)
            signal.set_wakeup_fd(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.close(here)
            os.close(there)

    def _interrupted(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in SIGNALS:
                continue
            if self._deadline < float("inf"):
                self._signal(signal.SIGKILL)
            elif self._status is None:
                self._end(128 + number, signal.Signals(number), SAVE if number == signal.SIGTERM else GRACE)

    def _ended(self, rank: int, handle: int) -> None:
        """See to a rank's end, and that of all that it has started; its number is its own until it is waited for."""
        self._events.unregister(handle)
        os.close(handle)
        process = self._ranks.pop(rank)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        if status != 0 and self._status is None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self._fail(rank, process.pid, how, 128 - status if status < 0 else status)

    def _told(self, pipe: int) -> None:
        words = os.read(pipe, 64)
        if not words:
            self._events.unregister(pipe)  # all have ended
        elif self._status is None:
            self._culprit = int(words.split()[0])
            process = self._ranks.get(self._culprit)
            self._fail(self._culprit, process.pid if process else 0, "was ended by an exception", 1)

    def _fail(self, rank: int, process: int, how: str, status: int) -> None:
        others = "; the other ranks are ended" if self._ranks.keys() - {rank} else ""
        sys.stderr.write(f"gpucoll run: rank {rank} (process {process}) {how}{others}\n")
        sys.stderr.flush()
        self._end(status, signal.SIGTERM, GRACE)

    def _end(self, status: int, number: signal.Signals, grace: float) -> None:
        self._status, self._deadline = status, time.monotonic() + grace
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, and to those that they have started; who waits for the others' end comes last."""
        for rank, process in self._ranks.items():
            if rank != self._culprit or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


# ---------------------------------------------------------------- in a rank

PATIENCE = 4 * GRACE  # seconds until a rank ends by itself that nobody ends
BLAMED = 2.0  # seconds that one whose error is another one's end waits for the job to end by that


def follow(words: str, rank: int) -> None:
    """Tie this process to its `Parent`, given in words: it ends with that, and an uncaught exception ends the job."""
    parent = Parent(*map(int, words.split(":")))
    ctypes.CDLL(None, use_errno=True).prctl(PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent.process:
        os._exit(1)  # it has ended before
    for pipe in parent[1:]:
        os.set_inheritable(pipe, False)
    mine = os.getpid()

    def claim(error: BaseException) -> None:
        if os.getpid() != mine:
            return  # a fork's child is no rank
        if isinstance(error, RankFailedError | RevokedError):
            time.sleep(BLAMED)
        if not os.read(parent.ticket, 1):
            time.sleep(PATIENCE)

    def abort() -> None:
        if os.getpid() != mine:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(OSError):
            os.write(parent.pipe, f"{rank}\n".encode())
            time.sleep(PATIENCE)  # killed meanwhile; whoever sees this rank end would tell of it, too
        os._exit(1)

    bootstrap.on_abort.append(claim)
    bootstrap.after_abort.append(abort)
    bootstrap.end_together()
