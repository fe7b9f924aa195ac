"""How long calls took: the last ones of each kind, for `explain`."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy

LAST = 32


class Seconds:
    """The seconds of the last LAST calls of a kind. `ring` has how many were noted, then those; others may write it."""

    def __init__(self) -> None:
        self.ring = numpy.zeros(1 + LAST)

    def append(self, seconds: float) -> None:
        """Note a call."""
        ring = self.ring
        ring[1 + int(ring[0]) % LAST] = seconds
        ring[0] += 1

    def __iter__(self) -> Iterator[float]:
        return iter(self.ring[1:1 + min(LAST, int(self.ring[0]))].tolist())


class Times:
    """Seconds of the blocking calls on host arrays, by collective, executor, algorithm and digits of the size."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, str, int], Seconds] = {}

    def of(self, collective: str, executor: str, algorithm: str, nbytes: int) -> Seconds:
        """Return where calls of a kind are noted."""
        key = (collective, executor, algorithm, nbytes.bit_length())
        if key not in self._kept:
            self._kept[key] = Seconds()
        return self._kept[key]

    def summary(self, collective: str, executor: str, algorithm: str, nbytes: int) -> tuple[int, float | None]:
        """Return of how many calls something is known, and their median seconds."""
        seconds = list(self.of(collective, executor, algorithm, nbytes))
        return len(seconds), statistics.median(seconds) if seconds else None
