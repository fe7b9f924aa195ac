"""Messages between all pairs of ranks: how long a short one takes, how fast a long one is, and which links are slow.

A pair is measured while no other pair uses its hosts: who is not at work sleeps. Pairs that look slow are measured
again, and the better figures count, so that what disturbed a host for a moment is no verdict on a link.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.errors import CollectiveTimeout

SHORT, SHORT_REPEATS = 8, 20  # bytes; there and back so many times
LONG, LONG_REPEATS = 1 << 20, 3
NAP = 1e-3  # seconds between two looks of a rank that has nothing to do
REST = (0.05, 0.2, 0.4)  # seconds to let pass before pairs that look slow are measured again
FACTOR = 3.0  # so many times worse than the better links of its class: slow
SLACK = 50e-6  # seconds of latency that are never held against a link: a scheduler's doing
TAG = 1

Pair = tuple[int, int]


class Link(NamedTuple):
    """What was measured between two ranks, `one` below `two`: seconds one way, and bytes per second."""

    one: int
    two: int
    kind: str  # its class: "same node" or "across nodes"
    latency: float
    bandwidth: float


class Slow(NamedTuple):
    """A link with figures far off what its class shows: `latency` and `bandwidth` are those of its better links."""

    link: Link
    latency: float
    bandwidth: float


# ---------------------------------------------------------------- which pairs, when


def meetings(count: int) -> Iterator[list[Pair]]:
    """Yield rounds in which each of `count` nodes meets at most one other; in the first each meets itself.

    >>> list(meetings(3))
    [[(0, 0), (1, 1), (2, 2)], [(1, 2)], [(0, 2)], [(0, 1)]]
    """
    yield [(node, node) for node in range(count)]
    seats = list(range(count + count % 2))  # the last one is empty where the number is odd
    for _ in seats[1:]:
        met = zip(seats, reversed(seats), strict=True)
        yield [(one, two) for one, two in itertools.islice(met, len(seats) // 2) if max(one, two) < count for one, two
               in [sorted((one, two))]]
        seats[1:] = [seats[-1], *seats[1:-1]]


def rounds(pairs: Iterable[Pair], nodes: Sequence[int]) -> Iterator[list[Pair]]:
    """Yield `pairs` in rounds; in each a node takes part in one pair at most. `nodes` is the node of every rank.

    >>> list(rounds([(0, 1), (0, 2), (1, 2), (2, 3)], [0, 0, 1, 1]))
    [[(0, 1), (2, 3)], [(0, 2)], [(1, 2)]]
    """
    waiting: dict[Pair, list[Pair]] = defaultdict(list)
    for one, two in pairs:
        waiting[min(nodes[one], nodes[two]), max(nodes[one], nodes[two])].append((one, two))
    for meeting in meetings(max(nodes) + 1):
        for together in itertools.zip_longest(*(waiting[met] for met in meeting if met in waiting)):
            yield [pair for pair in together if pair is not None]


# ---------------------------------------------------------------- measuring


def measure(mpi: Any, nodes: Sequence[int], timeout: float) -> list[Link]:
    """Return the links between all pairs of ranks of `mpi`, on rank 0; empty elsewhere. A collective call.

    `nodes` is the node of every rank. Raises CollectiveTimeout on a rank that gets no answer for `timeout` seconds,
    and on the ranks that wait for it after twice that.
    """
    probe = _Probe(mpi, nodes, timeout)
    links = probe.run(list(itertools.combinations(range(mpi.size), 2)))
    for rest in REST:
        suspects = mpi.bcast([(found.link.one, found.link.two) for found in slow(links.values())])
        time.sleep(rest if suspects else 0.0)
        for pair, again in probe.run(suspects).items():
            before = links[pair]
            links[pair] = before._replace(latency=min(before.latency, again.latency),
                                          bandwidth=max(before.bandwidth, again.bandwidth))
    return list(links.values())


class _Probe:
    """One rank's part in measuring pairs."""

    def __init__(self, mpi: Any, nodes: Sequence[int], timeout: float) -> None:
        self._mpi, self._nodes, self._timeout = mpi, nodes, timeout
        self._short = numpy.zeros(SHORT, numpy.uint8)
        self._long = numpy.zeros(LONG, numpy.uint8)

    def run(self, pairs: Sequence[Pair]) -> dict[Pair, Link]:
        """Return the links of `pairs` by pair, on rank 0; empty elsewhere. A collective call."""
        mine = []
        for together in rounds(pairs, self._nodes):
            self._meet()
            mine += [self._measure(pair) for pair in together if self._mpi.rank in pair]
        self._meet()
        found = self._mpi.gather([link for link in mine if link.one == self._mpi.rank]) or []
        return {(link.one, link.two): link for links in found for link in links}

    def _measure(self, pair: Pair) -> Link:
        one, two = pair
        first, peer = self._mpi.rank == one, two if self._mpi.rank == one else one
        latency = _quarter(self._bounce(self._short, peer, SHORT_REPEATS, first=first))
        seconds = _quarter(self._bounce(self._long, peer, LONG_REPEATS, first=first))
        kind = "same node" if self._nodes[one] == self._nodes[two] else "across nodes"
        return Link(one, two, kind, latency, LONG / seconds)

    def _bounce(self, buffer: Any, peer: int, repeats: int, *, first: bool) -> list[float]:
        """Return the seconds of a way, measured there and back; the first time, which may connect, is not counted."""
        ways = []
        for _ in range(1 + repeats):
            started = time.perf_counter()
            for sends in (first, not first):
                self._complete((self._mpi.Isend if sends else self._mpi.Irecv)(buffer, peer, TAG), peer)
            ways.append((time.perf_counter() - started) / 2)
        return ways[1:]

    def _complete(self, request: Any, peer: int) -> None:
        deadline = time.monotonic() + self._timeout
        while not request.Test():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"link test: rank {self._mpi.rank} has heard nothing from rank {peer} for "
                                        f"{self._timeout:g} s", ranks=(self._mpi.rank, peer))
            os.sched_yield()

    def _meet(self) -> None:
        """Wait for every rank, asleep: the cores are for those who measure."""
        everyone, deadline = self._mpi.Ibarrier(), time.monotonic() + 2 * self._timeout
        while not everyone.Test():
            if time.monotonic() > deadline:
                raise CollectiveTimeout(f"link test: waited {2 * self._timeout:g} s for the pairs that measure")
            time.sleep(NAP)


# ---------------------------------------------------------------- verdicts


def classes(links: Iterable[Link]) -> dict[str, list[Link]]:
    """Return the links by class, within a node first."""
    found: dict[str, list[Link]] = defaultdict(list)
    for link in sorted(links, key=lambda link: link.kind, reverse=True):
        found[link.kind].append(link)
    return dict(found)


def slow(links: Iterable[Link]) -> list[Slow]:
    """Return the links that are `FACTOR` times worse than the better ones of their class, in latency or bandwidth.

    The better ones are the best quarter: one bad host among three spoils two of three links, and with them the median.

    >>> fast = [Link(0, rank, "across nodes", 1e-5, 1e9) for rank in (1, 2)]
    >>> [found.link[:2] for found in slow([*fast, Link(1, 2, "across nodes", 1e-5, 1e8)])]
    [(1, 2)]
    """
    found = []
    for alike in classes(links).values():
        latency, bandwidth = good(alike)
        found += [Slow(link, latency, bandwidth) for link in alike
                  if link.latency > FACTOR * latency + SLACK or link.bandwidth * FACTOR < bandwidth]
    return found


def good(alike: Sequence[Link]) -> tuple[float, float]:
    """Return latency and bandwidth of the better links of a class."""
    return _quarter(link.latency for link in alike), 1 / _quarter(1 / link.bandwidth for link in alike)


def _quarter(values: Iterable[float]) -> float:
    """Return the largest of the smallest quarter of `values`, at least the smallest."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]
