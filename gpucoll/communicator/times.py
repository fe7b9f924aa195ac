"""How long calls took: the last ones of each kind, for `explain`."""

from __future__ import annotations

import collections
import statistics
from typing import TypeAlias

LAST = 32
Seconds: TypeAlias = "collections.deque[float]"


class Times:
    """Seconds of the blocking calls on host arrays, by collective, executor, algorithm and digits of the size."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str, str, int], Seconds] = {}

    def of(self, collective: str, executor: str, algorithm: str, nbytes: int, device: str = "cpu") -> Seconds:
        """Return where calls of a kind are noted: the last LAST of them; none on a device: they do not wait."""
        if device != "cpu":
            return collections.deque(maxlen=0)
        key = (collective, executor, algorithm, nbytes.bit_length())
        if key not in self._kept:
            self._kept[key] = collections.deque(maxlen=LAST)
        return self._kept[key]

    def summary(self, collective: str, executor: str, algorithm: str, nbytes: int) -> tuple[int, float | None]:
        """Return of how many calls something is known, and their median seconds."""
        seconds = self.of(collective, executor, algorithm, nbytes)
        return len(seconds), statistics.median(seconds) if seconds else None
