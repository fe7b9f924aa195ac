"""The launcher of ``gpucoll run --standalone``: starts and watches the ranks of one host, without MPI.

Each rank is the leader of a session, so that all processes started by a rank end with the rank. The first rank that
ends with an error ends the job with the same status. A rank ended by an exception announces this before the other ranks
can miss it, so that only this rank's traceback is printed. Signals are passed on to all ranks; ranks still alive after
a grace period, or at a second signal, are killed. The grace period ends early if all remaining ranks are waiting to be
killed. If the launcher itself is killed, the kernel kills the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.core.output import attempt, say
from gpucoll.errors import RankFailedError, RevokedError
from gpucoll.launch import bootstrap
from gpucoll.launch.descent import end_with

KILL_TIMEOUT = 5.0  # seconds for ranks to end after a rank has failed, or after an interrupt, before SIGKILL
SAVE = 30.0  # seconds for ranks to end after SIGTERM: batch systems send SIGTERM so that programs can save their state
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Parent(NamedTuple):
    """A rank's connection to the launcher: the launcher's process number and two pipes.

    The pipe `ticket` holds a single byte: the rank that reads the byte prints a traceback, all others stay silent. Into
    `pipe` a rank ended by an exception writes the rank's number, or without the ticket the complement of the number.
    The rank then waits to be killed.
    """

    process: int
    pipe: int
    ticket: int


def loop_of(interrupted: Callable[[int], None]) -> Any:
    """Return an event loop that hands the signals of `SIGNALS` to `interrupted`; closing it resets the handlers."""
    import asyncio  # here, because ranks import this module and need no asyncio

    loop = asyncio.new_event_loop()
    for number in SIGNALS:
        # An ignored signal (as under nohup) stays ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, interrupted, number)
    return loop


class LaunchedJob:
    """The end of a job: by a signal, or by a decision of the launcher; after a grace period by SIGKILL."""

    _status: int | None = None  # the job's exit status, once decided
    _loop: Any = None

    def _signal(self, number: int) -> None:
        """Send a signal to the job."""
        raise NotImplementedError

    def _interrupted(self, number: int) -> None:
        if self._status is not None:
            self._signal(signal.SIGKILL)
        else:
            self._end(128 + number, number, SAVE if number == signal.SIGTERM else KILL_TIMEOUT)

    def _end(self, status: int, number: int, grace: float) -> None:
        self._status = status
        # To the keepers of a stopped mpiexec its end is the order to kill.
        self._loop.call_later(grace, self._signal, signal.SIGKILL)
        self._signal(number)


class Job(LaunchedJob):
    """The ranks of a job; `command` returns a rank's command line, given the text of `Parent`."""

    def __init__(self, command: Callable[[str], Sequence[str]], variables: Sequence[Mapping[str, str]], *,
                 survive: bool = False) -> None:
        # `variables` are the environment variables of each rank. With `survive` a rank that fails does not end the
        # others.
        self._command, self._variables, self._survive = command, variables, survive
        self._lost, self._ends_well = 0, False  # the status of the first rank lost; whether any rank has ended well
        self._waiting: set[int] = set()  # ranks ended by an exception and waiting to be killed
        self._ranks: dict[int, subprocess.Popen[bytes]] = {}  # the ranks alive

    def run(self) -> int:
        """Run the job to the end of all ranks and return the exit status."""
        self._loop = loop_of(self._interrupted)
        self._loop.set_exception_handler(self._break_off)
        with contextlib.closing(self._loop):
            self._start()
            self._loop.run_forever()
        return self._status or (0 if self._ends_well else self._lost)

    def _start(self) -> None:
        """Start all ranks."""
        reports, report = os.pipe()
        self._loop.add_reader(reports, self._take_reports, reports)
        ticket, give = os.pipe()
        os.write(give, b"1")
        parent = f"{os.getpid()}:{report}:{ticket}"
        try:
            for own in self._variables:
                rank = int(own["RANK"])  # among the ranks of all hosts
                process = subprocess.Popen(self._command(parent), env={**os.environ, **own}, start_new_session=True,
                                           stdin=None if rank == 0 else subprocess.DEVNULL,
                                           pass_fds=[report, ticket])
                self._ranks[rank] = process
                # The event loop watches a process descriptor: no polling, and no handler of SIGCHLD.
                handle = os.pidfd_open(process.pid)
                self._loop.add_reader(handle, self._ended, rank, handle)
        except BaseException:
            self._signal(signal.SIGKILL)
            raise
        finally:
            # Only ranks keep these ends: `reports` ends with the last rank, and an empty `ticket` reads as its end.
            for end in (report, ticket, give):
                os.close(end)

    def _break_off(self, loop: Any, context: Mapping[str, Any]) -> None:
        """End the job after an error in a callback of the launcher: ranks must not stay without a watch."""
        self._status = self._status or 1
        self._signal(signal.SIGKILL)
        loop.stop()
        say(f"gpucoll run: the launcher itself has failed, and the ranks are killed: {context.get('exception')!r}\n")

    def _ended(self, rank: int, handle: int) -> None:
        """Handle the end of a rank: kill all processes started by the rank, and record a failure."""
        self._loop.remove_reader(handle)
        os.close(handle)
        process = self._ranks.pop(rank)
        # Kill before `wait`: until then the process number cannot be taken by another process.
        self._kill(process.pid)
        status = process.wait()
        self._ends_well |= status == 0
        if status != 0 and self._status is None:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            if rank in self._waiting:  # killed here
                how, status = "was ended by an exception", 1
            self._fail(rank, process.pid, how, 128 - status if status < 0 else status)
        self._kill_where_all_wait()
        if not self._ranks:
            self._loop.stop()

    @staticmethod
    def _kill(group: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)

    def _take_reports(self, pipe: int) -> None:
        words = os.read(pipe, 4096)
        if not words:
            self._loop.remove_reader(pipe)  # all ranks have ended
        # A complement (below 0) comes from a rank without the ticket: the rank waits, but is not the reason.
        for number in array("i", words):
            rank = max(number, ~number)
            self._waiting.add(rank)
            process = self._ranks.get(rank)
            if self._survive and process:
                self._kill(process.pid)  # its end is the failure
            elif number >= 0 and self._status is None:
                self._fail(rank, process.pid if process else 0, "was ended by an exception", 1)
        self._kill_where_all_wait()

    def _kill_where_all_wait(self) -> None:
        # End the grace period early: no remaining rank has anything left to save or print.
        if self._status is not None and self._ranks.keys() <= self._waiting:
            self._signal(signal.SIGKILL)

    def _fail(self, rank: int, process: int, how: str, status: int) -> None:
        if self._survive:
            self._lost = self._lost or status
            say(f"gpucoll run: rank {rank} (process {process}) {how}; the other ranks go on\n")
            return
        others = "; the other ranks are ended" if self._ranks.keys() - {rank} else ""
        self._end(status, signal.SIGTERM, KILL_TIMEOUT)  # before the words, which a full pipe can hold up
        say(f"gpucoll run: rank {rank} (process {process}) {how}{others}\n")

    def _signal(self, number: int) -> None:
        """Send a signal to all ranks and the processes started by them; waiting ranks receive only SIGKILL."""
        # Waiting ranks must stay until the other ranks have ended: a rank that sees another rank end reports an error.
        for rank, process in self._ranks.items():
            if rank not in self._waiting or number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)


# ---------------------------------------------------------------- in a rank

SELF_EXIT = 4 * KILL_TIMEOUT  # seconds until a waiting rank ends by itself, should the launcher not kill it
# Seconds that a rank with an error caused by another rank's failure leaves the ticket to the other rank.
BLAMED = 2.0


def follow(words: str, rank: int) -> None:
    """Tie this rank to the launcher, given the text of `Parent`; an uncaught exception here ends the job."""
    parent = Parent(*map(int, words.split(":")))
    # The kernel kills this rank when the launcher ends, however the launcher ends.
    end_with(parent.process)
    # The rank's children must not keep the pipes open.
    for pipe in parent[1:]:
        os.set_inheritable(pipe, False)
    mine = os.getpid()

    def report(number: int) -> None:
        with contextlib.suppress(OSError):
            os.write(parent.pipe, array("i", [number]).tobytes())
            time.sleep(SELF_EXIT)  # killed meanwhile: ending now would cause errors in the ranks waiting for this rank

    @contextlib.contextmanager
    def alone(error: BaseException) -> Iterator[None]:
        if os.getpid() != mine:
            yield  # the child of a fork is no rank: print, but leave the job alone
            return
        try:
            if isinstance(error, RankFailedError | RevokedError):
                time.sleep(BLAMED)
            if not os.read(parent.ticket, 1):
                report(~rank)
            yield
            for stream in (sys.stdout, sys.stderr):
                attempt(stream.flush)
        finally:  # whatever happens above: the launcher learns of the failure by one of these two
            report(rank)
            os._exit(1)

    bootstrap.on_abort.append(alone)
    bootstrap.end_together()
