"""Ranks of one host, started and watched without MPI: what ``gpucoll run --standalone`` is while its job runs.

Each rank is a session of its own, so that all that it starts ends with it. The first rank that ends with an error ends
the job with its status; a rank that an exception ends tells so before anybody can miss it, so that its traceback is the
only one. A signal is passed on to all ranks, and a rank that has not ended some time after it, or after a second one,
is killed; where all ranks that are left have nothing more to do, they are killed at once. Where this process is killed,
the system kills the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from gpucoll.errors import RankFailedError, RevokedError
from gpucoll.launch import bootstrap

GRACE = 5.0  # seconds that ranks have to end once one of them has failed, or the job is interrupted
SAVE = 30.0  # the same after SIGTERM, which batch systems send for that
DRAIN = 1.0  # seconds for what was written last to come, where something still has a rank's output open
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PDEATHSIG = 1  # of prctl


class Parent(NamedTuple):
    """How a rank reaches the process that watches it: its number, and a pipe to tell which rank ends the job.

    Only the rank that has taken the one byte of the pipe `ticket` shows its traceback. Along `pipe` a rank that an
    exception ends tells its number, or, without the ticket, the complement of its number; then it waits for its end.
    """

    process: int
    pipe: int
    ticket: int


def _pass_on(rank: int, stream: BinaryIO, target: BinaryIO) -> None:
    """Pass on the lines that a rank writes, with its number before them."""
    for line in stream:
        with contextlib.suppress(OSError):  # nobody reads it any more
            target.write(f"[{rank}] ".encode() + line.removesuffix(b"\n") + b"\n")
            target.flush()


class Job:
    """The ranks of one job; `command` is given this process as a `Parent` in words, and `variables` are each rank's."""

    def __init__(self, command: Callable[[str], Sequence[str]], variables: Sequence[Mapping[str, str]], *,
                 tag: bool) -> None:
        self._command, self._variables, self._tag = command, variables, tag
        self._status: int | None = None  # of the job, once it is known
        self._waiting: set[int] = set()  # ranks that an exception ends, and that wait to be killed
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}  # which have not ended
        self._loop: Any = None

    def run(self) -> int:
        """Return the status of the job, once all of its ranks have ended."""
        import asyncio  # which no rank needs

        self._loop = asyncio.new_event_loop()
        with contextlib.closing(self._loop):  # which lets the signals be as before
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._loop.add_signal_handler(number, self._interrupted, number)
            outputs = self._start()
            self._loop.run_forever()
            late = time.monotonic() + DRAIN
            for thread in outputs:
                thread.join(max(0.0, late - time.monotonic()))
        return self._status or 0

    def _start(self) -> list[threading.Thread]:
        """Start all ranks; return the threads that pass on what they write."""
        told, tell = os.pipe()
        self._loop.add_reader(told, self._told, told)
        ticket, give = os.pipe()
        os.write(give, b"1")
        parent, outputs = f"{os.getpid()}:{tell}:{ticket}", subprocess.PIPE if self._tag else None
        threads = []
        try:
            for rank, own in enumerate(self._variables):
                process = subprocess.Popen(self._command(parent), env={**os.environ, **own}, start_new_session=True,
                                           stdin=None if rank == 0 else subprocess.DEVNULL, stdout=outputs,
                                           stderr=outputs, pass_fds=[tell, ticket])
                self._ranks[rank] = process
                handle = os.pidfd_open(process.pid)
                self._loop.add_reader(handle, self._ended, rank, handle)
                for stream, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                    if stream is not None:
                        threads.append(threading.Thread(target=_pass_on, args=[rank, stream, target.buffer],
                                                        daemon=True))
                        threads[-1].start()
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        finally:
            for end in (tell, ticket, give):
                os.close(end)
        return threads

    def _interrupted(self, number: int) -> None:
        if self._status is not None:
            self._signal(signal.SIGKILL)
        else:
            self._end(128 + number, signal.Signals(number), SAVE if number == signal.SIGTERM else GRACE)

    def _ended(self, rank: int, handle: int) -> None:
        """See to a rank's end, and that of all that it has started; its number is its own until it is waited for."""
        self._loop.remove_reader(handle)
        os.close(handle)
        process = self._ranks.pop(rank)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        if status != 0 and self._status is None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            self._fail(rank, process.pid, how, 128 - status if status < 0 else status)
        self._kill_where_all_wait()
        if not self._ranks:
            self._loop.stop()

    def _told(self, pipe: int) -> None:
        words = os.read(pipe, 4096)
        if not words:
            self._loop.remove_reader(pipe)  # all have ended
        for number in array("i", words):
            rank = max(number, ~number)
            self._waiting.add(rank)
            if number >= 0 and self._status is None:
                process = self._ranks.get(rank)
                self._fail(rank, process.pid if process else 0, "was ended by an exception", 1)
        self._kill_where_all_wait()

    def _kill_where_all_wait(self) -> None:
        if self._status is not None and self._ranks.keys() <= self._waiting:
            self._signal(signal.SIGKILL)

    def _fail(self, rank: int, process: int, how: str, status: int) -> None:
        others = "; the other ranks are ended" if self._ranks.keys() - {rank} else ""
        sys.stderr.write(f"gpucoll run: rank {rank} (process {process}) {how}{others}\n")
        sys.stderr.flush()
        self._end(status, signal.SIGTERM, GRACE)

    def _end(self, status: int, number: signal.Signals, grace: float) -> None:
        self._status = status
        self._loop.call_later(grace, self._signal, signal.SIGKILL)
        self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all ranks, and to those that they have started; only SIGKILL reaches ranks that wait."""
        for rank, process in self._ranks.items():
            if rank not in self._waiting or number == signal.SIGKILL:
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

    def tell(number: int) -> None:
        with contextlib.suppress(OSError):
            os.write(parent.pipe, array("i", [number]).tobytes())
            time.sleep(PATIENCE)  # killed meanwhile; a rank that sees this one end would tell of it, too

    @contextlib.contextmanager
    def alone(error: BaseException) -> Iterator[None]:
        if os.getpid() != mine:
            yield  # a fork's child is no rank
            return
        if isinstance(error, RankFailedError | RevokedError):
            time.sleep(BLAMED)
        if not os.read(parent.ticket, 1):
            tell(~rank)
        yield
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        tell(rank)
        os._exit(1)

    bootstrap.on_abort.append(alone)
    bootstrap.end_together()
