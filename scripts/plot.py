"""`--plot FILE.svg` and `--plot FILE.png` of scripts/train.py, by matplotlib (extra `plot`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from gpucoll.bench.plot import PLOT_SETTINGS, save
from gpucoll.bench.plot import check as check_kind

from gpucoll.lab.document import LINES
from records import Refusal, Step, medians


def check(path: Path) -> None:
    """Refuse a file impossible to write, before anything is drawn."""
    check_kind(str(path))
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Refusal(f"--plot {path} cannot be written")


def draw(steps: Sequence[Step], steps_per_epoch: int, path: Path) -> None:
    """Draw the loss of every step, and the median times of a step in each epoch."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    epochs: dict[int, list[Step]] = {}
    for step in steps:
        epochs.setdefault(-(-step.step // steps_per_epoch), []).append(step)
    with rc_context(PLOT_SETTINGS):
        whole = Figure(figsize=(11, 4), layout="constrained")
        left, right = whole.subplots(1, 2)
        left.plot([step.step for step in steps], [step.loss for step in steps], color=LINES[0], linewidth=1)
        left.set(xlabel="step", ylabel="loss per sample (nats)", ylim=(0, None))
        left.set_title("Loss", loc="left")
        compute, exposed = ([medians(some)[part] for some in epochs.values()] for part in range(2))
        right.bar([*epochs], compute, 0.9, color=LINES[0], label="compute")
        right.bar([*epochs], exposed, 0.9, compute, color=LINES[1], label="communication exposed")
        right.set(xlabel="epoch", ylabel="median time of a step (ms)")
        right.set_title("Computation and exposed communication", loc="left")
        right.xaxis.get_major_locator().set_params(integer=True)
        whole.legend(*right.get_legend_handles_labels(), loc="outside lower right", frameon=False, ncols=3)
        for axes in (left, right):
            axes.grid(axis="y")
            axes.set_axisbelow(True)
        save(whole, str(path))
