"""Gradients gathered in buckets: a few long messages in place of many short ones, each under way while others come."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from gpucoll.arrays import Array
from gpucoll.communicator import Communicator, internal
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError
from gpucoll.training.parameters import Like

BUCKET_BYTES = 25 << 20
FIRST = 1 << 20  # bytes of the first bucket, which is full early: its message fills the time until the second one

# Collectives one after the other: each is yielded, as a call to make, and its result is sent back
Phases: TypeAlias = Generator[Callable[..., Any], Any, None]


def cut(parameters: Mapping[str, Like], bucket_bytes: int, kind: Callable[[str], Any]) -> list[list[str]]:
    """Return the names in buckets of about so many bytes, last parameter first, as gradients come in a backward pass.

    All of a bucket are of one dtype and one `kind`.
    """
    if not is_whole(bucket_bytes) or bucket_bytes < 1:
        raise ArgumentError(f"bucket_bytes {bucket_bytes!r} is not a number of bytes", code="GC-COUNTS")
    found: list[list[str]] = []
    open_: dict[Any, tuple[list[str], int]] = {}  # by dtype and kind: names, bytes
    for name, array in reversed([*parameters.items()]):
        key = array.dtype, kind(name)
        names, filled = open_.get(key, ([], 0))
        most = min(FIRST, bucket_bytes) if found and names is found[0] else bucket_bytes
        if not names or filled + array.nbytes > most:
            names, filled = [], 0
            found.append(names)
        names.append(name)
        open_[key] = names, filled + array.nbytes
    return found


class Bucket:
    """Gradients that travel together, one after the other in a row of memory."""

    def __init__(self, like: Mapping[str, Like] | Mapping[str, Array], row: Array) -> None:
        self.row, self.gradients = row, {}
        start = 0
        for name, one in like.items():
            self.gradients[name] = row[start:start + one.size].reshape(one.shape)
            start += one.size


class Arrivals:
    """Which gradients have come in this step, and when a bucket may start: in the same order on every rank."""

    def __init__(self, buckets: Sequence[Sequence[str]]) -> None:
        self._buckets = buckets
        self._bucket_of = {name: number for number, names in enumerate(buckets) for name in names}
        self.held: set[str] = set()  # what holds a gradient already, to which more is added
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._missing = [set(names) for names in self._buckets]
        self._started = 0
        self.held.clear()

    def check(self, name: str) -> None:
        """Raise ArgumentError where the last gradient of a parameter has come before in this step."""
        if name not in self._missing[self._bucket_of[name]]:
            raise ArgumentError(f"ready: the gradient of {name} has come before in this step; inside no_sync() "
                                "gradients add up", code="GC-NAME")

    def came(self, name: str) -> None:
        """Note the last gradient of a parameter in this step."""
        self._missing[self._bucket_of[name]].remove(name)

    def startable(self, *, all_of_them: bool = False) -> Iterable[int]:
        """Yield the buckets to start now: those that are full, up to the first that is not; or all that are left."""
        while self._started < len(self._buckets) and (all_of_them or not self._missing[self._started]):
            self._started += 1
            yield self._started - 1

    @property
    def missing(self) -> list[str]:
        """The names whose gradients have not come."""
        return [name for names, missing in zip(self._buckets, self._missing, strict=True) for name in names
                if name in missing]


class Pipeline:
    """Reductions under way, each of one or more collectives, which all ranks make in the same order.

    When one starts, those before it that have more to come go on by one collective: how long a message takes decides
    nothing. They go on `beside` what the caller does, or each ends before the call that makes it returns.
    """

    def __init__(self, *, beside: bool) -> None:
        self._beside = beside
        self._under_way: list[tuple[Phases, Callable[[], Any], int]] = []  # and what waits for the last one's result

    def start(self, phases: Phases, collectives: int) -> None:
        """Make the first of a reduction's `collectives`, then the next one of each that is under way."""
        before, self._under_way = self._under_way, []
        self._go_on(phases, None, collectives)
        for earlier, wait, left in before:
            if left:
                self._go_on(earlier, wait(), left)
            else:
                self._under_way.append((earlier, wait, left))

    def _go_on(self, phases: Phases, came: Any, left: int) -> None:
        try:
            call = phases.send(came)
        except StopIteration:
            return
        wait = call(async_op=True).wait if self._beside else functools.partial(_given, call())
        self._under_way.append((phases, wait, left - 1))

    def finish(self, *, most: int = 0) -> None:
        """Take all of them to their ends, but for the last ones, of which `most` may be under way."""
        while len(self._under_way) > most:
            phases, wait, left = self._under_way.pop(0)
            self._go_on(phases, wait(), left)


def _given(result: Any) -> Any:
    return result


def has_room_beside(comm: Communicator, arrays: Iterable[Like]) -> bool:
    """Return whether collectives of such arrays may gain by going on beside what ranks compute. A collective call.

    Inside a node those of host arrays are work for processors. Where each rank has one, which computes, a thread that
    communicates only takes turns with it: with 4 ranks on 2 processors it cost as much again as the collectives.
    """
    processors, ranks = len(os.sched_getaffinity(0)), comm.local_size
    is_shared = processors * ranks > (os.cpu_count() or processors)  # else they are this rank's own
    has_room = processors >= (2 * ranks if is_shared else 2)
    everyone = [one["room"] for one in internal.all_gather_metadata(comm, {"room": has_room}, "training")]
    return any(array.gpu for array in arrays) or comm.nodes > 1 or all(everyone)
