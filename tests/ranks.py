"""Programs on real ranks: a pool of rank processes for tests, and jobs of their own for tests that crash them.

    pool = RankPool()
    pool.run(program, 4, 10, timeout=5)     # [program(comm, 10) of rank 0, ..., of rank 3]
    launch(2, sys.executable, "script.py")  # a job by itself, as a user would start it

Starting ranks costs a second, a program on ranks that are already there a millisecond, so one pool serves a whole test
session. Every run ends: a program that hangs, dies or raises ends with an error that says where each rank was, and the
next run gets new ranks where these are spoilt. This process never imports mpi4py; `rank_worker.py` is what ranks run.
"""

import contextlib
import functools
import importlib.util
import os
import pickle
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

from rank_worker import PROTOCOL, receive_message, send_message

INSTALL_HINT = "no mpiexec beside this Python or on the PATH: pip install gpucoll[mpich]"
WORKER = Path(__file__).with_name("rank_worker.py")
JOB_MARK = "RANKS_JOB"  # in the environment of every process of a job: whoever has it belongs to the job
TRANSFER_SECONDS = 30.0  # for one message to or from a rank that is ready for it
STACK_SECONDS = 5.0  # for all ranks to write their stacks; a stopped process never does
TERMINATE_SECONDS = 3.0  # for mpiexec to clean up after itself when told to end
GENERATIONS = 200  # a failed run costs a communicator that is never freed, and MPICH has 2,048 of them
TAIL = 4000  # characters of output shown per rank


# Errors


class PoolError(Exception):
    """A program on the pool failed. The message tells all; `exceptions` maps each rank that raised to its exception."""

    def __init__(self, message, ranks=(), exceptions=None):
        super().__init__(message)
        self.ranks = list(ranks)
        self.exceptions = exceptions or {}


class RankError(PoolError):
    """The program raised on `ranks`."""


class RanksHung(PoolError):
    """The program did not come to an end on `ranks` in time."""


class RankDied(PoolError):
    """The processes of `ranks` ended while the program ran, the first one first."""


class StartFailed(PoolError):
    """The ranks did not start."""


class JobTimeout(Exception):
    """A launched job did not end in time; the message holds what it had written."""


class RankException(Exception):
    """Stands for an exception of a rank that cannot be pickled: `type_name`, text and `rank_traceback` remain."""

    def __init__(self, type_name, text):
        super().__init__(text)
        self.type_name = type_name


# The launcher


@dataclass(frozen=True)
class Vendor:
    """How one kind of mpiexec wants to be called; `mark` occurs in its `--version`."""

    mark: str
    options: tuple = ()
    keep_survivors: tuple = ()  # without these, ranks are killed with the first that dies and show no stacks
    environment: dict = field(default_factory=dict)  # waiting ranks yield: there are more of them than cores


VENDORS = (
    Vendor(
        "Open MPI",
        options=("--oversubscribe", "--allow-run-as-root"),
        keep_survivors=("--continuous",),
        environment={"OMPI_MCA_mpi_yield_when_idle": "1"},
    ),
    Vendor(  # MPICH
        "HYDRA",
        keep_survivors=("-disable-auto-cleanup",),
        environment={"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"},  # 8 ranks on 2 cores: an allreduce in 3 ms instead of 7
    ),
    Vendor(""),
)


@dataclass(frozen=True)
class Launcher:
    path: str
    version: str
    vendor: Vendor

    def command(self, ranks, argv, options=()):
        return [self.path, "-n", str(ranks), *self.vendor.options, *options, *map(os.fspath, argv)]


@functools.cache
def find_launcher():
    """The mpiexec beside this Python, else the one on the PATH, else None."""
    beside = Path(sys.executable).with_name("mpiexec")
    path = str(beside) if beside.exists() else shutil.which("mpiexec")
    if path is None:
        return None
    shown = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    return Launcher(path, version_line(shown), next(vendor for vendor in VENDORS if vendor.mark in shown))


def version_line(shown):
    """The first line of `mpiexec --version`; of MPICH's, which has only a title there, the second one too."""
    lines = shown.split("\n")
    lines = lines[:2] if lines[0].endswith(":") else lines[:1]
    return " ".join(" ".join(lines).split())


def require_launcher():
    launcher = find_launcher()
    if launcher is None:
        raise StartFailed(INSTALL_HINT)
    return launcher


# Jobs: an mpiexec and all that it started


def start_job(command, token, output, errors=subprocess.STDOUT, environment=None, cwd=None):
    """An mpiexec in a process group of its own; all of its processes carry the token in their environment."""
    variables = {**os.environ, **require_launcher().vendor.environment, **(environment or {}), JOB_MARK: token}
    variables = {name: value for name, value in variables.items() if value is not None}
    return subprocess.Popen(
        command,
        env=variables,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        start_new_session=True,
    )


def end_job(process, token):
    """No process of the job is left, and mpiexec had its chance to remove its own files."""
    if process.poll() is None:
        process.terminate()
        ends_within(process, TERMINATE_SECONDS)
    while members := job_members(token):
        for member in members:
            kill_and_wait(member)
    if process.poll() is None:
        process.kill()
        process.wait()


def job_members(token):
    """Handles of a job's living processes, by their token: ranks leave mpiexec's group and session, and may outlive it.

    Only Linux shows environments; elsewhere mpiexec is trusted to end its ranks.
    """
    return [handle for place in Path("/proc").glob("[0-9]*") if (handle := handle_of_member(place, token)) is not None]


def handle_of_member(place, token):
    """A handle of the process described in this folder of /proc, None if it is not of the job."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(int(place.name))  # the handle before the look: a pid may change hands in between
        with contextlib.suppress(OSError):
            if f"{JOB_MARK}={token}\0".encode() in (place / "environ").read_bytes():
                return handle
        os.close(handle)
    return None


def kill_and_wait(handle):
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        wait([handle], TERMINATE_SECONDS)
    os.close(handle)


def launch(ranks, *argv, timeout=60.0, env=None, cwd=None, options=()):
    """The `subprocess.CompletedProcess` of `mpiexec -n ranks argv`, output as text; none of its processes is left.

    The ranks import the same gpucoll as this process. `env` adds variables (None removes one), `options` go to mpiexec.
    JobTimeout, with the output so far, when it does not end in time.
    """
    __tracebackhide__ = True
    return run_job(require_launcher().command(ranks, argv, options), timeout, env, cwd)


def run_job(command, timeout, env=None, cwd=None):
    """The `subprocess.CompletedProcess` of a command that starts ranks; nothing of it is left behind."""
    token = uuid.uuid4().hex
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # a pipe could stay open in an orphan
        process = start_job(command, token, output, errors, {**same_gpucoll(), **(env or {})}, cwd)
        try:
            in_time = ends_within(process, timeout)
        finally:
            end_job(process, token)
        result = subprocess.CompletedProcess(command, process.returncode, whole(output), whole(errors))
    if not in_time:
        raise JobTimeout(timeout_message(result, timeout))
    return result


def ends_within(process, seconds):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.poll() is not None


def timeout_message(result, timeout):
    said = section("stdout", result.stdout) + section("stderr", result.stderr)
    return f"no end within {timeout:g} s: {' '.join(result.args)}{said}"


def whole(file):
    file.seek(0)
    return file.read().decode(errors="replace")


def same_gpucoll():
    """The variables that let another Python import the gpucoll that this one imports."""
    found = importlib.util.find_spec("gpucoll")
    if found is None or found.origin is None:
        return {}
    places = [str(Path(found.origin).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(places)}


# The ranks of the pool


class Rank:
    """One worker process as the parent sees it: its number, its pid, its two connections and its two files."""

    def __init__(self, number, pid, folder, channel, bell):
        self.number, self.pid, self.channel, self.bell = number, pid, channel, bell
        self.output, self.stacks = folder / f"rank{number}.output", folder / f"rank{number}.stacks"
        self.before = 0

    def mark_output(self):
        """From here on, `printed` is what the rank prints from here on."""
        self.before = self.output.stat().st_size

    def printed(self):
        return self.output.read_bytes()[self.before :].decode(errors="replace")

    def ask_for_stacks(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)

    def stack_text(self):
        """The dump without the thread that watches the parent, or why there is none."""
        threads = self.stacks.read_text().split("\n\n")
        shown = [thread for thread in threads if " in end_with_parent\n" not in thread + "\n"]
        return "\n\n".join(shown).strip() or f"no stack; the process {self.process_state()}"

    def process_state(self):
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            return "is gone"
        return next("is in state " + line.split(maxsplit=1)[1] for line in lines if line.startswith("State:"))


class Job:
    """The rank processes of a pool, from their start to their end: every one connected and waiting for an order."""

    def __init__(self, size, seconds):
        self.size, self.token, self.launcher = size, uuid.uuid4().hex, require_launcher()
        self.loaded = set()  # files whose modules every rank has
        self.generation = 0  # the number of runs that failed: see `communicator_for` in rank_worker.py
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))  # mode 0700: only this user can connect
        self.listener = socket.socket(socket.AF_UNIX)
        self.connections = [self.listener]
        self.selector = selectors.DefaultSelector()
        self.process = self.start()
        try:
            self.ranks = self.greet(time.monotonic() + seconds)
        except BaseException:
            self.end()
            raise

    def start(self):
        self.listener.bind(str(self.folder / "parent"))
        self.listener.listen(2 * self.size)
        argv = [sys.executable, WORKER, self.folder / "parent"]
        command = self.launcher.command(self.size, argv, self.launcher.vendor.keep_survivors)
        variables = {
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",  # what a rank has printed survives its death
            "TMPDIR": str(self.folder),  # MPI's own files go with the job, even if it is killed
        }
        with open(self.folder / "mpiexec.output", "wb") as output:
            return start_job(command, self.token, output, environment=variables)

    def greet(self, deadline):
        """The ranks in order, once both connections of each have said who they are."""
        met = {}
        while len(met) < 2 * self.size:
            kind, number, world, pid, connection = self.next_greeting(deadline)
            if world != self.size:
                raise StartFailed(f"{self.size} ranks see a world of {world}: mpiexec and the MPI of mpi4py differ")
            met[number, kind] = connection, pid
        return [self.rank(number, *met[number, "channel"], met[number, "bell"][0]) for number in range(self.size)]

    def rank(self, number, channel, pid, bell):
        rank = Rank(number, pid, self.folder, channel, bell)
        self.selector.register(channel, selectors.EVENT_READ, rank)
        return rank

    def next_greeting(self, deadline):
        self.listener.settimeout(0.2)  # how soon the end of mpiexec is noticed
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(TimeoutError, EOFError):
                connection, _ = self.listener.accept()
                self.connections.append(connection)
                connection.settimeout(TRANSFER_SECONDS)
                return (*pickle.loads(receive_message(connection)), connection)
        state = "took too long" if self.process.poll() is None else f"ended with exit code {self.process.returncode}"
        said = section("printed by mpiexec", self.mpiexec_output())
        raise StartFailed(f"mpiexec {state} before {self.size} ranks were there{said}")

    def mpiexec_output(self):
        return (self.folder / "mpiexec.output").read_text(errors="replace")

    def write_stacks(self, ranks):
        """Every rank of these that could has written its stacks by now; waits for each one's bell, not for long."""
        deadline = time.monotonic() + STACK_SECONDS
        waiting = {rank.bell for rank in ranks}
        for rank in ranks:
            rank.ask_for_stacks()
        while waiting and time.monotonic() < deadline:
            waiting.difference_update(wait(waiting, deadline - time.monotonic()))

    def end(self):
        """No rank and no file is left."""
        end_job(self.process, self.token)
        self.selector.close()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def end_in_order(self, seconds):
        """The ranks left their loop and finalised MPI if that took no longer; in any case none is left."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            for rank in self.ranks:
                send_message(rank.channel, b"")
            self.process.wait(seconds)
        self.end()


# One run


class Run:
    """One program on the first `size` ranks of a job: who has answered what, and the story of it when it fails."""

    def __init__(self, job, name, size, allow_errors=False):
        self.job, self.name, self.size, self.allow_errors = job, name, size, allow_errors
        self.ranks = job.ranks[:size]
        self.answers = {}  # rank number: ("ok", pickled value) or ("error", description)
        self.dead = []  # rank numbers, the first to die first

    def send(self, order):
        """Every rank has the order, as far as it lives."""
        request = pickle.dumps(order, PROTOCOL)
        for rank in self.ranks:
            rank.mark_output()
        for rank in self.ranks:
            with contextlib.suppress(ConnectionError):  # dead: collect will find it so
                send_message(rank.channel, request)

    def collect(self, timeout, grace):
        """Gathers answers until all are there, a rank is dead, or time is up: soon, once a rank has raised."""
        limit = time.monotonic() + timeout
        while self.unanswered() and not self.dead:
            events = self.job.selector.select(limit - time.monotonic())
            if not events:
                return
            self.receive_all(events)
            if self.raised() and not self.allow_errors:
                limit = min(limit, time.monotonic() + grace)

    def receive_all(self, events):
        for rank in [key.data for key, _ in events if key.data.number not in self.dead]:
            try:
                self.answers[rank.number] = pickle.loads(receive_message(rank.channel))
            except (EOFError, ConnectionError):
                self.dead.append(rank.number)

    def unanswered(self):
        return [rank.number for rank in self.ranks if rank.number not in self.answers]

    def raised(self):
        return sorted(number for number, (state, _) in self.answers.items() if state == "error")

    def is_over(self):
        """Whether all ranks live and are ready for the next run."""
        return not self.dead and not self.unanswered()

    def outcomes(self):
        """For each rank ("ok", value) or ("error", exception)."""
        return [self.outcome(rank.number) for rank in self.ranks]

    def outcome(self, number):
        state, content = self.answers[number]
        return state, pickle.loads(content) if state == "ok" else revived(content)

    # How it failed. An error is made while the job still lives: stacks and output are in it.

    def failure(self, timeout):
        """The error to raise, None if there is none. A death explains what others raised, so it comes first."""
        if self.dead:
            return self.died()
        if self.raised() and not self.allow_errors:
            return self.failed()
        return self.hung(timeout) if self.unanswered() else None

    def died(self):
        self.job.write_stacks([rank for rank in self.ranks if rank.number not in self.dead])
        self.receive_all(self.job.selector.select(0))  # who died with it, as all do after MPI_Abort
        first = self.job.ranks[self.dead[0]]
        headline = (
            f"rank {first.number} (process {first.pid}) died in {self.name}: it ended without a Python exception, "
            f"as by os._exit, a signal or a crash"
        )
        if self.dead[1:]:
            headline += f"; {spoken(self.dead[1:])} died with it"
        return self.error(RankDied, headline, self.dead, stacks=True)

    def hung(self, timeout):
        self.job.write_stacks(self.ranks)
        late = self.unanswered()
        headline = f"{self.name} did not end within {timeout:g} s on {spoken(late)}"
        return self.error(RanksHung, headline, late, stacks=True)

    def failed(self):
        """The error for ranks that raised, with the stacks of all where others did not come to an end."""
        if self.unanswered():
            self.job.write_stacks(self.ranks)
        return self.error(RankError, self.raised_headline(), self.raised(), stacks=bool(self.unanswered()))

    def raised_headline(self):
        late = f"; {spoken(self.unanswered())} did not end after that" if self.unanswered() else ""
        return f"{self.name} raised on {spoken(self.raised())} of {self.size}{late}"

    def error(self, kind, headline, ranks, stacks):
        parts = [headline, self.tracebacks(), self.stacks() if stacks else "", self.outputs()]
        return kind("".join(parts), ranks, {number: self.outcome(number)[1] for number in self.raised()})

    def tracebacks(self):
        """The first traceback in full, then a line for each different one."""
        alike = grouped({number: self.answers[number][1]["traceback"] for number in self.raised()})
        lines = []
        for (first, *others), text in alike:
            lines.append(section(f"rank {first} raised", text) if not lines else self.raised_line(first))
            if others:
                lines.append(f"\n{spoken(others)}: the same traceback as rank {first}")
        return "".join(lines)

    def raised_line(self, number):
        return f"\nrank {number}: {self.answers[number][1]['text'].splitlines()[0]}"

    def stacks(self):
        """Every rank's state and stack, those first that have not ended."""
        parts = []
        for (first, *others), text in grouped({number: self.stack(number) for number in self.by_state()}):
            parts.append(section(f"rank {first}: {self.state(first)}", text))
            parts += [f"\n--- rank {number}: {self.state(number)}; the same stack as rank {first}" for number in others]
        return "".join(parts)

    def by_state(self):
        return sorted((rank.number for rank in self.ranks), key=lambda number: number in self.answers)

    def stack(self, number):
        return "" if number in self.dead else self.ranks[number].stack_text()

    def state(self, number):
        if number in self.dead:
            return "died"
        return {"ok": "finished", "error": "raised", None: "running"}[self.answers.get(number, (None,))[0]]

    def outputs(self):
        printed = [section(f"printed by rank {rank.number}", rank.printed()) for rank in self.ranks]
        return "".join([*printed, section("printed by mpiexec", self.job.mpiexec_output())])


def section(title, text):
    """The end of the text under a title; nothing for an empty text."""
    text = text.strip("\n")
    cut = f"[{len(text) - TAIL} characters left out] ..." if len(text) > TAIL else ""
    return f"\n\n--- {title} ---\n{cut}{text[-TAIL:]}\n" if text else ""


def grouped(texts):
    """[([numbers], text)]: numbers with the same text together, in the order given; addresses do not count."""
    groups = {}
    for number, text in texts.items():
        groups.setdefault(without_addresses(text), ([], text))[0].append(number)
    return list(groups.values())


def without_addresses(text):
    return " ".join(word for word in text.split(" ") if not word.startswith("0x"))


def spoken(ranks):
    """
    >>> spoken([3]), spoken([0, 1, 2])
    ('rank 3', 'ranks 0, 1, 2')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def revived(description):
    """The exception that a rank raised, with the traceback there as `rank_traceback`."""
    try:
        exception = pickle.loads(description["pickled"])
    except Exception:  # None, or of a class that this process cannot import
        exception = RankException(description["type"], description["text"])
    exception.rank_traceback = description["traceback"]
    return exception


# The pool


class RankPool:
    """`size` rank processes that run one program after another, started by the first run, and anew when spoilt."""

    def __init__(self, size=8, start_timeout=120.0):
        self.size, self.start_timeout = size, start_timeout
        self.job = None

    def run(self, program, size, *args, timeout=60.0, grace=5.0, env=None, allow_errors=False, **kwargs):
        """`program(comm, *args, **kwargs)` has run on ranks 0 to `size` - 1; its results, one per rank.

        comm is an mpi4py communicator of exactly these ranks, the same object for one size until a program fails.
        `program` is a function at the top level of a module; ranks import it, arguments and results are pickled. `env`
        holds for the run, None removes a variable. The timeout counts from when all ranks have imported the module.

        RankError where it raises; ranks that then do not end within `grace` seconds count as hung. RanksHung at the
        timeout, RankDied as soon as a rank's process is gone. With `allow_errors` an exception is a result like others:
        the list has ("ok", value) or ("error", exception) for each rank, and no grace applies.
        """
        __tracebackhide__ = True
        job, where = self.living_job(size), reference(program)
        self.load(job, where)
        order = {**where, "environment": env or {}, "arguments": pickle.dumps((args, kwargs), PROTOCOL)}
        outcomes = self.exchange(job, order, size, timeout, grace, allow_errors)
        return outcomes if allow_errors else [value for _, value in outcomes]

    def load(self, job, where):
        """All ranks have the program's module: imports are slow and must not count against the program's timeout."""
        __tracebackhide__ = True
        if where["file"] not in job.loaded:
            self.exchange(job, {**where, "program": None}, self.size, self.start_timeout, self.start_timeout)
            job.loaded.add(where["file"])

    def exchange(self, job, order, size, timeout, grace, allow_errors=False):
        """The outcomes of an order on all its ranks, or its error; ranks not ready for the next order are gone."""
        __tracebackhide__ = True
        run = Run(job, f"{order['module']}.{order['program'] or ' (import)'}", size, allow_errors)
        try:
            with contextlib.suppress(TimeoutError):  # a rank stopped in the middle of a message: it counts as hung
                run.send({**order, "path": sys.path, "size": size, "generation": job.generation})
                run.collect(timeout, grace)
            error = run.failure(timeout)
        except BaseException:  # KeyboardInterrupt too: nobody knows what the ranks are doing
            self.kill()
            raise
        self.look_after(run)
        if error:
            raise error
        return run.outcomes()

    def look_after(self, run):
        """The next run meets no rank that is still busy, and no message of a run that failed."""
        if not run.is_over():
            self.kill()
        elif run.raised():
            run.job.generation += 1

    def living_job(self, size):
        if not 1 <= size <= self.size:
            raise ValueError(f"the pool has {self.size} ranks, not {size}")
        if self.job is not None and self.job.generation >= GENERATIONS:
            self.close()
        if self.job is None:
            self.job = Job(self.size, self.start_timeout)
        return self.job

    def kill(self):
        """No rank is left; the next run starts new ones."""
        job, self.job = self.job, None
        if job is not None:
            job.end()

    def close(self, timeout=10.0):
        """No rank is left, and MPI was finalised if that took no longer than `timeout`. The pool can be used again."""
        job, self.job = self.job, None
        if job is not None:
            job.end_in_order(timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def reference(program):
    """Where the ranks find the program: module, file and name in it. TypeError where they could not."""
    name = getattr(program, "__qualname__", "<nameless>")
    module = sys.modules.get(getattr(program, "__module__", None))
    if "<" in name or getattr(module, "__file__", None) is None or module.__name__ == "__main__":
        raise TypeError(f"{program!r} must be at the top level of an importable module: ranks get it by name")
    return {"module": module.__name__, "file": os.path.abspath(module.__file__), "program": name}
