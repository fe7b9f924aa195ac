"""`gpucoll synthesize`: write an algorithm for a graph of links to a file, proved and priced."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll.errors import ArgumentError
from gpucoll.internal import Rounds, Schedule, Transfers, loaded, replayed_seconds, schedules, simulate, xml
from gpucoll.lab.document import write
from gpucoll.lab.graphs.link_graph import LinkGraph, load_graph
from gpucoll.lab.graphs.link_order import in_link_order
from gpucoll.lab.graphs.synthesis import Synthesis, synthesis
from gpucoll.lab.sizes import byte_size

FILE_HEAD = '''"""{kind} on {graph}, {ranks} ranks.

Made by gpucoll synthesize: {note}.
"""

import functools

from gpucoll.algorithms import algorithm
from gpucoll.core.{imported}

{rows} = (  # {columns}
{lines}
)
'''
ALGORITHM = '''

@functools.cache
def {made}():
    return {call}


@algorithm("{kind}", "{name}", chunks={chunks},
           unfit=lambda size, nodes: None if size == {ranks} else "the graph has {ranks} ranks")
def {name}(rank, size):
    return {made}().{method}(rank)
'''


def as_python(made: Synthesis, graph: LinkGraph, kind: str, names: Mapping[str, int]) -> str:
    """Return a Python file that registers the algorithms in `names`: from name to the number of segments."""
    found = made.found
    trees = [tree for tree in found.trees if tree.root == 0 or not found.sides]  # the file turns the trees of rank 0
    lines = "\n".join(f"    ({tree.root}, {tree.share}, {tree.edges})," for tree in trees)
    note = (f"{len(found.trees)} trees, segments: {', '.join(map(str, names.values()))}; at most "
            f"{float(found.algbw):.6g} GB/s of the bound {float(made.limit.algbw):.6g} GB/s")
    head = FILE_HEAD.format(kind=kind, graph=graph.name, ranks=graph.ranks, note=note, rows="TREES", lines=lines,
                            imported=f"forest import Forest{', turned' if found.sides else ''}",
                            columns="root, chunks of a segment, edges from parent to child")
    rows = f"turned(TREES, {found.sides})" if found.sides else "TREES"
    return head + "".join(ALGORITHM.format(
        made="forest" if len(names) == 1 else f"forest_{segments}", kind=kind, name=name, ranks=graph.ranks,
        call=f"Forest({rows}, {segments}, has_blocks={found.has_blocks})", method=found.method,
        chunks=made.forest.chunks // made.forest.segments * segments) for name, segments in names.items())


def identifier(graph: LinkGraph, kind: str) -> str:
    """Return the name of a graph's algorithm for a collective, a name of a function in Python."""
    name = re.sub(r"[\W_]+", "_", f"{graph.name}_{kind}", flags=re.ASCII).strip("_")
    return f"graph_{name}" if name[0].isdigit() else name


class Made(NamedTuple):
    """An algorithm before it has a file: rounds, the file in Python, and the predicted seconds."""

    chunks: int
    rounds: Callable[[int], Rounds]
    text: str
    seconds: float


class Maker:
    """The algorithms for a graph, a collective and a size."""

    def __init__(self, graph: LinkGraph, kind: str, nbytes: int, name: str = "") -> None:
        self.graph: LinkGraph = graph
        self.kind: str = kind
        self.nbytes: int = nbytes
        self.name: str = name or identifier(graph, kind)

    def schedules(self, chunks: int, rounds: Callable[[int], Rounds]) -> list[Schedule]:
        """Return the schedules of all ranks."""
        return [Schedule(self.kind, self.name, rank, self.graph.ranks, chunks, functools.partial(rounds, rank))
                for rank in range(self.graph.ranks)]

    def seconds(self, chunks: int, rounds: Callable[[int], Rounds]) -> float:
        """Return the predicted time."""
        return replayed_seconds(self.schedules(chunks, rounds), self.graph.routes(self.graph.ranks), self.nbytes)

    def trees(self, made: Synthesis) -> Made:
        """Return the algorithm of spanning trees."""
        forest, rounds = made.forest, getattr(made.forest, made.found.method)
        text = as_python(made, self.graph, self.kind, {self.name: forest.segments})
        return Made(forest.chunks, rounds, text, self.seconds(forest.chunks, rounds))

    def best_trees(self, found: Synthesis) -> Made:
        """Return the algorithm with the least predicted time: of trees in a pipeline, or in the order of links."""
        made, ordered = self.trees(found), in_link_order(self.graph, self.kind, self.nbytes)
        return made if ordered is None else min(made, self.steps(ordered), key=lambda one: one.seconds)

    def steps(self, made: Transfers) -> Made:
        """Return the algorithm of messages in the order of links."""
        names = {"kind": self.kind, "ranks": self.graph.ranks}
        text = FILE_HEAD.format(
            **names, graph=self.graph.name, note=f"messages in the order of links, {len(made.steps)} rounds",
            imported="transfers import Transfers", rows="STEPS", columns="of each step: piece, sender, receiver",
            lines="\n".join(f"    {tuple(step)}," for step in made.steps)) + ALGORITHM.format(
            **names, name=self.name, made="transfers", method="rounds", chunks=made.chunks,
            call=f'Transfers("{self.kind}", {self.graph.ranks}, {made.per_block}, STEPS, combining={made.combining})')
        return Made(made.chunks, made.rounds, text, self.seconds(made.chunks, made.rounds))

    def written(self, made: Made, output: str | None) -> str:
        """Write the file of the algorithm, and return the name for commands."""
        path = Path(output or f"{self.name}.py")
        if path.suffix not in (".py", ".xml"):
            raise ArgumentError(f"{path} ends neither in .py nor in .xml", code="GC-FILE")
        text = xml(self.schedules(made.chunks, made.rounds)) if path.suffix == ".xml" else made.text
        write(path, text)
        return str(path) if path.suffix == ".xml" else f"{path}:{self.name}"


def main(options: Any) -> int:
    """Synthesise an algorithm, prove it, write its file, and print the prediction as text or JSON."""
    began = time.monotonic()
    graph, nbytes = load_graph(options.graph), byte_size(options.size)
    if not nbytes:
        raise ArgumentError("--size 0: without bytes there is no bandwidth", code="GC-SIZE")
    maker = Maker(graph, options.collective, nbytes)
    limit = math.inf if options.time_limit is None else options.time_limit
    found = synthesis(graph, maker.kind, nbytes, seconds=limit)
    made = maker.best_trees(found)
    algorithm = maker.written(made, options.output)
    (kind, name), *_ = loaded(algorithm)
    everyone = schedules(kind, name, size=graph.ranks)  # proves, as with every algorithm of a user
    predicted = simulate(kind, name, graph.ranks, nbytes, graph)
    row = {"algorithm": algorithm, "algbw_GBps": nbytes / predicted.seconds / 1e9,
           "trees_GBps": float(found.found.algbw), "bound_GBps": float(found.limit.algbw),
           "rounds": max(sum(map(bool, rounds)) for rounds in everyone), "chunks": made.chunks, "proved": True,
           "seconds": round(time.monotonic() - began, 3)}
    print(json.dumps(row) if options.json else f"""\
{maker.kind} on {graph.name}, {graph.ranks} ranks: {algorithm}
{row['algbw_GBps']:.2f} GB/s predicted for {options.size}; trees {row['trees_GBps']:.2f} GB/s, \
bound {row['bound_GBps']:.2f} GB/s
{row['rounds']} rounds, {row['chunks']} chunks, proved, {row['seconds']} s""")
    return 0
