"""Small calls alike, captured once as a CUDA graph and replayed.

NCCL asks that a message is part of a graph on both of its ranks or on none, so that whether a call is replayed must
follow from what all ranks know: what is called, and how often it has been. Arrays are not known to all, hence a graph
works on buffers of its own, into which the input is copied and from which the output is; and one that is called on the
same arrays again, on those: that saves the copies, and to the other ranks it is the same.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

from gpucoll.arrays import address
from gpucoll.device import Graph, Stream
from gpucoll.executors import Task

LIMIT = 1 << 18  # bytes up to which a schedule's launches cost more than the two copies
CALLS = 3  # a call that has come so often is likely to come again
GRAPHS = 64  # kept; further calls are enqueued one by one
DIRECT = 256  # kept of those on the user's own memory
SEEN = 4096  # signatures counted


class Replay:
    """A captured call, the addresses that it reads and writes, and what must live as long: its buffers and stream.

    NCCL's communicator is there as long as a graph of it: `drop` lets go of that, whoever still has the replay.
    """

    __slots__ = ("__weakref__", "_graph", "_keep", "source", "target")

    def __init__(self, graph: Graph, source: int, target: int, keep: tuple[Any, ...]) -> None:
        self._graph: Graph | None = graph
        self._keep: tuple[Any, ...] | None = keep
        self.source, self.target = source, target

    def launch(self, stream: Stream) -> None:
        assert self._graph is not None
        self._graph.launch(stream)

    def rows(self) -> list[Any]:
        """Return the buffers of a graph that has its own."""
        return [] if self._keep is None else [row for row in self._keep[:2] if row is not None]

    def drop(self) -> None:
        """Let go of the graph."""
        self._graph = self._keep = None


class Graphs:
    """The captured calls of one communicator, and how often each has come.

    `direct` are those on the user's own memory, by `place_of`; `buffered` by the name that `serve` gives and whether
    they are in place.
    """

    def __init__(self) -> None:
        self._seen: collections.Counter[Any] = collections.Counter()
        self._chosen: set[Any] = set()
        self.buffered: dict[Any, Replay] = {}
        self.direct: dict[Any, Replay] = {}
        self._all: weakref.WeakSet[Replay] = weakref.WeakSet()  # direct ones that somebody still launches

    def serve(self, task: Task) -> Any:
        """Return under which name `task` is to be replayed, alike on every rank, or None; counts the call."""
        if not 0 < task.nbytes <= LIMIT or task.lengths is not None or task.stream.is_capturing():
            return None
        signature = _signature(task)
        if signature in self._chosen:
            return signature
        if len(self._seen) == SEEN:
            self._seen.clear()
        self._seen[signature] += 1
        if self._seen[signature] <= CALLS or len(self._chosen) == GRAPHS:
            return None
        self._chosen.add(signature)
        return signature

    def keep_direct(self, place: Any, replay: Replay) -> None:
        """Keep a graph that works on a task's own memory, and forget the oldest where there are too many."""
        if len(self.direct) == DIRECT:
            del self.direct[next(iter(self.direct))]
        self.direct[place] = replay
        self._all.add(replay)

    def rows(self) -> list[Any]:
        """Return the buffers of all graphs that have their own."""
        return [row for replay in self.buffered.values() for row in replay.rows()]

    def clear(self) -> None:
        for replay in (*self.buffered.values(), *self._all):
            replay.drop()
        for kept in (self.buffered, self.direct, self._chosen, self._seen):
            kept.clear()


def _signature(task: Task) -> tuple[Any, ...]:
    """Return what tells a call from another one and is the same on every rank."""
    return task.collective, task.algorithm, task.nbytes, task.dtype.name, task.root, task.op and task.op.cuda


def place_of(task: Task) -> tuple[Any, ...]:
    """Return what tells a call on given memory from another one."""
    return _signature(task), address(task.input), address(task.output)

