"""Small calls alike, captured once as a CUDA graph and replayed.

NCCL asks that a message is part of a graph on both of its ranks or on none, so that whether a call is replayed must
follow from what all ranks know: what is called, and how often it has been. Arrays are not known to all, hence a graph
works on buffers of its own, into which the input is copied and from which the output is.
"""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

from gpucoll.device import Device, Graph, Stream
from gpucoll.executors import Task

LIMIT = 1 << 18  # bytes up to which a schedule's launches cost more than the two copies
CALLS = 3  # a call that has come so often is likely to come again
GRAPHS = 64  # kept; further calls are enqueued one by one
SEEN = 4096  # signatures counted


class Replay(NamedTuple):
    """A captured call, the addresses that it reads and writes, and what must live as long: its buffers and stream."""

    graph: Graph
    source: int
    target: int
    keep: Any


class Graphs:
    """The captured calls of one communicator, and how often each has come."""

    def __init__(self) -> None:
        self._seen: collections.Counter[Any] = collections.Counter()
        self._chosen: set[Any] = set()
        self._kept: dict[Any, Replay] = {}

    def serve(self, task: Task) -> Any:
        """Return under which name `task` is to be replayed, alike on every rank, or None; counts the call."""
        if not 0 < task.nbytes <= LIMIT or task.lengths is not None or task.stream.is_capturing():
            return None
        # what tells a call from another one and is the same on every rank
        signature = task.collective, task.algorithm, task.nbytes, task.dtype.name, task.root, task.op and task.op.cuda
        if signature in self._chosen:
            return signature
        if len(self._seen) == SEEN:
            self._seen.clear()
        self._seen[signature] += 1
        if self._seen[signature] <= CALLS or len(self._chosen) == GRAPHS:
            return None
        self._chosen.add(signature)
        return signature

    def get(self, name: Any, *, in_place: bool) -> Replay | None:
        """Return the captured call, if there is one; in place and out of place are two."""
        return self._kept.get((name, in_place))

    def put(self, name: Any, replay: Replay, *, in_place: bool) -> Replay:
        """Keep a captured call."""
        self._kept[name, in_place] = replay
        return replay

    def buffers(self, task: Task, device: Device, stream: Stream) -> tuple[Any, Any]:
        """Return new rows for input and output, one and the same in place, as the plan has been made for."""
        def like(row: Any) -> Any:
            return None if row is None else device.empty(row.size, row.dtype, stream)

        target = like(task.output)
        return target if task.in_place else like(task.input), target

    def clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()
        self._chosen.clear()
        self._seen.clear()

