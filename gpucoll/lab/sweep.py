"""`gpucoll simulate`: predictions for many algorithms, numbers of ranks and sizes; as rows, text or JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from gpucoll import internal
from gpucoll.errors import ArgumentError
from gpucoll.internal import Prediction, Topology
from gpucoll.lab.graphs.link_graph import LinkGraph, is_graph, load_graph
from gpucoll.lab.graphs.named import is_named
from gpucoll.lab.sizes import byte_size

RANKS = 8  # unless asked for, or given by a graph
AnyLinks: TypeAlias = Topology | LinkGraph
Segments: TypeAlias = Callable[[str, str, int, int], int]  # (collective, algorithm, bytes, ranks) to segments


def load_links(name_or_file: str) -> AnyLinks:
    """Return a graph of links, or a topology of levels, by name or from a TOML file; raise ArgumentError.

    >>> load_links("torus(4x4)").ranks, load_links("two_hosts").name
    (16, 'two_hosts')
    """
    path = Path(name_or_file)
    with contextlib.suppress(OSError):
        if is_named(name_or_file) or (path.suffix == ".toml" and is_graph(path.read_bytes())):
            return load_graph(name_or_file)
    return internal.load(name_or_file)


class LeftOut(NamedTuple):
    """An algorithm without a prediction for a number of ranks, with the reason."""

    algorithm: str
    ranks: int
    reason: str


class Sweep(NamedTuple):
    """Predictions, sorted by ranks, bytes and time; and the algorithms left out."""

    rows: list[Prediction]
    left_out: list[LeftOut]


def sweep(collective: str, names: Sequence[str], ranks: Iterable[int], sizes: Sequence[int], topology: AnyLinks,
          segments: Segments, root: int = 0) -> Sweep:
    """Predict the algorithms in `names`; with no names predict all algorithms, leaving out too large cases.

    `segments` returns the number of segments. Raises ArgumentError if a named algorithm does not fit the request.
    """
    rows: list[Prediction] = []
    left_out: list[LeftOut] = []
    for size in ranks:
        for name in names or internal.algorithms(collective, size=size):
            pieces = {nbytes: segments(collective, name, nbytes, size) for nbytes in sizes}.__getitem__
            try:
                rows += [row for number, group in groupby(sorted(sizes, key=pieces), pieces)  # one schedule each
                         for row in internal.simulate_sizes(collective, name, size, [*group], topology, root=root,
                                                            segments=number)]
            except ArgumentError as error:
                if names or error.code != "GC-SIMULATE":
                    raise ArgumentError(f"{collective}:{name} for {size} ranks: {error.args[0]}",
                                        code=error.code) from None
                left_out.append(LeftOut(name, size, str(error.args[0])))
    rows.sort(key=lambda row: (row.ranks, row.nbytes, row.seconds, row.algorithm))
    return Sweep(rows, left_out)


SWEEP_HEADING = (f"{'ranks':>7} {'bytes':>12}  {'algorithm':24} {'segments':>8} {'time us':>13} {'latency':>8} "
                 f"{'bandwidth':>9} {'reduction':>9} {'busbw GB/s':>10}")


def as_text(collective: str, topology: AnyLinks, swept: Sweep) -> Iterator[str]:
    """Yield the lines of the table, the quickest algorithm first for every number of ranks and size."""
    yield f"{collective} on {topology.name}: {topology.about or 'a topology of your own'}"
    yield SWEEP_HEADING
    yield from map(_line, swept.rows)
    if swept.rows and swept.rows[-1].ranks > internal.MANY:
        yield f"more than {internal.MANY} ranks: by the cost formulas; a lower bound if ranks have unequal steps"
    for left in swept.left_out:
        yield f"left out: {left.algorithm} for {left.ranks} ranks: {left.reason}"


def _line(row: Prediction) -> str:
    """Return a line of the table; the bandwidth is nccl-tests' bus bandwidth in GB/s."""
    shares = [f"{100 * part / row.seconds if row.seconds else 0:.0f} %"
              for part in (row.latency, row.bandwidth, row.reduction)]
    busbw = internal.evaluate(internal.COLLECTIVES[row.collective].busbw, P=row.ranks) * row.nbytes / 1e9
    return (f"{row.ranks:7} {row.nbytes:12}  {row.algorithm:24} {row.segments:8} {1e6 * row.seconds:13.2f} "
            f"{shares[0]:>8} {shares[1]:>9} {shares[2]:>9} {busbw / row.seconds if row.seconds else 0:10.2f}")


def byte_sizes(text: str) -> list[int]:
    """Return the sizes of a comma-separated list in bytes, sorted; raise ArgumentError for other text.

    >>> byte_sizes("8,64K,1.5M")
    [8, 65536, 1572864]
    """
    return sorted(set(map(byte_size, text.split(","))))


def answer(options: Any, segments: Segments) -> str:
    """Predict the cases in `options`, and return the text to print, a table or JSON.

    `segments` returns the number of segments used by a call; ``options.segments`` overrides it. Raises ArgumentError.
    """
    given, topology = options.segments, load_links(options.topology)
    ranks = options.ranks or [topology.ranks if isinstance(topology, LinkGraph) else RANKS]
    swept = sweep(options.collective, internal.names_of(options.algorithm) if options.algorithm else [], ranks,
                  byte_sizes(options.size), topology,
                  segments if given is None else lambda *_: given, options.root)
    if options.json:
        rows = [row._asdict() | {"seconds": row.seconds, "us": 1e6 * row.seconds,
                                 "algbw_GBps": row.nbytes / row.seconds / 1e9 if row.seconds else 0.0}
                for row in swept.rows]
        return json.dumps({"collective": options.collective, "topology": topology.name, "predictions": rows,
                           "left_out": [left._asdict() for left in swept.left_out]})
    return "\n".join(as_text(options.collective, topology, swept))
