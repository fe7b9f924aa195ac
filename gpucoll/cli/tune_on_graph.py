"""`gpucoll tune --topology`: write the table of `auto` from predictions on a graph of links, without measuring.

The candidates are the library's algorithms and, per collective, one packing of spanning trees pipelined for several
sizes. The table keeps a synthesised algorithm only if it is the quickest at some size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections import defaultdict
from typing import Any, NamedTuple

from gpucoll.algorithms import find, library_names, own_names
from gpucoll.analysis.graphs.link_graph import LinkGraph, load_graph
from gpucoll.analysis.graphs.synthesis import SCHEDULES, Synthesis, pipelined, synthesis
from gpucoll.analysis.simulate.sweep import sweep
from gpucoll.analysis.sizes import byte_text
from gpucoll.calibration.commands import collectives_of, make_folder, table_before, write_file, write_table
from gpucoll.cli.synthesize import as_python, identifier
from gpucoll.errors import ArgumentError
from gpucoll.launch.launchers import launched
from gpucoll.msccl.files import registered
from gpucoll.tuner import segments
from gpucoll.tuner.table import ANY, AlgorithmFile, Curve, GraphTable, facts, table_path

SIZES = tuple(1 << power for power in (3, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30))  # bytes, of the predictions
PIPELINED = tuple(1 << power for power in (16, 20, 24, 28))  # sizes in bytes; trees are cut into segments for each size


class Trees(NamedTuple):
    """A collective's trees, and the algorithms made of them: the number of segments by name."""

    made: Synthesis
    names: dict[str, int]


def main(options: Any) -> int:
    """Predict, write the files of algorithms and the table, and print the choice by size; return 0."""
    if launched()[0] > 1:
        raise ArgumentError("tune --topology predicts for all ranks of the graph: start it once, without mpiexec",
                            code="GC-RANKS")
    if options.sweep:
        raise ArgumentError("--sweep measures and --topology predicts: omit one", code="GC-TOPOLOGY")
    started, collectives, graph = time.perf_counter(), collectives_of(options), load_graph(options.topology)
    path = table_path(facts())
    make_folder(path.parent)
    files, curves = list[AlgorithmFile](), list[Curve]()
    for kind in collectives:
        trees = _trees(graph, kind)
        found, best, refused = _predicted(graph, kind, trees)
        curves += found
        kept = {name: count for name, count in trees.names.items() if name in best.values()} if trees else {}
        if trees and kept:
            name = f"{path.stem}-{graph.ranks}-{options.device}-{kind}.py"
            content = as_python(trees.made, graph, kind, kept).encode()
            write_file(path.with_name(name), content)
            files.append(AlgorithmFile(name, kind, tuple(kept), hashlib.sha256(content).hexdigest()))
        sys.stderr.write(f"{kind:16} {_by_size(best) or 'no prediction'}\n")
        for reason, names in refused.items():
            sys.stderr.write(f"{'':16} refused {len(names)}: {', '.join(names)}: {reason}\n")
    made = GraphTable(graph.name, graph.ranks, options.device, time.strftime("%Y-%m-%d"), tuple(files), tuple(curves),
                      graph.digest)
    write_table(path, table_before(path).predicted(made))
    sys.stderr.write(f"{path}: {graph.ranks} ranks of the graph {graph.name}, "
                     f"{time.perf_counter() - started:.1f} s\n")
    if options.json:
        print(json.dumps({"file": str(path), "graph": graph.name, "ranks": graph.ranks,
                          "files": [str(path.with_name(file.name)) for file in files],
                          "curves": [curve._asdict() for curve in curves]}))
    return 0


def _trees(graph: LinkGraph, kind: str) -> Trees | None:
    """Register the synthesised algorithms of a collective; None without any."""
    if kind not in SCHEDULES:
        return None
    try:
        made = synthesis(graph, kind, PIPELINED[0])
    except ArgumentError as error:
        if error.code != "GC-SYNTHESIS":  # a graph without trees
            raise
        sys.stderr.write(f"{kind:16} nothing synthesised: {error.args[0]}\n")
        return None
    counts = sorted({pipelined(graph, made, nbytes).forest.segments for nbytes in PIPELINED})
    base = identifier(graph, kind).lower()  # GPUCOLL_ALGO has small letters
    # The name ends with a digest of the trees: another packing never has the name of this one.
    digest = hashlib.sha256(repr((made.found.trees, made.found.method)).encode()).hexdigest()[:8]
    names = {f"{base}_{count}_{digest}": count for count in counts}
    if not all(name in own_names(kind) for name in names):
        registered(f"{base}.py", as_python(made, graph, kind, names).encode())
    return Trees(made, names)


def _predicted(graph: LinkGraph, kind: str,
               trees: Trees | None) -> tuple[list[Curve], dict[int, str], dict[str, list[str]]]:
    """Return the curves of a collective, the quickest algorithm by size, and the algorithms refused by reason."""
    # A graph has no nodes, so algorithms that depend on nodes are left out.
    names = [name for name in library_names(kind, graph.ranks) if "nodes" not in find(kind, name).options]
    points, refused = defaultdict[str, list[tuple[int, float]]](list), defaultdict[str, list[str]](list)
    sizes = SIZES[:1] if kind == "barrier" else SIZES
    for name in itertools.chain(names, trees.names if trees else ()):
        try:
            rows = sweep(kind, [name], [graph.ranks], sizes, graph, segments).rows
        except ArgumentError as error:
            if error.code != "GC-SIMULATE":  # too many messages for the simulator
                raise
            refused[error.args[0].partition(" ranks: ")[2]].append(name)
            continue
        points[name] += [(row.nbytes, row.seconds) for row in rows]
    best = {nbytes: min(points, key=lambda name: points[name][place][1]) for place, nbytes in enumerate(sizes)
            if points}
    kept = {*best.values(), *names}
    curves = [Curve(kind, ANY, name, *zip(*row, strict=True)) for name, row in points.items() if name in kept]
    return curves, best, refused


def _by_size(best: dict[int, str]) -> str:
    """Return the quickest algorithms in words, each with the size from which it is the quickest."""
    runs = [(name, next(sizes)) for name, sizes in itertools.groupby(best, best.__getitem__)]
    return ", ".join(f"{name} from {byte_text(nbytes)}" if turn else name for turn, (name, nbytes) in enumerate(runs))
