"""Predicted times of collectives: from the curves of a table, or from the simulator with the table's link constants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from gpucoll.algorithms import evaluate, find, library_names, schedule
from gpucoll.core.schedule import Copy, Reduce, Send
from gpucoll.core.topology import node_shape
from gpucoll.errors import ArgumentError
from gpucoll.simulator import Level, Topology, simulate
from gpucoll.tuner.table import Curve, LinkCost, Table, built_in

MOST_SEGMENTS = 32


def segments(collective: str, algorithm: str, nbytes: int, size: int) -> int:
    """Return the number of segments of a call on `nbytes`: 1 for an algorithm without pipelining."""
    entry = None if algorithm == "native" else find(collective, algorithm)
    if entry is None or "segments" not in entry.options:
        return 1
    return max(1, min(MOST_SEGMENTS, -(-nbytes // _segment(entry.traits.segment, size))))


@functools.lru_cache(maxsize=1024)
def _segment(formula: str, size: int) -> int:
    """Return the bytes for each segment of a call, by the algorithm's `Traits.segment` formula."""
    return int(evaluate(formula, P=size))


# Executors whose number of segments is that of least predicted time. For the engine, which reads the memory of other
# ranks, the measured length of a segment in `Traits.segment` is better.
PRICED = ("nccl", "peer", "mpi", "ucx")
STANDS_FOR = {"nccl": "mpi", "peer": "shared"}  # on the emulated device: the executor with the constants to use
ONE_PASS = "one_pass"  # the table's name for `shared` when every rank reads its operands at the source
IN_MEMORY = ("shared", "peer", ONE_PASS)
# Schedules of more ranks, on several nodes, are not simulated: the cost formulas serve.
SIMULATED = 32
COUNTED = 1024  # of more ranks the bytes that leave a node are not counted: the count takes seconds


class World(NamedTuple):
    """The ranks of a collective: the node of every rank, and the device of the arrays."""

    nodes: tuple[int, ...]
    device: str = "cpu"

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def node_count(self) -> int:
        """The number of nodes."""
        return max(self.nodes) + 1


class Candidate(NamedTuple):
    """An algorithm on an executor, with the time in seconds and the model's parts of the time."""

    executor: str
    algorithm: str
    segments: int
    seconds: float
    latency: float
    bandwidth: float
    reduction: float
    measured: bool  # whether the seconds are from a curve; the parts stay the model's
    ways: float = 0.0  # see `Model.ways`; set for candidates that tie


class Model:
    """Predictions for one `world` by a table. The most similar shape in the table serves, exact or not."""

    def __init__(self, table: Table, world: World) -> None:
        self.table, self.world = table, world
        self.topology = functools.cache(self._topology)
        device = "cuda" if world.device == "cuda" else "cpu"
        # Links missing in the table's shape are taken from the built-in table.
        self._shapes = [shape for source in (table, built_in())
                        if (shape := source.nearest(world.size, world.node_count, device)) is not None]
        self.shape = self._shapes[0]  # the shape most similar to this world
        self._exact = self.shape[:2] == (world.size, world.node_count)  # whether the shape has these ranks and nodes

    def candidates(self, collective: str, nbytes: int, executors: Sequence[str],
                   names: Sequence[str]) -> list[Candidate]:
        """Return the candidates `names` on `executors`: measured before predicted ones, in the order of `ranked`."""
        priced = [candidate for executor in executors for name in names
                  if (name == "native") == (executor == "native")
                  for candidate in self._candidate(collective, nbytes, executor, name)]
        measured, others = ([one for one in priced if one.measured == kind] for kind in (True, False))
        return [row for some in (measured, others) for row in ranked(some, functools.partial(self.ways, collective))]

    def ways(self, collective: str, candidate: Candidate) -> float:
        """Return a candidate's load on links (the function `ways`): 0 if native or reading memory at the source."""
        name = candidate.algorithm
        if name == "native" or (candidate.executor in IN_MEMORY and find(collective, name).traits.at_source):
            return 0
        return ways(collective, name, self.world.nodes)

    def segments(self, collective: str, name: str, nbytes: int, executor: str) -> int:
        """Return the number of segments: of least time by the cost formulas, or by `Traits.segment`."""
        topology = self.topology(executor) if executor in PRICED and not find(collective, name).own else None
        return segments(collective, name, nbytes, self.world.size) if topology is None else \
            _least(collective, name, nbytes.bit_length(), topology, self.world)

    def _candidate(self, collective: str, nbytes: int, executor: str, name: str) -> list[Candidate]:
        curve = next((one for one in self.shape.curves if one[:3] == (collective, executor, name)), None)
        if executor == "native":
            return self._native(collective, nbytes, curve)
        barriers = find(collective, name).traits.barriers if executor == "shared" else 0
        topology = self.topology(ONE_PASS if barriers else executor)
        if topology is None:
            return []
        try:
            pieces = self.segments(collective, name, nbytes, executor)
            row = _predicted(collective, name, nbytes, topology, self.world, pieces, barriers)
        except ArgumentError:  # too many messages for the simulator
            return []
        measured = curve is not None and self._exact and nbytes < curve.end
        seconds = curve.at(nbytes) if curve is not None and measured else row.seconds
        return [row._replace(executor=executor, seconds=seconds, measured=measured)]

    def _native(self, collective: str, nbytes: int, curve: Curve | None) -> list[Candidate]:
        """Return the candidate for the native collective, or none.

        With a curve, return the curve's seconds, scaled if the shape differs from this world. Otherwise assume the best
        of gpucoll's algorithms with the native link constants.
        """
        topology = self.topology("native")
        best = None if topology is None else self._best(collective, nbytes, topology, self.world)
        if curve is None:
            return [] if best is None else [best._replace(executor="native", algorithm="native", segments=1)]
        seconds = curve.at(nbytes)
        if not self._exact:
            seconds *= self._scale(collective, nbytes)
        # Call the native curve measured only if schedules were measured too: measured candidates rank before predicted
        # candidates, and the native collective must not win for this reason alone.
        swept = self._exact and any(other.collective == collective and other.executor != "native" and nbytes < other.end
                                   for other in self.shape.curves)
        return [Candidate("native", "native", 1, seconds, 0.0, 0.0, 0.0, swept)]

    def _scale(self, collective: str, nbytes: int) -> float:
        """Return the model's ratio of the time for this world to the time for the table's shape."""
        topology = self.topology("mpi")
        if topology is None or self.world.size == 1:
            return 1.0
        measured = World(tuple(rank * self.shape.nodes // self.shape.ranks for rank in range(self.shape.ranks)))
        here, there = (self._best(collective, nbytes, topology, world) for world in (self.world, measured))
        return here.seconds / there.seconds if here and there and there.seconds else 1.0

    def _best(self, collective: str, nbytes: int, topology: Topology, world: World) -> Candidate | None:
        rows = []
        for name in library_names(collective, world.size):
            try:
                pieces = _least(collective, name, nbytes.bit_length(), topology, world)
                rows.append(_predicted(collective, name, nbytes, topology, world, pieces))
            except ArgumentError:
                continue
        return min(rows, key=lambda row: row.seconds, default=None)

    def _topology(self, executor: str) -> Topology | None:
        """Return the links of `executor` for this world; None if the table has no constants."""
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
        if self.world.device == "emulated":  # the emulated device uses MPI's messages and the host's memory
            executor = STANDS_FOR.get(executor, executor)
        if executor == "hybrid":
            executor = "shared" if name == "node" else "mpi"
        if executor == "ucx":  # the library under MPI's messages
            executor = "mpi"
        return next((link for shape in self._shapes for link in shape.links if link[:2] == (executor, name)), None)


@functools.lru_cache(maxsize=4096)
def _least(collective: str, name: str, bits: int, topology: Topology, world: World) -> int:
    """Return the number of segments of least time, for the largest power of two bytes with this bit length."""
    if "segments" not in find(collective, name).options:
        return 1
    return min((1 << power for power in range(MOST_SEGMENTS.bit_length())), key=lambda pieces: _priced(
        collective, name, 1 << bits >> 1, topology, world, pieces).seconds)


def _predicted(collective: str, name: str, nbytes: int, topology: Topology, world: World, pieces: int,
               barriers: int = 0) -> Candidate:
    """Return the prediction for `pieces` segments: by the simulator on few ranks of several nodes, else by formulas."""
    if world.node_count > 1 and world.size <= SIMULATED and not barriers:
        row = simulate(collective, name, world.size, nbytes, topology, segments=pieces)
        return Candidate(topology.name, name, row.segments, row.seconds, *row[5:], False)
    return _priced(collective, name, nbytes, topology, world, pieces, barriers)


def _priced(collective: str, name: str, nbytes: int, topology: Topology, world: World, pieces: int,
            barriers: int = 0) -> Candidate:
    """Return the prediction by the algorithm's cost formulas.

    The formulas are exact on equal links, for algorithms with equal work on all ranks. On several nodes all rounds cost
    what the network costs, except those inside a node of an algorithm that uses the nodes: their cost, the cost for the
    ranks of one node, is the node's. With `barriers` > 0 each rank reads its operands at the source, and the rounds are
    this number of barriers.
    """
    entry = find(collective, name)
    pieces = 1 if barriers else entry.pieces(pieces)
    cost = entry.price(world.size, nbytes, pieces, world.nodes)
    if barriers:
        cost |= {"rounds": barriers, "gaps": barriers * max(0, world.size - 2), "path": 0, "sent": 0}
    costs = []
    if world.node_count > 1:
        if "nodes" in entry.options and not entry.own:
            group, _ = node_shape(world.size, world.nodes)
            inside = entry.price(group, nbytes, 1, (0,) * group)
            costs, cost = [(topology.levels[0], inside)], {key: cost[key] - inside[key] for key in cost}
        if world.size <= COUNTED:  # the ranks of a node share its link
            cost["path"] = max(cost["path"], nbytes * ways(collective, name, world.nodes))
    costs.append((topology.levels[-1], cost))
    times = [_seconds(some, level, topology.name) for level, some in costs]
    latency, bandwidth, reduction = map(sum, zip(*times, strict=True))
    return Candidate(topology.name, name, pieces, sum(map(sum, times)), latency, bandwidth, reduction, False)


def _seconds(cost: Mapping[str, float], level: Level, executor: str) -> tuple[float, float, float]:
    """Return latency, bandwidth and reduction of a cost on the links of one level."""
    return (cost["rounds"] * level.alpha + cost["gaps"] * level.gap, moved(cost, executor) * level.beta,
            cost["reduced"] * level.gamma)


def moved(cost: Mapping[str, float], executor: str) -> float:
    """Return the bytes that cost time: the most bytes sent, received, or on the longest chain of messages."""
    # In memory, only the reader's work takes time.
    return max(cost["path"], cost["received"], 0 if executor in IN_MEMORY else cost["sent"])


@functools.lru_cache(maxsize=1024)
def ways(collective: str, name: str, nodes: tuple[int, ...]) -> float:
    """Return the load of an algorithm on links.

    On a single node: the number of ranks rank 0 sends to plus the number rank 0 receives from. On several nodes: the
    bytes leaving the first node, in multiples of the bytes of the call.
    """
    if len(set(nodes)) > 1:
        return _leaving(collective, name, nodes)
    rounds = schedule(collective, name, rank=0, size=len(nodes), nodes=nodes)
    return len({(isinstance(step, Send), step.peer) for steps in rounds for step in steps
                if not isinstance(step, Copy | Reduce)})


def _leaving(collective: str, name: str, nodes: tuple[int, ...]) -> float:
    """Return the bytes sent by the ranks of the first node to other nodes, in multiples of the bytes of the call."""
    chunks = 0.0
    for rank in (rank for rank, node in enumerate(nodes) if node == nodes[0]):
        rounds = schedule(collective, name, rank=rank, size=len(nodes), nodes=nodes)
        chunks += sum(step.src.count for steps in rounds for step in steps
                      if isinstance(step, Send) and nodes[step.peer] != nodes[0]) / rounds.chunks
    return chunks


TIE = 0.05  # relative difference of predicted times counted as equal: the model is no more accurate
MEASURED_TIE = 0.02  # for measured times


def ranked(candidates: Sequence[Candidate], ways: Callable[[Candidate], float]) -> list[Candidate]:
    """Return the candidates by time; of the candidates tied with the quickest, the one of fewest `ways` comes first.

    No model knows the other traffic on the links; an algorithm with few partners is disturbed least.
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
