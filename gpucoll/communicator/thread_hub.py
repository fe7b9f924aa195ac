"""State shared by the ranks of a communicator that are threads of one process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection

from gpucoll.errors import CollectiveTimeout, listed
from gpucoll.health.farewell import Farewell, Why
from gpucoll.health.processes import RankThreads
from gpucoll.transport.kvstore import MemoryStore
from gpucoll.transport.mailbox import Mailbox

WAIT = 0.05  # seconds between two looks for ranks without a thread


class ThreadHub:
    """State shared by the threads of one `init_local`: mail, a store, parts, and the ranks that have left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail = (Mailbox(), Mailbox())
        self.store = MemoryStore()
        self.used: dict[int, Callable[[], set[int]]] = {}  # by rank, see `LocalLink.used_by`
        self.processes = RankThreads(self.used)
        self._changed = threading.Condition()  # guards the fields below; notified when a rank leaves or survives
        self._parts: dict[str, tuple[ThreadHub, set[int]]] = {}  # by name, with the ranks still to come
        self._complete = weakref.WeakValueDictionary[str, ThreadHub]()  # the parts to which all ranks have come
        self._releases: list[Callable[[bool], None]] = []  # of the ranks that have left
        self._has_failed = False
        self._left: set[int] = set()
        self.farewells: dict[int, Farewell] = {}  # of the ranks that have left; replaced whole
        self._survivors: set[int] = set()
        self._rest: list[int] | None = None  # the survivors, once all have come

    def stay(self, rank: int, *, stays: bool = True) -> bool:
        """Count a rank as a survivor, or no longer; return whether all have come, with this rank."""
        with self._changed:
            if stays:
                self._survivors.add(rank)
            elif self._rest is None:
                self._survivors.discard(rank)
                self._left.add(rank)
            self._changed.notify_all()
            return self._rest is not None and rank in self._rest

    def survivors(self, rank: int, timeout: float, ended: Callable[[], Collection[int]]) -> tuple[str, int, int]:
        """Return name, rank and size of the part of the survivors; CollectiveTimeout if a rank does not come."""
        deadline, everyone = time.monotonic() + timeout, {*range(self.size)}
        with self._changed:
            while self._rest is None:
                late = everyone - self._survivors - self._left - {*ended()}
                if not late:
                    self._rest = sorted(self._survivors)
                elif time.monotonic() > deadline:
                    self._survivors.discard(rank)
                    raise CollectiveTimeout(f"shrink: waited {timeout:g} s for ranks {listed(sorted(late))}, which "
                                            "are alive but do not join", ranks=tuple(sorted(late)))
                else:
                    self._changed.wait(WAIT)
            self._changed.notify_all()
            if rank not in self._rest:
                raise CollectiveTimeout("shrink: the other ranks went on without this late rank", ranks=(rank,))
            return f"survivors {self._rest}", self._rest.index(rank), len(self._rest)

    def part(self, name: str, rank: int, size: int) -> ThreadHub:
        """Return the hub of a part for its rank `rank`: the same object for all its ranks, and at each question."""
        with self._changed:
            known = self._complete.get(name)
            if known is not None:
                return known
            # The first rank makes the hub. Once the last one has come, the hub lives as long as its links.
            hub, left = self._parts.setdefault(name, (ThreadHub(size), {*range(size)}))
            left.discard(rank)
            if not left:
                del self._parts[name]
                self._complete[name] = hub
            return hub

    def tell(self, rank: int, farewell: Farewell) -> None:
        """Show the farewell of a rank to the others; a failure told before stays."""
        with self._changed:
            known = self.farewells.get(rank)
            if known is None or known.why < Why.FAILED:
                self.farewells = {**self.farewells, rank: farewell}

    def close(self, rank: int, release: Callable[[bool], None], farewell: Farewell, failed: bool) -> None:
        self.tell(rank, farewell)
        # Threads may close at the same time: exactly one must see that all ranks have left.
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()
            self._releases.append(release)
            self._has_failed |= failed
            if len(self._releases) < self.size:
                return
        # Only the last rank comes here, so no lock: a release may take long.
        while self._releases:
            self._releases.pop(0)(self._has_failed)
