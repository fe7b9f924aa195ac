"""Options, and the place of this rank: world, node and local rank, found by mpi4py when first asked.

Importing this starts nothing: MPI begins with the first `init` or `from_mpi`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import numbers
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

import numpy

from gpucoll.core import parsing
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, CollectiveTimeout, UsageError, listed, nearest
from gpucoll.launch.launchers import SLURM, SRUN, TOKEN, free_port, local_rank, started, torchrun_variables, vendor_of
from gpucoll.launch.watchdog import starting
from gpucoll.progress.operations import beside
from gpucoll.progress.waits import Waits
from gpucoll.transport.rendezvous import RollCall, wait_for_all
from gpucoll.version import __version__

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
FORWARDING = 0.2  # seconds that launchers have to pass on what a rank wrote last: an abort overtakes it
CHOICES = {"check": ("GC-CHECK", ("full", "deferred", "off")),
           "executor": ("GC-EXECUTOR", ("mpi", "shared", "nccl", "peer", "native"))}


class GivenOptions(TypedDict, total=False):
    """What `gpucoll.init` and its like take."""

    timeout: float | None
    check: str | None
    executor: str | None
    deterministic: bool
    device: int | str | None


class Options(NamedTuple):
    """How a communicator behaves; see `gpucoll.init`.

    `prefer` is GPUCOLL_ALGO; `device` is "emulated", a CUDA ordinal, or None.
    """

    timeout: float = 300.0
    check: str | None = None
    executor: str | None = None
    prefer: str = ""
    deterministic: bool = False
    device: str | int | None = None

    @property
    def emulated(self) -> bool:
        """Whether arrays on the host take the emulated device."""
        return self.device == "emulated"

    @property
    def ordinal(self) -> int | None:
        """The CUDA ordinal that was named."""
        return None if isinstance(self.device, str) else self.device


def options(given: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Return what was `given`, else what the environment says, else the defaults; None is not given.

    >>> options({"timeout": 5}, {"GPUCOLL_TIMEOUT": "9", "GPUCOLL_CHECK": "off"})
    Options(timeout=5.0, check='off', executor=None, prefer='', deterministic=False, device=None)
    """
    unknown = set(given) - GivenOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"no option is named {sorted(unknown)[0]!r}")
    said = {name: environment.get(f"GPUCOLL_{name.upper()}") or None for name in ("timeout", "device", *CHOICES)}
    said |= {name: value for name, value in given.items() if value is not None and name in said}
    for name, (code, known) in CHOICES.items():
        if said[name] not in (None, *known):
            raise ArgumentError(f"{name}={said[name]!r} is not known{nearest(said[name], known)}", code=code)
    timeout = Options().timeout if said["timeout"] is None else _seconds(said["timeout"])
    deterministic = given.get("deterministic", False)
    if not isinstance(deterministic, bool | numpy.bool_):
        raise UsageError(f"deterministic={deterministic!r} is neither True nor False", code="GC-OPTION")
    return Options(timeout, said["check"], said["executor"], environment.get("GPUCOLL_ALGO", ""),
                   bool(deterministic), _device(said["device"]))


def _device(device: Any) -> str | int | None:
    """Return the device that the user names: "emulated", a CUDA ordinal, or None."""
    if device is None or (isinstance(device, str) and device == "emulated"):
        return device
    text = str(device) if is_whole(device) or isinstance(device, str) else ""
    if not text.isdecimal():
        raise ArgumentError(f"device={device!r} is neither 'emulated' nor a CUDA ordinal, 0 or more", code="GC-DEVICE")
    return int(text)


def _seconds(value: Any) -> float:
    try:
        seconds = float(value) if isinstance(value, numbers.Real | str) and not isinstance(value, bool) else 0.0
    except (ValueError, OverflowError):
        seconds = 0.0
    if not seconds > 0:
        raise ArgumentError(f"timeout={value!r} is not a positive number of seconds", code="GC-TIMEOUT")
    return seconds


class RankTopology(NamedTuple):
    """A rank's place: `nodes` is the node of every rank, counted in order of their first ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    nodes: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, hosts: Sequence[object]) -> RankTopology:
        """Return a rank's place, where each rank is on the node of that name.

        >>> RankTopology.of(2, ["a", "b", "a"])
        RankTopology(rank=2, size=3, local_rank=1, local_size=2, nodes=(0, 1, 0))
        """
        order = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
        nodes = tuple(order[host] for host in hosts)
        return cls(rank, len(hosts), nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]), nodes)


class StorePlace(NamedTuple):
    """Which of the ranks that meet without MPI this process is; `token` is what they know each other by."""

    rank: int
    size: int
    token: str


def store_place(environment: Mapping[str, str] = os.environ) -> StorePlace | None:
    """Return this rank's place among those that a store joins: of one host, with torchrun's variables and no MPI.

    None for a lone process, and for one that MPI's launcher has started. Raises UsageError where they cannot meet.

    >>> store_place({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    StorePlace(rank=1, size=2, token='a:29500  ')
    """
    rank, size, local = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    token, process = environment.get(TOKEN), started(environment)
    by_torchrun = "TORCHELASTIC_RUN_ID" in environment
    by_mpi = process.size > 1 if process else any(name.startswith(("PMI_", "PMIX_")) for name in environment)
    if not rank or not size or (size == "1" and rank == "0") or (by_mpi and not by_torchrun and token is None):
        return None
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UsageError(f"init: RANK={rank!r} is not one of the WORLD_SIZE={size!r} ranks; set both, or neither",
                         code="GC-LAUNCHER")
    if local not in ("", size):
        raise UsageError(f"init: {local} of {size} ranks are on this host, and ranks of several hosts meet by MPI: "
                         "launch with mpiexec, or gpucoll run --hosts a,b", code="GC-LAUNCHER")
    if token is None and not environment.get("MASTER_PORT"):
        raise UsageError(f"init: this is to be one of {size} ranks (WORLD_SIZE), but MASTER_PORT does not say where "
                         f"they meet; launch with mpiexec, torchrun, or gpucoll run --standalone -n {size}",
                         code="GC-LAUNCHER")
    meeting = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT')}"
    run = (environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))
    return StorePlace(int(rank), int(size), token or " ".join([meeting, *run]))


def start_mpi(timeout: float) -> None:
    """Start MPI, unless mpi4py has; raise ImportError or RuntimeError where there is none.

    Where that lasts longer than `timeout` seconds, as where a rank does not come to it, the process ends.
    """
    process = started()
    deadline: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if process is not None and process.size > 1 and "mpi4py.MPI" not in sys.modules:
        deadline = starting(timeout, process.launcher.rank, process.size, process.local_size)
    with deadline:
        from mpi4py import MPI  # noqa: F401


def job(timeout: float, environment: Mapping[str, str] = os.environ) -> StorePlace | MPI.Intracomm:
    """Return where the ranks meet, as `gpucoll.init` has it: by a store, also a lone one without MPI, or COMM_WORLD.

    MPI starts within `timeout` seconds, or the process ends. Raises UsageError where several ranks were started that
    have no way to meet.
    """
    place = store_place(environment)
    if place is not None:
        return place
    try:
        start_mpi(timeout)
    except (ImportError, RuntimeError) as error:  # the latter where mpi4py finds no library of MPI's
        process = started(environment)
        if process is None or process.size == 1:
            return StorePlace(0, 1, "")
        raise UsageError(f"{process.launcher.name} started {process.size} ranks, which meet by MPI, but here is "
                         f"none ({error}): pip install mpi4py 'gpucoll[mpich]', or on one host without MPI gpucoll "
                         f"run --standalone -n {process.size}", code="GC-LAUNCHER") from None
    return world()


def world() -> MPI.Intracomm:
    """Return COMM_WORLD; raise UsageError where the launcher started ranks that MPI does not see."""
    from mpi4py import MPI

    process = started()
    if MPI.COMM_WORLD.size == 1 and process is not None and process.size > 1:
        version = MPI.Get_library_version()
        vendor = vendor_of(version)
        cure = f"srun {SRUN[vendor.family]}, or with " if vendor and process.launcher is SLURM else ""
        raise UsageError(f"{process.launcher.name} started {process.size} ranks, but mpi4py uses "
                         f"{version.splitlines()[0].strip()}, which sees only itself; launch with {cure}that library's "
                         "own mpiexec, or install the launcher's MPI", code="GC-LAUNCHER")
    return MPI.COMM_WORLD


def meet(comm: Any, timeout: float, call: Callable[[], T]) -> T:
    """Return what `call` does, by calls of MPI's on `comm` that have no deadline, once all ranks have come to it.

    Raises CollectiveTimeout after `timeout` seconds; it names those that have not come, or have stopped. Where MPI was
    started for one thread only, the call itself has no deadline. From here on an uncaught exception on one rank ends
    all of them, and one that crashes shows where it was.
    """
    if comm.size > 1:
        end_together()
    if not hasattr(comm, "Iprobe"):
        return call()  # a store's ranks, whose calls have a deadline
    from mpi4py import MPI

    waits, roll = Waits(timeout), RollCall(comm)

    def blame() -> tuple[str, tuple[int, ...]]:
        finalize_within.append(FINALIZE)
        missing = roll.missing()
        return f"ranks {listed(missing)}" if missing else "", missing

    for _ in range(2):  # the second time shows that no signal took a rank out of the first
        if not wait_for_all(comm, timeout, meanwhile=roll.answer):
            who, missing = blame()
            raise CollectiveTimeout(f"init: waited {timeout:g} s for {who or 'the other ranks'} to make this "
                                    "communicator", ranks=missing)
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        return call()
    waits.hooks.append(roll.answer)
    waits.blame = blame
    return beside(waits.run, call, "init")


FINALIZE = 5.0  # seconds for MPI's end where a rank has failed
# The same where its process has ended. MPI's end would wait for it for ever: only last messages have to leave.
DEATH = 1.0
finalize_within: list[float] = []  # the same, by each communicator that has failed


def end_together() -> None:
    """Let an uncaught exception end all ranks, where their launcher can, and a crash show where it was."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _abort_all
        threading.excepthook = _abort_by_thread
        if not faulthandler.is_enabled():
            with contextlib.suppress(Exception):  # where standard error is no file
                faulthandler.enable()


def check_alike(comm: Any, wanted: Options) -> None:
    """Raise UsageError, on every rank, where ranks differ in what decides how they do a call: options, versions.

    A collective call.
    """
    everyone = comm.allgather({"executor": wanted.executor, "GPUCOLL_ALGO": wanted.prefer, "check": wanted.check,
                               "GPUCOLL_DEVICE=emulated": wanted.emulated, "deterministic": wanted.deterministic,
                               "GPUCOLL_DUMP_DIR": bool(os.environ.get("GPUCOLL_DUMP_DIR")),
                               "GPUCOLL_NCCL_WINDOWS": os.environ.get("GPUCOLL_NCCL_WINDOWS"),
                               "the version of gpucoll": __version__,
                               "the major version of NumPy": numpy.__version__.partition(".")[0]})
    for name, first in everyone[0].items():
        differ = tuple(rank for rank, one in enumerate(everyone) if one[name] != first)
        if differ:
            raise UsageError(f"init: {name} is {first!r} on rank 0 and {everyone[differ[0]][name]!r} on ranks "
                             f"{listed(differ)}; give all ranks the same options, environment and packages",
                             code="GC-OPTION", ranks=differ)


def check_process() -> None:
    """Raise UsageError in the child of a fork of a process that has started MPI: the child has no part in it."""
    global _process
    _process = _process or os.getpid()
    if _process != os.getpid():
        raise UsageError("MPI was started by the parent of this process; a forked child cannot use it: start ranks by "
                         "mpiexec, or children by spawn", code="GC-FORK")


_process = 0  # that has started MPI


def abort(mpi: Any) -> None:
    """End all ranks with status 1, once what this one has written can be read; `mpi` is mpi4py's module."""
    time.sleep(FORWARDING)
    mpi.COMM_WORLD.Abort(1)


def _abort_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the whole job on an uncaught exception: the other ranks would wait for this one."""
    MPI = sys.modules.get("mpi4py.MPI")  # ranks that another launcher has started do without
    lives = MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized()
    rank = MPI.COMM_WORLD.rank if MPI and lives and not on_abort else os.environ.get("RANK", "0")
    stream = sys.__stderr__ or sys.stderr  # torch's own hook, around this one, keeps what goes to the latter
    with contextlib.ExitStack() as launcher:
        for enter in on_abort:
            launcher.enter_context(enter(error))
        stream.write(f"rank {rank} has ended by an exception that nobody caught, and all ranks with it:\n"
                     + parsing.text_of(kind, error, trace))
        stream.flush()
    if MPI and lives:
        abort(MPI)


# Where the launcher is not MPI's: may this rank tell of its error, as one does for all, which ends the job after that?
on_abort: list[Callable[[BaseException], contextlib.AbstractContextManager[None]]] = []


def _abort_by_thread(given: threading.ExceptHookArgs) -> None:
    if given.exc_type is not SystemExit:
        _abort_all(given.exc_type, given.exc_value or given.exc_type(), given.exc_traceback)


def place(comm: MPI.Intracomm) -> RankTopology:
    """Return this rank's place in `comm`; a collective call."""
    from mpi4py import MPI

    local = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    firsts = comm.allgather(local.bcast(comm.rank))
    local.Free()
    return RankTopology.of(comm.rank, firsts)


def set_variables(place: RankTopology, bcast: Callable[[Any], Any]) -> list[str]:
    """Add torchrun's variables to the environment where they are missing; return their names. A collective call."""
    address = "127.0.0.1" if max(place.nodes) == 0 else socket.gethostname()
    first = bcast({"MASTER_ADDR": address, "MASTER_PORT": str(free_port())})
    missing = {name: value for name, value in {**torchrun_variables(*place[:4]), **first}.items()
               if name not in os.environ}
    os.environ.update(missing)
    return [*missing]


def gpu_index(place: RankTopology) -> int:
    """Return the number by which the GPUs of a host are dealt out: the launcher's for this process, else the rank's.

    The launcher's number counts, since `place` may be that of a part of the ranks: its ranks are numbered anew.
    """
    given = local_rank()
    return place.local_rank if given is None else given
