"""What is tried: messages between all pairs of ranks, and every collective on small exact data.

A pair is measured while no other pair uses its hosts: who is not at work sleeps. Pairs that look slow are measured
again, and the better figures count, so that what disturbed a host for a moment is no verdict on a link.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy

import gpucoll
from gpucoll.collectives import COLLECTIVES, Side
from gpucoll.doctor.facts import reason
from gpucoll.errors import ArgumentError, CollectiveTimeout, UsageError

SHORT, LONG = (8, 20), (1 << 20, 3)  # bytes, and how often they go there and back
RESTS = (0.0, 0.05, 0.2, 0.4)  # seconds to let pass before pairs are measured: all at first, then those that look slow
FACTOR = 3.0  # so many times worse than the better links of its kind: slow
SLACK = 50e-6  # seconds of latency that are never held against a link: a scheduler's doing
KINDS = ("same node", "across nodes")

Pair = tuple[int, int]


class Link(NamedTuple):
    """What was measured between two ranks, `one` below `two`: seconds one way, and bytes per second."""

    one: int
    two: int
    kind: str
    latency: float
    bandwidth: float


def measure(mpi: Any, nodes: Sequence[int], timeout: float) -> list[Link]:
    """Return the links between all pairs of ranks of `mpi`, the same on all; `nodes` is the node of every rank.

    A collective call. Raises CollectiveTimeout on a rank that gets no answer for `timeout` seconds, and on those that
    wait for it after twice that.
    """
    links: dict[Pair, Link] = {}
    pairs = list(itertools.combinations(range(mpi.size), 2))
    for rest in RESTS:
        time.sleep(rest if pairs else 0.0)
        for link in _measure_all(mpi, nodes, pairs, timeout):
            before = links.get(link[:2], link)
            links[link[:2]] = link._replace(latency=min(before.latency, link.latency),
                                            bandwidth=max(before.bandwidth, link.bandwidth))
        pairs = [link[:2] for link in slow(list(links.values()))]
    return sorted(links.values())


def rounds(pairs: Sequence[Pair], nodes: Sequence[int]) -> Iterator[list[Pair]]:
    """Yield `pairs` in rounds, the same on every rank; in each a node takes part in one pair at most.

    In a shuffled order, so that a round soon has a pair for every node: in theirs, all of rank 0 come first.
    """
    left = random.Random(0).sample(pairs, len(pairs))
    while left:
        busy: set[int] = set()
        together, later = [], []
        for one, two in left:
            free = busy.isdisjoint((nodes[one], nodes[two]))
            (together if free else later).append((one, two))
            busy |= {nodes[one], nodes[two]} if free else set()
        yield together
        left = later


def _measure_all(mpi: Any, nodes: Sequence[int], pairs: Sequence[Pair], timeout: float) -> list[Link]:
    mine = []
    for together in [*rounds(pairs, nodes), []]:
        _complete(mpi.Ibarrier(), 2 * timeout, lambda: time.sleep(1e-3),  # asleep: cores are for those who measure
                  f"link test: waited {2 * timeout:g} s for the pairs that measure")
        mine += [_measure(mpi, pair, nodes, timeout) for pair in together if mpi.rank in pair]
    return [link for links in mpi.allgather(mine) for link in links]


def _measure(mpi: Any, pair: Pair, nodes: Sequence[int], timeout: float) -> Link:
    """Return what this rank, one of the `pair`, has measured; the other finds much the same."""
    kind = KINDS[nodes[pair[0]] != nodes[pair[1]]]
    latency, seconds = (_quarter(_bounce(mpi, pair, *message, timeout)) for message in (SHORT, LONG))
    return Link(*pair, kind, latency, LONG[0] / seconds)


def _bounce(mpi: Any, pair: Pair, nbytes: int, repeats: int, timeout: float) -> list[float]:
    """Return the seconds of a way, measured there and back; the first time, which may connect, is not counted."""
    first, peer = mpi.rank == pair[0], sum(pair) - mpi.rank
    buffer, ways = numpy.zeros(nbytes, numpy.uint8), []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        for sends in (first, not first):
            _complete((mpi.Isend if sends else mpi.Irecv)(buffer, peer, 1), timeout, os.sched_yield,
                      f"link test: rank {mpi.rank} has heard nothing from rank {peer} for {timeout:g} s")
        ways.append((time.perf_counter() - started) / 2)
    return ways[1:]


def _complete(request: Any, timeout: float, meanwhile: Callable[[], object], silence: str) -> None:
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            raise CollectiveTimeout(silence)
        meanwhile()


def slow(links: Sequence[Link]) -> list[Link]:
    """Return the links that are `FACTOR` times worse than the better ones of their kind, in latency or bandwidth.

    >>> fast = [Link(0, rank, "across nodes", 1e-5, 1e9) for rank in (1, 2)]
    >>> [link[:2] for link in slow([*fast, Link(1, 2, "across nodes", 1e-5, 1e8)])]
    [(1, 2)]
    """
    usual = good(links)
    return [link for link in links if link.latency > FACTOR * usual[link.kind][0] + SLACK
            or link.bandwidth * FACTOR < usual[link.kind][1]]


def good(links: Sequence[Link]) -> dict[str, tuple[float, float]]:
    """Return latency and bandwidth of the better links of each kind that there is.

    That is their best quarter: one bad host among three spoils two of three links, and with them the median.
    """
    kinds = {kind: alike for kind in KINDS if (alike := [link for link in links if link.kind == kind])}
    return {kind: (_quarter(link.latency for link in alike), 1 / _quarter(1 / link.bandwidth for link in alike))
            for kind, alike in kinds.items()}


def _quarter(values: Iterable[float]) -> float:
    """Return the largest of the smallest quarter of `values`, at least the smallest."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


# ---------------------------------------------------------------- the self-test

LENGTHS = (1000, 1, 4099)  # elements, which the blocks of all ranks share
DTYPES = ("float32", "int64", "float64", "int32")  # exact: the sums are small whole numbers


class Case(NamedTuple):
    """One call: the collective, its algorithm, the number of elements and their dtype."""

    collective: str
    algorithm: str
    length: int
    dtype: str

    def chunk(self, ranks: Collection[int], index: int, size: int) -> Any:
        """Return block `index`, or all, of what `ranks` have, added up; ragged blocks have lengths of their own."""
        row, source = COLLECTIVES[self.collective], max(ranks, default=0)
        more = {None: 0, "source": source, "target": index, "pair": source + 2 * index}[row.ragged] % 3
        length = max(1, self.length // size) + more if row.blocks else self.length
        numbers = ((7 * numpy.arange(length) + 13 * rank + 5 * index) % 11 for rank in ranks)
        return sum(numbers, numpy.zeros(length, int)).astype(self.dtype)

    def joined(self, side: Side, parts: list[Any]) -> Any:
        """Return blocks as one array, or as a list where they are ragged; what is no blocks as it is."""
        if not side.blocks:
            return parts[0]
        return parts if COLLECTIVES[self.collective].ragged else numpy.stack(parts)


def cases(size: int, device: str) -> Iterator[Case]:
    """Yield cases without end: first every collective once, then again with every algorithm, length and dtype."""
    algorithms = {name: ("auto", *gpucoll.algorithms(name, size=size, device=device)) for name in COLLECTIVES}
    for number in itertools.count():
        for name, choices in algorithms.items():
            yield Case(name, choices[number % len(choices)], LENGTHS[number % len(LENGTHS)],
                       DTYPES[number // 2 % len(DTYPES)])


def fault(comm: Any, case: Case, xp: Any) -> str | None:
    """Run one case on arrays of `xp`; return what is wrong with this rank's result, None where nothing is."""
    row, rank, size, root = COLLECTIVES[case.collective], comm.rank, comm.size, case.length % comm.size
    parts = [case.chunk({rank}, index, size) for index in range(size if row.input.blocks else 1)]
    given, options = case.joined(row.input, parts), {"algorithm": case.algorithm}
    options |= {"root": root} if row.rooted else {}
    if case.collective == "reduce_scatter_v":
        given, options["counts"] = numpy.concatenate(parts), [len(part) for part in parts]
    given = [xp.asarray(part) for part in given] if isinstance(given, list) else xp.asarray(given)
    if row.input.blocks and not row.input.exists(rank, root):
        given = None
    result = getattr(comm, case.collective)(*(() if row.input.where == "nowhere" else (given,)), **options)
    pieces = [row.result(rank, size, root, 1, index) for index in range(size if row.output.blocks else 1)]
    promised = case.joined(row.output, [case.chunk(piece.ranks, piece.chunk, size) for piece in pieces])
    return _difference(result, promised if row.output.exists(rank, root) else None, xp)


def _difference(result: Any, promised: Any, xp: Any) -> str | None:
    if promised is None or result is None:
        return None if result is promised else f"the result is {result!r:.40}, expected {promised!r:.40}"
    wrong, take = 0, getattr(xp, "asnumpy", numpy.asarray)
    for one, right in zip(result, promised, strict=True) if isinstance(promised, list) else [(result, promised)]:
        own = take(one)
        if (own.shape, own.dtype) != (right.shape, right.dtype):
            return f"the result is {own.dtype} of shape {own.shape}, expected {right.dtype} of shape {right.shape}"
        wrong += int(numpy.count_nonzero(own != right))
    return f"{wrong} elements are wrong" if wrong else None


def self_test(comm: Any, allgather: Callable[[Any], Any], device: str, xp: Any, seconds: float) -> dict[str, Any]:
    """Run cases on arrays of `xp` for `seconds`, each collective at least once; return the same account on every rank.

    A collective call; `allgather` tells the ranks of each other. An exception ends the test: the ranks may have parted.
    Where every rank refuses the first call's arrays, nothing has moved, and `refused` is the reason.
    """
    started, faults, refused = time.monotonic(), [], None
    for calls, case in enumerate(cases(comm.size, device), 1):
        everyone = allgather((*_guarded(comm, case, xp), time.monotonic() - started))
        wrong = {rank: what for rank, (what, _, _) in enumerate(everyone) if what}
        ended = {how for _, how, _ in everyone}
        if wrong:
            call = f"{case.collective}, algorithm {case.algorithm}, {case.length} elements of {case.dtype}"
            faults.append({"call": call, "ranks": list(wrong), "what": next(iter(wrong.values()))})
            refused = wrong[0] if calls == 1 and ended == {"refused"} else None
        late = max(spent for _, _, spent in everyone) >= seconds
        if ended != {None} or (late and calls >= len(COLLECTIVES)):
            break
    return {"calls": calls, "collectives": min(calls, len(COLLECTIVES)), "faults": faults, "refused": refused,
            "seconds": round(time.monotonic() - started, 3)}


def _guarded(comm: Any, case: Case, xp: Any) -> tuple[str | None, str | None]:
    """Return what is wrong, and how an exception ended the call: one of gpucoll's, CuPy's, whoever's."""
    try:
        return fault(comm, case, xp), None
    except (ArgumentError, UsageError) as error:
        return reason(error), "refused"
    except Exception as error:
        return reason(error), "failed"
