"""Graphs of links: ranks, switches that forward, and directed links with bandwidth and latency, from TOML files."""

from __future__ import annotations

import collections
import functools
import hashlib
import re
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpucoll.errors import ArgumentError
from gpucoll.internal import toml
from gpucoll.lab.graphs.named import graph_table

if TYPE_CHECKING:
    from gpucoll.lab.graphs.graph_routes import GraphRoutes

CODE = "GC-TOPOLOGY"
UNFIT = re.compile(r'["\\\x00-\x1f\x7f]')  # in the name of a graph
MOST_NODES, MOST_LINKS = 4096, 1 << 16
MOST_GBPS, MOST_US = 1e9, 1e9  # bounds of the numbers in a file: sums stay exact and finite


class Edge(NamedTuple):
    """The links from a node to another: the sum of the bandwidths in GB/s (1e9 bytes), the least latency in us."""

    GBps: Fraction
    us: Fraction


class LinkGraph(NamedTuple):
    """A graph of links. Nodes are numbers: ranks first, then switches; `names` has the name of each node.

    A switch forwards, holds no data and does not copy, unless its number is in `multicast`.
    """

    name: str
    names: tuple[str, ...]
    ranks: int
    edges: dict[tuple[int, int], Edge]
    multicast: frozenset[int] = frozenset()
    about: str = ""

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.names)

    @property
    def digest(self) -> str:
        """A text that differs for graphs with unlike links, whatever the names."""
        content = self.size, self.ranks, sorted(self.edges.items()), sorted(self.multicast)
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def routes(self, size: int) -> GraphRoutes:
        """Return the routes between all ranks, for the simulator; raise ArgumentError for another number of ranks."""
        from gpucoll.lab.graphs.graph_routes import GraphRoutes  # which reads graphs

        return GraphRoutes(self, size)

    def reversed(self) -> LinkGraph:
        """Return the graph with every link turned round."""
        return self._replace(edges={(dst, src): edge for (src, dst), edge in self.edges.items()})

    def leaving(self, nodes: Iterable[int]) -> Fraction:
        """Return the bandwidth of all links out of a set of nodes, in GB/s."""
        inside = {*nodes}
        return sum((edge.GBps for (src, dst), edge in self.edges.items() if src in inside and dst not in inside),
                   Fraction(0))

    def after(self) -> dict[int, list[int]]:
        """Return the ends of the links out of each node."""
        after: dict[int, list[int]] = {node: [] for node in range(self.size)}
        for src, dst in self.edges:
            after[src].append(dst)
        return after

    def hops(self, root: int) -> list[int]:
        """Return the least number of messages that carry data from rank `root` to each rank; 0 for the root itself.

        A message goes from a rank to another, through any number of switches. -1: no path.
        """
        after = self.after()
        found, near, messages = [-1] * self.size, [root], 0
        found[root] = 0
        while near:
            reached: list[int] = []
            messages += 1
            waiting = collections.deque(near)
            while waiting:
                for node in after[waiting.popleft()]:
                    if found[node] < 0:
                        found[node] = messages
                        (reached if node < self.ranks else waiting).append(node)
            near = reached
        return found[:self.ranks]


def load_graph(name_or_file: str) -> LinkGraph:
    """Return a graph by name, such as ``dgx_a100`` or ``torus(4x4)``, or from a TOML file; raise ArgumentError."""
    path = Path(name_or_file)
    if path.suffix != ".toml":
        return graph_of(name_or_file, graph_table(name_or_file))
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"cannot read graph {name_or_file}: {error.strerror}", code=CODE) from None
    return parse_graph(path.stem, content)


def is_graph(content: bytes) -> bool:
    """Return whether a TOML file describes a graph of links, not levels of links; False for malformed TOML."""
    try:
        return toml.TomlFile("", CODE).read(content, None).get("kind") == "graph"
    except ArgumentError:
        return False


KEYS = ("kind", "name", "about", "ranks", "switches", "multicast", "links")
GRAPH_CHECKS: dict[str, toml.Check] = {
    **dict.fromkeys(("name", "about"), toml.text), **dict.fromkeys(("ranks", "switches"), toml.list_of(toml.name)),
    "multicast": toml.flag}


def _bandwidth(key: str, value: Any) -> str | None:
    return f"{key} 0 is no bandwidth: leave the link out" if value == 0 else toml.number(key, value, MOST_GBPS)


LINK: dict[str, toml.Check] = {
    "GBps": _bandwidth, "us": functools.partial(toml.number, most=MOST_US), "both": toml.flag}


def parse_graph(stem: str, content: bytes) -> LinkGraph:
    """Return the graph of a TOML file; raise ArgumentError naming the fault and its place.

    >>> link = b'[[links]]\\nfrom = "a"\\nto = "b"\\nGBps = 25\\nus = 1\\nboth = true'
    >>> len(parse_graph("pair", b'kind = "graph"\\nranks = ["a", "b"]\\n' + link).edges)
    2
    """
    return graph_of(stem, toml.TomlFile(f"graph {stem}", CODE).read(content, KEYS))


def graph_of(stem: str, table: dict[str, Any]) -> LinkGraph:
    """Return the graph described by the content of a file; raise ArgumentError."""
    file = toml.TomlFile(f"graph {stem}", CODE)
    if table.get("kind") != "graph":
        raise file.error(f'kind is {table.get("kind")!r}, not "graph"')
    file.check({key: table.get(key) for key in GRAPH_CHECKS}, GRAPH_CHECKS)
    ranks = table.get("ranks", [])
    names = (*ranks, *table.get("switches", ()))
    double = next((name for name, count in collections.Counter(names).items() if count > 1), None)
    if double is not None:
        raise file.error(f"two nodes are named {double!r}")
    if len(ranks) < 2:
        raise file.error("a graph needs two ranks or more")
    if len(names) > MOST_NODES:
        raise file.error(f"{len(names)} nodes are more than {MOST_NODES}")
    edges = _edges(file, table, {name: number for number, name in enumerate(names)})
    copying = frozenset(range(len(ranks), len(names))) if table.get("multicast") else frozenset()
    name = table.get("name") or stem
    if UNFIT.search(name):  # the name stands in the text of files that Python runs
        raise file.error(f"name {name!r} has a quote, a backslash or a control character")
    graph = LinkGraph(name, names, len(ranks), edges, copying, table.get("about", ""))
    _check_paths(file, graph)
    return graph


def _edges(file: toml.TomlFile, table: dict[str, Any], numbers: dict[str, int]) -> dict[tuple[int, int], Edge]:
    known = toml.one_of(*numbers)

    def end(key: str, value: Any) -> str | None:
        fault = known(key, value)
        return fault and fault.replace("unknown ", "no node is named, as in ")

    checks, edges = {"from": end, "to": end, **LINK}, dict[tuple[int, int], Edge]()
    for count, (where, given) in enumerate(file.tables(table, "links"), 1):
        if count > MOST_LINKS:
            raise file.error(f"more than {MOST_LINKS} links")
        link: dict[str, Any] = file.row(dict, {"both": False} | given, checks, where)
        src, dst = numbers[link["from"]], numbers[link["to"]]
        if src == dst:
            raise file.error(f"a link from {link['from']!r} to itself", where)
        made = Edge(_exact(link["GBps"]), _exact(link["us"]))
        for key in ((src, dst), (dst, src))[:1 + link["both"]]:
            before = edges.get(key)
            edges[key] = made if before is None else Edge(before.GBps + made.GBps, min(before.us, made.us))
    return edges


def _exact(value: float) -> Fraction:
    return Fraction(str(value))  # the decimal in the file, not the float next to it


def _check_paths(file: toml.TomlFile, graph: LinkGraph) -> None:
    """Raise ArgumentError unless a path leads from every rank to every rank."""
    for made in (graph, graph.reversed()):
        lost = [rank for rank, hops in enumerate(made.hops(0)) if hops < 0]
        if lost:
            ends = [graph.names[0], graph.names[lost[0]]]
            src, dst = ends if made is graph else reversed(ends)
            raise file.error(f"no path leads from rank {src!r} to rank {dst!r}")
