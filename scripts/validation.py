"""Published figures beside ours, for docs/validation.md: one list of cases, each with a function that computes ours.

A further case is a row of `cases`: the part of the page, a name, the published figure, a function, and the cause of a
difference. A further part is a row of `PARTS`. Cases that take longer than a second run with ``--all``; all other rows
stay as the page has them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy

import teccl
from gpucoll.algorithms import schedules
from gpucoll.core.schedule import Send
from gpucoll.lab.graphs.bounds import bound
from gpucoll.lab.graphs.graph_routes import GraphRoutes
from gpucoll.lab.graphs.link_graph import LinkGraph, graph_of, load_graph
from gpucoll.lab.graphs.synthesis import synthesis, trees_for
from gpucoll.lab.synthesize import Maker
from gpucoll.simulator import simulate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "validation.md"
Figure: TypeAlias = Fraction | float
GIB, MIB = 1 << 30, 1 << 20


class Part(NamedTuple):
    """A section of the page: title, unit of the figures, and the text before the table."""

    title: str
    unit: str
    text: str


class Case(NamedTuple):
    """A published figure: the part of the page, a name, the figure, our computation, the cause of a difference.

    Two causes: of a larger and of a smaller figure of ours.
    """

    part: str
    name: str
    published: Figure
    computed: Callable[[], Figure]
    cause: tuple[str, str] = ("", "")
    is_quick: bool = True


PARTS = {
    "forestcoll": Part("ForestColl: the largest algbw of an all-gather", "GB/s", """
Source: github.com/liangyuRain/ForestColl. Its program printed the figures for its own graphs (A100, MI250) and for our
graphs of TE-CCL's machines. *Bound* is the largest [algbw](guide/time.md#algbw-and-busbw), a fraction printed by
`gpucoll bound`. *Trees* is the bandwidth, without latency, of the trees made by `gpucoll synthesize`."""),
    "tacos": Part("TACOS: an all-gather on tori and meshes", "us", """
Source: the tests of github.com/astra-sim/tacos. TACOS divides the data of each rank into 1, 2 or 3 chunks. Most of its
times are optimal for this number of chunks: the links of the rank with the least bandwidth are always in use. Ours is
the simulated time of the synthesised algorithm, with smaller chunks."""),
    "swing": Part("Swing: congestion on a torus", "", """
Source: arXiv:2401.09356. The figure is the time of all steps, without latency, divided by the time for sending the same
bytes to neighbours: the sum of d(s // D) / 2^(s + 1) over the steps s on a torus of D dimensions, with distances d of
1, 1, 3, 5, 11, ... Ours comes from the peers in the schedules of `swing`, in both directions at once, and from the link
loads in the simulator."""),
    "taccl": Part("TACCL: two NDv2", "us", """
Source: `TACCL_NDv2_2_chassis_*.csv` in github.com/microsoft/TE-CCL. A size is that of the whole result; 1 KB is 1e3
bytes. Ours is the simulated time on TE-CCL's links with all 16 GPUs: of the synthesised all-gather, and of the faster
of `direct` and `pairwise` for an all-to-all."""),
}


def graph(name: str) -> LinkGraph:
    """Return a named graph, or TE-CCL's links of two machines."""
    made = {"TE-CCL's DGX-2 x 2": teccl.dgx2, "TE-CCL's NDv2 x 2": teccl.ndv2}.get(name)
    return made() if made else load_graph(name)


def uneven_mesh(width: int, height: int, across: float, along: float, us: float) -> LinkGraph:
    """Return a mesh of two dimensions with unlike bandwidths in GiB/s."""
    places = [*itertools.product(range(height), range(width))]
    links = [{"from": f"r{row}_{column}", "to": f"r{row + down}_{column + right}", "us": us, "both": True,
              "GBps": round((along if down else across) * GIB / 1e9, 7)}
             for row, column in places for down, right in ((0, 1), (1, 0))
             if row + down < height and column + right < width]
    return graph_of("mesh", {"kind": "graph", "ranks": [f"r{row}_{column}" for row, column in places], "links": links})


def synthesised(links: LinkGraph | str, nbytes: int) -> float:
    """Return the simulated microseconds of a synthesised all-gather on a graph, or on a graph by name."""
    made_for = graph(links) if isinstance(links, str) else links
    maker = Maker(made_for, "all_gather", nbytes)
    return maker.best_trees(synthesis(made_for, "all_gather", nbytes)).seconds * 1e6


def all_to_all(nbytes: int) -> float:
    """Return the simulated microseconds of an all-to-all on two NDv2; `nbytes` are the result of a rank."""
    links = graph("TE-CCL's NDv2 x 2")
    return min(simulate("all_to_all", name, links.ranks, nbytes, links).seconds * 1e6
               for name in ("direct", "pairwise"))


def congestion(side: int, dimensions: int) -> float:
    """Return the loads of links by `swing` in both directions on a torus, for each byte sent to a neighbour."""
    ring = GraphRoutes(load_graph(f"ring({side}, GBps=1, us=0)"), side)
    steps = side.bit_length() - 1
    peers = [[step.peer for rounds in one for step in rounds if isinstance(step, Send)][:steps]
             for one in schedules("all_reduce", "swing", size=side)]
    total = 0.0
    for step in range(steps * dimensions):
        # Of the parts of the array, two cross a dimension in a step: one as it is, one in the mirror.
        there = [(rank, peers[rank][step // dimensions]) for rank in range(side)]
        pairs = numpy.array([*there, *((-src % side, -dst % side) for src, dst in there)])
        _, betas = ring.fares(pairs[:, 0], pairs[:, 1], numpy.ones(len(pairs)))
        total += betas.max() * 1e9 / 2 ** (step + 1)
    return total


def distances(side: int, dimensions: int) -> float:
    """Return the same sum by the paper's formula."""
    return sum(abs(1 - (-2) ** (step // dimensions + 1)) / 3 / 2 ** (step + 1)
               for step in range((side.bit_length() - 1) * dimensions))


def algbw(found: Callable[..., Any], name: str) -> Fraction:
    """Return the bandwidth of an all-gather on a graph: the bound, or that of the trees."""
    return found(graph(name), "all_gather").algbw


def forestcoll() -> Iterator[Case]:
    """Yield the cases of ForestColl: graph, what the program prints, whether the trees take a second at most."""
    shared = "TE-CCL's DGX-2 has 125 GB/s per GPU instead of 150, and only odd GPUs send to the other box"
    rows = [("dgx1", "1200/7", True), ("dgx_a100", "2400/7", True), ("dgx_a100(2)", "1040/3", True),
            ("dgx_a100(4)", "800/3", True), ("mi250", "2400/7", True), ("mi250(2)", "5312/15", False),
            ("TE-CCL's NDv2 x 2", "25", True), ("ndv2(2)", "25", False), ("ndv2(4)", "50/3", False),
            ("TE-CCL's DGX-2 x 2", "4000/31", False), ("dgx2(2)", "4000/31", True)]
    rounded = "the exact bandwidth needs 83 trees per rank; 9 are made"
    for name, printed, is_quick in rows:
        yield Case("forestcoll", f"{name}, bound", Fraction(printed),
                   functools.partial(algbw, bound, name), (shared, ""))
        yield Case("forestcoll", f"{name}, trees", Fraction(printed),
                   functools.partial(algbw, trees_for, name), (shared, rounded), is_quick)


def tacos() -> Iterator[Case]:
    """Yield the cases of TACOS: graph, MiB in all, printed microseconds."""
    def link(speed: float, us: float) -> str:
        return f"GBps={round(speed * GIB / 1e9, 7)}, us={us}"

    slow, fast = link(50, 0.5), link(100, 1)
    causes = ("", "smaller chunks keep the links of the slowest rank in use to the end, and longer rounds save latency")
    rows = [("torus", "3x3x3", slow, 1024, 3706.20), ("torus", "3x4x5", slow, 2048, 6676.67),
            ("torus", "4x2x3", slow, 3072, 11673.67), ("grid", "3x3x3", slow, 1024, 6671.17),
            ("grid", "3x4x5", slow, 2048, 13353.33), ("grid", "4x2x3", slow, 3072, 19178.17),
            ("grid", "5x5", slow, 1024, 9606.0), ("grid", "10x10", fast, 1024, 5049.0),
            ("grid", "7x12", fast, 4096, 19966.27)]
    for kind, sides, links, size, printed in rows:
        yield Case("tacos", f"{kind} {sides}, {size} MiB", printed,
                   functools.partial(synthesised, f"{kind}({sides}, {links})", size * MIB), causes, False)
    uneven = [(5, 5, 50, 75, 0.5, 1024, 8005.0), (8, 5, 80, 35, 1.0, 1024, 8595.43),
              (7, 10, 16, 73, 1.5, 4096, 44612.47)]
    for width, height, across, along, us, size, printed in uneven:
        yield Case("tacos", f"grid {width}x{height} of {across} and {along} GiB/s, {size} MiB", printed,
                   functools.partial(synthesised, uneven_mesh(width, height, across, along, us), size * MIB), causes,
                   False)


def swing() -> Iterator[Case]:
    """Yield the cases of Swing."""
    for side, dimensions in ((8, 2), (64, 2), (8, 3), (16, 3), (8, 4)):
        yield Case("swing", "x".join([str(side)] * dimensions), distances(side, dimensions),
                   functools.partial(congestion, side, dimensions))


def taccl() -> Iterator[Case]:
    """Yield the cases of TACCL: collective, and microseconds by size from 1 KB to 1 GB; a failed run has none."""
    printed = {"all_gather": (10.15875, 11.85, 12.68, 13.08, 25.26, 62.15, 216.5, None, 3133.2, 12494.6, 53766.7),
               "all_to_all": (36.799, 32.115, 35.760, 50.340, 115.720, 359.0, 1324.2, 5164.4, 20532.0, 81964.2,
                              320049.4)}
    causes = {"all_gather": ("a pipeline with many segments pays latency",
                             "trees at the bound of 25 GB/s; few rounds for short arrays"),
              "all_to_all": ("", "all messages start at once, and each has the latency of its route once")}
    sizes = [f"{count} {unit}" for unit in ("KB", "MB") for count in (1, 4, 16, 64, 256)] + ["1 GB"]
    for kind, figures in printed.items():
        for size, figure in zip(sizes, figures, strict=True):
            nbytes = int(size.split()[0]) * {"KB": 10**3, "MB": 10**6, "GB": 10**9}[size.split()[1]]
            if figure is not None:
                computed = functools.partial(synthesised, "TE-CCL's NDv2 x 2", nbytes) if kind == "all_gather" else \
                    functools.partial(all_to_all, nbytes)
                yield Case("taccl", f"{kind}, {size}", figure, computed, causes[kind], False)


def cases() -> list[Case]:
    """Return all cases, in the order of the page."""
    return [*forestcoll(), *tacos(), *swing(), *taccl()]


def number(figure: Figure) -> str:
    """Return a figure in six digits, with its fraction.

    >>> number(Fraction(1200, 7)), number(25.0)
    ('171.429 (1200/7)', '25')
    """
    is_exact = isinstance(figure, Fraction) and figure.denominator > 1
    return f"{float(figure):.6g}" + (f" ({figure})" if is_exact and len(str(figure)) < 12 else "")


def row_of(case: Case) -> str:
    """Return the row of the page, computed now."""
    found = case.computed()
    ratio = float(found / case.published) - 1
    difference = "none" if found == case.published or abs(ratio) < 5e-6 else f"{ratio:+.2%}"
    return f"| {case.name} | {number(case.published)} | {number(found)} | {difference} | " \
           f"{'' if difference == 'none' else case.cause[ratio < 0]} |"


def standing(page: str) -> dict[str, list[str]]:
    """Return the rows of each part in a page."""
    rows: dict[str, list[str]] = {}
    for section in page.split("\n## ")[1:]:
        title, _, content = section.partition("\n")
        rows[title] = [line for line in content.splitlines() if line.startswith("| ")][1:]
    return rows


def main() -> int:
    """Compute the rows asked for, and write the page."""
    parser = argparse.ArgumentParser(prog="scripts/validation", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="also cases that take longer than a second")
    parser.add_argument("-k", metavar="WORD", default="", help="only cases with this in the name or the part")
    chosen = parser.parse_args()
    old, new = standing(PAGE.read_text()), dict[str, list[str]]()
    for case in cases():
        rows = {row.split(" | ")[0]: row for row in old.get(PARTS[case.part].title, ())}
        row = rows.get(f"| {case.name}", f"| {case.name} | {number(case.published)} | | | not yet computed |")
        if (chosen.all or case.is_quick) and chosen.k in f"{case.part} {case.name}":
            row = row_of(case)
            print(row, flush=True)
        new.setdefault(case.part, []).append(row)
    head = PAGE.read_text().partition("\n## ")[0].rstrip()
    PAGE.write_text("\n".join([head, *map(section_of, new, new.values()), ""]))
    return 0


def section_of(part: str, rows: list[str]) -> str:
    """Return a section of the page."""
    title, unit, text = PARTS[part]
    heading = f"| case | published{', ' * bool(unit)}{unit} | ours | difference | cause |"
    return "\n".join([f"\n## {title}", text, "", heading, "|---|---|---|---|---|", *rows])


if __name__ == "__main__":
    sys.exit(main())
