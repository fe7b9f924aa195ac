"""`GPUCOLL_METRICS`: the figures of `stats` for Prometheus, in a file or at a port of localhost.

Also the report on these figures at the end of a process (`GPUCOLL_SUMMARY`).

prometheus_client writes and serves the text. A process exports the sums over all its communicators, also the closed
ones, since a counter never decreases. ``file:F.prom`` is replaced every few seconds and at the end, always as a whole,
as node_exporter's textfile collector needs it. The first rank of a host writes ``F.prom``, local rank 3 ``F-3.prom``.
``port:9400`` answers HTTP requests to 127.0.0.1, local rank 3 at port 9403.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, BackendError
from gpucoll.health.flight import NAMES, CallRecord
from gpucoll.transport.process import PROCESS

PAUSE = 5.0  # seconds between two files
# By name in `stats`: the name of the counter, and its help.
COUNTERS = {
    "calls": ("gpucoll_calls_total", "Completed calls."),
    "bytes": ("gpucoll_bytes_total", "Bytes of the calls, the larger of input and output over all ranks."),
    "own_seconds": ("gpucoll_own_seconds_total", "Seconds by which this rank came later than the first rank."),
    "waiting_seconds": ("gpucoll_waiting_seconds_total", "Seconds in calls until the other ranks had come."),
    "moving_seconds": ("gpucoll_moving_seconds_total", "Seconds of moving and reducing."),
}


def export_place(wanted: str) -> Path | int:
    """Return the file of ``file:F.prom`` or the port of ``port:9400``; raise ArgumentError for other texts.

    >>> export_place("port:9400")
    9400
    """
    way, _, place = wanted.partition(":")
    if way == "file" and place:
        return Path(place)
    if way == "port" and place.isdecimal() and 0 < int(place) < 1 << 16:
        return int(place)
    raise ArgumentError(f"GPUCOLL_METRICS={wanted!r} is not of the form file:F.prom or port:9400", code="GC-OPTION")


class Exporter:
    """The export of one process; a communicator enters its record by `add` and leaves by `retire`.

    All records of a process count for its first `rank`, but those of threads as ranks for their own.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._lock = rank, threading.Lock()
        self.advice = ""  # the last line of the summary, if any
        self._began = time.monotonic()
        self._past: dict[int, CallRecord] = collections.defaultdict(CallRecord)  # by rank: closed communicators
        self._open: dict[CallRecord, int] = {}
        self._places = set[Path | int | None]()  # where this process exports; None: the summary

    def add(self, record: CallRecord, rank: int, *, threads: bool) -> None:
        """Export the record of a communicator."""
        with self._lock:
            self._open[record] = rank if threads else self._rank

    def retire(self, record: CallRecord) -> None:
        """Keep only the figures of a communicator that is closed."""
        with self._lock:
            self._past[self._open.pop(record)].absorb(record)

    def total(self, rank: int) -> CallRecord:
        """Return the sums of now of a rank."""
        total = CallRecord()
        with self._lock:
            for record in (self._past[rank], *(one for one, of in self._open.items() if of == rank)):
                total.absorb(record)
        return total

    def collect(self) -> Iterator[Any]:
        """Yield the counters of now, as a collector of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily

        figures = {rank: self.total(rank).stats() for rank in sorted({*self._past, *self._open.values()})}
        for name, (counter, words) in COUNTERS.items():
            family = CounterMetricFamily(counter, words, labels=("rank", "collective", "size_class"))
            for rank, stats in figures.items():
                for (collective, size), row in stats.items():
                    family.add_metric((str(rank), collective, str(size)), row[name])
            yield family

    def _own(self, do: Callable[[], object]) -> None:
        """Do something, but not in the child of a fork; a full disk must not end the program."""
        if PROCESS.exporter is self:
            with contextlib.suppress(OSError):
                do()

    def begin(self, place: Path | int | None, local_rank: int) -> None:
        """Export to a file or at a port, or without either let rank 0 print a summary at the end; once.

        A file is written now, every PAUSE seconds, and at the end of the process; raises OSError from the first time.
        """
        if place in self._places:
            return
        if place is not None:
            from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile

            registry = CollectorRegistry()
            registry.register(self)
            if isinstance(place, int):
                start_http_server(place + local_rank, "127.0.0.1", registry)
            else:
                # Replaces the file as a whole.
                write = functools.partial(write_to_textfile, str(_path(place, local_rank)), registry)
                write()
                threading.Thread(target=self._repeat, args=[write], name="gpucoll metrics", daemon=True).start()
                atexit.register(self._own, write)
        elif self._rank == 0:
            atexit.register(self._own, self._summarise)
        self._places.add(place)

    def _repeat(self, write: Callable[[], object]) -> None:
        while True:
            time.sleep(PAUSE)
            self._own(write)

    def _summarise(self) -> None:
        from gpucoll.health.report import shares_table  # not in every process: the module takes long to load

        total, seconds = self.total(0), time.monotonic() - self._began
        share = 100 * sum(one[name] for one in total.stats().values() for name in NAMES[2:]) / seconds
        print(f"gpucoll: rank 0 ran for {seconds:.2f} s and was {share:.1f} % of the time in calls of gpucoll",
              *shares_table(total), *filter(None, [self.advice]), sep="\n", file=sys.stderr)


def exporter_of(environment: Mapping[str, str], rank: int, local_rank: Callable[[], int]) -> Exporter | None:
    """Return this process' exporter, begun as GPUCOLL_METRICS and GPUCOLL_SUMMARY ask; None without either.

    `rank` becomes the label of the figures, `local_rank` chooses the file or the port. Raises ArgumentError for an
    unknown value of GPUCOLL_METRICS, BackendError if the file cannot be written, or the port is taken.
    """
    metrics = environment.get("GPUCOLL_METRICS", "")
    places = [*([export_place(metrics)] if metrics else []), *[None] * (environment.get("GPUCOLL_SUMMARY") == "1")]
    if not places:
        return None
    with _making:
        exporter: Exporter = PROCESS.exporter or Exporter(rank)
        try:
            for place in places:
                exporter.begin(place, local_rank())
        except (OSError, OverflowError) as error:
            raise BackendError(f"GPUCOLL_METRICS={metrics}: rank {rank}: {error}", code="GC-OPTION") from error
        PROCESS.exporter = exporter
    return exporter


def _path(path: Path, local_rank: int) -> Path:
    return path if local_rank == 0 else path.with_name(f"{path.stem}-{local_rank}{path.suffix}")


_making = threading.Lock()
