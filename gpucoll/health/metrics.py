"""`GPUCOLL_METRICS`: the figures of `stats` for Prometheus, in a file or at a port of localhost, or for OpenTelemetry.

Also the same figures as a summary at the end (`GPUCOLL_SUMMARY`).

Prometheus reads its text format 0.0.4. A process exports the sums over all its communicators, the closed ones too,
since a counter never decreases. ``file:F.prom`` is replaced every few seconds and at the end, always as a whole, as
node_exporter's textfile collector needs it. The first rank of a host writes ``F.prom``, local rank 3 ``F-3.prom``.
``port:9400`` answers HTTP requests to 127.0.0.1, local rank 3 at port 9403. With ``otel`` the counters are observed by
OpenTelemetry's meter provider, set by the program.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, BackendError, nearest
from gpucoll.health.shares import CallSums, Stats, total_of
from gpucoll.health.summary import summary_of
from gpucoll.version import __version__

WAYS = ("file", "port", "otel")
SUMMARY = "summary"  # in place of a value of GPUCOLL_METRICS: the table of GPUCOLL_SUMMARY
PAUSE = 5.0  # seconds between two files
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# By name in `stats`: the name of the counter, its help, and OpenTelemetry's unit.
COUNTERS = {
    "calls": ("gpucoll_calls_total", "Completed calls.", "{call}"),
    "bytes": ("gpucoll_bytes_total", "Bytes of the calls, the larger of input and output over all ranks.", "By"),
    "own_seconds": ("gpucoll_own_seconds_total", "Seconds by which this rank came later than the first rank.", "s"),
    "waiting_seconds": ("gpucoll_waiting_seconds_total", "Seconds in calls until the other ranks had come.", "s"),
    "moving_seconds": ("gpucoll_moving_seconds_total", "Seconds of moving and reducing.", "s"),
}


def text_of(by_rank: Mapping[int, Stats]) -> str:
    """Return the figures of the ranks in Prometheus' text format 0.0.4.

    >>> print(text_of({3: {("barrier", 0): {"calls": 2}}}), end="")
    # HELP gpucoll_calls_total Completed calls.
    # TYPE gpucoll_calls_total counter
    gpucoll_calls_total{rank="3",collective="barrier",size_class="0"} 2
    """
    lines = []
    for name, (counter, words, _) in COUNTERS.items():
        rows = [(f'rank="{rank}",collective="{escaped(collective)}",size_class="{size}"', figures[name])
                for rank, found in sorted(by_rank.items()) for (collective, size), figures in found.items()
                if name in figures]
        if rows:
            lines += [f"# HELP {counter} {words}", f"# TYPE {counter} counter"]
            lines += [f"{counter}{{{labels}}} {value!r}" for labels, value in rows]
    return "".join(f"{line}\n" for line in lines)


def escaped(value: str) -> str:
    r"""Return the value of a label, escaped.

    >>> escaped('a "b"')
    'a \\"b\\"'
    """
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def place_of(wanted: str) -> Path | int | None:
    """Return the file of ``file:F.prom``, the port of ``port:9400``, None for ``otel``; ArgumentError for other texts.

    >>> place_of("port:9400")
    9400
    """
    way, _, place = wanted.partition(":")
    if way not in WAYS:
        raise ArgumentError(f"GPUCOLL_METRICS={wanted!r}{nearest(way, WAYS)}; write file:F.prom, port:9400 or otel",
                            code="GC-OPTION")
    if wanted == "otel":
        return None
    if way == "file" and place:
        return Path(place)
    if way == "port" and place.isdecimal() and 0 < int(place) < 1 << 16:
        return int(place)
    raise ArgumentError(f"GPUCOLL_METRICS={wanted!r} is not of the form file:F.prom, port:9400 or otel",
                        code="GC-OPTION")


class Exporter:
    """The export of one process; a communicator enters its sums by `add` and leaves by `retire`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._lock = threading.Lock()
        self._sums: list[tuple[int, CallSums]] = []
        self._past: dict[int, Stats] = {}  # of closed communicators
        self._past_delays: dict[int, dict[str, float]] = {}

    def add(self, sums: CallSums, rank: int, *, threads: bool) -> None:
        """Export the sums of a communicator. All those of a process count for its first rank, `threads` for `rank`."""
        with self._lock:
            self._sums.append((rank if threads else self._rank, sums))

    def retire(self, sums: CallSums) -> None:
        """Keep only the figures of a communicator that is closed."""
        with self._lock:
            for rank, _ in [one for one in self._sums if one[1] is sums]:
                self._past[rank] = total_of([self._past.get(rank, {}), sums.stats()])
                _add(self._past_delays.setdefault(rank, {}), sums.delays)
            self._sums = [one for one in self._sums if one[1] is not sums]

    def figures(self) -> dict[int, Stats]:
        """Return the figures of now, by rank."""
        with self._lock:
            by_rank = dict(self._past)
            for rank, sums in self._sums:
                by_rank[rank] = total_of([by_rank.get(rank, {}), sums.stats()])
        return by_rank

    def delays(self) -> dict[int, dict[str, float]]:
        """Return the seconds of own delays until now, by rank and place (see `CallSums.delayed`)."""
        with self._lock:
            by_rank = {rank: dict(delays) for rank, delays in self._past_delays.items()}
            for rank, sums in self._sums:
                _add(by_rank.setdefault(rank, {}), sums.delays)
        return by_rank

    def text(self) -> str:
        """Return the figures of now in Prometheus' text format."""
        return text_of(self.figures())

    def summarise(self) -> None:
        """Print the summary of rank 0 at the end of the process."""
        owner, began = os.getpid(), time.monotonic()

        def show() -> None:
            if os.getpid() == owner:
                with contextlib.suppress(OSError):
                    print(summary_of(self.figures().get(0, {}), 0, time.monotonic() - began,
                                     self.delays().get(0, {})), file=sys.stderr, end="")

        if self._rank == 0:
            atexit.register(show)

    def write(self, path: Path) -> None:
        """Replace the file as a whole; raise OSError if the folder refuses."""
        part = path.with_name(f"{path.name}.{os.getpid()}")  # the collector reads names in .prom only
        try:
            part.write_text(self.text(), encoding="utf-8")
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def write_on(self, path: Path) -> None:
        """Write the file now, every PAUSE seconds, and at the end of the process; raise OSError from the first time."""
        self.write(path)
        owner = os.getpid()

        def write() -> None:
            # The child of a fork leaves the parent's file alone. A full disk must not end the program.
            if os.getpid() == owner:
                with contextlib.suppress(OSError):
                    self.write(path)

        def serve() -> None:
            while True:
                time.sleep(PAUSE)
                write()

        threading.Thread(target=serve, name="gpucoll metrics", daemon=True).start()
        atexit.register(write)

    def observe(self) -> None:
        """Let OpenTelemetry's meter provider read the counters; raise ImportError without its package."""
        from opentelemetry import metrics

        meter = metrics.get_meter("gpucoll", __version__)

        def reading(name: str) -> Callable[..., Iterator[Any]]:
            def read(_: Any) -> Iterator[Any]:
                for rank, stats in self.figures().items():
                    for (collective, size), one in stats.items():
                        labels: dict[str, Any] = {"rank": rank, "collective": collective, "size_class": size}
                        yield metrics.Observation(one[name], labels)

            return read

        for name, (counter, words, unit) in COUNTERS.items():
            meter.create_observable_counter(counter.removesuffix("_total"), [reading(name)], unit, words)

    def serve(self, port: int) -> None:
        """Answer HTTP requests at a port of localhost in a thread; raise OSError if the port is taken."""
        import http.server  # with ssl and email: slow, and few programs serve

        exporter = self

        class MetricsHandler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] in ("/", "/metrics")
                body = exporter.text().encode() if is_known else b"the metrics are at /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", CONTENT_TYPE if is_known else "text/plain")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Print nothing: the program's standard error is its own."""

        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), MetricsHandler)
        threading.Thread(target=server.serve_forever, name="gpucoll metrics", daemon=True).start()


def _add(into: dict[str, float], delays: Mapping[str, float]) -> None:
    for site, seconds in list(delays.items()):  # a copy: another thread may add a site
        into[site] = into.get(site, 0.0) + seconds


def exporters(environment: Mapping[str, str], rank: int, local_rank: Callable[[], int]) -> list[Exporter]:
    """Return this process' exporters asked for by GPUCOLL_METRICS and GPUCOLL_SUMMARY; see `export`.

    Raises ArgumentError for an unknown value of GPUCOLL_METRICS.
    """
    metrics = environment.get("GPUCOLL_METRICS", "")
    if metrics:
        place_of(metrics)
    wanted = (metrics, environment.get("GPUCOLL_SUMMARY") == "1" and SUMMARY)
    return [export(one, rank, local_rank()) for one in wanted if one]


def export(wanted: str, rank: int, local_rank: int) -> Exporter:
    """Return the exporter of this process, begun by the first call.

    `wanted` is GPUCOLL_METRICS' value, or SUMMARY. `rank` becomes the label of the figures, `local_rank` chooses the
    file or the port.

    Raises BackendError if the file cannot be written, the port is taken, or OpenTelemetry is missing.
    """
    place = wanted if wanted == SUMMARY else place_of(wanted)
    with _making:
        if (os.getpid(), wanted) not in _exporters:
            made = Exporter(rank)
            try:
                if place == SUMMARY:
                    made.summarise()
                elif place is None:
                    made.observe()
                elif isinstance(place, int):
                    made.serve(place + local_rank)
                elif isinstance(place, Path):
                    made.write_on(_path(place, local_rank))
            except ImportError as error:
                raise BackendError("GPUCOLL_METRICS=otel needs OpenTelemetry: pip install opentelemetry-sdk",
                                   code="GC-OPTION") from error
            except (OSError, OverflowError) as error:
                raise BackendError(f"GPUCOLL_METRICS={wanted}: rank {rank}: {error}", code="GC-OPTION") from error
            _exporters[os.getpid(), wanted] = made
        return _exporters[os.getpid(), wanted]


def _path(path: Path, local_rank: int) -> Path:
    return path if local_rank == 0 else path.with_name(f"{path.stem}-{local_rank}{path.suffix}")


_making = threading.Lock()
_exporters: dict[tuple[int, str], Exporter] = {}  # by process, as a fork's child must not use the parent's
