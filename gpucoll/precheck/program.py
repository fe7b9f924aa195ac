"""A program run by virtual ranks, and the check of a function."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import importlib.machinery
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

from threadpoolctl import threadpool_limits

import gpucoll as gc
from gpucoll import internal
from gpucoll.emulation import installed
from gpucoll.errors import ArgumentError, UsageError
from gpucoll.precheck.findings import Analysis, Finding, with_refusals
from gpucoll.precheck.gpu_arrays import after_imports
from gpucoll.precheck.matching import VirtualGroup
from gpucoll.precheck.ranks import VirtualTransport, end
from gpucoll.precheck.state import SEED, ProcessState, is_of_program, replaced
from gpucoll.precheck.turns import Turns, Unwound, VirtualRank, refusal, refusals

MOST_THREADS = 4096  # threads of one process
# Variables that concern real ranks only.
LOCKED = "<frozen importlib", os.path.join(os.path.dirname(gc.__file__), "device", "store.py")
HIDDEN = ("GPUCOLL_DUMP_DIR", "GPUCOLL_FAULT", "GPUCOLL_METRICS", "GPUCOLL_SUMMARY")


class Precheck:
    """A program run once by `size` virtual ranks."""

    is_running: ClassVar[bool] = False  # whether this process runs a precheck

    def __init__(self, size: int, *, is_program: bool) -> None:
        if not internal.is_whole(size) or not 1 <= size <= MOST_THREADS:
            raise ArgumentError(f"precheck: size={size!r} is not a number of ranks in 1..{MOST_THREADS}",
                                code="GC-PRECHECK")
        if Precheck.is_running:
            raise UsageError("precheck: called inside another precheck, or at the same time by another thread",
                             code="GC-PRECHECK")
        self._size = int(size)
        self._is_program = is_program
        self._groups: list[VirtualGroup] = []
        self._worlds: list[VirtualGroup] = []
        self._found: list[Finding] | None = None
        self._stack = contextlib.ExitStack()

    def run(self, program: Callable[[VirtualRank], object]) -> list[Finding]:
        """Return the findings of ``program(rank)``."""
        # A function keeps the CuPy that its process has imported before.
        with installed(self._size, "quick") if self._is_program or "cupy" not in sys.modules \
                else contextlib.nullcontext():
            return self._run(program)

    def _run(self, program: Callable[[VirtualRank], object]) -> list[Finding]:
        def body(rank: VirtualRank) -> None:
            try:
                program(rank)
            except Unwound:
                raise
            except BaseException as error:
                if not (isinstance(error, SystemExit) and error.code in (None, 0)):
                    rank.failure = error
            if not turns.is_over:
                while rank.exits and rank.failure is None:
                    rank.exits.pop()()
                end(rank.transports, failed=rank.failure is not None)

        self.turns: Turns = Turns(self._size, body, self._stopped, self._switched)
        turns = self.turns
        refusals.clear()
        had_torch = "gpucoll.torch" in sys.modules
        before = {name: os.environ.pop(name) for name in HIDDEN if name in os.environ}
        self.state: ProcessState = ProcessState(self._size, is_program=self._is_program)
        Precheck.is_running = True
        try:
            # One rank runs at a time; further threads of a product only spin while they wait for their parts.
            with internal.default_transport(self._transport), followed(self._after_imports()), _own_process(turns), \
                    threadpool_limits(1, "blas"), self._mpi(), self._stack:
                if had_torch:
                    self._follow_torch()
                turns.run()
        finally:
            Precheck.is_running = False
            self.state.switch(None, None)
            os.environ.update(before)
            # A first import by a virtual rank has left this out: it is for the rank of this process.
            if not (had_torch or self._is_program) and "gpucoll.torch" in sys.modules:
                sys.modules["gpucoll.torch"].set_variables()
        if self._found is None:
            self._stopped()
        return with_refusals(self._found or [])

    def _new_group(self) -> VirtualGroup:
        """Return a new group of all ranks."""
        return VirtualGroup(self.turns, range(self._size), self._groups)

    def _mpi(self) -> contextlib.AbstractContextManager[None]:
        """Return the context with a COMM_WORLD of virtual ranks for mpi4py, if the program imports mpi4py."""
        if "mpi4py.MPI" not in sys.modules:
            return contextlib.nullcontext()
        from gpucoll.precheck.mpi_world import as_world

        return as_world(self._new_group())

    def _after_imports(self) -> dict[str, Callable[[], object]]:
        """Return what follows the import of a module by a rank."""
        def import_backend() -> None:
            sys.modules["torch"].manual_seed(SEED)  # the same in each run
            # Virtual ranks then use torch.distributed; real ranks of torch would wait for ever.
            with contextlib.suppress(ImportError):
                importlib.import_module("gpucoll.torch")

        backend: dict[str, Callable[[], object]] = {"torch": import_backend} if self._is_program else {}
        # torch's groups belong to the process: give each virtual rank its own before the program makes any.
        return backend | {"gpucoll.torch": self._follow_torch} | after_imports(self.state.follow, SEED)

    def _follow_torch(self) -> None:
        """Let torch.distributed make groups of virtual ranks until the end of the precheck."""
        from gpucoll.precheck.torch_world import as_world, c10d, fresh_variables

        self._stack.enter_context(as_world(self.turns, self._groups))
        self.state.follow(c10d, fresh_variables)

    def _transport(self) -> VirtualTransport:
        """Return the transport of the rank whose turn it is, for its next world."""
        rank = self.turns.own("init")
        if rank.worlds == len(self._worlds):
            self._worlds.append(self._new_group())
        rank.worlds += 1
        return VirtualTransport(self._worlds[rank.worlds - 1], rank.number)

    def _stopped(self) -> None:
        self._found = Analysis(self.turns, self._groups).run()

    def _switched(self, old: VirtualRank, new: VirtualRank) -> None:
        self.state.switch(old.number if old.thread is not None else None, new.number)


def check_function(function: Callable[[Any], object], size: int) -> list[Finding]:
    """Return the findings for ``function(comm)``; see `gpucoll.precheck`."""
    return Precheck(size, is_program=False).run(lambda rank: function(gc.init()))


def _has_lock() -> bool:
    """Return whether this thread may hold a lock of all ranks: a library imports a module, or a kernel is compiled."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name = frame.f_code.co_filename
        if name.startswith(LOCKED):
            return True
        if is_of_program(name):
            return False
    return False


def _own_process(turns: Turns) -> contextlib.AbstractContextManager[None]:
    """Return the context in which each rank is as a process of its own.

    Ranks that sleep give up their turn, since a rank may poll for another rank. `os._exit` ends only the rank.
    Functions for the exit are called at the end of their rank.
    """
    process, sleeps, exits = os.getpid(), time.sleep, os._exit
    registers, unregisters = atexit.register, atexit.unregister
    replaces: dict[int, Callable[..., NoReturn]] = {2: os.execv, 3: os.execve}  # by the number of arguments

    def is_rank() -> bool:
        # A process forked by a rank, as for loading data, has no other ranks.
        return turns.current.thread is threading.current_thread() and os.getpid() == process

    def sleep(seconds: Any, /) -> None:
        if is_rank() and not _has_lock():
            turns.pause("time.sleep")
        else:
            sleeps(seconds)

    def leave(status: int) -> NoReturn:
        if is_rank():
            turns.current.exits.clear()
            raise SystemExit(status)
        raise exits(status)  # does not return

    def register(function: Any, /, *given: Any, **named: Any) -> Any:
        # Libraries are shared by all ranks, and end with the process.
        if not (is_rank() and is_of_program(sys._getframe(1).f_code.co_filename)):
            return registers(function, *given, **named)
        turns.current.exits.append(functools.partial(function, *given, **named))
        return function

    def unregister(function: Any) -> None:
        unregisters(function)
        if is_rank():
            turns.current.exits[:] = [one for one in turns.current.exits if getattr(one, "func", one) != function]

    def replace(*given: Any) -> NoReturn:
        if is_rank():
            raise refusal("exec: precheck cannot follow a program that replaces its process by another")
        raise replaces[len(given)](*given)

    return replaced([(time, "sleep", sleep), (os, "_exit", leave), (atexit, "register", register),
                     (atexit, "unregister", unregister), (os, "execv", replace), (os, "execve", replace)])


@contextlib.contextmanager
def followed(after: Mapping[str, Callable[[], object]]) -> Iterator[None]:
    """Compile, or read, a module once for all ranks; call ``after[name]()`` after the import of the module `name`.

    Each rank imports the program's modules for itself, and all share the libraries.
    """
    loader: Any = importlib.machinery.SourceFileLoader
    known: dict[tuple[str, str], Any] = {}

    def get_code(self: Any, fullname: str) -> Any:
        key = self.path, fullname
        if key not in known:
            known[key] = super(loader, self).get_code(fullname)
        return known[key]

    def exec_module(self: Any, module: Any) -> None:
        super(loader, self).exec_module(module)
        after.get(module.__name__, lambda: None)()

    loader.get_code, loader.exec_module = get_code, exec_module
    try:
        yield
    finally:
        del loader.get_code, loader.exec_module
