"""What scripts/train.py leaves behind and shows: checkpoints, a log of steps, a line of progress.

Only rank 0 uses these. Nothing here knows of ranks or GPUs; weights come as NumPy arrays.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

STYLES = ("auto", "bar", "lines", "off")
BAR_WIDTH = 24
INTERVALS = {"bar": 0.1, "lines": 5.0}  # seconds


class Refusal(Exception):
    """What the user asked for cannot be done; the message is one line for people."""


@dataclass(frozen=True)
class Step:
    """One step of training; `loss` is the mean per sample of the global batch, times are seconds."""

    step: int
    loss: float
    samples: int
    seconds: float
    communication: float


def total(steps: list[Step]) -> dict[str, float]:
    """Loss (mean over steps), samples per second, and the share of time inside collectives."""
    seconds = sum(step.seconds for step in steps)
    return {
        "loss": sum(step.loss for step in steps) / len(steps),
        "samples_per_second": sum(step.samples for step in steps) / seconds,
        "communication_share": sum(step.communication for step in steps) / seconds,
    }


# Checkpoints


def write_checkpoint(path: Path, state: np.ndarray, epochs: int, settings: Mapping[str, Any]) -> None:
    """`path` holds the state after `epochs` epochs; cut short at any moment, it holds the old one.

    The rename is atomic within a folder, and fsync puts the bytes on disk before their name.
    """
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            np.savez(file, weights=state[0], momentum=state[1], epoch=epochs, **settings)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_checkpoint(path: Path, settings: Mapping[str, Any]) -> tuple[np.ndarray, int]:
    """State (2, parameters) and the number of epochs done. Refuses a file of other settings."""
    try:
        with np.load(path, allow_pickle=False) as file:
            fields = {name: file[name] for name in file.files}
        refuse_other_settings(path, fields, settings)
        return np.stack([fields["weights"], fields["momentum"]]), int(fields["epoch"])
    except (OSError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise Refusal(f"cannot resume from {path}: {error}") from error


def refuse_other_settings(path: Path, fields: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name, wanted in settings.items():
        if not np.array_equal(fields[name], wanted):
            found = fields[name].tolist()
            raise Refusal(f"cannot resume from {path}: its {name} is {found}, asked for is {wanted}")


# Log


def open_log(path: Path, done: int) -> IO[str]:
    """The log, to be continued after step `done`: later lines, of an epoch cut short, are gone."""
    kept = [line for line in read_lines(path) if done and is_up_to(line, done)]
    log = path.open("w", buffering=1)  # a line reaches the file as soon as it is complete
    log.writelines(kept)
    return log


def read_lines(path: Path) -> list[str]:
    return path.read_text().splitlines(keepends=True) if path.is_file() else []


def is_up_to(line: str, step: int) -> bool:
    try:
        return json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):  # the last line of a run that was killed
        return False


def write_step(log: IO[str], step: Step) -> None:
    log.write(json.dumps({"step": step.step, **total([step])}) + "\n")


# Progress


class Progress:
    """Shows how far training is: a bar that redraws itself, or whole lines, on `stream`.

    At most one line each 0.1 s (bar) or 5 s (lines), and always one after the last step. Figures
    are those of the steps since the line before.
    """

    def __init__(self, style: str, epochs: int, stream: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        automatic = "bar" if stream.isatty() else "lines"
        self.style = automatic if style == "auto" else style
        self.epochs, self.stream, self.clock = epochs, stream, clock
        self.steps: list[Step] = []
        self.shown_at = clock()

    def add(self, step: Step, epochs_done: float) -> None:
        """Takes in one step, after which `epochs_done` epochs (a fraction within one) are done."""
        if self.style == "off":
            return
        self.steps.append(step)
        last = epochs_done >= self.epochs
        if last or self.is_due():
            self.show(epochs_done, last)

    def is_due(self) -> bool:
        return self.clock() - self.shown_at >= INTERVALS[self.style]

    def show(self, epochs_done: float, last: bool) -> None:
        text = describe(epochs_done, self.epochs, self.steps)
        if self.style == "bar":
            text = redraw(epochs_done / self.epochs, text, shutil.get_terminal_size().columns)
        self.stream.write(text + ("\n" if last or self.style == "lines" else ""))
        self.stream.flush()
        self.steps, self.shown_at = [], self.clock()


def describe(epochs_done: float, epochs: int, steps: list[Step]) -> str:
    """One line: `epoch 12/30  loss 0.5241  12345 samples/s  communication 34 %`."""
    figures = total(steps)
    return (
        f"epoch {int(epochs_done):{len(str(epochs))}}/{epochs}  loss {figures['loss']:.4f}  "
        f"{figures['samples_per_second']:.0f} samples/s  "
        f"communication {100 * figures['communication_share']:.0f} %"
    )


def redraw(done: float, text: str, columns: int) -> str:
    """The bar and the text in the terminal's current line, over all that stood there."""
    full = int(done * BAR_WIDTH)
    line = f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {text}"[: columns - 1]
    return "\r" + line.ljust(columns - 1)
