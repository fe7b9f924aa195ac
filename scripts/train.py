"""Train a small network on handwritten digits, with gradients summed over ranks by gpucoll.

    mpiexec -n 8 python scripts/train.py
    mpiexec -n 2 python scripts/train.py --device cuda --algorithm ring --log training.jsonl

Every step takes the same global batch, whatever the number of ranks. Each rank computes the sum of
its samples' gradients, one all-reduce adds these sums, and every rank takes the same step. So the
loss curve does not depend on the number of ranks, but for round-off in the last digits.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from environment import launchers

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads(environment: MutableMapping[str, str], cores: int) -> None:
    """Gives each rank of a node its part of the cores, unless the user chose a number.

    BLAS reads these variables when numpy is first imported. Without them every rank would start
    as many threads as there are cores, and the ranks would wait for each other.
    """
    ranks = launchers.local_size(environment) or 1
    for name in THREADS:
        environment.setdefault(name, str(max(1, cores // ranks)))


if __name__ == "__main__":
    limit_threads(os.environ, len(os.sched_getaffinity(0)))

import numpy as np  # noqa: E402

import digits  # noqa: E402
import gpucoll as gc  # noqa: E402
import records  # noqa: E402
from gpucoll.rendezvous import by_first_rank  # noqa: E402
from records import Refusal, Step  # noqa: E402

# Steps moderate enough that round-off, which differs with the number of ranks, dies away and does not grow: batches of
# 16 at the rate of 64, for instance, give 1 and 8 ranks curves that part altogether. The warm-up adds to accuracy too.
MOMENTUM = 0.9
RATE_PER_SAMPLE = 0.2 / 64
LARGEST_RATE = 0.4
DECAY = 0.93  # of the rate, per epoch; it does not depend on --epochs, so that a finished run can be resumed
WARM_UP = 20  # steps
REFUSED = (gc.ArgumentError, gc.BackendError, gc.DtypeError, gc.PeerError, gc.UsageError)

Result = TypeVar("Result")


# Options


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(message)  # argparse would print on every rank


def number(kind: Callable[[str], Any], lowest: float) -> Callable[[str], Any]:
    """An argparse type: a finite number of that kind, not below `lowest`, that fits a checkpoint's 64 bits."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not lowest <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not between {lowest} and 2**63")
        return value

    convert.__name__ = kind.__name__  # argparse names it in its own message
    return convert


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="train.py", description=__doc__, add_help=False, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this page and stop")
    add("--epochs", type=number(int, 1), default=30, metavar="N", help="default 30")
    add("--batch", type=number(int, 1), default=64, metavar="N", help="samples per step, over all ranks; default 64")
    add("--seed", type=number(int, 0), default=0, metavar="N", help="of first weights and order; default 0")
    add("--learning-rate", type=number(float, 0), metavar="X", help="default batch * 0.2 / 64, at most 0.4")
    add("--dtype", choices=("float32", "float64"), default="float32", help="default float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where every rank has a GPU")
    add("--algorithm", default="auto", metavar="NAME", help="of all_reduce, as in its algorithm=")
    add("--executor", metavar="NAME", help="as in gpucoll.init(executor=)")
    add("--save", type=Path, metavar="FILE.npz", help="write a checkpoint after each epoch")
    add("--resume", type=Path, metavar="FILE.npz", help="go on where this checkpoint was written")
    add("--log", type=Path, metavar="FILE.jsonl", help="write one JSON object per step")
    add("--progress", choices=records.STYLES, default="auto", help="auto: a bar on a terminal, else lines")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, with the learning rate filled in. Raises Refusal where they are wrong."""
    options = make_parser().parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = min(LARGEST_RATE, RATE_PER_SAMPLE * options.batch)
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What must be alike in a run and its continuation, for the result to be that of one run."""
    names = ("batch", "dtype", "seed", "learning_rate")
    return {"layers": list(digits.LAYERS), **{name: getattr(options, name) for name in names}}


# Ranks and devices


def on_first(comm: Any, action: Callable[[], Result]) -> Result | None:
    """Runs `action` on rank 0, which alone has its result; where it refuses, all ranks refuse.

    So no rank goes on and waits in a collective for one that has left.
    """
    kept: list[Result] = []
    try:
        by_first_rank(comm.mpi, lambda: kept.append(action()))
    except (Refusal, OSError) as error:
        raise Refusal(str(error)) from None
    return kept[0] if kept else None


def choose_arrays(comm: Any, device: str) -> Any:
    """CuPy, with this rank's GPU made current, where asked for or where `auto` finds one on every rank; else NumPy."""
    found, reason = None, "another rank has no GPU"
    if device != "cpu":
        try:
            import cupy

            cupy.cuda.Device(comm.device).use()
            found = cupy
        except (ImportError, RuntimeError) as error:  # CuPy's CUDARuntimeError is a RuntimeError
            reason = str(error)
    if all(comm.mpi.allgather(found is not None)):
        return found
    if device == "cuda":
        raise Refusal(f"--device cuda: {reason}")
    return np


def to_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


# Training


class Training:
    """Weights, momentum and data of one rank; after every step all ranks hold the same weights."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.xp = choose_arrays(comm, options.device)
        self.buffer = self.xp.zeros(digits.PARAMETERS + 1, options.dtype)
        try:  # before anything slow: an algorithm or executor may be one that cannot serve the steps
            self.all_reduce(self.buffer)
        except REFUSED as error:
            raise Refusal(str(error)) from error
        first = on_first(comm, self.first_state) or (np.zeros((2, digits.PARAMETERS), options.dtype), 0)
        self.state = comm.broadcast(self.xp.asarray(first[0]), root=0)  # weights and momentum
        self.epochs_done = int(comm.broadcast(self.xp.asarray([first[1]]), root=0)[0])
        # Only rank 0 needs scikit-learn and the time that it takes.
        table = on_first(comm, read_table)
        table = np.zeros((digits.SAMPLES, digits.PIXELS + 1), np.uint8) if table is None else table
        table = to_host(comm.broadcast(self.xp.asarray(table), root=0))
        self.train_set, self.test_set = digits.split(table[:, digits.PIXELS])
        self.images, self.targets = digits.prepare(self.xp, table, options.dtype)
        self.steps_per_epoch = math.ceil(len(self.train_set) / options.batch)

    def first_state(self) -> tuple[np.ndarray, int]:
        """Weights and momentum, shape (2, PARAMETERS), and the epochs done: of a checkpoint, or fresh ones."""
        if self.options.resume:
            return records.read_checkpoint(self.options.resume, settings(self.options))
        weights = digits.initial(self.options.seed, self.options.dtype)
        return np.stack([weights, np.zeros_like(weights)]), 0

    def all_reduce(self, array: Any) -> Any:
        return self.comm.all_reduce(array, out=array, algorithm=self.options.algorithm)

    def settle(self) -> float:
        """Waits for the GPU, so that the time that it returns is that of the work before."""
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()
        return time.perf_counter()

    def epoch(self, epoch: int) -> Iterator[Step]:
        options = self.options
        batches = digits.batches(self.train_set, options.batch, options.seed, epoch)
        for step, batch in enumerate(batches, start=epoch * self.steps_per_epoch + 1):
            yield self.step(step, batch, options.learning_rate * DECAY**epoch * min(1.0, step / WARM_UP))

    def step(self, step: int, batch: np.ndarray, rate: float) -> Step:
        """Takes one step along the mean gradient of `batch`, the same on every rank.

        The time of communication holds that of waiting for slower ranks.
        """
        began = time.perf_counter()
        mine = self.xp.asarray(digits.share(batch, self.comm.rank, self.comm.size))
        digits.gradient(self.xp, self.state[0], self.images[mine], self.targets[mine], out=self.buffer)
        computed = self.settle()
        self.all_reduce(self.buffer)
        communication = self.settle() - computed
        self.buffer /= len(batch)
        weights, momentum = self.state
        momentum *= MOMENTUM
        momentum += self.buffer[:-1]
        weights -= rate * momentum
        loss = float(self.buffer[-1])
        return Step(step, loss, len(batch), time.perf_counter() - began, communication)

    def accuracy(self) -> float:
        """Per cent of the test set that is read rightly; every rank looks at its part of it."""
        mine = self.xp.asarray(digits.share(self.test_set, self.comm.rank, self.comm.size))
        right = digits.correct(self.xp, self.state[0], self.images[mine], self.targets[mine])
        return 100 * int(self.all_reduce(right)[0]) / len(self.test_set)


def read_table() -> np.ndarray:
    try:
        return digits.read_table()
    except ImportError as error:
        raise Refusal(f"scikit-learn is missing ({error}): pip install gpucoll[train]") from error


def train(comm: Any, options: argparse.Namespace) -> None:
    """Trains to the end; rank 0 logs, saves, and shows how far it is."""
    on_first(comm, lambda: refuse_unwritable(options.save))
    training = Training(comm, options)
    progress = records.Progress(options.progress if comm.rank == 0 else "off", options.epochs, sys.stderr)
    done = training.epochs_done * training.steps_per_epoch
    with on_first(comm, lambda: records.open_log(options.log, done) if options.log else None) or nullcontext() as log:
        for epoch in range(training.epochs_done, options.epochs):
            for step in training.epoch(epoch):
                progress.add(step, step.step / training.steps_per_epoch)
                if log:
                    records.write_step(log, step)
            if options.save:
                on_first(comm, lambda: records.write_checkpoint(  # it is called before the next epoch
                    options.save, to_host(training.state), epoch + 1, settings(options)))  # noqa: B023
    accuracy = training.accuracy()
    if comm.rank == 0:
        print(f"test accuracy {accuracy:.1f} %", flush=True)


def refuse_unwritable(path: Path | None) -> None:
    if path and not os.access(path.parent, os.W_OK):
        raise Refusal(f"--save {path}: {path.parent} is not a folder that can be written to")


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, and returns the exit code: 0, or on all ranks 2 where the arguments are wrong."""
    try:
        options = parse(arguments)
        if options.help:
            return say(make_parser().format_help(), sys.stdout, 0)
        communicator = gc.init(executor=options.executor)
    except (Refusal, *REFUSED) as error:
        return refuse(error)
    with communicator as comm:
        try:
            train(comm, options)
        except Refusal as error:
            return refuse(error)
    return 0


def refuse(error: Exception) -> int:
    return say(f"train.py: error: {' '.join(str(error).split())}\n", sys.stderr, 2)


def say(text: str, stream: Any, code: int) -> int:
    """Writes the text once, from rank 0 of all that were launched; returns the exit code."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        stream.write(text)
        stream.flush()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
