"""Train a small network on several ranks by `gpucoll.training`: handwritten digits, or characters of a text.

    mpiexec -n 8 python scripts/train.py
    mpiexec -n 8 python scripts/train.py --strategy zero2 --compression powersgd
    mpiexec -n 2 python scripts/train.py --device cuda --algorithm ring --log training.jsonl

Every step takes the same global batch, for any number of ranks and any strategy. So the loss curve is the same, except
for round-off in the last digits and for the losses of a compression.
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
from typing import Any, NoReturn

from environment import launchers

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def limit_threads(environment: MutableMapping[str, str], cores: int) -> None:
    """Give each rank of a node its share of the cores, unless the user chose a number.

    BLAS reads these variables at the first import of numpy. Without them every rank would start a thread per core, and
    the ranks would wait for each other.
    """
    process = launchers.started(environment)
    ranks = (process and process.local_size) or 1
    for name in THREADS:
        environment.setdefault(name, str(max(1, cores // ranks)))


if __name__ == "__main__":
    limit_threads(os.environ, len(os.sched_getaffinity(0)))

import numpy as np  # noqa: E402

import digits  # noqa: E402
import gpucoll as gc  # noqa: E402
import models  # noqa: E402
import records  # noqa: E402
import texts  # noqa: E402
from gpucoll.training import Sampler  # noqa: E402
from gpucoll.training.compression import COMPRESSIONS  # noqa: E402
from records import Refusal, Step, on_first, to_host  # noqa: E402
from strategies import Chain, Strategy  # noqa: E402
from strategies.data_parallel import DataParallel  # noqa: E402
from strategies.parameter_server import ParameterServer  # noqa: E402
from strategies.pipeline import Pipeline  # noqa: E402
from strategies.tensor_parallel import TensorParallel  # noqa: E402
from strategies.zero import ZeRO  # noqa: E402

STRATEGIES: dict[str, type[Strategy]] = {
    "data_parallel": DataParallel, "zero1": ZeRO, "zero2": ZeRO, "zero3": ZeRO, "parameter_server": ParameterServer,
    "tensor_parallel": TensorParallel, "pipeline": Pipeline}
# Small steps: round-off differs with the number of ranks, and is to fade instead of growing. For instance, batches of
# 16 at the rate of 64 give 1 and 8 ranks completely different curves. The warm-up also improves accuracy.
RATE_PER_SAMPLE = 0.2 / 64
LARGEST_RATE = 0.4
TRANSFORMER_RATE = 3e-3  # Adam's rate, independent of the batch
DECAY = 0.93  # of the rate, per epoch; independent of --epochs, so that a finished run can be resumed
WARM_UP = 20  # steps
REFUSED = (gc.ArgumentError, gc.BackendError, gc.DtypeError, gc.PeerError, gc.UsageError)


# Options


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refusal(message)  # argparse itself would print on every rank


def number(kind: Callable[[str], Any], lowest: float) -> Callable[[str], Any]:
    """Return an argparse type: a finite number of that kind, not below `lowest`, within a checkpoint's 64 bits."""

    def convert(text: str) -> Any:
        value = kind(text)
        if not lowest <= value < 2**63:
            raise argparse.ArgumentTypeError(f"{text} is not between {lowest} and 2**63")
        return value

    convert.__name__ = kind.__name__  # used by argparse in its own message
    return convert


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="train.py", description=__doc__, add_help=False, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this page and stop")
    add("--strategy", choices=STRATEGIES, default="data_parallel", help="default data_parallel")
    add("--compression", choices=COMPRESSIONS, default="none", help="of gradients, with error feedback; default none")
    add("--model", choices=models.MODELS, default="mlp", help="mlp and cnn read digits, transformer text; default mlp")
    add("--servers", type=number(int, 1), default=1, metavar="N", help="parameter servers, the last ranks; default 1")
    add("--staleness", type=number(int, 0), default=0, metavar="N", help="steps that a worker may be ahead; default 0")
    add("--epochs", type=number(int, 1), default=30, metavar="N", help="default 30")
    add("--batch", type=number(int, 1), default=64, metavar="N", help="samples per step, over all ranks; default 64")
    add("--seed", type=number(int, 0), default=0, metavar="N", help="of first weights and order; default 0")
    add("--learning-rate", type=number(float, 0), metavar="X", help="default batch * 0.2 / 64, at most 0.4; of the "
        "transformer 0.003")
    add("--dtype", choices=("float32", "float64"), default="float32", help="default float32")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where every rank has a GPU")
    add("--algorithm", default="auto", metavar="NAME", help="of all_reduce, as in its algorithm=")
    add("--executor", metavar="NAME", help="as in gpucoll.init(executor=)")
    add("--save", type=Path, metavar="FILE.npz", help="write a checkpoint after each epoch")
    add("--resume", type=Path, metavar="FILE.npz", help="go on where this checkpoint was written")
    add("--log", type=Path, metavar="FILE.jsonl", help="write one JSON object per step")
    add("--plot", type=Path, metavar="FILE", help="draw loss and times, the host's, as .svg or .png; needs matplotlib")
    add("--progress", choices=records.STYLES, default="auto", help="auto: a bar on a terminal, else lines")
    return parser


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, with the learning rate filled in. Raise Refusal for wrong options."""
    options = make_parser().parse_args(arguments)
    if options.learning_rate is None:
        options.learning_rate = TRANSFORMER_RATE if options.model == "transformer" else min(
            LARGEST_RATE, RATE_PER_SAMPLE * options.batch)
    if options.algorithm != "auto" and (options.strategy, options.compression) not in (
            ("data_parallel", "none"), ("tensor_parallel", "none"), ("pipeline", "none")):
        raise Refusal(f"--algorithm is that of all_reduce, which --strategy {options.strategy} --compression "
                      f"{options.compression} does not call by itself")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings to be equal in a run and its continuation, for the result of a single run."""
    return {name: getattr(options, name) for name in ("model", "batch", "dtype", "seed", "learning_rate")}


# Ranks and devices


def choose_arrays(comm: Any, device: str) -> Any:
    """Return CuPy, with this rank's GPU current, if requested, or if `auto` and every rank has a GPU; else NumPy."""
    found, reason = None, "another rank has no GPU"
    if device != "cpu":
        try:
            import cupy

            cupy.cuda.Device(comm.device).use()
            found = cupy
        except (ImportError, RuntimeError) as error:  # CuPy's CUDARuntimeError is a RuntimeError
            reason = str(error)
    if all(comm.all_gather_object(found is not None)):
        return found
    if device == "cuda":
        raise Refusal(f"--device cuda: {reason}")
    return np


# Training


class Training:
    """The model, the data and the strategy of one rank."""

    def __init__(self, comm: Any, options: argparse.Namespace) -> None:
        self.comm, self.options = comm, options
        self.xp = choose_arrays(comm, options.device)
        try:  # before anything slow: the algorithm or executor may be unable to serve the steps
            comm.all_reduce(self.xp.zeros(1, options.dtype), algorithm=options.algorithm)
        except REFUSED as error:
            raise Refusal(str(error)) from error
        data = texts if options.model == "transformer" else digits
        # Only rank 0 needs scikit-learn and the time for reading.
        table = on_first(comm, lambda: read_table(data))
        shape = comm.broadcast(self.xp.asarray((0, 0) if table is None else table.shape), root=0)
        table = np.zeros([int(length) for length in to_host(shape)], np.uint8) if table is None else table
        table = to_host(comm.broadcast(self.xp.asarray(table), root=0))
        self.train_set, self.test_set = data.split(table)
        self.inputs, self.targets = data.prepare(self.xp, table, options.dtype)
        self.steps_per_epoch = math.ceil(len(self.train_set) / options.batch)
        self.layers = models.MODELS[options.model]()
        options.rate = self.rate
        weights = {name: self.xp.asarray(weight)
                   for name, weight in models.initial(self.layers, options.seed, options.dtype).items()}
        try:
            self.strategy = STRATEGIES[options.strategy](weights, comm, options)
            self.steps_done = self.strategy.load(options.resume, settings(options)) if options.resume else 0
        except REFUSED as error:
            raise Refusal(str(error)) from error
        self.ranks = self.strategy.comm  # the ranks sharing a batch
        self.chain = Chain(self.strategy, self.xp, self.layers)

    def rate(self, step: int) -> float:
        """Return the optimizer's rate in a step; steps count from 1."""
        epoch = (step - 1) // self.steps_per_epoch
        return float(self.options.learning_rate * DECAY**epoch * min(1.0, step / WARM_UP))

    def settle(self) -> float:
        """Wait for the GPU, so that the returned time includes all work before."""
        if self.xp is not np:
            self.xp.cuda.get_current_stream().synchronize()
        return time.perf_counter()

    def epoch(self, epoch: int) -> Iterator[Step]:
        options = self.options
        sampler = Sampler(len(self.train_set), rank=self.ranks.rank, size=self.ranks.size, batch=options.batch,
                          seed=options.seed)
        for number, mine in enumerate(sampler.epoch(epoch)):
            samples = min(options.batch, len(self.train_set) - number * options.batch)
            here = self.xp.asarray(self.train_set[mine])
            yield self.step(epoch * self.steps_per_epoch + number + 1, here, samples)

    def step(self, number: int, mine: Any, samples: int) -> Step:
        """Take one step along the mean gradient of a batch of `samples`; this rank's part is `mine`."""
        began, strategy = self.settle(), self.strategy
        exposed = strategy.exposed
        scale = self.ranks.size / samples  # so that the mean over ranks is the batch's
        loss = strategy.train(self.chain, self.inputs[mine], self.targets[mine], scale)
        strategy.step()
        with strategy.communicating():
            loss = self.ranks.all_reduce(loss)
        exposed = strategy.exposed - exposed
        return Step(number, float(loss[0]) / samples, samples, self.settle() - began, exposed)

    def accuracy(self) -> float:
        """Return the percentage of correct answers on the test set; every rank evaluates a part."""
        mine = self.xp.asarray(np.array_split(self.test_set, self.ranks.size)[self.ranks.rank])
        guesses = self.chain.forward(self.inputs[mine])[0].argmax(axis=-1)
        right = (guesses == self.targets[mine].argmax(axis=-1)).sum(dtype="int64").reshape(1)
        each = math.prod(guesses.shape[1:])
        return 100 * int(self.ranks.all_reduce(right)[0]) / (len(self.test_set) * each)


def read_table(data: Any) -> np.ndarray:
    try:
        return np.asarray(data.read_table())
    except ImportError as error:
        raise Refusal(f"scikit-learn is missing ({error}): pip install gpucoll[train]") from error


def train(comm: Any, options: argparse.Namespace) -> None:
    """Train to the end; rank 0 logs, saves, and shows the progress."""
    on_first(comm, lambda: refuse_unwritable(options.save))
    if options.plot:
        import plot

        on_first(comm, lambda: plot.check(options.plot))
    if (options.save or options.resume) and options.strategy not in ("data_parallel", "zero1", "zero2", "zero3"):
        raise Refusal(f"--save and --resume are not for --strategy {options.strategy}")
    if options.save and options.strategy == "data_parallel" and options.compression != "none":
        raise Refusal("--save with --compression is for --strategy zero1, zero2 or zero3, which save what it has lost")
    training = Training(comm, options)
    if training.strategy.is_server:
        training.strategy.serve()
        return
    progress = records.Progress(options.progress if comm.rank == 0 else "off", options.epochs, sys.stderr)
    done, ranks = training.steps_done, training.ranks
    path, history = options.log if comm.rank == 0 else None, list[Step]()
    with on_first(ranks, lambda: records.open_log(path, done) if path else None) or nullcontext() as log:
        for epoch in range(done // training.steps_per_epoch, options.epochs):
            for step in training.epoch(epoch):
                history.append(step)
                progress.add(step, step.step / training.steps_per_epoch)
                if log:
                    records.write_step(log, step)
            if options.save:
                training.strategy.save(options.save, settings(options))
    training.strategy.end()
    accuracy = training.accuracy()
    if comm.rank == 0:
        if history:  # empty if the resumed run had already ended
            print(f"a step: {records.times(history)}")
        print(f"test accuracy {accuracy:.1f} %", flush=True)
    if options.plot:
        on_first(ranks, lambda: plot.draw(history, training.steps_per_epoch, options.plot) if comm.rank == 0 else None)


def refuse_unwritable(path: Path | None) -> None:
    if path and not os.access(path.parent, os.W_OK):
        raise Refusal(f"--save {path}: {path.parent} is not a folder that can be written to")


# The command


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, and return the exit code: 0, or 2 on all ranks for wrong arguments."""
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
    """Write the text once, from rank 0 of all launched ranks; return the exit code."""
    from mpi4py import MPI

    if MPI.COMM_WORLD.Get_rank() == 0:
        stream.write(text)
        stream.flush()
    return code


if __name__ == "__main__":
    raise SystemExit(main())
