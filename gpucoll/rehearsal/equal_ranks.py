"""A process of equal ranks: the process runs the program once for all ranks with the same values so far.

The first process runs the program for all ranks. A value that depends on the rank's number is a `PerRank`. Where the
program needs a single value, the process forks into a process for each value. A training on a thousand ranks therefore
needs a process for each different rank only. The processes send their calls to a `Coordinator`.

Only agreement is proved in this way. A process gives up if calls differ, or before any change outside of the process.
The ranks then run one by one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import pickle
import socket
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import getstate, setstate
from socket import socketpair
from typing import Any, NoReturn

from gpucoll.rehearsal.coordinator import Given, receive, send
from gpucoll.rehearsal.effects import Effects
from gpucoll.rehearsal.per_rank import PerRank, mark_of


class EqualRanks:
    """The process of the ranks `numbers`, connected with the coordinator by `channel`."""

    def __init__(self, channel: socket.socket, size: int) -> None:
        self.numbers, self._channel = tuple(range(size)), channel
        self.effects = Effects(self.give_up, lambda: len(self.numbers) == 1)
        self._calls: dict[tuple[Any, int], Callable[[Any], None]] = {}  # what to do with the answers
        self._came: deque[Any] = deque()  # answers read and not yet used
        self._known: set[Any] = set()  # groups told to the coordinator

    # ------------------------------------------------------------ ranks

    def choose(self, values: Mapping[int, Any]) -> Any:
        """Return the value of the ranks of this process, after a fork into a process for each different value."""
        groups: dict[Any, list[int]] = {}
        for number in self.numbers:
            groups.setdefault(mark_of(values[number]), []).append(number)
        mine, *others = map(tuple, groups.values())
        if others:
            try:
                self._fork(mine, others)
            except Exception as error:  # as if the system has no room for further processes
                self.give_up(f"a fork: {error}")
        return values[self.numbers[0]]

    def _fork(self, mine: tuple[int, ...], others: Sequence[tuple[int, ...]]) -> None:
        self.effects.check()
        if threading.active_count() > 1:
            self.give_up("threads of the program")
        with self.effects.by_library():
            ends = []
            for numbers in others:
                here, there = socketpair()
                send(self._channel, ("part", numbers), there.fileno())
                there.close()
                ends.append(here)
            send(self._channel, ("parted",))
            # Each answer so far is for all parts.
            while (answer := self._receive()) is not None:
                self._came.append(answer)
            gc.freeze()  # the collector would write to, and so copy, the memory shared by the processes
            positions, drawn = _positions(), getstate()
            # A fork inside of a note of `logging` would make new locks for locks that are held.
            getattr(sys.modules.get("logging"), "_at_fork_reinit_lock_weakset", set()).clear()
            channel, self.numbers = self._channel, mine
            for numbers, end in zip(others, ends, strict=True):
                if os.fork() == 0:
                    self._channel, self.numbers = end, numbers
                    channel.close()
                    _reopen(positions)
                    setstate(drawn)  # the module `random` takes a new seed in each forked process
                    break
            for end in ends:
                if end is not self._channel:
                    end.close()
            self.effects.parted()

    def give_up(self, reason: str) -> NoReturn:
        """End the work of all processes, without a proof."""
        with contextlib.suppress(OSError):
            send(self._channel, ("gave up", reason))
        os._exit(1)

    def end(self) -> NoReturn:
        """End this process, whose program has ended."""
        self.effects.check()
        send(self._channel, ("end",))
        os._exit(0)

    # ------------------------------------------------------------ calls

    def call(self, group: Any, members: Sequence[int], number: int, signature: str, given: Given,
             use: Callable[[Any], None]) -> None:
        """Send a call to the coordinator; a later `advance` calls ``use(answer)``."""
        self.effects.check()
        self._calls[group, number] = use
        try:
            if group not in self._known:
                self._known.add(group)
                send(self._channel, ("group", group, members))
            send(self._channel, ("call", group, number, signature, given))
        except OSError:  # the coordinator has ended
            os._exit(1)

    def advance(self) -> None:
        """Wait for an answer, and use it."""
        group, number, answer = self._came.popleft() if self._came else self._receive()
        self._calls.pop((group, number))(answer)

    def has_answer(self, seconds: float) -> bool:
        """Return whether an answer arrives within some seconds."""
        if self._came:
            return True
        self._channel.settimeout(seconds)
        try:
            return bool(self._channel.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False
        finally:
            self._channel.settimeout(None)

    def _receive(self) -> Any:
        try:
            return pickle.loads(receive(self._channel)[1])
        except (EOFError, OSError):  # the coordinator has ended
            os._exit(1)


def _positions() -> dict[int, int]:
    """Return the position in each regular file or folder open for reading, by descriptor."""
    found = {}
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            if descriptor > 2 and (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                found[descriptor] = os.lseek(descriptor, 0, os.SEEK_CUR)
    return found


def _reopen(positions: Mapping[int, int]) -> None:
    """Open files again at these positions, because a forked process shares all positions with the parent."""
    for descriptor, position in positions.items():
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        os.lseek(again, position, os.SEEK_SET)
        os.dup2(again, descriptor, inheritable=False)
        os.close(again)


@functools.lru_cache(1024)
def pickled_request(request: Any) -> bytes:
    return pickle.dumps(request, pickle.HIGHEST_PROTOCOL)


class _Pickler(pickle.Pickler):
    """Writes the values of all ranks for a `PerRank`."""

    differs = False

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, PerRank):
            return None
        self.differs = True
        return {number: value.of(number) for number in value._ranks.numbers}


class _Unpickler(pickle.Unpickler):
    """Reads the objects of rank `number`."""

    def __init__(self, data: bytes, number: int) -> None:
        super().__init__(io.BytesIO(data))
        self._number = number

    def persistent_load(self, values: Any) -> Any:
        return values[self._number]


def pickled(process: EqualRanks, given: Any) -> tuple[bool, bytes]:
    """Return whether the objects of the ranks differ, and the pickled objects."""
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(given)
    except Exception as error:
        process.give_up(f"an object that cannot be pickled: {error}")
    return pickler.differs, file.getvalue()


def everyone_of(answer: Sequence[tuple[tuple[int, ...], tuple[bool, bytes]]], members: Sequence[int]) -> list[Any]:
    """Return the objects of all ranks, in rank order."""
    found = dict[int, Any]()
    for numbers, (differs, data) in answer:
        if differs:
            found |= {number: _Unpickler(data, number).load() for number in numbers}
        else:
            found |= dict.fromkeys(numbers, pickle.loads(data))
    return [found[number] for number in members]
