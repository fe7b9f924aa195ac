"""`gpucoll simulate`: predictions for many algorithms, numbers of ranks and sizes; as rows, text, object or picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gpucoll.algorithms import algorithms, evaluate, names_of
from gpucoll.analysis.simulate import Prediction, Topology, load, simulate_sizes
from gpucoll.analysis.sizes import byte_size
from gpucoll.collectives import COLLECTIVES
from gpucoll.errors import ArgumentError

Segments: TypeAlias = Callable[[str, int, int], int]  # of an algorithm, for bytes and ranks

LEAST = 8  # bytes: where a sweep over sizes begins
MOST = 1 << 20  # bytes: where it ends at the earliest


class LeftOut(NamedTuple):
    """An algorithm that is not predicted for a number of ranks, and why."""

    algorithm: str
    ranks: int
    reason: str


class Crossover(NamedTuple):
    """The size from which on `then` is the quickest; below, `first` is."""

    ranks: int
    first: str
    then: str
    nbytes: float


class Sweep(NamedTuple):
    """What was predicted: by ranks, then by bytes, the quickest algorithm first; and what could not be."""

    rows: list[Prediction]
    left_out: list[LeftOut]


def sweep(collective: str, names: Sequence[str], ranks: Iterable[int], sizes: Sequence[int], topology: Topology,
          segments: Segments, root: int = 0) -> Sweep:
    """Predict the algorithms of `names`, where it is empty all that there are: those may be left out with a reason.

    `segments` returns the pipelining. Raises ArgumentError where one that is named cannot do what is asked.
    """
    rows: list[Prediction] = []
    left_out: list[LeftOut] = []
    for size in ranks:
        for name in names or algorithms(collective, size=size):
            try:
                rows += [*_of_one(collective, name, size, sizes, topology, segments, root)]
            except ArgumentError as error:
                if names or error.code != "GC-SIMULATE":
                    raise ArgumentError(f"{collective}:{name} for {size} ranks: {error.args[0]}",
                                        code=error.code) from None
                left_out.append(LeftOut(name, size, str(error.args[0])))
    rows.sort(key=lambda row: (row.ranks, row.nbytes, row.seconds, row.algorithm))
    return Sweep(rows, left_out)


def _of_one(collective: str, name: str, size: int, sizes: Sequence[int], topology: Topology, segments: Segments,
            root: int) -> Iterator[Prediction]:
    """Yield the predictions of one algorithm; sizes of equal pipelining share one schedule."""
    def pieces(nbytes: int) -> int:
        return segments(name, nbytes, size)

    for number, group in groupby(sorted(sizes, key=pieces), pieces):
        yield from simulate_sizes(collective, name, size, [*group], topology, root=root, segments=number)


def grid(most: int) -> list[int]:
    """Return the powers of two from LEAST to `most` bytes, or to MOST.

    >>> grid(0)[:3], grid(1 << 26)[-1] >> 20
    ([8, 16, 32], 64)
    """
    top = max(most, MOST).bit_length() - 1
    return [1 << power for power in range(LEAST.bit_length() - 1, top + 1)]


def crossovers(rows: Sequence[Prediction]) -> list[Crossover]:
    """Return where the quickest algorithm changes with the size, for each number of ranks.

    Between two sizes times are taken to be straight lines, as they are where the same chain of messages rules.
    """
    crossings = []
    for ranks, group in groupby(rows, lambda row: row.ranks):
        by_size = [{row.algorithm: row.seconds for row in same} for _, same in groupby(group, lambda row: row.nbytes)]
        sizes = sorted({row.nbytes for row in rows if row.ranks == ranks})
        for (low, before), (high, after) in pairwise(zip(sizes, by_size, strict=True)):
            first, then = (min(times, key=times.__getitem__) for times in (before, after))
            if first != then:
                gap, end = before[then] - before[first], after[first] - after[then]
                crossings.append(Crossover(ranks, first, then, low + (high - low) * gap / (gap + end)))
    return crossings


def as_object(collective: str, topology: Topology, swept: Sweep,
              crossings: Iterable[Crossover] | None) -> dict[str, Any]:
    """Return what `--json` prints."""
    rows = [row._asdict() | {"seconds": row.seconds} for row in swept.rows]
    result = {"collective": collective, "topology": topology.name, "predictions": rows,
              "left_out": [left._asdict() for left in swept.left_out]}
    return result if crossings is None else result | {"crossovers": [one._asdict() for one in crossings]}


HEADER = (f"{'ranks':>7} {'bytes':>12}  {'algorithm':24} {'segments':>8} {'time us':>13} {'latency':>8} "
          f"{'bandwidth':>9} {'reduction':>9} {'busbw GB/s':>10}")


def as_text(collective: str, topology: Topology, swept: Sweep, crossings: Iterable[Crossover] | None) -> Iterator[str]:
    """Yield the lines of the table, the quickest algorithm first for every number of ranks and size."""
    yield f"{collective} on {topology.name}: {topology.about or 'a topology of your own'}"
    yield HEADER
    for _, group in groupby(swept.rows, lambda row: (row.ranks, row.nbytes)):
        yield from map(_line, group)
    for left in swept.left_out:
        yield f"left out: {left.algorithm} for {left.ranks} ranks: {left.reason}"
    for one in crossings or ():
        yield f"{one.ranks} ranks: {one.first} up to {one.nbytes:.0f} bytes, then {one.then}"


def _line(row: Prediction) -> str:
    shares = [f"{100 * part / row.seconds if row.seconds else 0:.0f} %"
              for part in (row.latency, row.bandwidth, row.reduction)]
    return (f"{row.ranks:7} {row.nbytes:12}  {row.algorithm:24} {row.segments:8} {1e6 * row.seconds:13.2f} "
            f"{shares[0]:>8} {shares[1]:>9} {shares[2]:>9} {_busbw(row):10.2f}")


def _busbw(row: Prediction) -> float:
    """Return nccl-tests' bus bandwidth in GB/s."""
    factor = evaluate(COLLECTIVES[row.collective].busbw, P=row.ranks)
    return factor * row.nbytes / row.seconds / 1e9 if row.seconds else 0.0


def byte_sizes(text: str) -> list[int]:
    """Return the bytes of a list of sizes; ArgumentError for anything else.

    >>> byte_sizes("8,64K,1.5M")
    [8, 65536, 1572864]
    """
    return sorted(set(map(byte_size, text.split(","))))


class Request(NamedTuple):
    """What was asked for, understood; `segments` is the pipelining of an algorithm for bytes and ranks."""

    collective: str
    names: list[str]
    ranks: list[int]
    sizes: list[int]
    topology: Topology
    segments: Segments
    root: int

    def sweep(self, **changed: Any) -> Sweep:
        """Return the predictions, some of the request changed."""
        return sweep(*self._replace(**changed))


def answer(options: Any, segments: Segments) -> str:
    """Predict what was asked for, draw it where that was asked for, and return what is to be printed.

    `segments` is the pipelining that a call would use, unless the options say another. Raises ArgumentError.
    """
    given = options.segments
    request = Request(options.collective, names_of(options.algorithm) if options.algorithm else [], options.ranks,
                      byte_sizes(options.size), load(options.topology),
                      segments if given is None else lambda name, nbytes, size: given, options.root)
    if options.plot and not options.plot.endswith(".svg"):
        raise ArgumentError(f"--plot: {options.plot} does not end in .svg", code="GC-PLOT")
    swept = request.sweep()
    crossings = _draw(request, swept, options.plot) if options.plot else None
    if options.json:
        return json.dumps(as_object(request.collective, request.topology, swept, crossings))
    return "\n".join(as_text(request.collective, request.topology, swept, crossings))


def _draw(request: Request, swept: Sweep, path: str) -> list[Crossover]:
    """Write the picture, for the largest size and the first number of ranks; return that one's crossovers."""
    from gpucoll.analysis.simulate.plot import svg

    largest = max(request.sizes)
    by_size = request.sweep(ranks=request.ranks[:1], sizes=grid(largest)).rows
    crossings = crossovers(by_size)
    picture = svg(f"{request.collective} on {request.topology.name}, predicted",
                  [row for row in swept.rows if row.nbytes == largest], by_size, crossings)
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"--plot: cannot write {path}: {error.strerror}", code="GC-FILE") from None
    return crossings
