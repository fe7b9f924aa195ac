"""Bytes sent and kept by a rank with each strategy of training, beside the formulas.

    OMP_NUM_THREADS=1 mpiexec -n 4 python -m bench.strategies [--width 128] [--steps 15]

The model is x @ up @ down in float32, by Adam. The formulas are those of rings, and the program sets
`GPUCOLL_ALGO=ring`. The bytes of rank 0's messages are counted in the schedule of the algorithm taken for each
collective of a step; the few bytes for reporting errors do not count. Memory means parameters, gradients and Adam's
state at the optimizer's step; for a parameter server without gradients, for a worker with the gradients sent. Prints a
table in Markdown. Exits with 1 if a count differs from the formula.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy

import gpucoll as gc
from gpucoll.algorithms import schedule
from gpucoll.cli.arguments import at_least
from gpucoll.core.schedule import Send
from gpucoll.training import ParameterServer

from . import steps

SAMPLES = 64  # samples per rank
# Bytes sent in a step and kept, on P ranks: b bytes of parameters, k of Adam's state, a of the reduced activations.
FORMULAS = {
    "DataParallel": ("2 * (P - 1) / P * b", "2 * b + k"),
    "ZeRO, stage 1": ("2 * (P - 1) / P * b", "2 * b + k / P"),
    "ZeRO, stage 2": ("2 * (P - 1) / P * b", "b + (b + k) / P"),
    "ZeRO, stage 3": ("3 * (P - 1) / P * b", "(2 * b + k) / P"),
    "Linear, columns then rows": ("4 * (P - 1) / P * a", "(2 * b + k) / P"),
    "ParameterServer, a worker": ("b", "2 * b"),
    "ParameterServer, the server": ("(P - 1) * b", "b + k")}


def bytes_sent(comm: gc.Communicator, name: Any, nbytes: int) -> Fraction:
    """Return the bytes of this rank's messages in the schedule that `auto` takes for a call."""
    chosen = comm.explain(name, nbytes).candidates[0]
    rounds = schedule(name, chosen["algorithm"], rank=comm.rank, size=comm.size, segments=chosen["segments"])
    chunks = sum(step.src.count for steps in rounds for step in steps if isinstance(step, Send))
    return Fraction(chunks * nbytes, rounds.chunks)


@contextlib.contextmanager
def counting() -> Iterator[list[Fraction]]:
    """Append to the list the bytes sent by this rank's collectives, also on sub-communicators."""
    sent: list[Fraction] = []

    def counted(name: str) -> Any:
        call = getattr(gc.Communicator, name)

        def method(self: gc.Communicator, x: Any, *arguments: Any, **options: Any) -> Any:
            if x.nbytes > 1:  # a single byte reports errors
                sent.append(bytes_sent(self, name, x.nbytes * (self.size if name == "all_gather" else 1)))
            return call(self, x, *arguments, **options)

        return method

    with contextlib.ExitStack() as stack:
        for name in ("all_reduce", "reduce_scatter", "all_gather"):
            stack.enter_context(mock.patch.object(gc.Communicator, name, counted(name)))
        yield sent


def measure(step: steps.StepCall, repeats: int) -> Fraction:
    """Return the bytes sent by a step; a first step is not counted."""
    step()
    with counting() as sent:
        for _ in range(repeats):
            step()
    return sum(sent, Fraction()) / repeats


def rows(comm: gc.Communicator, weights: Any, x: Any, repeats: int) -> Iterator[tuple[Fraction, int]]:
    """Yield bytes sent and bytes kept of rank 0, in the order of FORMULAS. A collective call."""
    for way in (steps.data_parallel, *map(steps.zero, (1, 2, 3)), steps.linear):
        adam = steps.Watched()
        sent = measure(way(comm, {name: weight.copy() for name, weight in weights.items()}, adam, x), repeats)
        yield sent, adam.kept
    adam = steps.Watched()
    place = ParameterServer(weights, comm, 1, adam)
    if place.is_server:
        kept = steps.nbytes(place.serve()) + adam.nbytes
    else:
        measure(steps.worker(place, x), repeats)
        kept = steps.nbytes(place.parameters) + sum(bucket.row.nbytes for bucket in place._whole)
        place.done()
    for rank in (0, comm.size - 1):
        yield comm.mpi.bcast((Fraction(place.traffic["out"], repeats + 1), kept), root=rank)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.strategies", description=__doc__)
    parser.add_argument("--width", type=at_least(1), default=128, help="of x, a multiple of the ranks: no padding")
    parser.add_argument("--steps", type=at_least(1), default=15)
    options = parser.parse_args()
    os.environ["GPUCOLL_ALGO"] = "ring"
    with gc.init() as comm:
        if comm.size < 2 or options.width % comm.size:
            raise SystemExit(f"bench.strategies: a width of {options.width} is not divided by {comm.size} ranks, or 1")
        chance, width = numpy.random.default_rng(0), options.width
        shapes = {"up": (width, 4 * width), "down": (4 * width, width)}
        weights = {name: chance.standard_normal(shape, "f4") / width for name, shape in shapes.items()}
        x = chance.standard_normal((SAMPLES, width), "f4")
        found, b = [*rows(comm, weights, x, options.steps)], steps.nbytes(weights)
    names, wrong = {"P": comm.size, "a": x.nbytes, "b": b, "k": 2 * b}, 0
    lines = [f"| P = {comm.size}, b = {b:,}, k = {2 * b:,}, a = {x.nbytes:,} | bytes sent | formula | bytes kept "
             "| formula |", "|---|---|---|---|---|"]
    for (name, formulas), (sent, kept) in zip(FORMULAS.items(), found, strict=True):
        wrong += [eval(formula, names) for formula in formulas] != [sent, kept]
        sends, keeps = (formula.replace(" *", "") for formula in formulas)
        lines.append(f"| {name} | {float(sent):,.0f} | {sends} | {kept:,} | {keeps} |")
    if comm.rank == 0:
        print("\n".join(lines), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
