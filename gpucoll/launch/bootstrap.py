"""Options of a communicator, the start of MPI, the meeting of all ranks, and this rank's place (node, local rank).

Importing this module starts nothing: MPI starts with the first `init` or `from_mpi`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import numbers
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy

from gpucoll.core import output, parsing
from gpucoll.core.dtypes import is_whole
from gpucoll.device.nccl_settings import checked
from gpucoll.errors import ArgumentError, CollectiveTimeout, UsageError, listed, nearest
from gpucoll.executors.engine.extension import library
from gpucoll.launch.descent import mark_rank, refuse_children, refuse_without_connection
from gpucoll.launch.launchers import SLURM, SRUN, TORCHRUN, free_port, local_rank, started, vendor_of
from gpucoll.launch.places import StorePlace, announced, store_place
from gpucoll.launch.watchdog import starting
from gpucoll.progress.operations import Operation, in_thread
from gpucoll.progress.waits import Progress
from gpucoll.transport.process import PROCESS
from gpucoll.transport.rendezvous import RollCall
from gpucoll.version import __version__

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
# Seconds before an abort, so that the launcher forwards the rank's last output: an abort overtakes the output.
FORWARDING = 0.2
CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {"check": ("GC-OPTION", ("full", "deferred", "off")),
           "executor": ("GC-EXECUTOR", ("mpi", "ucx", "shared", "nccl", "peer", "native"))}


class GivenOptions(TypedDict, total=False):
    """The keyword options of `gpucoll.init` and related functions."""

    timeout: float | None
    check: str | None
    executor: str | None
    deterministic: bool | Literal["exact"]
    device: int | str | None
    nccl: Mapping[str, int | str] | None


class Options(NamedTuple):
    """The checked options of a communicator; see `gpucoll.init`.

    `prefer` is the value of GPUCOLL_ALGO; `device` is "emulated", a CUDA ordinal, or None; `nccl` has NCCL's settings.
    """

    timeout: float = 300.0
    check: str | None = None
    executor: str | None = None
    prefer: str = ""
    deterministic: bool | Literal["exact"] = False
    device: str | int | None = None
    nccl: dict[str, Any] | None = None

    @property
    def emulated(self) -> bool:
        """Whether host arrays are handled by the emulated device."""
        return self.device == "emulated"

    @property
    def ordinal(self) -> int | None:
        """The CUDA ordinal given by the user, else None."""
        return None if isinstance(self.device, str) else self.device


def options(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Return the options: `given` values, else the environment's, else the defaults.

    None counts as not given; `deterministic` has no value None.

    >>> options({"timeout": 5}, {"GPUCOLL_TIMEOUT": "9", "GPUCOLL_CHECK": "off"})
    Options(timeout=5.0, check='off', executor=None, prefer='', deterministic=False, device=None, nccl=None)
    """
    library()  # an error here, before this rank meets the others, if there is no engine
    unknown = set(given) - GivenOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no option is named {sorted(unknown)[0]!r}")
    said = {name: environment.get(f"GPUCOLL_{name.upper()}") or None for name in ("timeout", "device", *CHOICES)}
    said |= {name: value for name, value in given.items() if value is not None and name in said}
    for name, (code, known) in CHOICES.items():
        if said[name] not in (None, *known):
            raise ArgumentError(f"{name}={said[name]!r} is not known{nearest(said[name], known)}", code=code)
    timeout = Options().timeout if said["timeout"] is None else seconds_of(said["timeout"])
    text = environment.get("GPUCOLL_DETERMINISTIC") or "0"
    deterministic = given.get("deterministic", {"0": False, "1": True}.get(text, text))
    is_exact = isinstance(deterministic, str) and deterministic == "exact"
    if not is_exact and not isinstance(deterministic, bool | numpy.bool_):
        raise UsageError(f"deterministic={deterministic!r} is neither True nor False nor 'exact'; the environment has "
                         "0, 1 or exact", code="GC-OPTION")
    return Options(timeout, said["check"], said["executor"], environment.get("GPUCOLL_ALGO", ""),
                   "exact" if is_exact else bool(deterministic), _device(said["device"]), checked(given.get("nccl")))


def _device(device: Any) -> str | int | None:
    """Return the device given by the user: "emulated", a CUDA ordinal, or None; ArgumentError for anything else."""
    if device is None or (isinstance(device, str) and device == "emulated"):
        return device
    text = str(device) if is_whole(device) or isinstance(device, str) else ""
    if not text.isdecimal():
        raise ArgumentError(f"device={device!r} is neither 'emulated' nor a CUDA ordinal, 0 or more", code="GC-DEVICE")
    return int(text)


def seconds_of(value: Any) -> float:
    """Return a timeout as a number of seconds; ArgumentError unless positive."""
    try:
        seconds = float(value) if isinstance(value, numbers.Real | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        seconds = 0.0
    # In this form, the comparison also rejects NaN.
    if not seconds > 0:
        raise ArgumentError(f"timeout={value!r} is not a positive number of seconds", code="GC-TIMEOUT")
    return seconds


class RankTopology(NamedTuple):
    """A rank's place: `nodes` is the node number of every rank, where nodes are numbered in order of first ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: tuple[int, ...]

    @property
    def node(self) -> int:
        """The number of this rank's node."""
        return self.nodes[self.rank]

    @classmethod
    def of(cls, rank: int, hosts: Sequence[object]) -> RankTopology:
        """Return the place of `rank`, given a name of the node of every rank.

        >>> RankTopology.of(2, ["a", "b", "a"])
        RankTopology(rank=2, size=3, local_rank=1, local_size=2, nodes=(0, 1, 0))
        """
        order = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
        if len(order) == 1:  # also quick for thousands of ranks
            return cls(rank, len(hosts), rank, len(hosts), (0,) * len(hosts))
        nodes = tuple(order[host] for host in hosts)
        return cls(rank, len(hosts), nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]), nodes)


def start_mpi(timeout: float) -> None:
    """Start MPI, unless mpi4py has already; raise ImportError or RuntimeError without an MPI.

    If the start takes longer than `timeout` seconds, for example because a rank is missing, the process ends. Raises
    UsageError in the child of a rank: MPI's start would end the child, by errors of C.
    """
    if "mpi4py.MPI" not in sys.modules:
        refuse_children()
        if importlib.util.find_spec("mpi4py") is not None:
            refuse_without_connection()
    with contextlib.nullcontext() if "mpi4py.MPI" in sys.modules else start_deadline(timeout):
        from mpi4py import MPI  # noqa: F401
    _mark()


def _mark() -> None:
    """Mark this process for its descendants, if a launcher of MPI has started it."""
    process = started()
    if process is not None:
        mark_rank(process.rank)


def start_deadline(timeout: float) -> contextlib.AbstractContextManager[None]:
    """Return a context for the start of MPI among several ranks: after `timeout` seconds the process ends."""
    # MPI_Init waits for all ranks and cannot be interrupted, so several ranks need the watchdog (`starting`).
    process = started()
    if process is None or process.size == 1:
        return contextlib.nullcontext()
    return starting(timeout, process.launcher.rank, process.size, process.local_size)


# Returns the transport for the next world of the calling rank, see `gpucoll.internal.default_transport`; None: ranks
# meet by MPI or a store.
default_transport: Callable[[], Any] | None = None


def job(timeout: float, given: StorePlace | None = None, environment: Mapping[str, str] = os.environ) -> Any:
    """Return where the ranks of `gpucoll.init` meet; it has a `rank` and a `size`.

    It is the transport of `default_transport`, the `given` place, a place in a store, or COMM_WORLD. A lone process
    without MPI gets its own store. MPI starts within `timeout` seconds, or the process ends. Raises UsageError if
    several ranks were started and have no way to meet, and in the child of a rank.
    """
    if default_transport is not None:
        return default_transport()
    if given is not None:
        return given
    refuse_children()
    if (place := store_place(environment)) is not None:
        mark_rank(place.rank)
        return announced(place, timeout, environment)
    try:
        start_mpi(timeout)
    except (ImportError, RuntimeError) as error:  # RuntimeError if mpi4py finds no MPI library
        process = started(environment)
        if process is None or process.size == 1:
            return StorePlace(0, 1, "")
        raise UsageError(f"{process.launcher.name} started {process.size} ranks, which need MPI, but mpi4py cannot "
                         f"load one ({error}): pip install mpi4py 'gpucoll[mpich]', or without MPI gpucoll run "
                         f"--nnodes, on one host gpucoll run --standalone -n {process.size}",
                         code="GC-LAUNCHER") from None
    return world()


def world() -> MPI.Intracomm:
    """Return COMM_WORLD; raise UsageError if the launcher started several ranks and MPI sees only this rank."""
    from mpi4py import MPI

    process = started()
    if MPI.COMM_WORLD.size == 1 and process is not None and process.size > 1:
        version = MPI.Get_library_version()
        vendor = vendor_of(version)
        cure = f"srun {SRUN[vendor.family]}, or with " if vendor and process.launcher is SLURM else ""
        raise UsageError(f"{process.launcher.name} started {process.size} ranks, but mpi4py uses "
                         f"{version.splitlines()[0].strip()}, so each rank sees only itself; launch with {cure}that "
                         "library's own mpiexec, or install the launcher's MPI", code="GC-LAUNCHER")
    return MPI.COMM_WORLD


def meet(comm: Any, timeout: float, call: Callable[[], T], waits: Progress | None = None) -> T:
    """Wait for all ranks of `comm`, then return the result of `call`, made of MPI calls without a deadline.

    Raises CollectiveTimeout after `timeout` seconds, naming the ranks that are missing or stopped. If MPI was started
    for a single thread, `call` itself has no deadline. From here on, an uncaught exception on a rank ends all ranks,
    and a crash prints the stack. `waits` are those of a communicator that exists already: its hooks end the meeting,
    and a failed meeting revokes the communicator.
    """
    if comm.size > 1:
        end_together()
    if not hasattr(comm, "Iprobe"):
        if waits is None:
            return call()  # the ranks of a store: all their calls have a deadline
        with _blaming(waits, comm.missing):
            return in_thread(waits.run, call, MEETING)
    from mpi4py import MPI

    roll = RollCall(comm)
    with _blaming(waits or Progress(timeout), roll.missing, roll.answer) as waiting:
        try:
            waiting.run(_all_come(comm), MEETING)
        except CollectiveTimeout as late:
            if waits is not None:
                raise
            who = f"ranks {listed(late.ranks)}" if late.ranks else "the other ranks"
            raise CollectiveTimeout(f"init: waited {timeout:g} s for {who} to make this communicator",
                                    ranks=late.ranks) from late
        # Run `call` in a helper thread, while this thread watches the deadline and answers roll calls. Both call MPI,
        # so this needs MPI_THREAD_MULTIPLE.
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            return call()
        return in_thread(waiting.run, call, "init" if waits is None else MEETING)


MEETING = "a meeting of all ranks"


@contextlib.contextmanager
def _blaming(waits: Progress, find: Callable[[], tuple[int, ...]], *hooks: Callable[[], object]) -> Iterator[Progress]:
    """Let late waits name the missing ranks, as `find` finds them; run these hooks meanwhile."""
    before = waits.blame

    def blame() -> tuple[str, tuple[int, ...]]:
        # The meeting has failed, and a missing rank may never come to MPI's end.
        PROCESS.limits.append(FINALIZE)
        missing = find()
        return (f"ranks {listed(missing)}", missing) if missing else before()

    waits.hooks.extend(hooks)
    waits.blame = blame
    try:
        yield waits
    finally:
        for hook in hooks:
            waits.hooks.remove(hook)
        waits.blame = before


def _all_come(comm: Any) -> Operation:
    # A rank may enter the first barrier and be taken out of the wait by a signal's exception.
    for _ in range(2):  # the second time shows that every rank came through the first
        yield comm.Ibarrier().Test


FINALIZE = 5.0  # seconds for MPI's end after a rank has failed: the rank may still come to MPI's end
# Seconds for MPI's end after a process has died: MPI would wait for ever, and only the last messages have to leave.
DEATH = 1.0


def end_together() -> None:
    """Install hooks, once: an uncaught exception ends all ranks, if the launcher can, and a crash prints the stack."""
    PROCESS.end_as_child()
    # Only in place of Python's own hook: a hook of the user's stays.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _abort_all
        threading.excepthook = _abort_by_thread
        if not faulthandler.is_enabled():
            with contextlib.suppress(Exception):  # standard error may be no file
                faulthandler.enable()


def check_alike(comm: Any, wanted: Options) -> None:
    """Raise UsageError, on every rank, if ranks differ in options or versions that decide how a call is carried out.

    A collective call.
    """
    # Every entry affects how a call is carried out: ranks that differ could exchange different messages and wait for
    # each other until the deadline.
    everyone = comm.allgather({"executor": wanted.executor, "GPUCOLL_ALGO": wanted.prefer, "check": wanted.check,
                               "GPUCOLL_DEVICE=emulated": wanted.emulated, "deterministic": wanted.deterministic,
                               "GPUCOLL_DUMP_DIR": bool(os.environ.get("GPUCOLL_DUMP_DIR")),
                               "nccl": wanted.nccl,
                               "the version of gpucoll": __version__,
                               "the major version of NumPy": numpy.__version__.partition(".")[0]})
    for name, first in everyone[0].items():
        differ = tuple(rank for rank, one in enumerate(everyone) if one[name] != first)
        if differ:
            raise UsageError(f"init: {name} is {first!r} on rank 0 and {everyone[differ[0]][name]!r} on ranks "
                             f"{listed(differ)}; give all ranks the same options, environment and packages",
                             code="GC-OPTION", ranks=differ)


def check_process() -> None:
    """Raise UsageError in the child of a fork if the parent had started MPI: the child cannot use MPI."""
    if PROCESS.lost_mpi:
        raise UsageError("MPI was started by the parent of this process; a forked child cannot use MPI: start ranks by "
                         "mpiexec, or children by spawn", code="GC-FORK")
    _mark()


def abort(mpi: Any) -> None:
    """End all ranks with status 1, after a pause for this rank's last output; `mpi` is the module `mpi4py.MPI`."""
    try:
        time.sleep(FORWARDING)
    finally:  # also where a signal ends the pause
        mpi.COMM_WORLD.Abort(1)


def _abort_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception and end the whole job: the other ranks would wait for this rank."""
    MPI = sys.modules.get("mpi4py.MPI")  # not imported here: ranks of another launcher run without MPI
    lives = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()
    given = os.environ.get("RANK", "0")
    rank = MPI.COMM_WORLD.rank if MPI and lives and not on_abort else given
    try:
        with contextlib.ExitStack() as launcher:
            for enter in on_abort:
                launcher.enter_context(enter(error))
            _write_error_file(kind, error, trace)
            # torch's own hook, around this hook, captures `sys.stderr`.
            output.say(f"rank {rank} has ended by an exception that nobody caught, and all ranks with it:\n"
                       + parsing.text_of(kind, error, trace), sys.__stderr__)
    finally:  # whatever happens above
        if MPI and lives:
            abort(MPI)


def _write_error_file(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write an uncaught exception to torchrun's file, for torchrun's report, unless the program has written one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    more = {"py_callstack": parsing.text_of(kind, error, trace), "timestamp": str(int(time.time()))}
    words = kind.__name__
    with contextlib.suppress(Exception):  # `str` of an error is the program's code
        words = f"{words}: {error}"
    content = json.dumps({"message": {"message": words, "extraInfo": more}})
    with contextlib.suppress(OSError), open(path, "x") as file:
        try:
            file.write(content)
            file.flush()
        except OSError:  # a full disk: torchrun could not read a part
            os.unlink(path)
            raise


# Contexts around the printing of an uncaught exception, set by a launcher other than MPI's. On entry they wait until
# this rank may print (only one rank does), on exit they end the job.
on_abort: list[Callable[[BaseException], contextlib.AbstractContextManager[None]]] = []


def _abort_by_thread(given: threading.ExceptHookArgs) -> None:
    # SystemExit ends only the thread, as in Python's own hook.
    if given.exc_type is not SystemExit:
        _abort_all(given.exc_type, given.exc_value or given.exc_type(), given.exc_traceback)


def place(comm: MPI.Intracomm) -> RankTopology:
    from mpi4py import MPI

    # MPI knows the ranks with common memory. The first rank of each node serves as the node's name.
    local = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    firsts = comm.allgather(local.bcast(comm.rank))
    local.Free()
    return RankTopology.of(comm.rank, firsts)


def set_variables(place: RankTopology, bcast: Callable[[Any], Any]) -> list[str]:
    """Add torchrun's variables to the environment, if missing; return the names added. A collective call."""
    address = "127.0.0.1" if max(place.nodes) == 0 else socket.gethostname()
    # All ranks need the same address and port, chosen by rank 0: only there is the port known to be free.
    first = bcast({"MASTER_ADDR": address, "MASTER_PORT": os.environ.get("MASTER_PORT") or str(free_port())})
    wanted = {**dict(zip(TORCHRUN, place[:4], strict=True)), **first}
    missing = {name: str(value) for name, value in wanted.items() if name not in os.environ}
    os.environ.update(missing)
    return [*missing]


def gpu_index(place: RankTopology) -> int:
    """Return the number that selects a GPU of the host: the launcher's local rank, else the communicator's.

    The launcher's number comes first, because `place` may belong to a part of the ranks, numbered anew.
    """
    given = local_rank()
    return place.local_rank if given is None else given
