"""Slow ranks and slow links, found by what they do to the others, and named.

A slow rank makes every rank's time long, so its own time does not give it away. What does is that it never waits: a
rank's busy time is that of its call less what it spent waiting for others, as the library's waits report it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from .cases import Contestant
from .data import Data, Turn
from .measure import Bench, Trial
from .summary import Array

ROUNDS = 5
LONGEST_NAP = 1e-3  # seconds: polls that lie further apart had something between them that was no waiting
TWICE, SHARE = 2.0, 0.4
CROWDED_NOISE = 2e-3  # seconds that a rank may wait for a processor where there are fewer of them than ranks
# Where all ranks have the same to do; roots of trees and stars are busy by right.
ALIKE = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "hypercube", "sendrecv")
EVEN = ("auto", "native", "ring", "bidirectional_ring", "recursive_doubling", "recursive_halving", "halving_doubling",
        "direct", "pairwise", "bruck", "circulant", "swing", "sendrecv", "two_shot")


class Waiting:
    """A hook of the library's waits: adds up the seconds between polls that follow each other closely."""

    def __init__(self) -> None:
        self.seconds, self._last = 0.0, float("-inf")

    def __call__(self) -> None:
        now = time.perf_counter()
        gap, self._last = now - self._last, now
        if gap <= LONGEST_NAP:
            self.seconds += gap


def slow_ranks(bench: Bench, contestants: Sequence[Contestant], data: Data, hosts: Sequence[str],
               noise: float) -> list[str]:
    """Return a sentence for each rank that the others wait for; a collective call, made of untimed repetitions."""
    if bench.device.name == "cuda" or bench.comm.size < 3 or data.case.test not in ALIKE:
        return []
    sentences = []
    for contestant in contestants:
        if contestant.name not in EVEN or contestant.peer:
            continue
        rows, hooks = [], bench.comm._waits.hooks
        for number in range(ROUNDS):
            hook = Waiting()
            hooks.append(hook)
            try:
                calls = [Turn(number, call) for call in range(data.calls)]
                elapsed = Trial(bench, contestant, data, calls, None).time()
            finally:
                hooks.remove(hook)
            rows.append((max(0.0, elapsed - hook.seconds / data.calls), elapsed))
        everyone = numpy.array(bench.comm.mpi.allgather(rows))
        found = busiest(everyone[..., 0], everyone[..., 1], noise)
        if found is not None:
            sentences.append(
                f"slow rank: {found.rank} on {hosts[found.rank]} is busy for {found.busy * 1e3:.3g} ms while "
                f"{data.case.test} by {contestant.name} of {data.case.nbytes(data.count)} bytes takes "
                f"{found.elapsed * 1e3:.3g} ms; the other ranks are for {found.others * 1e3:.3g} ms")
    return sentences


class Verdict(NamedTuple):
    """The rank that is waited for, its busy seconds, those of the others, and how long the calls took."""

    rank: int
    busy: float
    others: float
    elapsed: float


def busiest(busy: Array, elapsed: Array, noise: float = 0.0) -> Verdict | None:
    """Return the rank that is busiest in every round, by twice the others' and by much of the call; else None.

    Both arrays are seconds, of shape (ranks, rounds); `noise` is what it must be busier by at least.
    """
    ranks = set(busy.argmax(axis=0).tolist())
    if len(ranks) > 1:
        return None
    rank = ranks.pop()
    own, others = float(numpy.median(busy[rank])), float(numpy.median(numpy.delete(busy, rank, axis=0)))
    whole = float(numpy.median(elapsed))
    is_slow = own > TWICE * others and own - others > max(noise, SHARE * whole)
    return Verdict(rank, own, others, whole) if is_slow else None


def slow_links(pairs: Sequence[dict[str, Any]], hosts: Sequence[str], noise: float = 0.0) -> list[str]:
    """Mark each pair as slow or not, and return a sentence for each slow one.

    A link is slow where its fastest repetition took over twice what the fastest quarter of links of its kind usually
    do, and over `noise` seconds more; kinds are within and between hosts. Of each size those are judged by themselves.
    """
    def kind(pair: dict[str, Any]) -> tuple[int, bool]:
        return pair["size"], hosts[pair["source"]] == hosts[pair["target"]]

    sentences = []
    for pair in pairs:
        alike = sorted(other["time_us"] for other in pairs if kind(other) == kind(pair))
        quick = alike[(len(alike) - 1) // 4]
        pair["slow"] = pair["least_us"] > max(TWICE * quick, quick + noise * 1e6)
        if pair["slow"]:
            source, target = pair["source"], pair["target"]
            sentences.append(
                f"slow link: {source} on {hosts[source]} to {target} on {hosts[target]}: {pair['size']} bytes take "
                f"{pair['time_us']:.3g} us ({pair['bandwidth']:.3g} GB/s), {pair['time_us'] / quick:.1f} times as long "
                "as the quickest links of its kind")
    return sentences
