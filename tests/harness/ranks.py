"""Programs on real ranks: a pool of rank processes for tests.

    pool = RankPool()
    pool.run(program, 4, 10, timeout=5)     # [program(comm, 10) of rank 0, ..., of rank 3]

One pool serves a whole test session, since ranks take a second to start. If a program hangs, dies or raises, the error
tells where each rank was, and the next run gets new ranks if the old ranks are unusable. Timeouts are scaled by the
machine's pace. This process never imports mpi4py; `rank_worker.py` runs in the ranks.
"""

import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import sys
import tempfile
import uuid
from multiprocessing.connection import Connection, wait
from pathlib import Path

from harness import budgets, leftovers
from harness.jobs import (  # noqa: F401 (whoever uses ranks may find jobs here)
    INSTALL_HINT,
    StartFailed,
    end_job,
    ends_within,
    find_launcher,
    launch,
    require_launcher,
    run_job,
    same_gpucoll,
    section,
    start_job,
)
from harness.pace import Patience

WORKER = Path(__file__).with_name("rank_worker.py")
START_SECONDS = 120.0
MOST_COPIES = 500  # of communicators, in a rank before the pool is restarted: see `Copies` in rank_worker.py
STACK_SECONDS = 5.0  # for all ranks to write their stacks; a stopped process never does


class PoolError(Exception):
    """A program on the pool failed on `ranks`; the message has all details."""

    def __init__(self, message, ranks=()):
        super().__init__(message)
        self.ranks = list(ranks)


class RankError(PoolError):
    """The program raised on `ranks`."""


class RanksHung(PoolError):
    """The program did not end in time on `ranks`."""


class RankDied(PoolError):
    """The processes of `ranks` ended while the program ran; the first death comes first."""


class LeftBehind(PoolError):
    """The program ended well, but left changes in the processes of `ranks`, to be used by other programs."""


class Rank:
    """A worker process, as seen by the parent, with its two connections."""

    def __init__(self, number, pid, folder, channel, bell):
        self.number, self.pid, self.channel, self.bell = number, pid, channel, bell
        self.output, self.stacks = folder / f"rank{number}.output", folder / f"rank{number}.stacks"
        self.seen = 0  # bytes of output from earlier runs

    def printed(self):
        return self.output.read_bytes()[self.seen:].decode(errors="replace")

    def stack(self):
        return self.stacks.read_text() or "no stack: the process is stopped or gone"


class Job:
    """The rank processes of a pool, from start to end: all connected and waiting for orders."""

    def __init__(self, size):
        self.token, self.ranks, self.lasting = uuid.uuid4().hex, [], set()
        self.used = 0.0  # processor seconds reported by the ranks
        self.copies = 0  # of communicators, left in a rank by the programs so far
        self.generation = 0  # the number of failed runs: see `communicator_for` in rank_worker.py
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # mode 0700: only this user can connect
        with socket.socket(socket.AF_UNIX) as listener, open(self.folder / "mpiexec.output", "wb") as output:
            listener.bind(str(self.folder / "parent"))
            listener.listen(2 * size)
            launcher = require_launcher()
            argv = [sys.executable, WORKER, self.folder / "parent"]
            # Unbuffered, so that a rank's output survives its death; MPI's own files go into the job's folder.
            variables = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1",
                         "TMPDIR": str(self.folder)}
            self.process = start_job(launcher.command(size, argv, launcher.vendor.keep_survivors), self.token, output,
                                     environment=variables)
            try:
                self.ranks = self.greet(listener, size)
            except BaseException:
                self.end()
                raise

    def greet(self, listener, size):
        """Return the ranks in order, after both connections of each rank have introduced themselves."""
        met, patience, ended = {}, Patience(START_SECONDS), os.pidfd_open(self.process.pid)
        while len(met) < 2 * size:
            ready = wait([listener, ended], patience.left())
            if listener not in ready:
                said = section("printed by mpiexec", self.mpiexec_output())
                how = "ended" if ready else "took too long"
                raise StartFailed(f"mpiexec {how} before {size} ranks were there{said}")
            connection = Connection(listener.accept()[0].detach())
            number, kind, world, pid = connection.recv()
            if world != size:
                raise StartFailed(f"{size} ranks see a world of {world}: mpiexec and the MPI of mpi4py differ")
            met[number, kind] = connection, pid
        os.close(ended)
        self.lasting = {("child", self.process.pid), *(("descriptor", one.fileno()) for one, _ in met.values())}
        leftovers.lasting |= self.lasting
        return [Rank(number, met[number, "bell"][1], self.folder, met[number, "channel"][0], met[number, "bell"][0])
                for number in range(size)]

    def mpiexec_output(self):
        return (self.folder / "mpiexec.output").read_text(errors="replace")

    def write_stacks(self, ranks):
        """Let the ranks write their stacks; wait for each rank's bell, but not for long."""
        waiting, patience = {rank.bell for rank in ranks}, Patience(STACK_SECONDS)
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR2)
        while waiting and (left := patience.left()):
            waiting.difference_update(wait(waiting, left))

    def end(self, in_order=False):
        """End all ranks and remove all files. In order: let the ranks leave their loop and finalise MPI, if in time."""
        before = budgets.children_seconds()
        if in_order:
            with contextlib.suppress(OSError):
                for rank in self.ranks:
                    rank.channel.send_bytes(b"")
                ends_within(self.process, 10)
        end_job(self.process, self.token)
        counted_again = min(self.used, budgets.children_seconds() - before)  # of ranks already waited for by mpiexec
        budgets.used_by_ranks[0] -= counted_again
        leftovers.lasting.difference_update(self.lasting)
        for rank in self.ranks:
            rank.channel.close()
            rank.bell.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class Run:
    """One program on the first `size` ranks of a job: the answers, and the report of a failure."""

    def __init__(self, job, name, size):
        self.job, self.name, self.ranks = job, name, job.ranks[:size]
        self.answers = {}  # by rank: ("ok" or "error", value, or exception and its text), unpickled
        self.dead = []  # ranks, the first to die first
        self.left = {}  # by rank: the leftovers of the program

    def send(self, order):
        for rank in self.ranks:
            rank.seen = rank.output.stat().st_size
            with contextlib.suppress(ConnectionError):  # dead: found by `collect`
                rank.channel.send_bytes(pickle.dumps(order))

    def collect(self, timeout, grace=None):
        """Gather answers until all have come, a rank is dead, or the time is over (`grace` after the first error)."""
        patience = Patience(timeout)
        while self.unanswered() and not self.dead and (left := patience.left()):
            before = self.raised()
            self.receive(left)
            if grace is not None and self.raised() and not before:
                patience.at_most(grace)

    def receive(self, timeout):
        waiting = {rank.channel: rank.number for rank in self.ranks
                   if rank.number not in self.answers and rank.number not in self.dead}
        for channel in wait(waiting, timeout):
            try:
                state, pickled, left, used, copies = channel.recv()
                self.job.used += used
                self.job.copies = max(self.job.copies, copies)
                budgets.used_by_ranks[0] += used
                self.answers[waiting[channel]] = state, pickle.loads(pickled)
                self.left |= {waiting[channel]: left} if left else {}
            except (EOFError, ConnectionError):
                self.dead.append(waiting[channel])

    def unanswered(self):
        return [rank.number for rank in self.ranks if rank.number not in self.answers]

    def raised(self):
        return sorted(number for number, (state, _) in self.answers.items() if state == "error")

    def outcomes(self):
        """Return ("ok", value) or ("error", exception) for each rank."""
        found = [self.answers[rank.number] for rank in self.ranks]
        return [(state, value[0] if state == "error" else value) for state, value in found]

    def failure(self, timeout, allow_errors):
        """Return the error to raise, or None. A death comes first, since it explains the errors of other ranks.

        Called while the job still lives: the error has stacks and output.
        """
        late, raised = self.unanswered(), self.raised()
        if late:
            self.job.write_stacks([rank for rank in self.ranks if rank.number not in self.dead])
        if self.dead:
            self.receive(0)  # the ranks dying with it, as all do after MPI_Abort
            return self.error(RankDied, self.dead, f"rank {self.dead[0]} died in {self.name}, without a Python "
                              f"exception, as by os._exit, a signal or a crash; dead now: {spoken(self.dead)}")
        if raised and not allow_errors:
            after = f"; {spoken(late)} did not end after that" if late else ""
            return self.error(RankError, raised, f"{self.name} raised on {spoken(raised)} of {len(self.ranks)}{after}")
        if late:
            return self.error(RanksHung, late, f"{self.name} did not end within {timeout:g} s on {spoken(late)}")
        if self.left:
            shown = dict.fromkeys(line for lines in self.left.values() for line in lines)
            return LeftBehind(f"{self.name} left behind on {spoken(sorted(self.left))}: {'; '.join(shown)}",
                              sorted(self.left))
        return None

    def error(self, kind, ranks, headline):
        """Return an error: headline, tracebacks, stacks of unfinished programs, and output; equal texts only once."""
        parts = {f"rank {number} raised": self.answers[number][1][1] for number in self.raised()}
        if self.unanswered():
            parts |= {f"rank {rank.number}: {'ended' if rank.number in self.answers else 'running'}": rank.stack()
                      for rank in self.ranks if rank.number not in self.dead}
        parts |= {f"printed by rank {rank.number}": rank.printed() for rank in self.ranks}
        parts["printed by mpiexec"] = self.job.mpiexec_output()
        shown = {}
        for title, text in parts.items():  # except for addresses, ranks have much in common
            shown.setdefault(re.sub("0x[0-9a-f]+", "", text), ([], text))[0].append(title)
        return kind(headline + "".join(section("; ".join(titles), text) for titles, text in shown.values()), ranks)


def spoken(ranks):
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class RankPool:
    """`size` rank processes for one program after another, started by the first run, and restarted if unusable."""

    def __init__(self, size=8):
        self.size, self.job = size, None

    def run(self, program, size, *args, timeout=120.0, grace=5.0, env=None, allow_errors=False, **kwargs):
        """Run `program(comm, *args, **kwargs)` on ranks 0 to `size` - 1; return the results, one per rank.

        comm is an mpi4py communicator of exactly these ranks, the same object for one size until a program fails.
        `program` is a function at the top level of a module; arguments and results are pickled. `env` holds for the
        run, None removes a variable.

        Raises RankError if the program raises; ranks not ending within another `grace` seconds count as hung. Raises
        RanksHung at the timeout, and RankDied as soon as a rank's process is gone. LeftBehind names changes left in a
        process; as far as possible, the process is restored. With `allow_errors` an exception is a result: the list has
        ("ok", value) or ("error", exception) for each rank, with a RuntimeError for exceptions that cannot be pickled.
        """
        __tracebackhide__ = True
        if not 1 <= size <= self.size:
            raise ValueError(f"the pool has {self.size} ranks, not {size}")
        where = reference(program)
        job = self.job = self.job or Job(self.size)
        run = Run(job, f"{where['module']}.{where['program']}", size)
        try:
            run.send({**where, "path": sys.path, "size": size, "generation": job.generation, "environment": env or {},
                      "arguments": pickle.dumps((args, kwargs))})
            run.collect(timeout, None if allow_errors else grace)
            error = run.failure(timeout, allow_errors)
        except BaseException:  # KeyboardInterrupt too: the state of the ranks is unknown
            self.close(in_order=False)
            raise
        if run.dead or run.unanswered():  # the next run must not meet a busy rank
            self.close(in_order=False)
        elif job.copies > MOST_COPIES:  # nor an MPI without contexts for communicators
            self.close()
        elif run.raised():  # nor a message of this run
            job.generation += 1
        if error:
            raise error
        outcomes = run.outcomes()
        return outcomes if allow_errors else [value for _, value in outcomes]

    def close(self, in_order=True):
        """End all ranks. The pool can be used again."""
        job, self.job = self.job, None
        if job is not None:
            job.end(in_order)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def reference(program):
    """Return module, file and name of the program, for the ranks; raise TypeError if ranks could not find it."""
    name = getattr(program, "__qualname__", "<nameless>")
    module = sys.modules.get(getattr(program, "__module__", None))
    if "<" in name or getattr(module, "__file__", None) is None or module.__name__ == "__main__":
        raise TypeError(f"{program!r} must be at the top level of an importable module: ranks get it by name")
    return {"module": module.__name__, "file": os.path.abspath(module.__file__), "program": name}
