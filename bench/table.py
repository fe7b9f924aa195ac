"""What is printed: nccl-tests' header, lines and footer, byte for byte; what it lacks begins with #.

Data lines are gpucoll's; with several algorithms each ends with the algorithm's name. Peers, spread, skew, and shares
of the bound stand in a table of their own after them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .arguments import Options
from .machine import Place
from .records import PLACEMENTS
from .summary import geometric_mean

Result = Mapping[str, Any]  # of a record: see `records`
LEFT = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
SIDE = "  {:>7}  {:>6}  {:>6}  {:>6}"
SPREAD = "  {:>7}  {:>7}  {:>7}  {:>7}"
BLOCKING = ("", "wait and barrier after each inner iteration (-m)", "wait after each inner iteration (-m), no barrier",
            "wait and barrier after each outer iteration (-n); time excludes barrier")
STAMP = "%Y-%m-%d %H:%M:%S"
DETAILS = "# {:>10}  {:<20}  {:>9}  {:>9}  {:>9}  {:>5}  {:>9}  {:>6}"


def number(value: float, width: int) -> str:
    """Return nccl-tests' spelling of a number: as many decimals as there is room for.

    >>> number(3.14159, 7), number(123456.789, 7), number(12345678.9, 7)
    ('   3.14', ' 123457', '1.2e+07')
    """
    for form in (f"{value:{width}.2f}", f"{value:{width}.1f}", f"{value:{width}.0f}"):
        if len(form) <= width:
            return form
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def line(result: Result, *, spread: bool = False, stamp: str = "", name: str = "") -> str:
    """Return a line of data."""
    text = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}".format(*(result[key] for key in
                                                         ("size", "count", "type", "redop", "root")))
    for placement in PLACEMENTS:
        text += _side(result[placement]) + (_spread(result[f"{placement}_per_iter"]) if spread else "")
    return text + (f"{stamp:>21}" if stamp else "") + (f"  {name}" if name else "")


def _side(body: Mapping[str, Any]) -> str:
    wrong = "N/A" if body["nwrong"] is None else f"{body['nwrong']:g}"
    return SIDE.format(number(body.get("time", body.get("cpu_time")), 7), number(body["alg_bw"], 6),
                       number(body["bus_bw"], 6), wrong)


def _spread(statistics: Mapping[str, Any]) -> str:
    return SPREAD.format(*(number(statistics[key], 7) for key in ("min_us", "max_us", "p99_us", "cv_pct")))


def header(options: Options, versions: Mapping[str, str], places: Sequence[Place]) -> list[str]:
    """Return the lines before the titles."""
    flags, (first, last) = options.flags, options.bounds
    step = f"{flags.stepfactor}(factor)" if flags.stepfactor > 1 else f"{flags.stepbytes}(bytes)"
    return [
        "# " + "  ".join(f"{name} {version}" for name, version in versions.items()),
        f"# Collective test starting: {flags.test}",
        f"# nThread 1 nGpus 1 minBytes {first} maxBytes {last} step: {step} warmup iters: {flags.warmup_iters} "
        f"iters: {options.iterations or 20} agg iters: {flags.agg_iters} validation: {flags.check} "
        f"graph: {options.launches} unalign: {flags.unalign}",
        *([f"# Blocking Enabled: {BLOCKING[flags.blocking]} "] if flags.blocking else []),
        "#",
        "# Using devices",
        *(f"#  Rank {rank:2d} Group {0:2d} Pid {place.pid:6d} on {place.host:>10} device {place.device:2d} "
          f"[{place.identity}] {place.info}" for rank, place in enumerate(places)),
    ]


def titles(options: Options, several: bool) -> list[str]:
    """Return the lines over the columns."""
    flags = options.flags
    spread, stamped = bool(flags.per_iter_timing), bool(flags.report_timestamps)
    over = ("           out-of-place                       in-place          " if not spread else
            "              out-of-place (+ per-iteration)                                in-place (+ per-iteration)")
    time = "cputime" if flags.report_cputime else "time"
    rows = [
        (("size", "count", "type", "redop", "root"), (time, "algbw", "busbw", "#wrong"),
         ("i_min", "i_max", "i_p99", "i_cv%"), "timestamp", "algorithm"),
        (("(B)", "(elements)", "", "", ""), ("(us)", "(GB/s)", "(GB/s)", ""),
         ("(us)", "(us)", "(us)", "(%)"), STAMP, ""),
    ]
    return ["#", LEFT.format("", "", "", "", "") + over,
            *(LEFT.format(*left) + (SIDE.format(*side) + (SPREAD.format(*more) if spread else "")) * 2
              + (f" {at:>19}" if stamped else " ") + (f" {last}" if several else "")
              for left, side, more, at, last in rows)]


def details(results: Sequence[Result]) -> list[str]:
    """Return a table of what nccl-tests' lines do not say, and for each peer the geometric means."""
    peers = list(dict.fromkeys(peer for result in results for peer in result["against"]))
    rows = [_detail(result, peers) for result in results]
    return ["#", "# Out-of-place: spread over repetitions (each as long as on its slowest rank), skew between ranks,",
            "# busbw over the bound that the copy bandwidth sets" + (", times of peers over ours" if peers else ""),
            DETAILS.format("size", "algorithm", "p50", "p99", "skew", "last", "bound", "share")
            + "".join(f"  {peer:>7}" for peer in peers),
            DETAILS.format("(B)", "", "(us)", "(us)", "(us)", "rank", "(GB/s)", "(%)"), *rows]


def _detail(result: Result, peers: Iterable[str]) -> str:
    spread, bound, share = result["out_of_place_per_iter"], result["bound"], result["share"]
    text = DETAILS.format(
        result["size"], result["algorithm"], number(spread["p50_us"], 9).strip(), number(spread["p99_us"], 9).strip(),
        number(result["skew_us"], 9).strip(), result["late_rank"], "-" if bound is None else number(bound, 9).strip(),
        "-" if share is None else f"{100 * share:.1f}")
    ratios = [result["against"].get(peer, {}).get("ratio") for peer in peers]
    return text + "".join(f"  {'-' if ratio is None else format(ratio['out_of_place'], '.3f'):>7}" for ratio in ratios)


def means(results: Iterable[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """Return {peer: {collective: {algorithm: the geometric mean of its out-of-place ratios}}}."""
    ratios: dict[str, dict[str, dict[str, list[float]]]] = {}
    for result in results:
        for peer, found in result["against"].items():
            by_algorithm = ratios.setdefault(peer, {}).setdefault(result["collective"], {})
            by_algorithm.setdefault(result["algorithm"], []).append(found["ratio"]["out_of_place"])
    return {peer: {test: {name: geometric_mean(row) for name, row in rows.items()} for test, rows in tests.items()}
            for peer, tests in ratios.items()}


def comparison(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return, for each peer and test, how many times as fast as the peer each algorithm was on the whole.

    >>> comparison({"mpi": {"all_reduce": {"ring": 0.5, "tree": 2}}})
    ['# against mpi  all_reduce  geometric mean  ring 0.500  tree 2.000']
    """
    return [f"# against {peer}  {test}  geometric mean  "
            + "  ".join(f"{name} {mean:.3f}" for name, mean in row.items())
            for peer, tests in found.items() for test, row in tests.items()]


def average(results: Sequence[Result]) -> float:
    """Return nccl-tests' average bus bandwidth: over all lines, and over both halves of each; 0 without lines."""
    busbw = [result[placement]["bus_bw"] for result in results for placement in PLACEMENTS]
    return math.fsum(busbw) / len(busbw) if busbw else 0.0


def footer(options: Options, wrong: int, bandwidth: float) -> list[str]:
    """Return the lines after the data."""
    verdict = "" if options.floor is None else "FAILED" if bandwidth < options.floor else "OK"
    return [f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# {'Avg bus bandwidth':<20} : {bandwidth:g} {verdict}", "#",
            f"# Collective test concluded: {options.flags.test}", "#"]


# sendrecv --pairs

PAIR = "{:>12}  {:>6}  {:>6}  {:>9}  {:>9}  {:>6}"
PAIR_TITLES = (("#       size", "source", "target", "time", "bandwidth", "#wrong"),
               ("#        (B)", "(rank)", "(rank)", "(us)", "(GB/s)", ""))


def pair_line(pair: Result) -> str:
    """Return a line of one directed pair of ranks."""
    return PAIR.format(pair["size"], pair["source"], pair["target"], number(pair["time_us"], 9).strip(),
                       f"{pair['bandwidth']:.4g}", "N/A" if pair["nwrong"] is None else pair["nwrong"])
