"""Buckets of gradients: few long messages instead of many short messages, overlapped with the backward pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gpucoll import Communicator, internal
from gpucoll.errors import ArgumentError
from gpucoll.internal import Array, is_whole
from gpucoll.training.parameters import Like

BUCKET_BYTES = 25 << 20
# Bytes of the first bucket. A small first bucket is full early, so communication starts early in the backward pass.
FIRST_BUCKET = 1 << 20

# A reduction made of consecutive collectives. The generator yields each collective as a function to call; the caller
# sends the result of the call back into the generator.
Phases: TypeAlias = Generator[Callable[..., Any], Any, None]


def cut(parameters: Mapping[str, Like], bucket_bytes: int, kind: Callable[[str], Any]) -> list[list[str]]:
    """Return the parameter names grouped in buckets of at most `bucket_bytes`, the last parameter first.

    A backward pass produces gradients in this order. The parameters of a bucket have equal dtypes and equal
    `kind(name)`. The first bucket has at most `FIRST_BUCKET` bytes. A parameter longer than the limit is a bucket by
    itself.
    """
    if not is_whole(bucket_bytes) or bucket_bytes < 1:
        raise ArgumentError(f"bucket_bytes {bucket_bytes!r} is not a number of bytes", code="GC-COUNTS")
    found: list[list[str]] = []
    open_: dict[Any, tuple[list[str], int]] = {}  # the bucket being filled for each dtype and kind: names, bytes
    for name, array in reversed([*parameters.items()]):
        key = array.dtype, kind(name)
        names, filled = open_.get(key, ([], 0))
        most = min(FIRST_BUCKET, bucket_bytes) if found and names is found[0] else bucket_bytes
        if not names or filled + array.nbytes > most:
            names, filled = [], 0
            found.append(names)
        names.append(name)
        open_[key] = names, filled + array.nbytes
    return found


class Bucket:
    """Gradients sent in one message: each of `gradients` is a view of its part of the array `row`."""

    def __init__(self, like: Mapping[str, Like] | Mapping[str, Array], row: Array) -> None:
        self.row: Array = row
        self.gradients: dict[Any, Any] = {}
        start = 0
        for name, one in like.items():
            self.gradients[name] = row[start:start + one.size].reshape(one.shape)
            start += one.size


class Arrivals:
    """The gradients given so far in this step, and the buckets ready to start."""

    def __init__(self, buckets: Sequence[Sequence[str]]) -> None:
        self._buckets = buckets
        self._bucket_of = {name: number for number, names in enumerate(buckets) for name in names}
        self.held: set[str] = set()  # parameters with a gradient in the bucket already: further gradients are added
        self.clear()

    def clear(self) -> None:
        """Begin a step: forget all gradients."""
        self._missing = [set(names) for names in self._buckets]
        self._started = 0
        self.held.clear()

    def check(self, name: str) -> None:
        """Raise ArgumentError if the last gradient of a parameter was given before in this step."""
        if name not in self._missing[self._bucket_of[name]]:
            raise ArgumentError(f"ready: the gradient of {name} was already passed in this step; inside no_sync() "
                                "gradients add up", code="GC-NAME")

    def came(self, name: str) -> None:
        """Note the last gradient of a parameter in this step."""
        self._missing[self._bucket_of[name]].remove(name)

    def startable(self, *, all_of_them: bool = False) -> Iterable[int]:
        """Yield the buckets to start now: all full buckets before an incomplete bucket, or all left (`all_of_them`)."""
        # In the order of numbers, not of completion: all ranks must make the same collectives in the same order.
        while self._started < len(self._buckets) and (all_of_them or not self._missing[self._started]):
            self._started += 1
            yield self._started - 1

    @property
    def missing(self) -> list[str]:
        """The names of the parameters without their last gradient."""
        return [name for names, missing in zip(self._buckets, self._missing, strict=True) for name in names
                if name in missing]


class PhaseQueue:
    """Reductions under way, each made of one or more collectives.

    Starting a reduction advances every earlier unfinished reduction by one collective. The order of the collectives
    depends only on the order of `start` calls, never on the duration of a message, so the order is equal on all ranks.
    If it `overlaps`, the collectives are asynchronous and overlap with the caller's work; otherwise each is blocking.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self._overlaps = overlaps
        # Each reduction, the wait for the result of its latest collective, and the number of collectives to come
        self._under_way: list[tuple[Phases, Callable[[], Any], int]] = []

    def start(self, phases: Phases, collectives: int) -> None:
        """Make the first of a reduction's `collectives`, then the next collective of each earlier reduction."""
        before, self._under_way = self._under_way, []
        # The new reduction comes first: its collective runs while the loop waits for the results of earlier ones.
        self._go_on(phases, None, collectives)
        for earlier, wait, left in before:
            if left:
                self._go_on(earlier, wait(), left)
            else:  # all collectives are made: `finish` waits for the last result
                self._under_way.append((earlier, wait, left))

    def _go_on(self, phases: Phases, came: Any, left: int) -> None:
        try:
            call = phases.send(came)
        except StopIteration:
            return
        found = call(async_op=True) if self._overlaps else call()
        wait = found.wait if self._overlaps else lambda: found
        self._under_way.append((phases, wait, left - 1))

    def finish(self, *, most: int = 0) -> None:
        """Complete the reductions, oldest first, until at most `most` are under way."""
        while len(self._under_way) > most:
            phases, wait, left = self._under_way.pop(0)
            self._go_on(phases, wait(), left)


def can_overlap(comm: Communicator, arrays: Iterable[Like]) -> bool:
    """Return whether overlapping collectives of `arrays` with computation can gain time. A collective call.

    Inside a node, collectives of host arrays use processor time. On a node without spare processors a communicating
    thread takes turns with the computing thread: 4 ranks on 2 processors lost as much time again as the collectives.
    Overlap is used for GPU arrays, on several nodes, and if every rank has a second processor.
    """
    processors, ranks = len(os.sched_getaffinity(0)), comm.local_size
    # If the ranks' processor sets together exceed the host, the sets overlap; else each rank has its own set.
    is_shared = processors * ranks > (os.cpu_count() or processors)
    has_room = processors >= (2 * ranks if is_shared else 2)
    # A collective ends only when every rank has joined, so overlap gains nothing unless all ranks overlap.
    everyone = [one["room"] for one in internal.all_gather_metadata(comm, {"room": has_room}, "training")]
    return any(array.gpu for array in arrays) or comm.nodes > 1 or all(everyone)
