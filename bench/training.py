"""What buckets are worth: 1,000 small gradients averaged in buckets, and by a call for each; interleaved, as ratios.

    mpiexec -n 2 python -m bench.training [--gradients 1000] [--elements 1000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy

import gpucoll as gc
from gpucoll.training import DataParallel

REPEATS = 15


def contestants(comm: gc.Communicator, gradients: int, elements: int) -> dict[str, Callable[[], None]]:
    """What is compared: each averages the same gradients over all ranks."""
    weights = {f"{number}": numpy.zeros(elements, "f4") for number in range(gradients)}
    given = {name: numpy.full(elements, comm.rank + 1.0, "f4") for name in reversed(weights)}
    trainer = DataParallel(weights, comm)
    found = {name: numpy.empty_like(array) for name, array in given.items()}
    whole = comm.empty(gradients * elements, "f4")

    def buckets() -> None:
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

    return {"buckets": buckets, "a call for each": each, "copied into one array": one}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.training", description=__doc__)
    parser.add_argument("--gradients", type=int, default=1000)
    parser.add_argument("--elements", type=int, default=1000, help="of float32, in each gradient")
    options = parser.parse_args()
    with gc.init() as comm:
        calls = contestants(comm, options.gradients, options.elements)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(REPEATS):
            for name, call in calls.items():
                comm.barrier()
                began = time.perf_counter()
                call()
                seconds[name].append(float(comm.all_reduce(numpy.array([time.perf_counter() - began]), op="max")[0]))
        best = statistics.median(seconds["buckets"])
        if comm.rank == 0:
            print(f"{options.gradients} gradients of {options.elements} float32, {comm.size} ranks, {REPEATS} repeats")
            for name, found in seconds.items():
                print(f"{name:24} {statistics.median(found) * 1e3:9.2f} ms {statistics.median(found) / best:7.2f}")


if __name__ == "__main__":
    main()
