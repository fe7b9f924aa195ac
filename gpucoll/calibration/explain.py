"""`gpucoll explain`: what `auto` would choose, and why; under mpiexec of these ranks, else on a topology."""

from __future__ import annotations

import json
from typing import Any

import gpucoll
from gpucoll.analysis.simulate import DEFAULT, load
from gpucoll.analysis.simulate.sweep import sweep
from gpucoll.analysis.sizes import byte_size
from gpucoll.arguments import launched
from gpucoll.collectives import collective as collective_row
from gpucoll.errors import ArgumentError
from gpucoll.tuner import segments
from gpucoll.tuner.choice import scheduled
from gpucoll.tuner.explanation import Explanation, on_topology

RANKS = 8


def main(options: Any) -> int:
    """Print the explanation; return 0. Under mpiexec rank 0 prints."""
    here = launched()[0] > 1 and options.ranks is None and options.topology is None
    if here:
        with gpucoll.init() as comm:
            explanation = comm.explain(options.collective, byte_size(options.size), options.dtype, options.device)
    else:
        explanation = _elsewhere(options)
    if launched()[1] == 0:
        print(json.dumps(explanation) if options.json else explanation, flush=True)
    return 0


def _elsewhere(options: Any) -> Explanation:
    """Return what the simulator finds best on a topology, by default on one switch of equal links."""
    nbytes, ranks = byte_size(options.size), RANKS if options.ranks is None else options.ranks
    row, topology = collective_row(options.collective), load(options.topology or DEFAULT)
    if ranks < 1:
        raise ArgumentError(f"{ranks} ranks are none", code="GC-RANKS")
    nodes = topology.nodes(ranks)
    names = scheduled(row.name, ranks, 1 if nodes is None else max(nodes) + 1)
    rows = sweep(row.name, [], [ranks], [nbytes], topology, segments).rows
    rows = [one for one in rows if one.algorithm in names]
    if not rows:
        raise ArgumentError(f"nothing can be predicted of {row.name} for {ranks} ranks", code="GC-SIMULATE")
    return on_topology(row.name, nbytes, topology, rows)
