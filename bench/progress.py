"""How far a long run is, on rank 0's standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import IO

INTERVALS = {"bar": 0.1, "lines": 5.0}  # seconds between two signs
BAR_WIDTH = 24
SMALL = 256 << 10  # bytes that take as long as a barrier does: no size weighs less


class Progress:
    """Shows which share of a run's work is done, and how long the rest will take at the same pace.

    `total` is the sum of the weights that `done` will be told; None where there is no end.
    """

    def __init__(self, style: str, total: int | None, stream: IO[str],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.style = ("bar" if stream.isatty() else "lines") if style == "auto" else style
        self._total, self._stream, self._clock = total, stream, clock
        self._done, self._started, self._shown = 0, clock(), clock()
        self._is_drawn = False

    def done(self, weight: int, what: str) -> None:
        """Take in that `what` is done; show it if the last sign is long enough ago."""
        self._done += weight
        if self.style != "off" and self._clock() - self._shown >= INTERVALS[self.style]:
            self._show(what)

    def _show(self, what: str) -> None:
        self._shown = self._clock()
        text = self._text(what)
        if self.style == "lines":
            self._stream.write(f"gpucoll bench: {text}\n")
        else:
            self._draw(text)
        self._stream.flush()

    def _text(self, what: str) -> str:
        elapsed = self._clock() - self._started
        if self._total is None:
            return f"{what}, {duration(elapsed)} so far, no end"
        share = self._done / self._total
        return f"{100 * share:3.0f} %  {what}, {duration(elapsed)} so far, {duration(elapsed / share - elapsed)} to go"

    def _draw(self, text: str) -> None:
        full = int(self._done / self._total * BAR_WIDTH) if self._total else 0
        columns = shutil.get_terminal_size().columns
        line = f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {text}"[:columns - 1]
        self._stream.write("\r" + line.ljust(columns - 1))
        self._is_drawn = True

    def clear(self) -> None:
        """Take the bar away, so that a line may be printed where it stood."""
        if self._is_drawn:
            self._stream.write("\r" + " " * (shutil.get_terminal_size().columns - 1) + "\r")
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
