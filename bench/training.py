"""Training with collectives: contestants in turn within one run, as medians and ratios.

    mpiexec -n 2 python -m bench.training [buckets]     small gradients in buckets, and by a call for each
    mpiexec -n 2 python -m bench.training overlap       a step against its computing and its communication alone
    mpiexec -n 2 python -m bench.training ddp           against PyTorch's DistributedDataParallel over Gloo
    mpiexec -n 4 python -m bench.training backend       torch.distributed over gpucoll and over Gloo
    mpiexec -n 8 python -m bench.training servers       parameter servers against a ring
    mpiexec -n 2 python -m bench.training formats       all-reduce in block-scaled formats against float32

With OMP_NUM_THREADS=1 each rank computes with one thread, and does not disturb the other ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import statistics
from collections.abc import Callable, Mapping

import numpy

import gpucoll as gc
from gpucoll.block_scaled import FORMATS, BlockScaledCollectives
from gpucoll.calibration.measure import in_turn
from gpucoll.cli.arguments import Parser, at_least, refuse
from gpucoll.lab.sizes import byte_size
from gpucoll.training import DataParallel

from .contestants import LeftOutPeer

TRAINING_COMMAND = "bench.training"
MIB = 1 << 20
BATCH = 256  # the batch for timing the computing, before the final batch is chosen


def medians(comm: gc.Communicator, calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return the median milliseconds of each call, by the slowest rank's clock; the first calls warm up."""
    taken = in_turn(comm.mpi, [*calls.values()], 1 + repeats)
    return {name: 1e3 * statistics.median(each[1:]) for name, each in zip(calls, taken, strict=True)}


def buckets(comm: gc.Communicator, options: argparse.Namespace) -> list[str]:
    """Return the times for averaging small gradients over all ranks, in each of three ways."""
    gradients, elements = options.gradients, options.elements
    weights = {f"{number}": numpy.zeros(elements, "f4") for number in range(gradients)}
    given = {name: numpy.full(elements, comm.rank + 1.0, "f4") for name in reversed(weights)}
    trainer = DataParallel(weights, comm)
    found = {name: numpy.empty_like(array) for name, array in given.items()}
    whole = comm.empty(gradients * elements, "f4")

    def in_buckets() -> None:
        for name, gradient in given.items():
            trainer.ready(name, gradient)
        trainer.finish()

    def each() -> None:
        for name, gradient in given.items():
            comm.all_reduce(gradient, out=found[name], op="avg")

    def one() -> None:
        for place, gradient in zip(whole.reshape(gradients, elements), given.values(), strict=True):
            place[...] = gradient
        comm.all_reduce(whole, out=whole, op="avg")

    times = medians(comm, {"buckets": in_buckets, "a call for each": each, "copied into one array": one},
                    options.repeats)
    return [f"{gradients} gradients of {elements} float32, {comm.size} ranks, {options.repeats} repeats",
            *(f"{name:24} {ms:9.2f} ms {ms / times['buckets']:7.2f}" for name, ms in times.items())]


class Perceptron:
    """Square layers with ReLUs, and one batch; the loss is half the sum of the squared outputs."""

    def __init__(self, layers: int, width: int, batch: int) -> None:
        chance = numpy.random.default_rng(batch)
        self.weights = {f"{layer}": chance.standard_normal((width, width), "f4") * numpy.float32((2 / width) ** 0.5)
                        for layer in range(layers)}
        self._kept = [chance.standard_normal((batch, width), "f4"), *numpy.zeros((layers, batch, width), "f4")]
        self._slopes = numpy.zeros((2, batch, width), "f4")

    def forward(self) -> None:
        """Compute and keep the output of each layer."""
        for (x, y), weight in zip(itertools.pairwise(self._kept), self.weights.values(), strict=True):
            numpy.maximum(numpy.matmul(x, weight, out=y), 0, out=y)

    def backward(self, gradients: Mapping[str, numpy.ndarray], ready: Callable[[str], None]) -> None:
        """Compute each layer's gradient in place and call `ready`, the last layer first."""
        slope, other = self._slopes
        slope[...] = self._kept[-1]
        for x, (name, weight) in zip(self._kept[-2::-1], reversed(self.weights.items()), strict=True):
            numpy.matmul(x.T, slope, out=gradients[name])
            ready(name)
            if x is not self._kept[0]:
                numpy.matmul(slope, weight.T, out=other)
                slope, other = numpy.multiply(other, x > 0, out=other), slope


class TrainingStep:
    """A step of data parallel training, and its parts."""

    def __init__(self, comm: gc.Communicator, options: argparse.Namespace, batch: int) -> None:
        self._model = Perceptron(options.layers, options.width, batch)
        self._trainer = DataParallel(self._model.weights, comm, options.bucket_bytes)
        self._gradients = self._trainer.gradients
        self.forward: Callable[[], None] = self._model.forward

    def compute(self) -> None:
        """Compute gradients without communication."""
        self.forward()
        self._model.backward(self._gradients, lambda name: None)

    def communicate(self) -> None:
        """Average the existing gradients."""
        for name in self._gradients:
            self._ready(name)
        self._trainer.finish()

    def whole(self) -> None:
        """Average each gradient while the next gradients are computed."""
        self.forward()
        self._model.backward(self._gradients, self._ready)
        self._trainer.finish()

    def _ready(self, name: str) -> None:
        self._trainer.ready(name, self._gradients[name])


def overlap(comm: gc.Communicator, options: argparse.Namespace) -> list[str]:
    """Return the time of a step, and the least possible time.

    Communication hides only behind backward, from the first bucket on, and the last bucket cannot hide at all. So
    without a given batch, the batch is chosen to make backward as long as communication.
    """
    batch = options.batch
    if batch is None:
        step = TrainingStep(comm, options, BATCH)
        alone = medians(comm, {"forward": step.forward, "compute": step.compute, "comm": step.communicate}, 3)
        batch = max(1, round(BATCH * alone["comm"] / (alone["compute"] - alone["forward"])))
    step = TrainingStep(comm, options, batch)
    calls = {"forward": step.forward, "compute": step.compute, "communication": step.communicate, "step": step.whole}
    times = medians(comm, calls, options.repeats)
    most = max(times["compute"], times["communication"])
    layer, layers = 4 * options.width**2, options.layers
    last = max(1, options.bucket_bytes // layer) / layers  # of the communication
    first = (times["compute"] - times["forward"]) / (2 * layers - 1)  # of the matrix products of backward
    least = max(times["compute"] + last * times["communication"], times["forward"] + first + times["communication"])
    return [f"{layers} layers of {options.width}, batch {batch}, {layers * layer / MIB:g} MiB of gradients in buckets "
            f"of {options.bucket_bytes / MIB:g} MiB, {comm.size} ranks on {comm.nodes} nodes, "
            f"{options.repeats} repeats",
            *(f"{name:24} {ms:9.2f} ms" for name, ms in times.items()),
            f"{'step / max(compute, communication)':34} {times['step'] / most:7.3f}",
            f"{'and at least':34} {least / most:7.3f}"]


def formats(comm: gc.Communicator, options: argparse.Namespace) -> list[str]:
    """Return the times of all-reduces in each block-scaled format, in float32's time, and the bits sent."""
    x = numpy.random.default_rng(comm.rank).standard_normal(options.bytes // 4, "f4")
    out = numpy.empty_like(x)
    with contextlib.ExitStack() as stack:
        narrow = {name: stack.enter_context(BlockScaledCollectives(comm, name)) for name in FORMATS}
        calls: dict[str, Callable[[], object]] = {"float32": lambda: comm.all_reduce(x, out)}
        calls |= {name: functools.partial(one.all_reduce, x, out=out) for name, one in narrow.items()}
        times = medians(comm, calls, options.repeats)
    bits = {"float32": 32.0} | {name: row.wire_bits for name, row in FORMATS.items()}
    return [f"{options.bytes / MIB:g} MiB of float32, {comm.size} ranks on {comm.nodes} nodes, "
            f"{options.repeats} repeats",
            *(f"{name:12} {bits[name]:6.3f} bits {ms:9.2f} ms {times['float32'] / ms:7.2f} times float32's speed"
              for name, ms in times.items())]


def main() -> None:
    """Run one of the measurements, under mpiexec."""
    parser = Parser(prog=TRAINING_COMMAND, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    kinds = {"buckets": buckets, "overlap": overlap, "formats": formats}
    add("what", nargs="?", choices=(*kinds, "ddp", "backend", "servers"), default="buckets")
    add("--gradients", type=at_least(1), default=1000, help="buckets: how many (1000)")
    add("--elements", type=at_least(1), default=1000, help="buckets: of float32, in each gradient (1000)")
    add("--layers", type=at_least(1), help="overlap, ddp, backend: of the network (16; 4; 6)")
    add("--width", type=at_least(1), default=1024, help="overlap, ddp, backend: of each layer (1024)")
    add("--batch", type=at_least(1), help="overlap, ddp, backend: of each rank (overlap chooses it; 128; 8)")
    add("--bucket-bytes", type=byte_size, help="overlap, ddp, backend: (4M; 25M, the default of both libraries)")
    add("--bytes", type=byte_size, default=16 * MIB, help="servers, formats: of the array (16M)")
    add("--repeats", type=at_least(1), default=15, help="(15)")
    options = parser.parse_args()
    defaults = {"ddp": {"layers": 4, "batch": 128, "bucket_bytes": 25 * MIB},
                "backend": {"layers": 6, "batch": 8, "bucket_bytes": 25 * MIB}}
    for name, value in defaults.get(options.what, {"layers": 16, "bucket_bytes": 4 * MIB}).items():
        setattr(options, name, value if getattr(options, name) is None else getattr(options, name))
    apart = {"ddp": "torch_ddp", "backend": "torch_backend", "servers": "servers"}
    with gc.init() as comm:
        try:
            measure = kinds.get(options.what) or importlib.import_module(
                f".{apart[options.what]}", __package__).measure
            lines = measure(comm, options)
        except (LeftOutPeer, gc.ArgumentError) as error:  # the same error on every rank
            refuse(TRAINING_COMMAND, str(error))
        if comm.rank == 0:
            print("\n".join(lines))


if __name__ == "__main__":
    main()
