"""Slow ranks and slow links, found by what they do to the others, and named.

A slow rank makes every rank's time long, so its own time does not give it away. What does is that it never waits: a
rank's busy time is that of its call less what it spent waiting for others, as the library's waits report it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy

from .cases import Contestant
from .data import Data, Turn
from .machine import Copy
from .measure import Bench, Trial
from .summary import Array

ROUNDS = 5
LONGEST_NAP = 1e-3  # seconds: polls that lie further apart had something between them that was no waiting
TWICE, SHARE, THIRD = 2.0, 0.4, 1 / 3
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
    found = [(contestant.name, *busy_times(bench, contestant, data)) for contestant in contestants
             if contestant.name in EVEN and not contestant.peer]
    return [_sentence(data, hosts, name, verdict) for name, busy, elapsed in found
            if (verdict := busiest(busy, elapsed, noise)) is not None]


def busy_times(bench: Bench, contestant: Contestant, data: Data) -> tuple[Array, Array]:
    """Return every rank's busy and whole seconds, each of shape (ranks, rounds)."""
    rows = [_round(bench, contestant, data, number) for number in range(ROUNDS)]
    everyone = numpy.array(bench.comm.mpi.allgather(rows))
    return everyone[..., 0], everyone[..., 1]


def _round(bench: Bench, contestant: Contestant, data: Data, number: int) -> tuple[float, float]:
    hook, hooks = Waiting(), bench.comm._waits.hooks
    hooks.append(hook)
    try:
        elapsed = Trial(bench, contestant, data, [Turn(number, call) for call in range(data.calls)], None).time()
    finally:
        hooks.remove(hook)
    return max(0.0, elapsed - hook.seconds / data.calls), elapsed


class Verdict(NamedTuple):
    """The rank that is waited for, its busy seconds, those of the others, and how long the calls took."""

    rank: int
    busy: float
    others: float
    elapsed: float


def busiest(busy: Array, elapsed: Array, noise: float = 0.0) -> Verdict | None:
    """Return the rank that is busiest in every round, by twice the others' and by much of the call; else None.

    `noise` is what it must be busier by at least, in seconds.

    >>> busiest(numpy.array([[1.0], [1.0], [9.0]]), numpy.array([[9.0], [9.0], [9.0]]))
    Verdict(rank=2, busy=9.0, others=1.0, elapsed=9.0)
    """
    ranks = set(busy.argmax(axis=0).tolist())
    if len(ranks) > 1:
        return None
    rank = ranks.pop()
    own, others = float(numpy.median(busy[rank])), float(numpy.median(numpy.delete(busy, rank, axis=0)))
    whole = float(numpy.median(elapsed))
    slow = own > TWICE * others and own - others > max(noise, SHARE * whole)
    return Verdict(rank, own, others, whole) if slow else None


def _sentence(data: Data, hosts: Sequence[str], name: str, verdict: Verdict) -> str:
    return (f"slow rank: {verdict.rank} on {hosts[verdict.rank]} is busy for {verdict.busy * 1e3:.3g} ms while "
            f"{data.case.test} by {name} of {data.case.nbytes(data.count)} bytes takes {verdict.elapsed * 1e3:.3g} ms; "
            f"the other ranks are for {verdict.others * 1e3:.3g} ms")


def slow_memory(copy: Copy, hosts: Sequence[str]) -> list[str]:
    """Return a sentence for each rank that copies at less than a third of its host's usual bandwidth.

    >>> slow_memory(Copy(0, 0, (9.0, 9.0, 2.0)), "aaa")
    ['slow rank: 2 on a copies memory at 2 GB/s while the ranks of its host usually do at 9 GB/s']
    """
    usual = {host: statistics.median(_of(host, copy.per_rank, hosts)) for host in hosts}
    return [f"slow rank: {rank} on {host} copies memory at {own:.3g} GB/s while the ranks of its host usually do at "
            f"{usual[host]:.3g} GB/s"
            for rank, (own, host) in enumerate(zip(copy.per_rank, hosts, strict=True)) if own < THIRD * usual[host]]


def _of(host: str, figures: Iterable[float], hosts: Sequence[str]) -> list[float]:
    return [figure for figure, place in zip(figures, hosts, strict=True) if place == host]


def slow_links(pairs: Sequence[dict[str, Any]], hosts: Sequence[str], noise: float = 0.0) -> list[str]:
    """Mark each pair as slow or not, and return a sentence for each slow one.

    A link is slow where its fastest repetition took over twice what the fastest quarter of links of its kind usually
    do, and over `noise` seconds more; kinds are within and between hosts. Of each size those are judged by themselves.
    """
    sentences = []
    for pair in pairs:
        alike = [other["time_us"] for other in pairs if _kind(other, hosts) == _kind(pair, hosts)]
        quick = sorted(alike)[(len(alike) - 1) // 4]
        pair["slow"] = pair["least_us"] > max(TWICE * quick, quick + noise * 1e6)
        if pair["slow"]:
            source, target = pair["source"], pair["target"]
            sentences.append(
                f"slow link: {source} on {hosts[source]} to {target} on {hosts[target]}: {pair['size']} bytes take "
                f"{pair['time_us']:.3g} us ({pair['bandwidth']:.3g} GB/s), {pair['time_us'] / quick:.1f} times as long "
                "as the quickest links of its kind")
    return sentences


def _kind(pair: dict[str, Any], hosts: Sequence[str]) -> tuple[int, bool]:
    return pair["size"], hosts[pair["source"]] == hosts[pair["target"]]
