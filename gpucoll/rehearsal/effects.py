"""Changes outside of a process, and random numbers without a seed: both are reported before they take effect.

Files, sockets and processes are common to all ranks. A program with such changes must run once for each rank. Random
numbers without a seed differ between ranks.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy

from gpucoll.rehearsal.state import GENERATORS

GiveUp = Callable[[str], NoReturn]
# Audit events of CPython for changes outside of the process. Source: "Audit events table" of Python's documentation.
CHANGES = frozenset({
    "os.chflags", "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link",
    "os.lockf", "os.mkdir", "os.posix_spawn", "os.remove", "os.removexattr", "os.rename", "os.rmdir", "os.setxattr",
    "os.spawn", "os.symlink", "os.system", "os.truncate", "os.utime", "fcntl.flock", "fcntl.lockf", "socket.bind",
    "socket.connect", "socket.sendto", "socket.sendmsg", "sqlite3.connect", "subprocess.Popen", "syslog.syslog"})
# Packages that are not followed: the threads of PyTorch do not survive a fork, and mpi4py may start MPI.
NOT_FOLLOWED = frozenset({"torch", "mpi4py"})
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
        entropy = self._entropy(os.urandom)
        os.urandom = random._urandom = entropy  # type: ignore[attr-defined] # the source of `secrets` and `uuid`
        threading.Thread.start = self._refused("a thread of the program")  # type: ignore[method-assign]
        numpy.random.RandomState = self._random_state()  # type: ignore[misc]
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def by_library(self) -> Iterator[None]:
        """Allow changes, by the library itself, until the end of the block."""
        self.is_library = True
        try:
            yield
        finally:
            self.is_library = False

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
            if (flags & WRITES or (mode and {*mode} & {*"wxa+"})) and path != os.devnull and not self.is_library:
                self._give_up(f"open({path!r}, {mode!r})")
        elif event == "import":
            if arguments[0] in NOT_FOLLOWED:
                self._give_up(f"import {arguments[0]}")
        elif event in CHANGES and not self.is_library:
            self._give_up(event)

    def _seeding(self, name: str, seed: Callable[..., Any]) -> Callable[..., Any]:
        def seeded(*arguments: Any, **options: Any) -> Any:
            self.check()
            found = seed(*arguments, **options)
            if any(one is not None for one in (*arguments, *options.values())):
                self._seeded.add(name)
            else:
                self._seeded.discard(name)
                self._marks[name] = GENERATORS[name].mark()
            return found

        return seeded

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
                with contextlib.nullcontext() if seed is None else effects.by_library():
                    super().__init__(seed)

        return RandomState

    def _refused(self, what: str) -> Callable[..., NoReturn]:
        return lambda *_, **__: self._give_up(what)
