"""`GPUCOLL_METRICS`: the figures of `stats` for Prometheus, in a file or at a port of localhost.

Also the same figures as a summary at the end (`GPUCOLL_SUMMARY`).

prometheus_client writes and serves the text. A process exports the sums over all its communicators, also the closed
ones, since a counter never decreases. ``file:F.prom`` is replaced every few seconds and at the end, always as a whole,
as node_exporter's textfile collector needs it. The first rank of a host writes ``F.prom``, local rank 3 ``F-3.prom``.
``port:9400`` answers HTTP requests to 127.0.0.1, local rank 3 at port 9403.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, BackendError
from gpucoll.health.shares import CallSums, Stats

SUMMARY = "summary"  # in place of a value of GPUCOLL_METRICS: the table of GPUCOLL_SUMMARY
PAUSE = 5.0  # seconds between two files
MOST, MOST_SITES = 10, 5  # kinds of calls in the table, and call sites before which the rank came late
SHARES = ("own_seconds", "waiting_seconds", "moving_seconds")
NO_DELAYS: Mapping[str, float] = {}
TITLES: tuple[str, ...] = ("collective", "bytes from", "calls", "seconds", "own %", "waiting %", "moving %", "GB/s")
# By name in `stats`: the name of the counter, and its help.
COUNTERS = {
    "calls": ("gpucoll_calls_total", "Completed calls."),
    "bytes": ("gpucoll_bytes_total", "Bytes of the calls, the larger of input and output over all ranks."),
    "own_seconds": ("gpucoll_own_seconds_total", "Seconds by which this rank came later than the first rank."),
    "waiting_seconds": ("gpucoll_waiting_seconds_total", "Seconds in calls until the other ranks had come."),
    "moving_seconds": ("gpucoll_moving_seconds_total", "Seconds of moving and reducing."),
}


def place_of(wanted: str) -> Path | int:
    """Return the file of ``file:F.prom`` or the port of ``port:9400``; raise ArgumentError for other texts.

    >>> place_of("port:9400")
    9400
    """
    way, _, place = wanted.partition(":")
    if way == "file" and place:
        return Path(place)
    if way == "port" and place.isdecimal() and 0 < int(place) < 1 << 16:
        return int(place)
    raise ArgumentError(f"GPUCOLL_METRICS={wanted!r} is not of the form file:F.prom or port:9400",
                        code="GC-OPTION")


def summary_of(stats: Stats, rank: int, seconds: float, delays: Mapping[str, float] = NO_DELAYS) -> str:
    """Return the summary of a process that ran for `seconds`: a row for each kind of call.

    The kinds that took most time come first. The bandwidth is algbw: bytes over the seconds of moving. `delays` are the
    seconds of own delays by call site; the sites with most of them are listed.

    >>> figures = {"calls": 4, "bytes": 32000000, "own_seconds": 0.0, "waiting_seconds": 0.03, "moving_seconds": 0.01}
    >>> print(summary_of({("all_reduce", 1 << 22): figures}, 0, 0.5), end="")
    gpucoll: rank 0 ran for 0.50 s and was 8.0 % of the time in calls of gpucoll
    collective  bytes from  calls  seconds  own %  waiting %  moving %  GB/s
    all_reduce     4194304      4    0.040    0.0       75.0      25.0  3.20
    """
    kinds = sorted(((sum(one[share] for share in SHARES), kind, one) for kind, one in stats.items()), reverse=True)
    total = sum(taken for taken, *_ in kinds)
    rows = [TITLES]
    for taken, (collective, size), one in kinds[:MOST]:
        moving = one["moving_seconds"]
        shares = [f"{100 * one[name] / taken if taken else 0.0:.1f}" for name in SHARES]
        speed = f"{1e-9 * one['bytes'] / moving:.2f}" if moving and one["bytes"] else "-"
        rows.append((collective, str(size), str(int(one["calls"])), f"{taken:.3f}", *shares, speed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines += [f"{len(kinds) - MOST} more kinds of calls took less time"] if len(kinds) > MOST else []
    share = 100 * total / seconds if seconds else 0.0
    head = f"gpucoll: rank {rank} ran for {seconds:.2f} s and was {share:.1f} % of the time in calls of gpucoll"
    sites = sorted(delays.items(), key=lambda one: -one[1])[:MOST_SITES]
    late = [f"late by {taken:.3f} s before {site or 'asynchronous calls'}" for site, taken in sites]
    return "".join(f"{line}\n" for line in (head, *(lines + late if kinds else ["no call"])))


class Exporter:
    """The export of one process; a communicator enters its sums by `add` and leaves by `retire`."""

    def __init__(self, rank: int) -> None:
        self._rank, self._owner = rank, os.getpid()
        self._lock = threading.Lock()
        # By rank: the sums of closed communicators first, then those of the open ones.
        self._sums: dict[int, list[CallSums]] = {}

    def add(self, sums: CallSums, rank: int, *, threads: bool) -> None:
        """Export the sums of a communicator. All those of a process count for its first rank, `threads` for `rank`."""
        with self._lock:
            self._sums.setdefault(rank if threads else self._rank, [CallSums()]).append(sums)

    def retire(self, sums: CallSums) -> None:
        """Keep only the figures of a communicator that is closed."""
        with self._lock:
            for past, *there in self._sums.values():
                if sums in there:
                    past.absorb(sums)
            self._sums = {rank: [one for one in there if one is not sums] for rank, there in self._sums.items()}

    def total(self, rank: int) -> CallSums:
        """Return the sums of now of a rank."""
        total = CallSums()
        with self._lock:
            for sums in self._sums.get(rank, ()):
                total.absorb(sums)
        return total

    def collect(self) -> Iterator[Any]:
        """Yield the counters of now, as a collector of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily

        figures = {rank: self.total(rank).stats() for rank in sorted(self._sums)}
        for name, (counter, words) in COUNTERS.items():
            family = CounterMetricFamily(counter, words, labels=("rank", "collective", "size_class"))
            for rank, stats in figures.items():
                for (collective, size), row in stats.items():
                    family.add_metric((str(rank), collective, str(size)), row[name])
            yield family

    def registry(self) -> Any:
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        registry.register(self)
        return registry

    def _own(self, do: Callable[[], object]) -> None:
        """Do something, but not in the child of a fork; a full disk must not end the program."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                do()

    def begin(self, place: Path | int | None, local_rank: int) -> None:
        """Export to a file or at a port, or without either let rank 0 print a summary at the end."""
        if isinstance(place, int):
            from prometheus_client import start_http_server

            start_http_server(place + local_rank, "127.0.0.1", self.registry())
        elif place is not None:
            self.write_on(_path(place, local_rank))
        elif self._rank == 0:
            atexit.register(self._own, functools.partial(self._summarise, time.monotonic()))

    def _summarise(self, began: float) -> None:
        total = self.total(0)
        print(summary_of(total.stats(), 0, time.monotonic() - began, total.delays), file=sys.stderr, end="")

    def write_on(self, path: Path) -> None:
        """Write the file now, every PAUSE seconds, and at the end of the process; raise OSError from the first time."""
        from prometheus_client import write_to_textfile

        write = functools.partial(write_to_textfile, str(path), self.registry())  # replaces the file as a whole
        write()

        def serve() -> None:
            while True:
                time.sleep(PAUSE)
                self._own(write)

        threading.Thread(target=serve, name="gpucoll metrics", daemon=True).start()
        atexit.register(self._own, write)


def exporters(environment: Mapping[str, str], rank: int, local_rank: Callable[[], int]) -> list[Exporter]:
    """Return this process' exporters asked for by GPUCOLL_METRICS and GPUCOLL_SUMMARY, begun by the first call.

    `rank` becomes the label of the figures, `local_rank` chooses the file or the port. Raises ArgumentError for an
    unknown value of GPUCOLL_METRICS, BackendError if the file cannot be written, or the port is taken.
    """
    metrics, found = environment.get("GPUCOLL_METRICS", ""), []
    place = place_of(metrics) if metrics else None
    for wanted in filter(None, (metrics, SUMMARY if environment.get("GPUCOLL_SUMMARY") == "1" else "")):
        with _making:
            if (os.getpid(), wanted) not in _exporters:
                made = Exporter(rank)
                try:
                    made.begin(None if wanted == SUMMARY else place, local_rank())
                except (OSError, OverflowError) as error:
                    raise BackendError(f"GPUCOLL_METRICS={wanted}: rank {rank}: {error}", code="GC-OPTION") from error
                _exporters[os.getpid(), wanted] = made
            found.append(_exporters[os.getpid(), wanted])
    return found


def _path(path: Path, local_rank: int) -> Path:
    return path if local_rank == 0 else path.with_name(f"{path.stem}-{local_rank}{path.suffix}")


_making = threading.Lock()
_exporters: dict[tuple[int, str], Exporter] = {}  # by process, as a fork's child must not use the parent's
