"""`gpucoll simulate`: from its options to what it prints and draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll.algorithms import names_of
from gpucoll.analysis.simulate import Topology, load
from gpucoll.analysis.simulate.plot import svg
from gpucoll.analysis.simulate.sweep import (
    Crossover,
    Segments,
    Sweep,
    as_object,
    as_text,
    crossovers,
    grid,
    sweep,
)
from gpucoll.analysis.sizes import byte_size
from gpucoll.errors import ArgumentError


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
    found = request.sweep()
    crossings = _draw(request, found, options.plot) if options.plot else None
    if options.json:
        return json.dumps(as_object(request.collective, request.topology, found, crossings))
    return "\n".join(as_text(request.collective, request.topology, found, crossings))


def _draw(request: Request, found: Sweep, path: str) -> list[Crossover]:
    """Write the picture, for the largest size and the first number of ranks; return that one's crossovers."""
    largest = max(request.sizes)
    by_size = request.sweep(ranks=request.ranks[:1], sizes=grid(largest)).rows
    crossings = crossovers(by_size)
    picture = svg(f"{request.collective} on {request.topology.name}, predicted",
                  [row for row in found.rows if row.nbytes == largest], by_size, crossings)
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"--plot: cannot write {path}: {error.strerror}", code="GC-FILE") from None
    return crossings
