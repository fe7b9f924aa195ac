"""Changes outside of a process, and values from outside: both are reported before they take effect.

Files, sockets and processes are common to all ranks. A program with such changes must run once for each rank. Random
numbers without a seed differ between ranks.
"""

from __future__ import annotations

import _thread
import contextlib
import mmap
import os
import random
import resource
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy

from gpucoll.rehearsal.per_rank import PerRank, single
from gpucoll.rehearsal.state import GENERATORS

GiveUp = Callable[[str], NoReturn]
# Audit events of CPython for changes outside of the process. Source: "Audit events table" of Python's documentation.
CHANGES = frozenset({
    "os.chflags", "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link",
    "os.lockf", "os.mkdir", "os.posix_spawn", "os.remove", "os.removexattr", "os.rename", "os.rmdir", "os.setxattr",
    "os.spawn", "os.symlink", "os.system", "os.truncate", "os.utime", "fcntl.flock", "fcntl.lockf", "socket.bind",
    "socket.connect", "socket.sendto", "socket.sendmsg", "sqlite3.connect", "subprocess.Popen", "syslog.syslog",
    "builtins.input"})
# Functions without an event, whose effect or result concerns several processes.
SHARED = {
    os: ("eventfd", "getrandom", "memfd_create", "mkfifo", "mknod", "openpty", "pipe", "pipe2", "setpgid", "setpgrp",
         "setsid"),
    socket: ("socketpair",), _thread: ("start_new_thread",)}
# Packages that are not followed: threads of PyTorch and others do not survive a fork, and mpi4py may start MPI.
NOT_FOLLOWED = frozenset({"jax", "mpi4py", "tensorflow", "torch"})
LONGEST = 64  # bytes of a file written without an event: libraries make semaphores of 32 bytes when imported
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Effects:
    """Watches a process; ``is_alone()`` returns whether the process runs the program for a single rank.

    `give_up` is called with the reason, and does not return.
    """

    def __init__(self, give_up: GiveUp, is_alone: Callable[[], bool]) -> None:
        self._give_up, self._is_alone = give_up, is_alone
        self.is_library = False
        self._marks = {name: generator.mark() for name, generator in GENERATORS.items()}
        self._seeded: set[str] = set()

    def watch(self) -> None:
        """Begin to watch, until the end of the process."""
        sys.dont_write_bytecode = True
        for name, owner, functions in (("python", random, ("seed", "setstate")),
                                       ("numpy", numpy.random, ("seed", "set_state"))):
            for function in functions:
                setattr(owner, function, self._seeding(name, getattr(owner, function)))
        random.Random.seed = self._seeding_of_objects(random.Random.seed)  # type: ignore[method-assign]
        entropy = self._entropy(os.urandom)
        os.urandom = random._urandom = entropy  # type: ignore[attr-defined] # the source of `secrets` and `uuid`
        threading.Thread.start = self._refused("a thread of the program")  # type: ignore[method-assign]
        numpy.random.RandomState = self._random_state()  # type: ignore[misc]
        numpy.random.default_rng = _of_single_values(numpy.random.default_rng)
        for module, names in SHARED.items():
            for name in filter(vars(module).__contains__, names):
                setattr(module, name, self._refused(f"{module.__name__}.{name}"))
        put = os.putenv  # without a process or code in C, nobody reads these variables
        os.putenv = lambda key, value: None if isinstance(value, PerRank) else put(key, value)
        process = os.getpid()
        os.getpid = lambda: process  # of all ranks, as in threads
        mmap.mmap = self._mapping()  # type: ignore[misc]
        sys.stdin = sys.__stdin__ = _Unread(sys.stdin, self._refused("standard input"))  # type: ignore[assignment, misc]
        # Code in C writes files without an event: the system then ends the process.
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST, LONGEST))
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def by_library(self) -> Iterator[None]:
        """Allow changes, by the library itself, until the end of the block."""
        self.is_library = True
        try:
            yield
        finally:
            self.is_library = False

    def parted(self) -> None:
        """Note that the process has been forked: processes of one rank have random numbers of their own."""
        for name, generator in GENERATORS.items():
            if name not in self._seeded and self._is_alone():
                generator.seed()

    def check(self) -> None:
        """Give up if a random number without a seed was drawn for several ranks."""
        for name, generator in GENERATORS.items():
            if name not in self._seeded and not self._is_alone():
                mark = generator.mark()
                if mark != self._marks[name]:
                    self._give_up(f"random numbers of {name} without a seed")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = arguments
            if path != os.devnull and not self.is_library \
                    and (flags & WRITES or (mode and {*mode} & {*"wxa+"}) or _is_special(path)):
                self._give_up(f"open({path!r}, {mode!r})")
        elif event == "import":
            if arguments[0].partition(".")[0] in NOT_FOLLOWED:
                self._give_up(f"import {arguments[0]}")
        elif event in CHANGES and not self.is_library:
            self._give_up(event)

    def _seeding(self, name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*arguments: Any, **options: Any) -> Any:
            self.check()
            found = _of_single_values(seed)(*arguments, **options)
            if any(one is not None for one in (*arguments, *options.values())):
                self._seeded.add(name)
            else:
                self._seeded.discard(name)
                self._marks[name] = GENERATORS[name].mark()
            return found

        return seeded

    def _seeding_of_objects(self, seed: Callable[..., None]) -> Callable[..., None]:
        def seeded(generator: Any, a: Any = None, version: int = 2) -> None:
            if a is None and not (self._is_alone() or self.is_library):
                self._give_up("random numbers of the system")
            seed(generator, _without_ranks(a), version)

        return seeded

    def _mapping(self) -> type[mmap.mmap]:
        """Return a class of mapped memory that is never shared by processes."""
        effects = self

        class Mapping(mmap.mmap):
            def __new__(cls, fileno: int, length: int, flags: int = mmap.MAP_SHARED, *more: Any, **options: Any) -> Any:
                if fileno == -1 and not flags & mmap.MAP_PRIVATE:
                    effects._give_up("memory shared by processes")
                return super().__new__(cls, fileno, length, flags, *more, **options)

        return Mapping

    def _entropy(self, real: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def urandom(size: int) -> bytes:
            if not (self._is_alone() or self.is_library):
                self._give_up("random numbers of the system")
            return real(size)

        return urandom

    def _random_state(self) -> type[numpy.random.RandomState]:
        """Return a class of NumPy's older generators, which ask the system for a seed even if the program gives one."""
        effects = self

        class RandomState(numpy.random.RandomState):
            def __init__(self, seed: Any = None) -> None:
                seed = _without_ranks(seed)
                with contextlib.nullcontext() if seed is None else effects.by_library():
                    super().__init__(seed)

        return RandomState

    def _refused(self, what: str) -> Callable[..., NoReturn]:
        return lambda *_, **__: self._give_up(what)


def _of_single_values(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: function(
        *map(_without_ranks, arguments), **{word: _without_ranks(value) for word, value in options.items()})


def _without_ranks(value: Any) -> Any:
    """Return a seed as a single value, not a `PerRank`."""
    return [*map(_without_ranks, value)] if type(value) in (list, tuple) else single(value)


class _Unread:
    """A file whose reading gives up: only a few of the ranks can read the standard input."""

    def __init__(self, file: Any, refuse: Callable[..., NoReturn]) -> None:
        self._file, self._refuse = file, refuse

    def __getattr__(self, name: str) -> Any:
        if name not in ("close", "closed", "encoding", "errors", "fileno", "isatty", "mode", "name"):
            self._refuse()
        return getattr(self._file, name)

    def __iter__(self) -> NoReturn:
        self._refuse()


def _is_special(path: Any) -> bool:
    """Return whether reading a file takes away, or makes, what is read: as with a pipe, or a device."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        mode = os.stat(path).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    return False
