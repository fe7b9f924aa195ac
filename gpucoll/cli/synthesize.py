"""`gpucoll synthesize`: write an algorithm for a graph of links to a file, proved and priced."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpucoll.algorithms import schedules
from gpucoll.analysis.graphs.link_graph import LinkGraph, load_graph
from gpucoll.analysis.graphs.synthesis import Synthesis, synthesis
from gpucoll.analysis.simulate import simulate
from gpucoll.analysis.sizes import byte_size
from gpucoll.core.schedule import Schedule
from gpucoll.errors import ArgumentError
from gpucoll.msccl.files import loaded
from gpucoll.msccl.write import xml

TEMPLATE = '''"""{about}

Made by gpucoll synthesize: {trees} trees, segments: {segments}; at most {best} GB/s of the bound {bound} GB/s.
"""

from gpucoll.algorithms import algorithm
from gpucoll.core.forest import Forest

TREES = (  # root, chunks of a segment, edges from parent to child
{rows}
)
'''
ALGORITHM = '''{forest} = Forest(TREES, {segments}, has_blocks={has_blocks})


@algorithm("{collective}", "{name}", chunks={forest}.chunks,
           unfit=lambda size, nodes: None if size == {ranks} else "the graph has {ranks} ranks")
def {name}(rank, size):
    return {forest}.{method}(rank)
'''


def as_python(made: Synthesis, graph: LinkGraph, kind: str, names: Mapping[str, int]) -> str:
    """Return a Python file that registers the algorithms in `names`: from name to the number of segments."""
    found = made.found
    rows = "\n".join(f"    ({tree.root}, {tree.share}, {tree.edges})," for tree in found.trees)
    head = TEMPLATE.format(
        about=f"{kind} on {graph.name}, {graph.ranks} ranks.", trees=len(found.trees),
        segments=", ".join(map(str, names.values())), best=f"{float(found.algbw):.6g}",
        bound=f"{float(made.limit.algbw):.6g}", rows=rows)
    return head + "\n\n".join(ALGORITHM.format(
        forest="FOREST" if len(names) == 1 else f"FOREST_{segments}", segments=segments, has_blocks=found.has_blocks,
        collective=kind, name=name, ranks=graph.ranks, method=found.method) for name, segments in names.items())


def identifier(graph: LinkGraph, kind: str) -> str:
    """Return the name of a graph's algorithm for a collective, a name of a function in Python."""
    name = re.sub(r"[\W_]+", "_", f"{graph.name}_{kind}", flags=re.ASCII).strip("_")
    return f"graph_{name}" if name[0].isdigit() else name


def main(options: Any) -> int:
    """Synthesise an algorithm, prove it, write its file, and print the prediction as text or JSON."""
    began = time.monotonic()
    graph, nbytes = load_graph(options.graph), byte_size(options.size)
    if options.chunks is not None and options.chunks < 1:
        raise ArgumentError(f"--chunks {options.chunks} is no number from 1 up", code="GC-SYNTHESIS")
    limit = math.inf if options.time_limit is None else options.time_limit
    made = synthesis(graph, options.collective, nbytes, chunks=options.chunks, seconds=limit)
    algorithm = _written(made, graph, options)
    (kind, name), *_ = loaded(algorithm)
    everyone = schedules(kind, name, size=graph.ranks)  # proves, as with every algorithm of a user
    predicted = simulate(kind, name, graph.ranks, nbytes, graph)
    row = {"algorithm": algorithm, "algbw_GBps": nbytes / predicted.seconds / 1e9,
           "bound_GBps": float(made.limit.algbw), "trees_GBps": float(made.found.algbw),
           "rounds": max(sum(map(bool, rounds)) for rounds in everyone), "chunks": made.forest.chunks, "proved": True,
           "seconds": round(time.monotonic() - began, 3)}
    print(json.dumps(row) if options.json else _as_text(row, graph, kind, options.size))
    return 0


def _written(made: Synthesis, graph: LinkGraph, options: Any) -> str:
    """Write the file of the algorithm, and return the name for commands."""
    kind, name = options.collective, identifier(graph, options.collective)
    path = Path(options.output or f"{name}.py")
    if path.suffix not in (".py", ".xml"):
        raise ArgumentError(f"{path} ends neither in .py nor in .xml", code="GC-FILE")
    if path.suffix == ".xml":
        rounds = getattr(made.forest, made.found.method)
        text = xml([Schedule(kind, name, rank, graph.ranks, made.forest.chunks, functools.partial(rounds, rank))
                    for rank in range(graph.ranks)])
    else:
        text = as_python(made, graph, kind, {name: made.forest.segments})
    try:
        path.write_text(text)
    except OSError as error:
        raise ArgumentError(f"cannot write {path}: {error.strerror}", code="GC-FILE") from None
    return str(path) if path.suffix == ".xml" else f"{path}:{name}"


def _as_text(row: dict[str, Any], graph: LinkGraph, kind: str, size: str) -> str:
    return (f"{kind} on {graph.name}, {graph.ranks} ranks: {row['algorithm']}\n"
            f"{row['algbw_GBps']:.2f} GB/s predicted for {size}; trees {row['trees_GBps']:.2f} GB/s, bound "
            f"{row['bound_GBps']:.2f} GB/s\n"
            f"{row['rounds']} rounds, {row['chunks']} chunks, proved, {row['seconds']} s")

