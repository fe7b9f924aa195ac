"""`sendrecv --pairs`: every pair of ranks by itself, all others quiet; each direction of a link on its own.

The source sends, the target answers with one byte: its time is that of the message plus one small latency, by the
source's clock alone.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
from mpi4py import MPI

from .cases import Case
from .measure import Bench
from .operands import random_bytes

ROUNDS = 3
REPETITIONS = 5  # in a round
WARMUPS = 1
NAP = 5e-4  # seconds: whoever has to wait leaves the processors to the pair


class Exchange(NamedTuple):
    """Seconds of each repetition by the source's clock, and how many bytes were wrong at the target."""

    seconds: list[float]
    wrong: int


def pairs_of(ranks: int) -> Iterator[tuple[int, int]]:
    """Return all directed pairs.

    >>> list(pairs_of(2))
    [(0, 1), (1, 0)]
    """
    return itertools.permutations(range(ranks), 2)


def measure_pairs(bench: Bench, case: Case, nbytes: int) -> list[dict[str, Any]]:
    """Return what JSON keeps of each pair, the same on every rank; a collective call.

    Every pair has its turn in each of several rounds, so that what disturbs the machine for a while is not taken for
    one slow link.
    """
    size = case.nbytes(case.count(nbytes))
    links = list(pairs_of(bench.comm.size))
    rounds = [[_exchanged(bench, size, *link) for link in links] for _ in range(ROUNDS)]
    return [_figures(bench, size, link, turns) for link, turns in zip(links, zip(*rounds, strict=True), strict=True)]


def _figures(bench: Bench, size: int, link: tuple[int, int], turns: Sequence[Exchange]) -> dict[str, Any]:
    seconds = [taken for turn in turns for taken in turn.seconds]
    middle, wrong = statistics.median(seconds), sum(turn.wrong for turn in turns)
    return {"size": size, "source": link[0], "target": link[1], "time_us": middle * 1e6,
            "least_us": min(seconds) * 1e6, "bandwidth": size / middle / 1e9,
            "nwrong": wrong if bench.checks else None, "slow": False}


def _exchanged(bench: Bench, size: int, source: int, target: int) -> Exchange:
    """Let one pair exchange messages; return the same on every rank: the source's seconds, the target's count."""
    comm, own = bench.comm, Exchange([], 0)
    _meet(comm.mpi)
    if comm.rank in (source, target):
        own = _exchange(bench, size, source, target)
    _meet(comm.mpi)
    return Exchange(comm.mpi.bcast(own.seconds, source), comm.mpi.bcast(own.wrong, target))


def _meet(mpi: MPI.Intracomm) -> None:
    everyone = mpi.Ibarrier()
    while not everyone.Test():
        time.sleep(NAP)


def _exchange(bench: Bench, size: int, source: int, target: int) -> Exchange:
    """Send and answer as often as asked for, each time other data."""
    comm, device = bench.comm, bench.device
    message, answer = device.empty((size,), "uint8"), device.empty((1,), "uint8")
    device.write(answer, numpy.zeros(1, numpy.uint8))
    seconds, wrong = [], 0
    for repetition in range(WARMUPS + (bench.options.iterations or REPETITIONS)):
        content = random_bytes(size, seed=repetition)
        device.write(message, content if comm.rank == source else content ^ 1)
        started = time.perf_counter()
        if comm.rank == source:
            comm.send(message, target)
            comm.recv(answer, target)
        else:
            comm.recv(message, source)
            comm.send(answer, source)
        device.synchronize()
        seconds.append(time.perf_counter() - started)
        wrong += int(numpy.count_nonzero(device.read(message, "uint8") != content))
    return Exchange(seconds[WARMUPS:], wrong)
