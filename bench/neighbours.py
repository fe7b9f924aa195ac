"""`scripts/bench --neighbour`: collectives while other processes compute on the same cores, compared with MPI's calls.

An ordinary machine is not quiet. A process beside the ranks takes slices of their cores, so the mean time of a call
depends on how a rank waits. Both contestants make calls for a fixed time, in turns. The result is the median over
turns of the mean time, including the slices taken by the neighbours. A turn consists of batches, since the same call
may take 10 us now and 2 ms a moment later.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy

import gpucoll
from gpucoll import Communicator

from .summary import geometric_mean

COLLECTIVES = ("all_reduce", "broadcast", "reduce", "scatter", "scan", "sendrecv")
SIZES = (8, 4096, 65536)  # bytes of the larger of input and output
NEIGHBOURS = (0, 1, 2)
SECONDS, TURNS = 0.1, 7  # of a turn; per contestant
BATCHES = 10  # per turn, if calls take as long as in the rehearsal
REHEARSAL = 50  # calls
BUSY = "while True: pass"

Call = Callable[[], Any]


class Row(NamedTuple):
    """Microseconds per call of gpucoll and of MPI beside `neighbours` processes; the ratio is MPI's time over ours."""

    neighbours: int
    collective: str
    nbytes: int
    ours: float
    mpi: float

    @property
    def ratio(self) -> float:
        return self.mpi / self.ours


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run `count` busy processes meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def contestants(comm: Communicator, name: str, nbytes: int) -> tuple[Call, Call]:
    """Return gpucoll's call and mpi4py's for the same collective, on equal arrays of 8-byte elements."""
    mpi, size, rank = comm.mpi, comm.size, comm.rank
    x = numpy.full(nbytes // 8, rank + 1.0)
    out = numpy.empty_like(x)
    block = numpy.empty(max(1, x.size // size))
    blocks = numpy.ones((size, block.size)) if rank == 0 else None
    result, right, left = out if rank == 0 else None, (rank + 1) % size, (rank - 1) % size
    return {
        "all_reduce": (lambda: comm.all_reduce(x, out), lambda: mpi.Allreduce(x, out)),
        "broadcast": (lambda: comm.broadcast(x), lambda: mpi.Bcast(x)),
        "reduce": (lambda: comm.reduce(x, result), lambda: mpi.Reduce(x, result)),
        "scatter": (lambda: comm.scatter(blocks, block), lambda: mpi.Scatter(blocks, block)),
        "scan": (lambda: comm.scan(x, out), lambda: mpi.Scan(x, out)),
        "sendrecv": (lambda: comm.sendrecv(x, out, right, left), lambda: mpi.Sendrecv(x, right, 0, out, left, 0)),
    }[name]


def batch(comm: Communicator, call: Call, count: int) -> float:
    """Return the seconds of `count` calls, from the first rank's beginning to the last rank's end."""
    comm.mpi.Barrier()
    began = time.perf_counter()
    for _ in range(count):
        call()
    comm.mpi.Barrier()
    return time.perf_counter() - began


def turn(comm: Communicator, call: Call, count: int) -> float:
    """Return the mean seconds of a call, from batches of `count` calls until rank 0's time for the turn is over."""
    total, batches = 0.0, 0
    while batches == 0 or comm.mpi.bcast(total < SECONDS):
        total, batches = total + batch(comm, call, count), batches + 1
    return total / (batches * count)


def measure(comm: Communicator, count: int, name: str, nbytes: int) -> Row:
    """Measure one collective at one size beside `count` neighbours. A collective call."""
    pair = contestants(comm, name, nbytes)
    counts = []
    for call in pair:
        batch(comm, call, REHEARSAL)
        each = batch(comm, call, REHEARSAL) / REHEARSAL
        counts.append(comm.mpi.bcast(math.ceil(SECONDS / BATCHES / each)))
    seconds: tuple[list[float], list[float]] = [], []
    for number in range(TURNS):
        for which in (0, 1) if number % 2 else (1, 0):
            seconds[which].append(turn(comm, pair[which], counts[which]))
    ours, mpi = (1e6 * statistics.median(times) for times in seconds)
    return Row(count, name, nbytes, ours, mpi)


def summary(rows: list[Row]) -> list[str]:
    """Return a line for each number of neighbours: geometric mean and minimum of the ratios."""
    lines = []
    for count in dict.fromkeys(row.neighbours for row in rows):
        ratios = [row.ratio for row in rows if row.neighbours == count]
        lines.append(f"# {count} neighbours: geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}")
    return lines


def main() -> None:
    """Print the times and the ratios, on rank 0."""
    parser = argparse.ArgumentParser(prog="python -m gpucoll.bench.neighbours", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", type=int, nargs="*", default=NEIGHBOURS, metavar="N")
    options = parser.parse_args()
    rows = []
    with gpucoll.init() as comm:
        if comm.rank == 0:
            print("# neighbours  collective       (B)   gpucoll (us)   MPI (us)   ratio", flush=True)
        for count in options.neighbours:
            with neighbours(count if comm.rank == 0 else 0):
                for name in COLLECTIVES:
                    for nbytes in SIZES:
                        rows.append(measure(comm, count, name, nbytes))
                        if comm.rank == 0:
                            row = rows[-1]
                            print(f"{row.neighbours:>12}  {row.collective:<10} {row.nbytes:>9} {row.ours:>14.2f} "
                                  f"{row.mpi:>10.2f} {row.ratio:>7.2f}", flush=True)
        if comm.rank == 0:
            print("\n".join(summary(rows)), flush=True)


if __name__ == "__main__":
    main()
