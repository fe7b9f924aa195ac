"""The doctor's tests: messages between all pairs of ranks, and every collective on small exact data.

During the measurement of a pair no other pair uses the hosts of the pair, and idle ranks sleep. Slow pairs are measured
again with more messages, and the better figures count: other processes on a host delay most messages, but not all.
"""

from __future__ import annotations

import collections
import itertools
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

import gpucoll
from gpucoll.core.collectives import COLLECTIVES, Collective, Side
from gpucoll.doctor.facts import reason
from gpucoll.errors import ArgumentError, CollectiveTimeout, UsageError
from gpucoll.transport.rendezvous import becomes, wait_for_all

SHORT = 8, 20  # bytes of a message, and number of round trips in the first measurement
AGAIN = 16, 0.1  # for a slow pair: at most so many times the round trips, in at most so many seconds
PIECE, WINDOW = 1 << 20, 1  # bytes of a long message, and the number of messages under way
# A stream doubles until its rate is within this share of the rate before and a part of its seconds has passed, or until
# all its seconds have passed. The last number limits the seconds of all streams of a rank.
STEADY, LEAST_PART, STREAM_SECONDS, ALL_SECONDS = 0.03, 0.2, 1.0, 12.0
# Seconds before each measurement: first of all pairs, then of the slow pairs, when a disturbance may be over.
RESTS = (0.0, 0.05, 0.2, 0.4)
FACTOR = 3.0  # a link worse than the better links of the same kind by this factor is slow
SLACK = 50.0  # microseconds of latency tolerated in addition, since the scheduler of the host may cause this delay

EXCHANGES, MOST_EXCHANGING = 5, 32  # exchanges of all ranks, and the most ranks

Pair = tuple[int, int]
Figures = tuple[float, float]  # one-way latency of a short message in microseconds, bandwidth of a long message in MB/s


def measure(mpi: Any, hosts: Sequence[str], timeout: float) -> dict[str, Any]:
    """Measure the links between all pairs of ranks of `mpi`; return the `verdict`, the same on all ranks.

    A collective call. `hosts` has the host of every rank. A rank without an answer for `timeout` seconds raises
    CollectiveTimeout; ranks waiting for this rank raise CollectiveTimeout after twice this time.
    """
    links: dict[Pair, Figures] = {}
    pairs: list[Pair] = list(itertools.combinations(range(mpi.size), 2))
    for rest in RESTS:
        time.sleep(rest if pairs else 0.0)
        for pair, (latency, bandwidth) in _measure_all(mpi, hosts, pairs, timeout, links):
            before = links.get(pair, (latency, bandwidth))
            links[pair] = min(latency, before[0]), max(bandwidth, before[1])
        pairs = [(one, two) for one, two in (link["ranks"] for link in verdict(links, hosts)["pairs"] if link["slow"])]
    found = verdict(links, hosts)
    if len(set(hosts)) > 1 and mpi.size <= MOST_EXCHANGING:
        shift, seconds = (exchange(mpi, timeout, range(1, end)) for end in (2, mpi.size))
        found["exchange"] = {"bytes": PIECE, "shift_seconds": float(f"{shift:.3g}"), "seconds": float(f"{seconds:.3g}")}
    return found


def verdict(links: Mapping[Pair, Figures], hosts: Sequence[str]) -> dict[str, Any]:
    """Return the report's part on links: the figures of the better links of each kind, and a judgement of each pair.

    The best quarter of the links is the reference. The median would be no reference, because one bad host among three
    slows down two of three links.
    """
    judged: dict[str, Any] = {"kinds": {}, "pairs": []}
    for kind, inside in (("same node", True), ("across nodes", False)):
        alike = {pair: own for pair, own in links.items() if (hosts[pair[0]] == hosts[pair[1]]) == inside}
        if alike:
            latency = _quarter(own[0] for own in alike.values())
            bandwidth = -_quarter(-own[1] for own in alike.values())
            slow = {pair for pair, own in alike.items()
                    if own[0] > FACTOR * latency + SLACK or own[1] * FACTOR < bandwidth}
            judged["kinds"][kind] = {"pairs": len(alike), "slow": len(slow), "latency_us": latency,
                                     "bandwidth_mb_s": bandwidth}
            judged["pairs"] += [{"ranks": list(pair), "hosts": [hosts[rank] for rank in pair], "kind": kind,
                                 "latency_us": own[0], "bandwidth_mb_s": own[1], "slow": pair in slow}
                                for pair, own in sorted(alike.items())]
    return judged


def _quarter(values: Iterable[float]) -> float:
    """Return the largest value in the smallest quarter of `values`; the smallest of fewer than five values."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 4]


def rounds(pairs: Sequence[Pair], hosts: Sequence[str]) -> Iterator[list[Pair]]:
    """Yield `pairs` in rounds, the same on every rank; a host takes part in at most one pair of a round."""
    # Shuffled for full rounds, since in the given order all pairs of rank 0 come first. The fixed seed makes all ranks
    # draw the same order.
    left = random.Random(0).sample(pairs, len(pairs))
    while left:
        busy: set[str] = set()
        together: list[Pair] = []
        later: list[Pair] = []
        for pair in left:
            own = {hosts[rank] for rank in pair}
            (together if busy.isdisjoint(own) else later).append(pair)
            busy |= own if pair in together[-1:] else set()
        yield together
        left = later


def repeats(before: Figures | None) -> int:
    """Return the number of round trips with short messages; more for a pair with earlier figures `before`."""
    most, seconds = AGAIN
    return SHORT[1] if before is None else max(SHORT[1], min(most * SHORT[1], int(seconds / (2e-6 * before[0]))))


def _measure_all(mpi: Any, hosts: Sequence[str], pairs: Sequence[Pair], timeout: float,
                 links: Mapping[Pair, Figures]) -> list[tuple[Pair, Figures]]:
    mine, planned = [], [*rounds(pairs, hosts), list[Pair]()]
    budget = min(STREAM_SECONDS, ALL_SECONDS / len(planned))
    for together in planned:
        if not wait_for_all(mpi, 2 * timeout, interval=1e-3):
            raise CollectiveTimeout(f"link test: waited {2 * timeout:g} s for the measuring pairs")
        for pair in (pair for pair in together if mpi.rank in pair):
            link = _Link(mpi, pair, timeout)
            # Both ranks of a pair have the same figures and so the same number of round trips.
            latency = link.latency(repeats(links.get(pair)))
            bandwidth = 1e-6 / link.stream(budget)
            if link.first:
                mine.append((pair, (float(f"{latency * 1e6:.3g}"), float(f"{bandwidth:.3g}"))))
    return [link for links in mpi.allgather(mine) for link in links]


class _Link:
    """The link between the ranks of a pair, as this rank measures it together with the other rank."""

    def __init__(self, mpi: Any, pair: Pair, timeout: float) -> None:
        self.mpi, self.timeout, self.first, self.peer = mpi, timeout, mpi.rank == pair[0], sum(pair) - mpi.rank

    def latency(self, repeats: int) -> float:
        """Return the least half of a round trip in seconds, without the first: MPI may connect during that.

        The figure of the first rank counts: a message may wait for the other rank, whose round trip then looks short.
        """
        buffer, ways = numpy.zeros(SHORT[0], numpy.uint8), []
        for _ in range(1 + repeats):
            started = time.perf_counter()
            for sends in (self.first, not self.first):
                self.wait(self.post(buffer, sends=sends))
            ways.append((time.perf_counter() - started) / 2)
        return min(ways[1:])

    def stream(self, budget: float) -> float:
        """Return the seconds of a byte in a long exchange, the same on both ranks; see `STEADY`.

        Data flow in both directions at once, as in most collectives: acknowledgements wait behind data. A rank times
        the second half of each stream: the first bytes may be quicker than the link, where a shaper of traffic lets
        bursts pass, and slower, where TCP's window still opens.
        """
        given, came = numpy.zeros(PIECE, numpy.uint8), numpy.empty((WINDOW, PIECE), numpy.uint8)
        count, before, began = 2, 0.0, time.perf_counter()
        while True:
            under_way, times = collections.deque[list[Any]](), list[float]()
            for number in range(count + WINDOW):
                if number >= WINDOW:
                    self.wait(*under_way.popleft())
                    times.append(time.perf_counter())
                if number < count:
                    under_way.append([self.post(came[number % WINDOW], sends=False), self.post(given, sends=True)])
            mine = numpy.array([(times[-1] - times[count // 2 - 1]) / (count - count // 2) / PIECE,
                                time.perf_counter() - began])
            theirs = numpy.empty_like(mine)
            self.wait(self.post(theirs, sends=False), self.post(mine, sends=True))
            seconds, spent = map(float, (mine + theirs) / 2)
            if spent > budget or (abs(seconds - before) <= STEADY * seconds and spent > LEAST_PART * budget):
                return seconds
            count, before = 2 * count, seconds

    def post(self, buffer: Any, *, sends: bool) -> Any:
        """Begin a message to or from the other rank; return the request."""
        return (self.mpi.Isend if sends else self.mpi.Irecv)(buffer, self.peer, 1)

    def wait(self, *requests: Any) -> None:
        """Wait for messages; raise CollectiveTimeout."""
        for request in requests:
            if not becomes(request.Test, self.timeout, interval=0.0):
                raise CollectiveTimeout(
                    f"link test: rank {self.mpi.rank} received nothing from rank {self.peer} for {self.timeout:g} s")


def exchange(mpi: Any, timeout: float, offsets: Sequence[int]) -> float:
    """Return the median seconds in which each rank sends `PIECE` bytes to the ranks at `offsets`. A collective call."""
    links = [[_Link(mpi, (mpi.rank, (mpi.rank + sign * offset) % mpi.size), timeout) for offset in offsets]
             for sign in (-1, 1)]
    buffers, times = numpy.zeros((2, len(offsets), PIECE), numpy.uint8), []
    for _ in range(1 + EXCHANGES):
        mpi.allgather(None)
        started = time.perf_counter()
        requests = [(link, link.post(buffer, sends=bool(sends))) for sends, rows in enumerate(buffers)
                    for link, buffer in zip(links[sends], rows, strict=True)]
        for link, request in requests:
            link.wait(request)
        times.append(time.perf_counter() - started)
    return float(numpy.median(numpy.max(mpi.allgather(times[1:]), axis=0)))


# ---------------------------------------------------------------- the self-test

LENGTHS = (1000, 1, 4099)  # elements, divided among the blocks of the ranks in collectives with blocks
DTYPES = ("float32", "int64", "float64", "int32")  # all exact, since the sums are small integers


class Trial(NamedTuple):
    """One test call: collective, algorithm, number of elements, dtype."""

    collective: str
    algorithm: str
    length: int
    dtype: str

    def chunk(self, ranks: Collection[int], index: int, size: int) -> Any:
        """Return the sum of block `index` of the inputs of `ranks`, or of the whole inputs without blocks."""
        row, source = COLLECTIVES[self.collective], max(ranks, default=0)
        more = {None: 0, "source": source, "target": index, "pair": source + 2 * index}[row.ragged] % 3
        length = max(1, self.length // size) + more if row.blocks else self.length
        numbers = ((7 * numpy.arange(length) + 13 * rank + 5 * index) % 11 for rank in ranks)
        return sum(numbers, numpy.zeros(length, int)).astype(self.dtype)


def cases(size: int, device: str) -> Iterator[Trial]:
    """Yield test cases for ever: each collective once, then again with other algorithms, lengths and dtypes."""
    algorithms = {name: ("auto", *gpucoll.algorithms(name, size=size, device=device)) for name in COLLECTIVES}
    for number in itertools.count():
        for name, choices in algorithms.items():
            yield Trial(name, choices[number % len(choices)], LENGTHS[number % len(LENGTHS)],
                       DTYPES[number // 2 % len(DTYPES)])


def fault(comm: Any, case: Trial, xp: Any) -> str | None:
    """Run one case on arrays of the module `xp`; return the error in this rank's result, None for a correct result."""
    row, rank, size, root = COLLECTIVES[case.collective], comm.rank, comm.size, case.length % comm.size
    parts = [case.chunk({rank}, index, size) for index in range(size if row.input.blocks else 1)]
    options: dict[str, Any] = {"algorithm": case.algorithm, **({"root": root} if row.rooted else {})}
    given = _joined(row, row.input, parts)
    if case.collective == "reduce_scatter_v":
        given, options["counts"] = numpy.concatenate(parts), [len(part) for part in parts]
    given = [xp.asarray(part) for part in given] if isinstance(given, list) else xp.asarray(given)
    if row.input.blocks and not row.input.exists(rank, root):
        given = None
    result = getattr(comm, case.collective)(*(() if row.input.where == "nowhere" else (given,)), **options)
    pieces = [row.result(rank, size, root, 1, index) for index in range(size if row.output.blocks else 1)]
    promised = _joined(row, row.output, [case.chunk(piece.ranks, piece.chunk, size) for piece in pieces])
    return _difference(result, promised if row.output.exists(rank, root) else None, xp)


def _joined(row: Collective, side: Side, parts: list[Any]) -> Any:
    """Return the input or output made of `parts`: one array, stacked blocks, or a list of ragged blocks."""
    return parts[0] if not side.blocks else parts if row.ragged else numpy.stack(parts)


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
    """Run cases on arrays of `xp` for `seconds`, each collective at least once; return the same result on every rank.

    A collective call; the ranks compare outcomes by `allgather`. An exception ends the test, because the ranks may now
    be in different calls. If every rank refuses the arrays of the first call, no data have moved, and `refused` is the
    reason.
    """
    started, faults, refused = time.monotonic(), [], None
    for calls, case in enumerate(cases(comm.size, device), 1):
        what, ended = None, None
        try:
            what = fault(comm, case, xp)
        # Any exception, of gpucoll, CuPy or MPI, is a finding.
        except Exception as error:
            what, ended = reason(error), "refused" if isinstance(error, ArgumentError | UsageError) else "failed"
        everyone = allgather((what, ended, time.monotonic() - started))
        wrong = {rank: what for rank, (what, _, _) in enumerate(everyone) if what}
        if wrong:
            call = f"{case.collective}, algorithm {case.algorithm}, {case.length} elements of {case.dtype}"
            faults.append({"call": call, "ranks": list(wrong), "what": next(iter(wrong.values()))})
        if any(ended for _, ended, _ in everyone):
            refused = wrong[0] if calls == 1 and all(ended == "refused" for _, ended, _ in everyone) else None
            break
        if calls >= len(COLLECTIVES) and max(spent for _, _, spent in everyone) >= seconds:
            break
    return {"calls": calls, "collectives": min(calls, len(COLLECTIVES)), "faults": faults, "refused": refused,
            "seconds": round(time.monotonic() - started, 3)}
