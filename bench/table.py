"""The printed lines: nccl-tests' header, lines and footer, byte for byte; additional lines begin with #.

Data lines are gpucoll's. With several algorithms each line ends with the algorithm's name. Peers, spread, skew, and
shares of the bound are in a separate table after the lines.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import IO, Any

from .arguments import Settings
from .machine import RankPlace
from .records import PLACEMENTS

Result = Mapping[str, Any]  # of a record: see `records`
LEFT_COLUMNS = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
SIDE_COLUMNS = "  {:>7}  {:>6}  {:>6}  {:>6}"
SPREAD = "  {:>7}  {:>7}  {:>7}  {:>7}"
BLOCKING = ("", "wait and barrier after each inner iteration (-m)", "wait after each inner iteration (-m), no barrier",
            "wait and barrier after each outer iteration (-n); time excludes barrier")
DETAILS = "# {:>10}  {:<20}  {:>9}  {:>9}  {:>9}  {:>5}  {:>9}  {:>6}"
INTERVALS = {"bar": 0.1, "lines": 5.0, "off": float("inf")}  # seconds between two signs of progress
STAMP = "%Y-%m-%d %H:%M:%S"


def number(value: float, width: int) -> str:
    """Return nccl-tests' format of a number: as many decimals as fit."""
    for form in (f"{value:{width}.2f}", f"{value:{width}.1f}", f"{value:{width}.0f}"):
        if len(form) <= width:
            return form
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def line(result: Result, *, spread: bool = False, stamp: str = "", name: str = "") -> str:
    """Return a line of data."""
    text = "{size:>12}  {count:>12}  {type:>8}  {redop:>6}  {root:>6}".format_map(result)
    for placement in PLACEMENTS:
        body = result[placement]
        wrong = "N/A" if body["nwrong"] is None else f"{body['nwrong']:g}"
        text += SIDE_COLUMNS.format(number(body.get("time", body.get("cpu_time")), 7), number(body["alg_bw"], 6),
                                    number(body["bus_bw"], 6), wrong)
        if spread:
            statistics = result[f"{placement}_per_iter"]
            text += SPREAD.format(*(number(statistics[key], 7) for key in ("min_us", "max_us", "p99_us", "cv_pct")))
    return text + (f"{stamp:>21}" if stamp else "") + (f"  {name}" if name else "")


def header(options: Settings, versions: Mapping[str, str], places: Sequence[RankPlace]) -> list[str]:
    """Return the lines before the titles."""
    flags = options.flags
    step = f"{flags.stepfactor}(factor)" if flags.stepfactor > 1 else f"{flags.stepbytes}(bytes)"
    return [
        "# " + "  ".join(f"{name} {version}" for name, version in versions.items()),
        f"# Collective test starting: {flags.test}",
        f"# nThread 1 nGpus 1 minBytes {flags.minbytes} maxBytes {flags.maxbytes} step: {step} "
        f"warmup iters: {flags.warmup_iters} iters: {options.iterations or 20} agg iters: {flags.agg_iters} "
        f"validation: {flags.check} graph: {options.launches} unalign: {flags.unalign}",
        *([f"# Blocking Enabled: {BLOCKING[flags.blocking]} "] if flags.blocking else []),
        "#",
        "# Using devices",
        *(f"#  Rank {rank:2d} Group {0:2d} Pid {place.pid:6d} on {place.host:>10} device {place.device:2d} "
          f"[{place.identity}] {place.info}" for rank, place in enumerate(places)),
    ]


def titles(options: Settings, several: bool) -> list[str]:
    """Return the title lines above the columns."""
    flags = options.flags
    spread, stamped = bool(flags.per_iter_timing), bool(flags.report_timestamps)
    over = ("           out-of-place                       in-place          " if not spread else
            "              out-of-place (+ per-iteration)                                in-place (+ per-iteration)")
    time = "cputime" if flags.report_cputime else "time"
    rows = [(("size", "count", "type", "redop", "root"), (time, "algbw", "busbw", "#wrong"),
             ("i_min", "i_max", "i_p99", "i_cv%"), "timestamp", "algorithm"),
            (("(B)", "(elements)", "", "", ""), ("(us)", "(GB/s)", "(GB/s)", ""), ("(us)", "(us)", "(us)", "(%)"),
             STAMP, "")]
    return ["#", LEFT_COLUMNS.format("", "", "", "", "") + over,
            *(LEFT_COLUMNS.format(*left) + (SIDE_COLUMNS.format(*side) + (SPREAD.format(*more) if spread else "")) * 2
              + (f" {at:>19}" if stamped else " ") + (f" {last}" if several else "")
              for left, side, more, at, last in rows)]


def details(results: Sequence[Result]) -> list[str]:
    """Return a table of the figures missing in nccl-tests' lines."""
    peers = list(dict.fromkeys(peer for result in results for peer in result["against"]))
    rows = []
    for result in results:
        spread, bound, share = result["out_of_place_per_iter"], result["bound"], result["share"]
        p50, p99, skew = (number(value, 9).strip() for value in (spread["p50_us"], spread["p99_us"], result["skew_us"]))
        ratios = [result["against"].get(peer, {}).get("ratio") for peer in peers]
        rows.append(DETAILS.format(result["size"], result["algorithm"], p50, p99, skew, result["late_rank"],
                                   "-" if bound is None else number(bound, 9).strip(),
                                   "-" if share is None else f"{100 * share:.1f}")
                    + "".join(f"  {'-' if one is None else format(one['out_of_place'], '.3f'):>7}" for one in ratios))
    return ["#", "# Out-of-place: spread over repetitions (each as long as on its slowest rank), skew between ranks,",
            "# busbw over the bound that the copy bandwidth sets" + (", times of peers over ours" if peers else ""),
            DETAILS.format("size", "algorithm", "p50", "p99", "skew", "last", "bound", "share")
            + "".join(f"  {peer:>7}" for peer in peers),
            DETAILS.format("(B)", "", "(us)", "(us)", "(us)", "rank", "(GB/s)", "(%)"), *rows]


def comparison(means: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return, for each peer and test, the mean speed of each algorithm as a multiple of the peer's."""
    return [f"# against {peer}  {test}  geometric mean" + "".join(f"  {name} {mean:.3f}" for name, mean in row.items())
            for peer, tests in means.items() for test, row in tests.items()]


def average(results: Sequence[Result]) -> float:
    """Return nccl-tests' average bus bandwidth, over both halves of all lines; 0 without lines."""
    busbw = [result[placement]["bus_bw"] for result in results for placement in PLACEMENTS]
    return math.fsum(busbw) / len(busbw) if busbw else 0.0


def footer(options: Settings, wrong: int, bandwidth: float) -> list[str]:
    """Return the lines after the data."""
    verdict = "" if options.floor is None else "FAILED" if bandwidth < options.floor else "OK"
    return [f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# {'Avg bus bandwidth':<20} : {bandwidth:g} {verdict}", "#",
            f"# Collective test concluded: {options.flags.test}", "#"]


class ProgressBar:
    """Shows the finished share of a run's work, and the estimated time for the rest.

    `total` is the sum of all weights passed to `done`; None for a run without end.
    """

    def __init__(self, style: str, total: int | None, stream: IO[str],
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.style: str = ("bar" if stream.isatty() else "lines") if style == "auto" else style
        self._total, self._stream, self._clock = total, stream, clock
        self._done, self._started, self._shown, self._is_drawn = 0, clock(), clock(), False

    def done(self, weight: int, what: str) -> None:
        """Record `what` as done; show the progress if the last sign is old enough."""
        self._done += weight
        now = self._clock()
        if now - self._shown < INTERVALS[self.style]:
            return
        self._shown, elapsed = now, now - self._started
        left = None if self._total is None else elapsed * (self._total - self._done) / self._done
        spent, rest = (timedelta(seconds=round(seconds)) for seconds in (elapsed, left or 0))
        text = f"{what}, {spent} so far, " + ("no end" if left is None else f"{rest} to go")
        self.clear()
        if self.style == "bar":
            self._stream.write(text[:shutil.get_terminal_size().columns - 1])
        else:
            self._stream.write(f"gpucoll bench: {text}\n")
        self._stream.flush()
        self._is_drawn = self.style == "bar"

    def clear(self) -> None:
        """Erase the progress line, so that another line can be printed in its place."""
        if self._is_drawn:
            self._stream.write("\r\033[K")
            self._is_drawn = False
