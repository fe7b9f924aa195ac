"""How far a long run is, on rank 0's standard error: one line that changes on a terminal, else a line now and then."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from datetime import timedelta
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
        left = None if self._total is None else elapsed * (self._total - self._done) / self._done
        spent, rest = (timedelta(seconds=round(seconds)) for seconds in (elapsed, left or 0))
        text = f"{what}, {spent} so far, " + ("no end" if left is None else f"{rest} to go")
        self.clear()
        if self.style == "bar":
            self._stream.write(text[:shutil.get_terminal_size().columns - 1])
        else:
            self._stream.write(f"gpucoll bench: {text}\n")
        self._stream.flush()
        self._is_drawn = self.style == "bar"

    def clear(self) -> None:
        """Take the line away, so that another may be printed where it stood."""
        if self._is_drawn:
            self._stream.write("\r\033[K")
            self._is_drawn = False
