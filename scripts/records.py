"""Output of scripts/train.py: checkpoints, a log of steps, a line of progress.

Only rank 0 uses these functions, except `on_first`, called by all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from gpucoll.errors import GpucollError

Result = TypeVar("Result")

SETTINGS = "settings.json"
STYLES = ("auto", "bar", "lines", "off")
BAR_WIDTH = 24
PARTS = ("compute", "exposed")  # of a step; together the whole time
INTERVALS = {"bar": 0.1, "lines": 5.0}  # seconds


class Refusal(Exception):
    """The user's request is impossible; the message is one line for the user."""


@dataclass(frozen=True)
class Step:
    """One step of training; `loss` is the mean per sample of the global batch, times are the host's, in seconds.

    `exposed` is the time of communicating or waiting without computing.
    """

    step: int
    loss: float
    samples: int
    seconds: float
    exposed: float

    @property
    def compute(self) -> float:
        """The time of computing."""
        return self.seconds - self.exposed


def total(steps: Sequence[Step]) -> dict[str, float]:
    """Return samples per second, the share of time inside collectives, and means over steps; times in seconds."""
    seconds = sum(step.seconds for step in steps)
    means = {name: sum(getattr(step, name) for step in steps) / len(steps) for name in ("loss", *PARTS)}
    return {"loss": means.pop("loss"), "samples_per_second": sum(step.samples for step in steps) / seconds,
            "communication_share": sum(step.exposed for step in steps) / seconds, **means}


def medians(steps: Sequence[Step]) -> list[float]:
    """Return the median milliseconds of each of PARTS."""
    return [1e3 * statistics.median(getattr(step, name) for step in steps) for name in PARTS]


def times(steps: Sequence[Step]) -> str:
    """Return `medians` in words."""
    return "compute {:.2f} ms, communication {:.2f} ms exposed".format(*medians(steps))


def on_first(comm: Any, action: Callable[[], Result]) -> Result | None:
    """Run `action` on rank 0 and return its result there; if rank 0 refuses, all ranks raise Refusal.

    So no rank waits in a collective for a rank already gone.
    """
    result, refusal = None, None
    if comm.rank == 0:
        try:
            result = action()
        except (Refusal, OSError, GpucollError) as error:
            refusal = str(error)
    refusal = comm.broadcast_object(refusal)
    if refusal is not None:
        raise Refusal(refusal)
    return result


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def write_checkpoint(path: Path, arrays: Mapping[str, Any], steps: int, settings: Mapping[str, Any]) -> None:
    """Write the arrays after `steps` steps to `path`; if interrupted at any moment, `path` keeps the old contents."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            np.savez(file, steps=steps, settings=json.dumps(settings),
                     **{name: to_host(array) for name, array in arrays.items()})  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())  # the bytes are on disk before the file gets its name
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path, arrays: Mapping[str, Any], settings: Mapping[str, Any]) -> int:
    """Read a checkpoint into the arrays; return the number of steps. Refuse a file with other settings."""
    try:
        with np.load(path, allow_pickle=False) as file:
            fields = {name: file[name] for name in file.files}
        compare(json.loads(str(fields["settings"])), settings)
        for name, array in arrays.items():
            if array.shape != fields[name].shape or array.dtype != fields[name].dtype:
                raise ValueError(f"its {name} is {fields[name].dtype} {fields[name].shape}")
        for name, array in arrays.items():
            if isinstance(array, np.ndarray):
                array[...] = fields[name]
            else:
                array.set(fields[name])
        return int(fields["steps"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise Refusal(f"cannot resume from {path}: {error}") from error


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder with other settings."""
    try:
        compare(json.loads((folder / SETTINGS).read_text()), settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"cannot resume from {folder}: {error}") from error


def compare(found: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, wanted in settings.items():
        if found[name] != wanted:
            raise ValueError(f"its {name} is {found[name]}, asked for is {wanted}")


def open_log(path: Path, done: int) -> IO[str]:
    """Return the log, to be continued after step `done`; later lines, of an interrupted epoch, are removed."""
    kept = []
    if done and path.is_file():
        for line in path.read_text().splitlines(keepends=True):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # the last line of a killed run
                kept += [line] * (json.loads(line)["step"] <= done)
    log = path.open("w", buffering=1)  # a complete line reaches the file at once
    log.writelines(kept)
    return log


def write_step(log: IO[str], step: Step) -> None:
    log.write(json.dumps({"step": step.step, **total([step])}) + "\n")


class Progress:
    """Shows the progress of training, averaged since the last display: a redrawn bar, or whole lines.

    At most one display per 0.1 s (bar) or 5 s (lines), and always a display after the last step.
    """

    def __init__(self, style: str, epochs: int, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.style = ("bar" if stream.isatty() else "lines") if style == "auto" else style
        self.epochs, self.stream, self.clock = epochs, stream, clock
        self.steps: list[Step] = []
        self.shown_at = clock()

    def add(self, step: Step, epochs_done: float) -> None:
        """Record one step; `epochs_done` epochs are then done (fractional within an epoch)."""
        if self.style == "off":
            return
        self.steps.append(step)
        last = epochs_done >= self.epochs
        if not last and self.clock() - self.shown_at < INTERVALS[self.style]:
            return
        found = total(self.steps)
        text = (f"epoch {int(epochs_done):{len(str(self.epochs))}}/{self.epochs}  loss {found['loss']:.4f}  "
                f"{found['samples_per_second']:.0f} samples/s  {times(self.steps)}")
        if self.style == "bar":  # overwrites the terminal's current line
            full, columns = int(epochs_done / self.epochs * BAR_WIDTH), shutil.get_terminal_size().columns - 1
            text = "\r" + f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {text}"[:columns].ljust(columns)
        self.stream.write(text + ("\n" if last or self.style == "lines" else ""))
        self.stream.flush()
        self.steps, self.shown_at = [], self.clock()
