"""What every way to do a collective is expected to take: by the table's curves, or by the simulator on its links."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpucoll.algorithms import algorithms, evaluate, find, own_names, schedule
from gpucoll.analysis.simulate import Level, Topology, simulate
from gpucoll.core.schedule import Copy, Reduce, Send
from gpucoll.errors import ArgumentError
from gpucoll.tuner.table import Curve, LinkCost, Table, built_in

MOST_SEGMENTS = 32


def segments(collective: str, algorithm: str, nbytes: int, size: int) -> int:
    """Return the number of segments of a call on `nbytes`: 1 for an algorithm that is not pipelined."""
    entry = None if algorithm == "native" else find(collective, algorithm)
    if entry is None or "segments" not in entry.options:
        return 1
    return max(1, min(MOST_SEGMENTS, -(-nbytes // _segment(entry.traits.segment, size))))


@functools.lru_cache(maxsize=1024)
def _segment(formula: str, size: int) -> int:
    """Return the bytes of a call for each of its segments, by the formula of an algorithm's row."""
    return int(evaluate(formula, P=size))


STANDS_FOR = {"nccl": "mpi", "peer": "shared"}  # on the emulated device
ONE_PASS = "one_pass"  # the constants of what `shared` does so, in the table
IN_MEMORY = ("shared", "peer", ONE_PASS)
SIMULATED = 32  # ranks on several nodes up to which schedules are simulated; otherwise formulas serve


class World(NamedTuple):
    """Who takes part: the node of every rank, and the device of their arrays."""

    nodes: tuple[int, ...]
    device: str = "cpu"

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def node_count(self) -> int:
        """How many nodes there are."""
        return max(self.nodes) + 1


class Candidate(NamedTuple):
    """A way to do a collective; seconds, and of what they are made up by the model. `measured`: by a curve."""

    executor: str
    algorithm: str
    segments: int
    seconds: float
    latency: float
    bandwidth: float
    reduction: float
    measured: bool
    ways: float = 0.0  # see `Model.ways`; of those that tie


class Model:
    """Predictions for one `world` by a table; what it has of other shapes stands in for what it lacks."""

    def __init__(self, table: Table, world: World) -> None:
        self.table, self.world = table, world
        self.topology = functools.cache(self._topology)
        device = "cuda" if world.device == "cuda" else "cpu"
        self._shapes = [shape for source in (table, built_in())
                        if (shape := source.nearest(world.size, world.node_count, device)) is not None]
        self.shape = self._shapes[0]  # the one most like this world
        self._exact = self.shape[:2] == (world.size, world.node_count)  # whether the table has this very shape

    def candidates(self, collective: str, nbytes: int, executors: Sequence[str],
                   names: Sequence[str]) -> list[Candidate]:
        """Return what `names` take on `executors`, the preferred one first; what cannot be predicted is left out."""
        priced = [candidate for executor in executors for name in names
                  if (name == "native") == (executor == "native")
                  for candidate in self._candidate(collective, nbytes, executor, name)]
        measured = [candidate for candidate in priced if candidate.measured]
        return [row for some in (measured, [one for one in priced if not one.measured])
                for row in ranked(some, functools.partial(self.ways, collective))]

    def ways(self, collective: str, candidate: Candidate) -> float:
        """Return how busy a candidate is on links: 0 for a native one, and for reads of memory at the source."""
        name = candidate.algorithm
        if name == "native" or (candidate.executor in IN_MEMORY and find(collective, name).traits.at_source):
            return 0
        return ways(collective, name, self.world.nodes)

    def _candidate(self, collective: str, nbytes: int, executor: str, name: str) -> list[Candidate]:
        curve = next((one for one in self.shape.curves if one[:3] == (collective, executor, name)), None)
        if executor == "native":
            return self._native(collective, nbytes, curve)
        barriers = find(collective, name).traits.barriers if executor == "shared" else 0
        topology = self.topology(ONE_PASS if barriers else executor)
        if topology is None:
            return []
        try:
            row = _predicted(collective, name, nbytes, topology, self.world, barriers)
        except ArgumentError:  # more than can be simulated
            return []
        measured = curve is not None and self._exact and nbytes < curve.end
        seconds = curve.at(nbytes) if curve is not None and measured else row.seconds
        return [row._replace(executor=executor, seconds=seconds, measured=measured)]

    def _native(self, collective: str, nbytes: int, curve: Curve | None) -> list[Candidate]:
        """A native collective is taken for the best of our algorithms, at its own constants or as its curve says."""
        topology = self.topology("native")
        best = None if topology is None else self._best(collective, nbytes, topology, self.world)
        if curve is None:
            return [] if best is None else [best._replace(executor="native", algorithm="native", segments=1)]
        seconds = curve.at(nbytes)
        if not self._exact:
            seconds *= self._scale(collective, nbytes)
        # Whether schedules were measured too, so that curves are compared with curves.
        swept = self._exact and any(other.collective == collective and other.executor != "native" and nbytes < other.end
                                   for other in self.shape.curves)
        return [Candidate("native", "native", 1, seconds, 0.0, 0.0, 0.0, swept)]

    def _scale(self, collective: str, nbytes: int) -> float:
        """Return how many times longer it takes here than in the table's shape, by the model."""
        topology = self.topology("mpi")
        if topology is None or self.world.size == 1:
            return 1.0
        measured = World(tuple(rank * self.shape.nodes // self.shape.ranks for rank in range(self.shape.ranks)))
        here, there = (self._best(collective, nbytes, topology, world) for world in (self.world, measured))
        return here.seconds / there.seconds if here and there and there.seconds else 1.0

    def _best(self, collective: str, nbytes: int, topology: Topology, world: World) -> Candidate | None:
        rows = []
        for name in (one for one in algorithms(collective, size=world.size) if one not in own_names(collective)):
            try:
                rows.append(_predicted(collective, name, nbytes, topology, world))
            except ArgumentError:
                continue
        return min(rows, key=lambda row: row.seconds, default=None)

    def _topology(self, executor: str) -> Topology | None:
        """Return the links of `executor` here, None where the table does not know it."""
        node, network = (self._link(executor, name) for name in ("node", "network"))
        world, levels = self.world, []
        per_node = max(world.nodes.count(node) for node in range(world.node_count))
        if per_node > 1 or world.node_count == 1:
            levels.append((node, per_node if world.node_count > 1 else None))
        if world.node_count > 1:
            levels.append((network, None))
        if any(link is None for link, _ in levels):
            return None
        return Topology(executor, tuple(Level(link.name, link.alpha, link.beta, link.gamma, gap=link.gap, ranks=ranks)
                                        for link, ranks in levels if link is not None))

    def _link(self, executor: str, name: str) -> LinkCost | None:
        if self.world.device == "emulated":  # whose messages are MPI's, and whose memory is the host's
            executor = STANDS_FOR.get(executor, executor)
        if executor == "hybrid":
            executor = "shared" if name == "node" else "mpi"
        return next((link for shape in self._shapes for link in shape.links if link[:2] == (executor, name)), None)


def _predicted(collective: str, name: str, nbytes: int, topology: Topology, world: World,
               barriers: int = 0) -> Candidate:
    """Return the prediction: on equal links by the registry's formulas, which are exact where ranks are alike.

    With `barriers` the ranks meet so often, and each reads its operands at the source.
    """
    pieces, level = segments(collective, name, nbytes, world.size), topology.levels[-1]
    if world.node_count > 1 and world.size <= SIMULATED and not barriers:
        row = simulate(collective, name, world.size, nbytes, topology, segments=pieces)
        return Candidate(topology.name, name, row.segments, row.seconds, *row[5:], False)
    entry = find(collective, name)
    pieces = 1 if barriers else entry.pieces(pieces)
    cost = entry.price(world.size, nbytes, pieces, world.nodes)
    rounds, beside, taken = cost["rounds"], cost["beside"], moved(cost, topology.name)
    if barriers:
        rounds, beside, taken = barriers, barriers * max(0, world.size - 2), cost["received"]
    parts = rounds * level.alpha + beside * level.gap, taken * level.beta, cost["reduced"] * level.gamma
    return Candidate(topology.name, name, pieces, sum(parts), *parts, False)


def moved(cost: Mapping[str, float], executor: str) -> float:
    """Return the bytes that take time: on links those that a rank sends, or receives; in memory those that it reads."""
    return max(cost["path"], cost["received"], 0 if executor in IN_MEMORY else cost["sent"])


@functools.lru_cache(maxsize=1024)
def ways(collective: str, name: str, nodes: tuple[int, ...]) -> float:
    """Return to how many ranks rank 0 sends plus from how many it receives; on several nodes how many times all data
    leave the first one.
    """
    if len(set(nodes)) > 1:
        return _leaving(collective, name, nodes)
    rounds = schedule(collective, name, rank=0, size=len(nodes), nodes=nodes)
    return len({(isinstance(step, Send), step.peer) for steps in rounds for step in steps
                if not isinstance(step, Copy | Reduce)})


def _leaving(collective: str, name: str, nodes: tuple[int, ...]) -> float:
    """Return the bytes that the ranks of the first node send to others, as a share of those of the call."""
    chunks = 0.0
    for rank in (rank for rank, node in enumerate(nodes) if node == nodes[0]):
        rounds = schedule(collective, name, rank=rank, size=len(nodes), nodes=nodes)
        chunks += sum(step.src.count for steps in rounds for step in steps
                      if isinstance(step, Send) and nodes[step.peer] != nodes[0]) / rounds.chunks
    return chunks


TIE = 0.05  # of the time: no model promises more
MEASURED_TIE = 0.02


def ranked(candidates: Sequence[Candidate], ways: Callable[[Candidate], float]) -> list[Candidate]:
    """Return the candidates by time; of those within a tie of the quickest, the one with the fewest `ways` first.

    No model sees what else is on the links: who has few partners meets the least of it.
    """
    rows = sorted(candidates, key=lambda row: row.seconds)
    if not rows:
        return []
    tie = MEASURED_TIE if rows[0].measured else TIE
    equal = sum(row.seconds <= rows[0].seconds * (1 + tie) for row in rows)
    if equal > 1:
        rows[:equal] = [row._replace(ways=ways(row)) for row in rows[:equal]]
        first = min(rows[:equal], key=lambda row: (row.ways, row.executor == "native"))
        rows.insert(0, rows.pop(rows.index(first)))
    return rows
