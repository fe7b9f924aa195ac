"""The measurement of durations and of links, for `gpucoll tune`, `gpucoll doctor` and the benchmark.

Calls to be compared alternate, so that a disturbance of the machine affects all calls equally.

During the measurement of a pair of ranks no other pair uses the hosts of the pair, and idle ranks sleep. Doubtful pairs
are measured again with more messages, and the better figures count: other processes on a host delay most messages, but
not all.
"""

from __future__ import annotations

import importlib
import itertools
import pickle
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy

from gpucoll.communicator import Communicator
from gpucoll.errors import CollectiveTimeout
from gpucoll.internal import link_of
from gpucoll.transport.rendezvous import becomes, wait_for_all


class HostRanks:
    """The ranks of a communicator without MPI, with mpi4py's names of the calls used to measure.

    Objects go through the link: the communicator measured may have an executor that takes GPU arrays only.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self._ranks = comm, link_of(comm).mpi
        self.rank: int = comm.rank
        self.size: int = comm.size

    def allgather(self, value: Any) -> list[Any]:
        return [pickle.loads(one) for one in self._ranks.allgather(pickle.dumps(value))]

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.rank == root else None)[root]

    def Barrier(self) -> None:
        self._comm.barrier()

    def Ibarrier(self) -> SimpleNamespace:
        return _request(self._comm.barrier(async_op=True))

    def Isend(self, buffer: Any, dest: int, tag: int) -> SimpleNamespace:
        return _request(self._comm.send(buffer, dest, tag, async_op=True))

    def Irecv(self, buffer: Any, source: int, tag: int) -> SimpleNamespace:
        return _request(self._comm.recv(buffer, source, tag, async_op=True))


def _request(work: Any) -> SimpleNamespace:
    return SimpleNamespace(Test=lambda: work.is_completed() and (work.wait(), True)[1])


def ranks_of(comm: Communicator) -> Any:
    """Return the ranks of `comm` with mpi4py's calls: mpi4py's communicator, or without MPI a `HostRanks`."""
    return HostRanks(comm) if comm.mpi is None else comm.mpi


FEWEST_REPEATS, MOST_REPEATS = 5, 25
SHORT_CALL = 1e-3  # seconds; a shorter call is timed SEVERAL times in a row, since clock and barrier cost time
SEVERAL = 8


def turns(count: int, repetition: int) -> list[int]:
    """Return the order of measuring: none of `count` calls is always first, or always after the same other call."""
    direction = -1 if repetition % 2 else 1
    return [(repetition + direction * turn) % count for turn in range(count)]


def repeats(seconds: float, spent: float, most: int = MOST_REPEATS) -> int:
    """Return the number of repetitions in about `seconds`, if one takes the seconds `spent`."""
    return max(FEWEST_REPEATS, min(most, int(seconds / max(spent, 1e-9))))


def in_turn(mpi: Any, calls: Sequence[Callable[[], Any]], count: int, device: str = "cpu",
            several: Sequence[int] = ()) -> list[list[float]]:
    """Return for each call `count` durations on the slowest rank. A collective call with the same result on every rank.

    `several` has for each call how many are made, and timed, in a row; by default one.
    """
    mine = numpy.zeros((count, len(calls)))
    for repetition, row in enumerate(mine):
        for number in turns(len(calls), repetition):
            row[number] = _time(mpi, calls[number], several[number] if several else 1, device)
    slowest: list[list[float]] = numpy.array(mpi.allgather(mine)).max(0).T.tolist()
    return slowest


def samples(mpi: Any, calls: Sequence[Callable[[], Any]], seconds: float, device: str = "cpu") -> list[list[float]]:
    """Return for each call durations as `in_turn` does, repeated for about `seconds` in all. A collective call."""
    # The first two calls warm up: they may plan, connect and allocate.
    firsts = [taken[2] for taken in in_turn(mpi, calls, 3, device)]
    several = [SEVERAL if first < SHORT_CALL else 1 for first in firsts]
    return in_turn(mpi, calls, repeats(seconds, float(numpy.dot(firsts, several))), device, several)


def _time(mpi: Any, call: Callable[[], Any], several: int, device: str) -> float:
    mpi.Barrier()
    started = time.perf_counter()
    for _ in range(several):
        call()
    # On a GPU the call has only enqueued work.
    if device == "cuda":
        importlib.import_module("cupy").cuda.get_current_stream().synchronize()
    return (time.perf_counter() - started) / several


# ---------------------------------------------------------------- links between pairs of ranks

SHORT_MESSAGE, ROUND_TRIPS = 8, 20  # bytes, and number of round trips in the first measurement
MOST_TRIPS, TRIP_SECONDS = 320, 0.1  # for a doubtful pair: at most so many round trips, in about so many seconds
PIECE = 1 << 20  # bytes of a long message
# A stream doubles until its rate is within this share of the rate before and a part of its seconds has passed, or until
# all its seconds have passed. The last number limits the seconds of all streams of a rank.
STEADY, LEAST_PART, STREAM_SECONDS, ALL_SECONDS = 0.03, 0.2, 1.0, 12.0
# Seconds before each measurement: first of all pairs, then of doubtful pairs, when a disturbance may be over.
RESTS = (0.0, 0.05, 0.2, 0.4)

Pair = tuple[int, int]
Figures = tuple[float, float]  # one-way latency of a short message in microseconds, bandwidth of a long message in MB/s


def links(mpi: Any, hosts: Sequence[str], timeout: float,
          doubtful: Callable[[Mapping[Pair, Figures]], list[Pair]]) -> dict[Pair, Figures]:
    """Measure the links between all pairs of ranks of `mpi`; return their figures, the same on all ranks.

    A collective call. `hosts` has the host of every rank; `doubtful` returns the pairs to be measured again. A rank
    without an answer for `timeout` seconds raises CollectiveTimeout; ranks waiting for this rank raise
    CollectiveTimeout after twice this time.
    """
    found: dict[Pair, Figures] = {}
    pairs: list[Pair] = list(itertools.combinations(range(mpi.size), 2))
    for rest in RESTS:
        time.sleep(rest if pairs else 0.0)
        for pair, (latency, bandwidth) in _measure_all(mpi, hosts, pairs, timeout, found):
            before = found.get(pair, (latency, bandwidth))
            found[pair] = min(latency, before[0]), max(bandwidth, before[1])
        pairs = doubtful(found)
    return found


def rounds(pairs: Sequence[Pair], hosts: Sequence[str]) -> Iterator[list[Pair]]:
    """Yield `pairs` in rounds, the same on every rank; a host takes part in at most one pair of a round."""
    # Shuffled for full rounds, since in the given order all pairs of rank 0 come first. The fixed seed makes all ranks
    # draw the same order.
    left = random.Random(0).sample(pairs, len(pairs))
    while left:
        busy, together = set[str](), list[Pair]()
        for pair in left:
            if busy.isdisjoint(own := {hosts[rank] for rank in pair}):
                together.append(pair)
                busy |= own
        yield together
        left = [pair for pair in left if pair not in together]


def _measure_all(mpi: Any, hosts: Sequence[str], pairs: Sequence[Pair], timeout: float,
                 known: Mapping[Pair, Figures]) -> list[tuple[Pair, Figures]]:
    mine, planned = [], [*rounds(pairs, hosts), list[Pair]()]
    budget = min(STREAM_SECONDS, ALL_SECONDS / len(planned))
    for together in planned:
        if not wait_for_all(mpi, 2 * timeout, interval=1e-3):
            raise CollectiveTimeout(f"link test: waited {2 * timeout:g} s for the measuring pairs")
        for pair in (pair for pair in together if mpi.rank in pair):
            link = PairLink(mpi, sum(pair) - mpi.rank, timeout)
            # Both ranks of a pair have the same figures and so the same number of round trips.
            trips = repeats(TRIP_SECONDS, 2e-6 * known[pair][0], MOST_TRIPS) if pair in known else ROUND_TRIPS
            latency = link.latency(trips, begins=mpi.rank == pair[0])
            bandwidth = 1e-6 / link.stream(budget)
            if mpi.rank == pair[0]:
                mine.append((pair, (float(f"{latency * 1e6:.3g}"), float(f"{bandwidth:.3g}"))))
    return [link for links in mpi.allgather(mine) for link in links]


class PairLink:
    """The link to another rank, as this rank measures it together with that rank."""

    def __init__(self, mpi: Any, peer: int, timeout: float) -> None:
        self._mpi, self._peer, self._timeout = mpi, peer, timeout

    def latency(self, count: int, *, begins: bool) -> float:
        """Return the least half of a round trip in seconds, without the first: MPI may connect during that.

        The figure of the rank that begins counts: a message may wait for the other rank, whose round trip then looks
        short.
        """
        buffer, halves = numpy.zeros(SHORT_MESSAGE, numpy.uint8), []
        for _ in range(1 + count):
            started = time.perf_counter()
            for sends in (begins, not begins):
                self.wait(self.post(buffer, sends=sends))
            halves.append((time.perf_counter() - started) / 2)
        return min(halves[1:])

    def stream(self, budget: float) -> float:
        """Return the seconds of a byte in a long exchange, the same on both ranks; see `STEADY`.

        Data flow in both directions at once, as in most collectives: acknowledgements wait behind data. A rank times
        the second half of each stream: the first bytes may be quicker than the link, where a shaper of traffic lets
        bursts pass, and slower, where TCP's window still opens.
        """
        given, came = numpy.zeros((2, PIECE), numpy.uint8)
        count, before, began = 2, 0.0, time.perf_counter()
        while True:
            times = []
            for _ in range(count):
                self.wait(self.post(came, sends=False), self.post(given, sends=True))
                times.append(time.perf_counter())
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
        return (self._mpi.Isend if sends else self._mpi.Irecv)(buffer, self._peer, 1)

    def wait(self, *requests: Any) -> None:
        """Wait for messages; raise CollectiveTimeout."""
        for request in requests:
            if not becomes(request.Test, self._timeout, interval=0.0):
                raise CollectiveTimeout(f"link test: rank {self._mpi.rank} received nothing from rank {self._peer} for "
                                        f"{self._timeout:g} s")
