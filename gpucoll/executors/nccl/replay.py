"""Repeated small calls, captured once as a CUDA graph and replayed.

NCCL demands that a message is part of a graph on both ranks or on neither. So the decision to replay depends only on
facts known to all ranks: the call, and how many times the call has come. Arrays are not known to all ranks, so a graph
works on private buffers, with a copy in and a copy out. A call repeated on the same arrays gets a graph on the arrays
in place: this saves the copies, and makes no difference to the other ranks.
"""

from __future__ import annotations

import collections
import weakref
from typing import Any

from gpucoll.arrays import address
from gpucoll.device import Graph, Stream
from gpucoll.executors import CallRequest

LIMIT = 1 << 18  # bytes up to which a schedule's launches cost more than two copies
CALLS = 3  # a call that has come this many times is likely to come again
GRAPHS = 64  # kept at most; any further call is enqueued piece by piece
DIRECT = 256  # the most graphs kept on the user's own memory
SEEN = 4096  # signatures counted


class Replay:
    """A captured call, the addresses read and written by it, and the objects to be kept: buffers and stream.

    A graph keeps NCCL's communicator alive. `drop` releases the graph even while others still hold the replay.
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
        """Return the private buffers of the graph; none if the graph works on the user's memory."""
        return [] if self._keep is None else [row for row in self._keep[:2] if row is not None]

    def drop(self) -> None:
        """Release the graph."""
        self._graph = self._keep = None


class Graphs:
    """The captured calls of one communicator, and the counts of all calls.

    `direct` has the graphs on the user's memory, by `place_of`; `buffered` the graphs on private buffers, by the name
    from `serve` and whether the call is in place.
    """

    def __init__(self) -> None:
        self._seen: collections.Counter[Any] = collections.Counter()
        self._chosen: set[Any] = set()
        self.buffered: dict[Any, Replay] = {}
        self.direct: dict[Any, Replay] = {}
        self._all: weakref.WeakSet[Replay] = weakref.WeakSet()  # all of `direct`, and those held only by a launcher

    def serve(self, request: CallRequest, stream: Stream) -> Any:
        """Count the call; return its name for a replay, equal on every rank, or None."""
        if not 0 < request.nbytes <= LIMIT or request.cut.lengths is not None or stream.is_capturing():
            return None
        signature = _signature(request)
        if signature in self._chosen:
            return signature
        # All ranks count the same calls, and so clear the counts at the same call.
        if len(self._seen) == SEEN:
            self._seen.clear()
        self._seen[signature] += 1
        if self._seen[signature] <= CALLS or len(self._chosen) == GRAPHS:
            return None
        self._chosen.add(signature)
        return signature

    def keep_direct(self, place: Any, replay: Replay) -> None:
        """Keep a graph on the user's memory, and forget the oldest if there are too many."""
        if len(self.direct) == DIRECT:
            del self.direct[next(iter(self.direct))]
        self.direct[place] = replay
        self._all.add(replay)

    def rows(self) -> list[Any]:
        """Return the private buffers of all graphs."""
        return [row for replay in self.buffered.values() for row in replay.rows()]

    def clear(self) -> None:
        for replay in (*self.buffered.values(), *self._all):
            replay.drop()
        for kept in (self.buffered, self.direct, self._chosen, self._seen):
            kept.clear()


def _signature(request: CallRequest) -> tuple[Any, ...]:
    """Return the key of a call, equal on every rank."""
    op = request.op and request.op.cuda
    return request.collective, request.algorithm, request.nbytes, request.dtype.name, request.root, op


def place_of(request: CallRequest, source: Any, target: Any) -> tuple[Any, ...]:
    """Return the key of a call on given memory."""
    return _signature(request), address(source), address(target)

