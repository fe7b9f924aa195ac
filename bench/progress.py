"""How far a long run is, on rank 0's standard error: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import IO

INTERVALS = {"bar": 0.1, "lines": 5.0, "off": float("inf")}  # seconds between two signs
SMALL = 256 << 10  # bytes that take as long as a barrier does: no size weighs less


class Progress:
    """Shows which share of a run's work is done, and how long the rest will take at the same pace.

    `total` is the sum of the weights that `done` will be told; None where there is no end.
    """

    def __init__(self, style: str, total: int | None, stream: IO[str],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.style = ("bar" if stream.isatty() else "lines") if style == "auto" else style
        self._total, self._stream, self._clock = total, stream, clock
        self._done, self._started, self._shown, self._is_drawn = 0, clock(), clock(), False

    def done(self, weight: int, what: str) -> None:
        """Take in that `what` is done; show it if the last sign is long enough ago."""
        self._done += weight
        now = self._clock()
        if now - self._shown < INTERVALS[self.style]:
            return
        self._shown, elapsed = now, now - self._started
        text = f"{what}, {duration(elapsed)} so far, no end"
        if self._total is not None:
            share = self._done / self._total
            left = duration(elapsed / share - elapsed)
            text = f"{100 * share:3.0f} %  {what}, {duration(elapsed)} so far, {left} to go"
        self.clear()
        columns = shutil.get_terminal_size().columns - 1
        self._stream.write(text[:columns] if self.style == "bar" else f"gpucoll bench: {text}\n")
        self._stream.flush()
        self._is_drawn = self.style == "bar"

    def clear(self) -> None:
        """Take the line away, so that another may be printed where it stood."""
        if self._is_drawn:
            self._stream.write("\r\033[K")
            self._stream.flush()
            self._is_drawn = False


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(7.4), duration(200), duration(7300)
    ('7 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
