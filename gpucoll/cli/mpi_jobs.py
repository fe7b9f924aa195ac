"""mpiexec as a child of ``gpucoll run``, with one convention of exit codes for all vendors of MPI.

mpiexec's own codes differ: MPICH's ends with 9 both for a rank that exits with 9 and for a rank killed by signal 9, and
joins the codes of several ranks by "or". Therefore each rank has a keeper. The keeper is the process that mpiexec
started; the rank is the keeper's child, made by a fork before the program runs. The keeper ends as the rank
does, and tells the launcher the status, or 128 plus the signal's number, through a socket. On other hosts
the socket is out of reach: there mpiexec's code counts. If the launcher is killed, the keepers see the end of the
socket, and kill their ranks.

MPICH's mpiexec lets the other ranks go on where a rank ends with a status before or after MPI. So the launcher ends
mpiexec soon after the first failure, unless mpiexec does so by itself.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import secrets
import select
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gpucoll.cli.standalone import KILL_TIMEOUT, LaunchedJob, loop_of
from gpucoll.core.output import say
from gpucoll.launch import bootstrap
from gpucoll.launch.descent import end_with
from gpucoll.launch.launchers import RUN

BACKLOG = 4096  # keepers that connect at once
# Seconds for mpiexec to end the other ranks by itself, after a rank has failed: it may know a better reason.
ALONE = 1.0
ABORT_SECONDS = 15.0  # seconds for a rank to print an uncaught exception and to end by MPI's abort
# Codes of ranks that mpiexec ends after the failure of another rank.
KILLED_CODES = {128 + signal.SIGTERM, 128 + signal.SIGKILL}


class RankFailure(NamedTuple):
    """What a keeper tells: when a rank has failed, the rank's exit code, and the rank."""

    when: int
    code: int
    rank: int


class MpiexecJob(LaunchedJob):
    """One mpiexec; `command` returns its command line, given the name of the launcher's socket.

    `shares_terminal` if mpiexec may have to ask for a password, as ssh does, on the launcher's terminal.
    """

    def __init__(self, command: Callable[[str], Sequence[str]], *, shares_terminal: bool = False) -> None:
        self._name = f"gpucoll-{secrets.token_hex(16)}"
        self._command, self._shares = command(self._name), shares_terminal
        self._keepers: set[socket.socket] = set()  # connected, and silent until now
        self._failures: list[RankFailure] = []
        self._mpiexec: subprocess.Popen[bytes]

    def run(self) -> int:
        """Run the job to the end of mpiexec and return the exit code."""
        self._loop = loop_of(self._interrupted)
        with contextlib.closing(self._loop), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{self._name}")
            listener.setblocking(False)
            listener.listen(BACKLOG)
            self._loop.add_signal_handler(signal.SIGCHLD, self._look)
            self._loop.add_reader(listener, self._accept, listener)
            # This job may be started in a rank of a job without MPI, whose name is not this job's.
            self._start({key: one for key, one in os.environ.items() if key != RUN})
            try:
                self._loop.run_forever()
            finally:
                self._signal(signal.SIGKILL)
            self._hear_rest(listener)
        return self._status or _job_code(self._mpiexec.wait(), [one.code for one in sorted(self._failures)])

    def _start(self, environment: Mapping[str, str]) -> None:
        # In a session of its own, mpiexec gets each signal once, from here. A job of the shell's background must not
        # read the shell's terminal.
        is_behind = os.isatty(0) and not self._shares and os.tcgetpgrp(0) != os.getpgrp()
        self._mpiexec = subprocess.Popen(self._command, env=environment, start_new_session=not self._shares,
                                         stdin=subprocess.DEVNULL if is_behind else None,
                                         preexec_fn=functools.partial(end_with, os.getpid()))

    def _look(self) -> None:
        if self._mpiexec.poll() is not None:
            self._loop.stop()

    def _signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self._mpiexec.kill()  # does nothing after the end
            self._loop.stop()
        # On a shared terminal, mpiexec has its own Ctrl-C. SIGHUP would end mpiexec without a word to the ranks.
        elif number != signal.SIGINT or not self._shares:
            self._mpiexec.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    def _accept(self, listener: socket.socket) -> None:
        """Take the connections of keepers; a keeper tells of its rank's failure, or closes the connection."""
        try:
            while True:
                keeper = listener.accept()[0]
                keeper.setblocking(False)
                self._keepers.add(keeper)
                self._loop.add_reader(keeper, self._hear, keeper)
        except BlockingIOError:  # no more for now
            return
        except OSError:  # no more descriptors: the other keepers are heard at the end
            self._loop.remove_reader(listener)

    def _hear(self, keeper: socket.socket) -> None:
        words = b""
        with contextlib.suppress(OSError):
            words = keeper.recv(100)
        self._loop.remove_reader(keeper)
        self._keepers.remove(keeper)
        keeper.close()
        with contextlib.suppress(ValueError):  # nothing told
            when, code, rank, patience = map(int, words.split())
            self._failures.append(RankFailure(when, code, rank))
            self._loop.call_later(patience / 1000, self._end_others)

    def _hear_rest(self, listener: socket.socket) -> None:
        for _ in range(2):  # first make room for the keepers not yet accepted
            for keeper in [*self._keepers]:
                self._hear(keeper)
            self._accept(listener)
        for keeper in [*self._keepers]:
            self._hear(keeper)

    def _end_others(self) -> None:
        """End all ranks, as mpiexec has not done so since the first failure."""
        if self._status is None and self._mpiexec.poll() is None:
            first = min(self._failures)
            self._end(first.code, signal.SIGTERM, KILL_TIMEOUT)  # before the words, which a full pipe can hold up
            say(f"gpucoll run: rank {first.rank} ended with status {first.code}; the other ranks are ended\n")


def _job_code(status: int, codes: Sequence[int]) -> int:
    """Return the exit code of a job: `status` is mpiexec's, below 0 for a signal, `codes` are those of the ranks.

    >>> _job_code(3, [3]), _job_code(7, [3, 4]), _job_code(9, [137]), _job_code(1, [143, 143]), _job_code(255, [])
    (3, 3, 137, 1, 255)
    """
    status = 128 - status if status < 0 else status
    # mpiexec knows of other hosts, and of MPI's abort. But MPICH's joins the bits of several codes, and ends with the
    # bare number of the signal by which it has ended the other ranks.
    is_bare = 128 + status in KILLED_CODES
    return status if not codes or status in codes or (KILLED_CODES.issuperset(codes) and not is_bare) else codes[0]


# ---------------------------------------------------------------- in a rank


def keep(name: str | None) -> None:
    """Go on as the rank, in a child process; this process stays as the rank's keeper, and ends with the rank.

    `name` is that of the launcher's socket.
    """
    keeper = os.getpid()
    # mpiexec sends signals to the rank's process group. None but SIGKILL may end the keeper before the rank.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fork beside other threads: NumPy's have handlers for it
        rank = os.fork()
    if rank != 0:
        try:
            _keep(rank, name)
        finally:
            os._exit(1)
    end_with(keeper)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    bootstrap.on_abort.append(functools.partial(_aborting, name))
    bootstrap.end_together()


def _keep(rank: int, name: str | None) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    events = select.poll()
    events.register(reader, select.POLLIN)
    with _launcher(name) as launcher:
        with contextlib.suppress(OSError):  # not connected
            launcher.getpeername()
            events.register(launcher, select.POLLIN)
        while (found := os.waitpid(rank, os.WNOHANG)) == (0, 0):
            if launcher.fileno() in dict(events.poll()):  # the launcher has ended
                # Also what the rank has started, if mpiexec has given the rank a process group.
                os.killpg(0, signal.SIGKILL) if os.getpgrp() == os.getpid() else os.kill(rank, signal.SIGKILL)
                events.unregister(launcher)
        code = os.waitstatus_to_exitcode(found[1])
        code = 128 - code if code < 0 else code
        if code:
            _tell(launcher, code, ALONE)
    if os.WIFSIGNALED(found[1]):  # end as the rank did: MPICH's mpiexec then ends the other ranks
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(code - 128, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.kill(os.getpid(), code - 128)
    os._exit(code)


def _launcher(name: str | None) -> socket.socket:
    """Return a socket to the launcher; without a connection on another host, and without `gpucoll run`."""
    launcher = socket.socket(socket.AF_UNIX)
    launcher.setblocking(False)
    with contextlib.suppress(OSError):
        launcher.connect(f"\0{name}")
    return launcher


def _tell(launcher: socket.socket, code: int, patience: float) -> None:
    """Tell the launcher that this rank fails; the launcher ends the others after `patience` seconds."""
    with contextlib.suppress(OSError):
        launcher.send(f"{time.monotonic_ns()} {code} {os.environ['RANK']} {int(1000 * patience)}".encode())


@contextlib.contextmanager
def _aborting(name: str | None, error: BaseException) -> Iterator[None]:
    """Tell the launcher of an uncaught exception; of ranks interrupted by one Ctrl-C let only rank 0 print theirs."""
    if isinstance(error, KeyboardInterrupt) and os.environ.get("RANK") != "0" and _all_are_interrupted():
        time.sleep(bootstrap.FORWARDING)
        os._exit(128 + signal.SIGINT)
    # Now, because mpiexec may end all processes while it fails to pass the words on.
    with _launcher(name) as launcher:
        _tell(launcher, 1, ABORT_SECONDS)
    yield


def _all_are_interrupted() -> bool:
    """Return whether SIGINT has come to the keeper, too: it is blocked there, and stays pending."""
    with contextlib.suppress(OSError, StopIteration, ValueError), open(f"/proc/{os.getppid()}/status") as status:
        pending = next(line for line in status if line.startswith("ShdPnd:"))
        return bool(int(pending.split()[1], 16) & 1 << signal.SIGINT - 1)
    return False
