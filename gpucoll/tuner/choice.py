"""The choice of executor and algorithm for a call, by predicted times, among those allowed by GPUCOLL_ALGO.

Times are predicted from the curves of a table, or from the simulator with the table's link constants. The rules of
GPUCOLL_ALGO are in NCCL_ALGO's grammar.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from gpucoll.algorithms import (
    MOST_SEGMENTS,
    algorithms,
    find,
    is_native,
    library_names,
    names_of,
    own_names,
    schedule,
    segments,
)
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.ops import Order
from gpucoll.core.schedule import Copy, Reduce, Send
from gpucoll.core.topology import node_shape
from gpucoll.device.gpus import ClaimedGpu
from gpucoll.errors import ArgumentError, nearest
from gpucoll.simulator import Level, Topology, simulate
from gpucoll.tuner.table import Curve, LinkCost, Shape, Table, built_in, of_kind

ANY_COLLECTIVE = ""  # the key of the rule for collectives without a rule of their own
NCCL_ONLY = ("collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")  # accepted in rules, but not available here


class Rule(NamedTuple):
    """A rule of GPUCOLL_ALGO for a collective: only these names or, if `excluded`, all but these names."""

    names: tuple[str, ...]
    excluded: bool


def allowed(text: str, collective: str, there: Sequence[str]) -> Sequence[str]:
    """Return the names of `there` allowed by the rules of `text`; names in an inclusion keep their parameters.

    A rule for all collectives is ignored if no name remains. Raises ArgumentError if a rule for this collective leaves
    no name.

    >>> allowed("^ring;broadcast:tree", "all_reduce", ["ring", "tree"])
    ['tree']
    """
    known = rules(text)
    rule = known.get(collective, known.get(ANY_COLLECTIVE))
    if rule is None:
        return there
    names = [_of_nccl(collective, name) for name in rule.names]
    left = [name for name in there if name not in names] if rule.excluded else \
        [name for name in names if base(name) in (*there, *own_names(collective))]
    if not left and collective in known:
        raise ArgumentError(f"GPUCOLL_ALGO excludes all algorithms of {collective}: {', '.join(there)}", code="GC-ALGO")
    return left or there


def _of_nccl(collective: str, name: str) -> str:
    """Return the algorithm with this name in NCCL, as the chain of a broadcast for `ring`; else the name itself.

    >>> _of_nccl("broadcast", "ring"), _of_nccl("all_reduce", "ring")
    ('chain', 'ring')
    """
    there = algorithms(collective)
    return name if name in there else next((one for one in there if find(collective, one).traits.in_nccl == name), name)


@functools.lru_cache(maxsize=16)
def rules(text: str) -> dict[str, Rule]:
    """Return the rules of GPUCOLL_ALGO by collective; raise ArgumentError for unknown names.

    >>> rules("AllReduce:tree,ring;^star")
    {'all_reduce': Rule(names=('tree', 'ring'), excluded=False), '': Rule(names=('star',), excluded=True)}
    """
    parts = (part.rpartition(":") for part in text.replace(" ", "").lower().split(";") if part)
    return {_collective(head) if colon else ANY_COLLECTIVE: _rule(names) for head, colon, names in parts}


def _rule(text: str) -> Rule:
    names = tuple(names_of(text.removeprefix("^")))
    known = {name for collective in COLLECTIVES for name in algorithms(collective)} | {"native", *NCCL_ONLY}
    for name in names:
        if base(name) not in known:
            raise ArgumentError(f"GPUCOLL_ALGO: no algorithm is named {name!r}{nearest(name, sorted(known))}",
                                code="GC-ALGO")
    return Rule(names, text.startswith("^"))


def base(name: str) -> str:
    """Return the name of an algorithm without its parameters.

    >>> base("torus(4x2)")
    'torus'
    """
    return name.partition("(")[0]


def _collective(text: str) -> str:
    """Return the collective named in NCCL's spelling (allreduce, reducescatter) or in gpucoll's."""
    for name in COLLECTIVES:
        if text in (name, name.replace("_", "")):
            return name
    raise ArgumentError(f"GPUCOLL_ALGO: no collective is named {text!r}{nearest(text, COLLECTIVES)}", code="GC-ALGO")


NATIVE = "native"


class Choice(NamedTuple):
    """The executor, the algorithm and the number of segments of a call."""

    executor: str
    algorithm: str
    segments: int


def scheduled(collective: str, size: int, nodes: int) -> list[str]:
    """Return the algorithms considered by `auto` for `size` ranks on `nodes` nodes; user-defined algorithms are not.

    Algorithms depending on the ranks' nodes are left out on a single node: there another algorithm costs as much.

    >>> scheduled("reduce_scatter", 4, 1)
    ['circulant', 'direct', 'recursive_halving', 'ring']
    """
    return [name for name in library_names(collective, size)
            if nodes > 1 or "nodes" not in find(collective, name).options]


class Tuner:
    """The choices for one communicator. All ranks have the same table, and so make the same choices.

    `nodes` is the node of every rank, `prefer` the text of GPUCOLL_ALGO. A choice is cached for all sizes with the same
    number of binary digits, and found again in well under 2 us. A call may demand an `order` of combination: then only
    algorithms with this order are taken, and the result depends on nothing but the inputs.
    """

    def __init__(self, nodes: Sequence[int], table: Table, prefer: str = "") -> None:
        self._nodes, self._prefer = tuple(nodes), prefer
        self._use(table)

    def _use(self, table: Table) -> None:
        self.table: Table = table
        self._kept: dict[tuple[str, str, int, tuple[str, ...], str, Order], tuple[str, str]] = {}
        # The model for arrays on a device, made at the first call on this device
        self.model: Callable[[str], Model] = functools.cache(
            lambda device: Model(self.table, World(self._nodes, device)))

    def follow(self, gpus: Sequence[ClaimedGpu]) -> None:
        """Choose by committed measurements on machines with these GPUs, one for each rank, unless this one has its own.
        """
        if not self.measured("cuda"):
            self._use(self.table._replace(shapes=(*of_kind(gpus), *self.table.shapes)))

    def choose(self, collective: str, algorithm: str, nbytes: int, executors: tuple[str, ...],
               device: str = "cpu", order: Order = "any") -> Choice:
        """Return the choice for a call, among the `executors` able to serve the call.

        `nbytes` is the larger of input and output. A named `algorithm` is kept; "auto" takes the best algorithm allowed
        by GPUCOLL_ALGO. Raises ArgumentError if no algorithm is left, or if `order` excludes the named one.
        """
        key = (collective, algorithm, nbytes.bit_length(), executors, device, order)
        kept = self._kept.get(key)
        if kept is None:
            if algorithm != "auto":
                self._check_order(collective, [algorithm], order)
            kept = self._kept[key] = self._choose(collective, algorithm, nbytes, executors, device, order)
        executor, name = kept
        if executor in PRICED:
            return Choice(executor, name, self.model(device).segments(collective, name, nbytes, executor))
        return Choice(executor, name, segments(collective, name, nbytes, len(self._nodes)))

    def candidates(self, collective: str, nbytes: int, executors: Sequence[str], device: str = "cpu",
                   algorithm: str = "auto", order: Order = "any") -> list[Candidate]:
        """Return the candidates for sizes with as many binary digits as `nbytes`, the choice first."""
        names: Iterable[str] = [algorithm]
        if algorithm == "auto":
            names = self._names(collective, executors, order)
        # The largest power of two up to `nbytes` (0 for 0), as choices are cached by the number of digits
        return self.model(device).candidates(collective, 1 << nbytes.bit_length() >> 1, executors, [*names])

    def source(self, device: str) -> str:
        """Return in words the table, and the shape used for choices on `device`."""
        shape = self.model(device).shape
        return (f"{self.table.source}: {shape.ranks} ranks on {shape.nodes} node{'s' * (shape.nodes > 1)}, "
                f"{f'measured {shape.measured}' if shape.measured else 'estimated'}")

    def measured(self, device: str) -> set[str]:
        """Return the executors that a table other than the built-in one has measured."""
        shapes = [shape for shape in self.table.shapes if shape.device == device and shape.measured]
        return {link.executor for shape in shapes for link in shape.links} | {
            curve.executor for shape in shapes for curve in shape.curves}

    def untried(self, device: str) -> str:
        """Return, as a sentence, what `gpucoll tune` would try on GPUs where nothing is measured; "" elsewhere."""
        if device != "cuda" or len(self._nodes) == 1 or "nccl" in self.measured(device):
            return ""
        return (f"nothing is measured on these GPUs, so auto takes native where it can: mpiexec -n {len(self._nodes)} "
                "gpucoll tune --device cuda would try gpucoll's algorithms on peer and nccl")

    def _choose(self, collective: str, algorithm: str, nbytes: int, executors: tuple[str, ...],
                device: str, order: Order) -> tuple[str, str]:
        able = [NATIVE] if is_native(algorithm) else \
            [name for name in executors if algorithm == "auto" or name != NATIVE]
        if len(able) == 1 and algorithm != "auto":
            return able[0], algorithm
        candidates = self.candidates(collective, nbytes, able, device, algorithm, order)
        if candidates:
            return candidates[0].executor, candidates[0].algorithm
        if algorithm == "auto":  # without any prediction: the first algorithm of the first executor
            names = self._names(collective, able, order)
            algorithm = next(name for name in names if is_native(name) == (able[0] == NATIVE))
        return able[0], algorithm

    def _names(self, collective: str, executors: Sequence[str], order: Order) -> Sequence[str]:
        """Return the names that "auto" may take; raise ArgumentError if none is left."""
        schedules = scheduled(collective, len(self._nodes), len(set(self._nodes)))
        names = [NATIVE] * (NATIVE in executors) + (schedules if set(executors) - {NATIVE} else [])
        if not names:
            raise ArgumentError(f"{collective}: no executor can run this call", code="GC-ALGO")
        # A rule of GPUCOLL_ALGO for this collective is kept or refused; a rule for all collectives may be ignored.
        ordered = names if collective in rules(self._prefer) else self._check_order(collective, names, order)
        return self._check_order(collective, allowed(self._prefer, collective, ordered), order)

    def _check_order(self, collective: str, names: Sequence[str], order: Order) -> list[str]:
        """Return the `names` that combine in `order`; raise ArgumentError if none does."""
        left = [name for name in names if is_ordered(collective, name, order)]
        if not left:
            others = [name for name in algorithms(collective, size=len(self._nodes))
                      if is_ordered(collective, name, order)]
            how = "by a single reduction in rank order" if order == "at once" else "in rank order"
            raise ArgumentError(f"{collective}: {', '.join(names)} does not combine all contributions {how}, as "
                                f"promised by the option deterministic; use auto, or one of {', '.join(others)}",
                                code="GC-DETERMINISTIC")
        return left


def is_ordered(collective: str, name: str, order: Order) -> bool:
    """Return whether an algorithm combines the contributions to an element in `order`, on every executor.

    >>> is_ordered("all_reduce", "ring", "in order"), is_ordered("scan", "linear", "at once")
    (False, False)
    """
    if order == "any" or not COLLECTIVES[collective].reduces:
        return True
    row = None if is_native(name) else find(collective, name)
    return row is not None and (row.at_once if order == "at once" else row.in_rank_order)


# Executors whose number of segments is that of least predicted time. For the engine, which reads the memory of other
# ranks, the measured length of a segment in `Traits.segment` is better.
PRICED = ("nccl", "peer", "mpi", "ucx")
STANDS_FOR = {"nccl": "mpi", "peer": "shared"}  # on the emulated device: the executor with the constants to use
ONE_PASS = "one_pass"  # the table's name for `shared` when every rank reads its operands at the source
IN_MEMORY = ("shared", "peer", ONE_PASS)
# Schedules of more ranks, on several nodes, are not simulated: the cost formulas serve.
SIMULATED = 32
MOST_COUNTED = 1024  # of more ranks the bytes that leave a node are not counted: the count takes seconds


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
    link_load: float = 0.0  # see `Model.load_of`; set for candidates that tie
    origin: str = "estimated"  # of the seconds: "measured" by a curve, "estimated", or "assumed" as the links are


def _nearest(table: Table, world: World, device: str) -> Shape | None:
    """Return the most similar shape of this device: first by one node or several, then by the number of ranks."""
    alike = [shape for shape in table.shapes if shape.device == device]
    nodes = world.node_count
    return min(alike, key=lambda shape: (min(shape.nodes, 2) != min(nodes, 2),
                                         abs(math.log2(shape.ranks / world.size)), shape.nodes != nodes), default=None)


class Model:
    """Predictions for one `world` by a table. The most similar shape in the table serves, exact or not."""

    def __init__(self, table: Table, world: World) -> None:
        self.table: Table = table
        self.world: World = world
        self.topology: Callable[[str], Topology | None] = functools.cache(self._topology)
        device = "cuda" if world.device == "cuda" else "cpu"
        # Links missing in the table's shape are taken from the built-in table.
        self._shapes = [shape for source in (table, built_in())
                        if (shape := _nearest(source, world, device)) is not None]
        self.shape: Shape = self._shapes[0]  # the shape most similar to this world
        self._exact = self.shape[:2] == (world.size, world.node_count)  # whether the shape has these ranks and nodes

    def candidates(self, collective: str, nbytes: int, executors: Sequence[str],
                   names: Sequence[str]) -> list[Candidate]:
        """Return the candidates `names` on `executors`: measured before predicted ones, in the order of `ranked`."""
        priced = [candidate for executor in executors for name in names
                  if is_native(name) == (executor == NATIVE)
                  for candidate in self._candidate(collective, nbytes, executor, name)]
        measured, others = ([one for one in priced if one.measured == kind] for kind in (True, False))
        rows = [row for some in (measured, others) for row in ranked(some, functools.partial(self.load_of, collective))]
        # On GPUs an estimate is no reason to leave NCCL's own collective.
        return sorted(rows, key=lambda row: self.world.device == "cuda" and row.executor != NATIVE and
                      not row.measured and any(self._bases(row.executor)))

    def load_of(self, collective: str, candidate: Candidate) -> float:
        """Return a candidate's load on links, see `link_load`: 0 if native or reading memory at the source."""
        name = candidate.algorithm
        if is_native(name) or (candidate.executor in IN_MEMORY and find(collective, name).traits.at_source):
            return 0
        return link_load(collective, name, self.world.nodes)

    def segments(self, collective: str, name: str, nbytes: int, executor: str) -> int:
        """Return the number of segments: of least time by the cost formulas, or by `Traits.segment`."""
        topology = self.topology(executor) if executor in PRICED and not find(collective, name).own else None
        return segments(collective, name, nbytes, self.world.size) if topology is None else \
            _least(collective, name, nbytes.bit_length(), topology, self.world)

    def _candidate(self, collective: str, nbytes: int, executor: str, name: str) -> list[Candidate]:
        curve = next((one for one in self.shape.curves if one[:3] == (collective, executor, name)), None)
        if executor == NATIVE:
            return [row._replace(algorithm=name) for row in self._native(collective, nbytes, curve)]
        traits = find(collective, name).traits
        if executor == "peer" and traits.kernel in self.shape.excluded:
            return []
        barriers = traits.barriers if executor == "shared" else 0
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
        origin = "measured" if measured else self._origin(ONE_PASS if barriers else executor)
        return [row._replace(executor=executor, seconds=seconds, measured=measured, origin=origin)]

    def _origin(self, executor: str) -> str:
        """Return whether predictions with the links of `executor` are "estimated", or "assumed" as a link is."""
        return "assumed" if any(basis.startswith("assumed") for basis in self._bases(executor)) else "estimated"

    def _bases(self, executor: str) -> list[str]:
        """Return where the links of `executor` come from; "" for a measured link."""
        names = ("node", "network")[:1 + (self.world.node_count > 1)]
        return [link.basis for name in names if (link := self._link(executor, name)) is not None]

    def _native(self, collective: str, nbytes: int, curve: Curve | None) -> list[Candidate]:
        """Return the candidate for the native collective, or none.

        With a curve, return the curve's seconds, scaled if the shape differs from this world. Otherwise assume the best
        of gpucoll's algorithms with the native link constants.
        """
        topology = self.topology("native")
        best = None if topology is None else self._best(collective, nbytes, topology, self.world)
        if curve is None:
            return [] if best is None else [best._replace(executor="native", algorithm="native", segments=1,
                                                          origin=self._origin("native"))]
        seconds = curve.at(nbytes)
        if not self._exact:
            seconds *= self._scale(collective, nbytes)
        # Call the native curve measured only if schedules were measured too: measured candidates rank before predicted
        # candidates, and the native collective must not win for this reason alone.
        swept = self._exact and any(other.collective == collective and other.executor != "native" and nbytes < other.end
                                   for other in self.shape.curves)
        origin = "measured" if self._exact else "estimated"
        return [Candidate("native", "native", 1, seconds, 0.0, 0.0, 0.0, swept, origin=origin)]

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
        if world.size <= MOST_COUNTED:  # the ranks of a node share its link
            cost["path"] = max(cost["path"], nbytes * link_load(collective, name, world.nodes))
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
def link_load(collective: str, name: str, nodes: tuple[int, ...]) -> float:
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


def ranked(candidates: Sequence[Candidate], load: Callable[[Candidate], float]) -> list[Candidate]:
    """Return the candidates by time; of those tied with the quickest, the candidate of the least `load` comes first.

    No model knows the other traffic on the links; an algorithm with few partners is disturbed least.
    """
    rows = sorted(candidates, key=lambda row: row.seconds)
    if not rows:
        return []
    tie = MEASURED_TIE if rows[0].measured else TIE
    equal = sum(row.seconds <= rows[0].seconds * (1 + tie) for row in rows)
    if equal > 1:
        rows[:equal] = [row._replace(link_load=load(row)) for row in rows[:equal]]
        first = min(rows[:equal], key=lambda row: (row.link_load, row.executor == "native"))
        rows.insert(0, rows.pop(rows.index(first)))
    return rows
