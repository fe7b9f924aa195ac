"""What is printed: nccl-tests' table with a column for the algorithm; lines that begin with # are not data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

from .arguments import Options
from .cases import PRINTED, Case, Contestant

COLUMNS = "{:>12}  {:>12}  {:>8}  {:>6}  {:>6}  {:>20}  {:>10}  {:>11}  {:>11}  {:>6}"
TITLES = (("size", "count", "type", "redop", "root", "algorithm", "time", "algbw", "busbw", "#wrong"),
          ("(B)", "(elements)", "", "", "", "", "(us)", "(GB/s)", "(GB/s)", ""))


class Place(NamedTuple):
    """Where a rank runs."""

    pid: int
    host: str


@dataclass(frozen=True)
class Row:
    """One line of data: bytes, elements, us and GB/s (10^9 bytes a second); `wrong` is None where not checked."""

    size: int
    count: int
    type: str
    redop: str
    root: int
    algorithm: str
    time: float
    algbw: float
    busbw: float
    wrong: int | None
    peer: bool = False


def row(case: Case, count: int, contestant: Contestant, seconds: float, wrong: int | None) -> Row:
    """Return the line of `contestant`, which took `seconds` for `count` elements as in `Case.count`.

    >>> found = row(Case("all_reduce", "float32", "sum", 0, 4), 1000, Contestant("ring", print), 2e-6, 0)
    >>> found.time, found.algbw, found.busbw
    (2.0, 2.0, 3.0)
    """
    nbytes = case.nbytes(count)
    algbw = nbytes / seconds / 1e9
    return Row(
        nbytes, count, PRINTED.get(case.dtype, case.dtype), case.op if case.row.reduces else "none",
        case.root if case.row.rooted else -1, contestant.name, seconds * 1e6, algbw, algbw * case.factor, wrong,
        contestant.peer)


def line(found: Row) -> str:
    """Return a line of data; bandwidths have five digits however small they are."""
    return COLUMNS.format(*astuple(found)[:6], f"{found.time:.2f}", f"{found.algbw:.5g}", f"{found.busbw:.5g}",
                          "N/A" if found.wrong is None else found.wrong)


def ratios(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return, by peer and algorithm, the peer's time / the algorithm's, of the rows of one size."""
    rows = list(rows)
    return {peer.algorithm: {ours.algorithm: peer.time / ours.time for ours in rows if not ours.peer}
            for peer in rows if peer.peer}


def header(options: Options, versions: Mapping[str, str], places: Sequence[Place]) -> list[str]:
    """Return the lines before the data."""
    iterations = options.iterations or "20 (fewer where they take long)"
    return [
        "# " + "  ".join(f"{name} {version}" for name, version in versions.items()),
        f"# Collective test starting: {options.collective}",
        f"# nRanks {len(places)} minBytes {options.bounds[0]} maxBytes {options.bounds[1]} step: {options.step} "
        f"warmup iters: {options.warmups} iters: {iterations} validation: {options.checks}",
        "#",
        "# Using ranks",
        *(f"#  Rank {rank:2d} Group  0 Pid {place.pid:6d} on {place.host:>10} device cpu"
          for rank, place in enumerate(places)),
        "#",
        *("#" + COLUMNS.format(*titles)[1:] for titles in TITLES),
    ]


def comparison(what: object, ratios_by_peer: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return, for each peer, the line that says how many times as fast as the peer each algorithm was.

    >>> comparison(1024, {"mpi": {"ring": 0.5, "tree": 2}})
    ['# against mpi          1024  ring 0.500  tree 2.000']
    """
    return [f"# against {peer} {what:>13}  " + "  ".join(f"{name} {ratio:.3f}" for name, ratio in found.items())
            for peer, found in ratios_by_peer.items()]


def means(found: Sequence[Mapping[str, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the geometric mean over the sizes of what `ratios` gave for each of them.

    >>> means([{"mpi": {"ring": 0.5}}, {"mpi": {"ring": 2.0}}])
    {'mpi': {'ring': 1.0}}
    """
    return {peer: {name: geometric_mean(each[peer][name] for each in found) for name in names}
            for peer, names in found[0].items()}


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the mean of ratios that values twice as fast and half as fast alike.

    >>> geometric_mean([0.5, 2.0])
    1.0
    """
    logarithms = [math.log(ratio) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms))


def footer(rows: Sequence[Row]) -> list[str]:
    """Return the lines after the data; the bandwidth is averaged over all but the peers."""
    wrong, busbw = sum(found.wrong or 0 for found in rows), [found.busbw for found in rows if not found.peer]
    return [f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
            f"# {'Avg bus bandwidth':<20} : {math.fsum(busbw) / len(busbw):g}", "#"]
