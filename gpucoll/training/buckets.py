"""Gradients gathered in buckets: a few long messages in place of many short ones, each under way while others come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from gpucoll.arrays import Array
from gpucoll.errors import ArgumentError
from gpucoll.training.parameters import Like
from gpucoll.waits import Work

BUCKET_BYTES = 25 << 20
FIRST = 1 << 20  # bytes of the first bucket, which is full early: its message fills the time until the second one

Phases: TypeAlias = Iterator[Work]  # collectives one after the other; what each brings is used before the next is made


def cut(parameters: Mapping[str, Like], bucket_bytes: int, kind: Callable[[str], Any]) -> list[list[str]]:
    """Return the names in buckets of about so many bytes, last parameter first, as gradients come in a backward pass.

    All of a bucket are of one dtype and one `kind`.
    """
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes < 1:
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
    nothing.
    """

    def __init__(self) -> None:
        self._under_way: list[tuple[Phases, Work, int]] = []

    def start(self, phases: Phases, collectives: int) -> None:
        """Make the first of a reduction's `collectives`, then the next one of each that is under way."""
        before, self._under_way = self._under_way, []
        self._go_on(phases, collectives)
        for earlier, work, left in before:
            if left:
                work.wait()
                self._go_on(earlier, left)
            else:
                self._under_way.append((earlier, work, left))

    def _go_on(self, phases: Phases, left: int) -> None:
        work = next(phases, None)
        if work is not None:
            self._under_way.append((phases, work, left - 1))

    def finish(self, *, most: int = 0) -> None:
        """Take all of them to their ends, but for the last ones, of which `most` may be under way."""
        while len(self._under_way) > most:
            phases, work, left = self._under_way.pop(0)
            work.wait()
            self._go_on(phases, left)
