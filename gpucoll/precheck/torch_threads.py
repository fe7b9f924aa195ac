"""Threads of virtual ranks for `gpucoll.torch.handles`: each has turns of its own, and gives up the turn to wait."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from gpucoll.precheck.turns import Turns


class TurnThread:
    """A thread of a rank that runs ``target()``, as `threading.Thread`."""

    def __init__(self, turns: Turns, target: Callable[[], None], **_: Any) -> None:
        self._turns, self._target = turns, target

    def start(self) -> None:
        """Start the thread at the end of the caller's turn."""
        self._thread = self._turns.add(self._target)

    def join(self) -> None:
        self._turns.wait(lambda: self._thread.has_ended, "wait")


class TurnEvent:
    """An event within a rank, as `threading.Event`."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._is_set = turns, False

    def set(self) -> None:
        self._is_set = True
        self._turns.wake(self._turns.ranks[self._turns.current.number])

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the event; with 0 only look. Other deadlines are not followed: turns take no time."""
        if timeout == 0:
            self._turns.pause("wait")
        else:
            self._turns.wait(self.is_set, "wait")
        return self._is_set


class TurnLock:
    """A lock between threads of a rank, as `threading.Lock`; the holder may give up the turn."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._is_held = turns, False

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock and return True; without `blocking` return False if another thread holds the lock."""
        if self._is_held and not blocking:
            return False
        self._turns.wait(lambda: not self._is_held, "wait")
        self._is_held = True
        return True

    def release(self) -> None:
        self._is_held = False
        self._turns.wake(self._turns.ranks[self._turns.current.number])

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class TurnQueue:
    """A queue between two threads of a rank, as `queue.SimpleQueue`; an entry keeps the line of its call."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._entries: collections.deque[tuple[Any, str]] = collections.deque()

    def put(self, item: Any) -> None:
        self._entries.append((item, self._turns.site()))
        self._turns.wake(self._turns.ranks[self._turns.current.number])

    def get(self) -> Any:
        """Wait for an entry, and return the first; the thread goes on with the line of the entry's call."""
        self._turns.current.line = ""
        self._turns.wake(self._turns.ranks[self._turns.current.number])
        self._turns.wait(lambda: bool(self._entries), "")
        item, self._turns.current.line = self._entries.popleft()
        return item


def primitives(turns: Turns) -> dict[str, Any]:
    """Return what takes the place of the modules `threading`, `queue` and `atexit` in `gpucoll.torch.handles`."""
    def exits() -> list[Callable[[], object]]:
        return turns.ranks[turns.current.number].exits

    def unregister(call: Callable[[], object]) -> None:
        exits()[:] = [one for one in exits() if one != call]

    return {"threading": SimpleNamespace(Thread=functools.partial(TurnThread, turns),
                                         Event=functools.partial(TurnEvent, turns),
                                         Lock=functools.partial(TurnLock, turns), get_ident=lambda: turns.current),
            "queue": SimpleNamespace(SimpleQueue=functools.partial(TurnQueue, turns)),
            "atexit": SimpleNamespace(register=lambda call: exits().append(call), unregister=unregister)}
