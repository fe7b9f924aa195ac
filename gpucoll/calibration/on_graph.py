"""`gpucoll tune --topology`: write the table of `auto` from predictions on a graph of links, without measuring.

The candidates are the library's algorithms and, per collective, one packing of spanning trees pipelined for several
sizes, and the synthesised algorithms of few rounds for short arrays. The table keeps a synthesised algorithm only if
it is the quickest at some size.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gpucoll.algorithms import find, library_names, own_names
from gpucoll.calibration.commands import collectives_of, make_folder, table_before, write_file, write_table
from gpucoll.errors import ArgumentError
from gpucoll.lab.graphs.link_graph import LinkGraph, load_graph
from gpucoll.lab.graphs.link_order import in_link_order
from gpucoll.lab.graphs.synthesis import SCHEDULES, pipelined, synthesis
from gpucoll.lab.sizes import byte_text
from gpucoll.lab.sweep import sweep
from gpucoll.lab.synthesize import Maker, as_python, identifier
from gpucoll.launch.launchers import launched
from gpucoll.msccl.files import registered
from gpucoll.tuner import segments
from gpucoll.tuner.table import ANY, AlgorithmFile, Curve, GraphTable, facts, table_path

SIZES = tuple(1 << power for power in (3, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30))  # bytes, of the predictions
PIPELINED = tuple(1 << power for power in (16, 20, 24, 28))  # sizes in bytes; trees are cut into segments for each size
SHORT = tuple(1 << power for power in (10, 16, 20))  # sizes in bytes, each with an algorithm of few rounds


class Bundle(NamedTuple):
    """Synthesised algorithms of one file: the number of segments by name, and the file's text for some of the names."""

    names: dict[str, int]
    text: Callable[[Mapping[str, int]], str]


def main(options: Any) -> int:
    """Predict, write the files of algorithms and the table, and print the choice by size; return 0."""
    if launched()[0] > 1:
        raise ArgumentError("tune --topology predicts for all ranks of the graph: start it once, without mpiexec",
                            code="GC-SIZE")
    if options.sweep:
        raise ArgumentError("--sweep measures and --topology predicts: omit one", code="GC-TOPOLOGY")
    started, collectives, graph = time.perf_counter(), collectives_of(options), load_graph(options.topology)
    path = table_path(facts())
    make_folder(path.parent)
    files, curves = list[AlgorithmFile](), list[Curve]()
    for kind in collectives:
        bundles = [*_trees(graph, kind), *_short(graph, kind)]
        found, best, refused = _predicted(graph, kind, bundles)
        curves += found
        for number, bundle in enumerate(bundles):
            kept = {name: count for name, count in bundle.names.items() if name in best.values()}
            if kept:
                name = f"{path.stem}-{graph.ranks}-{options.device}-{kind}{f'-{number}' if number else ''}.py"
                content = bundle.text(kept).encode()
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


def _trees(graph: LinkGraph, kind: str) -> Iterator[Bundle]:
    """Yield and register the algorithms of trees of a collective; none if there are no trees."""
    if kind not in SCHEDULES:
        return
    try:
        made = synthesis(graph, kind, PIPELINED[0])
    except ArgumentError as error:
        if error.code != "GC-SYNTHESIS":  # a graph without trees
            raise
        sys.stderr.write(f"{kind:16} nothing synthesised: {error.args[0]}\n")
        return
    counts = sorted({pipelined(graph, made, nbytes).forest.segments for nbytes in PIPELINED})
    base = identifier(graph, kind).lower()  # GPUCOLL_ALGO has small letters
    # The name ends with a digest of the trees: another packing never has the name of this one.
    digest = hashlib.sha256(repr((made.found.trees, made.found.method)).encode()).hexdigest()[:8]
    bundle = Bundle({f"{base}_{count}_{digest}": count for count in counts},
                  lambda names: as_python(made, graph, kind, names))
    _register(kind, bundle)
    yield bundle


def _short(graph: LinkGraph, kind: str) -> Iterator[Bundle]:
    """Yield and register algorithms of few rounds, in the order of links; none on a graph with switches."""
    found = set[str]()
    for nbytes in SHORT:
        made = in_link_order(graph, kind, nbytes)
        if made is None:
            return
        digest = hashlib.sha256(repr((made.per_block, made.steps, made.combining)).encode()).hexdigest()[:8]
        if digest not in found:
            found.add(digest)
            maker = Maker(graph, kind, nbytes, f"{identifier(graph, kind).lower()}_{len(made.steps)}_rounds_{digest}")
            bundle = _alone(maker.name, maker.steps(made).text)
            _register(kind, bundle)
            yield bundle


def _alone(name: str, text: str) -> Bundle:
    return Bundle({name: 1}, lambda _: text)


def _register(kind: str, bundle: Bundle) -> None:
    if not all(name in own_names(kind) for name in bundle.names):
        registered(f"{next(iter(bundle.names))}.py", bundle.text(bundle.names).encode())


def _predicted(graph: LinkGraph, kind: str,
               bundles: list[Bundle]) -> tuple[list[Curve], dict[int, str], dict[str, list[str]]]:
    """Return the curves of a collective, the quickest algorithm by size, and the algorithms refused by reason."""
    # A graph has no nodes, so algorithms that depend on nodes are left out.
    names = [name for name in library_names(kind, graph.ranks) if "nodes" not in find(kind, name).options]
    points, refused = defaultdict[str, list[tuple[int, float]]](list), defaultdict[str, list[str]](list)
    sizes = SIZES[:1] if kind == "barrier" else SIZES
    for name in itertools.chain(names, *(bundle.names for bundle in bundles)):
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
