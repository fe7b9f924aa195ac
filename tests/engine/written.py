"""Plans as written by the package, without MPI, and programs of these plans for driver.cc: calls, arrays, results."""

import struct
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import numpy

from gpucoll.algorithms import find, registry
from gpucoll.arrays import Cut
from gpucoll.call.compile import make_plan
from gpucoll.core import dtypes
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.ops import OPS
from gpucoll.executors import CallRequest
from gpucoll.executors.engine import plans, tables
from gpucoll.executors.engine.between_nodes import WireRoles
from gpucoll.executors.engine.neighbours import head_bytes
from gpucoll.launch.bootstrap import RankTopology
from gpucoll.tuner.choice import Choice
from oracles import oracle

WORKSPACE = 4096  # bytes, so few that moderately long arrays already take all paths of long arrays
LIMITS = {"TINY": WORKSPACE // 8, "SMALL": WORKSPACE, "LEAST_STAGING": WORKSPACE}
VARIANTS = 3  # data sets of a call, more than the two halves of a control segment
PAIRS = [("sum", "int64"), ("sum", "bfloat16"), ("max", "uint8"), ("avg", "float32")]
NAMES = [(collective, name) for collective, name in registry() if name != "hierarchical"]
# After one-way calls a rank knows little of the others: only progress counters (`mark`) tell of pending reads.
ONE_WAY = [(collective, name) for collective, name in NAMES
           if collective in ("broadcast", "reduce", "scatter", "gather", "scan")]


class Engine:
    """An engine of its own, keeping the sizes of the staging buffers and returning the parts of a plan."""

    def __init__(self):
        self.staged = [0, 0, 0]

    def staging(self, buffer, key, start, nbytes):
        self.staged[buffer] = nbytes

    def plan(self, *given):
        return given


class Rank:
    """The node of a rank, as asked by `Plans`; with several `nodes` the engine sends the messages between these."""

    def __init__(self, rank, size, copies, nodes=None):
        nodes = nodes or (0,) * size
        self.rank, self.size, self.copies, self.nodes = rank, size, copies, nodes
        self.all = frozenset(other for other in range(size) if nodes[other] == nodes[rank])
        self.engine = Engine()
        roles = WireRoles.of(rank, nodes, compares=True) if max(nodes) else None
        self.plans = plans.Plans(self, self.engine, roles=roles)

    def reserve(self, buffer, nbytes):
        """Do nothing: the memory is that of this process."""

    def plan(self, request):
        with mock.patch.multiple(plans, **LIMITS):
            return self.plans.plan_for(request)


class Call(NamedTuple):
    """One rank's part of a call: the plan, whether the arrays are symmetric or in place, inputs and results."""

    plan: tuple
    symmetric: bool
    in_place: bool
    given: list
    expected: list


def lengths_of(collective, rank, root, table):
    """Return the block lengths of input and output of a v-variant; `table` has the lengths from each rank to each."""
    counts, is_root = table[0], rank == root
    return {"all_gather_v": ((counts[rank],), counts), "gather_v": ((counts[rank],), counts if is_root else ()),
            "scatter_v": (counts if is_root else (), (counts[rank],)), "reduce_scatter_v": (counts, (counts[rank],)),
            "all_to_all_v": (table[rank], tuple(row[rank] for row in table))}[collective]


def outcome(collective, op, name, root, inputs, rank, table):
    """Return a rank's result by the contract; None without a result, and for a result filled by Python."""
    if collective == "barrier" or (collective == "exscan" and rank == 0):
        return None
    kind = collective.removesuffix("_v")
    if kind == "all_gather" or (kind == "gather" and rank == root):
        return numpy.concatenate(inputs)
    if kind not in ("scatter", "all_to_all", "reduce_scatter"):
        return oracle.outcome(kind, inputs, rank, root, op)
    cuts = [numpy.cumsum(row)[:-1] if kind != collective else len(inputs)
            for row in (table if kind == "all_to_all" else [table[0]] * len(inputs))]
    blocks = [None if one is None else numpy.split(one, cut)[rank] for one, cut in zip(inputs, cuts, strict=True)]
    if kind == "reduce_scatter":
        return oracle.reduced(op, name, blocks)
    return blocks[root] if kind == "scatter" else numpy.concatenate(blocks)


def drawn(random, ranks, names=NAMES):
    """Return a call of a random collective and algorithm, as the parts of all ranks."""
    size = len(ranks)
    collective, algorithm = random.choice(names)
    row, (op, name) = COLLECTIVES[collective], random.choice(PAIRS)
    if op == "avg" and "scan" in collective:
        op = "sum"
    if find(collective, algorithm).unfit(size, None) is not None:
        return drawn(random, ranks, names)
    root, width = random.randrange(size) if row.rooted else 0, oracle.kind(name).itemsize
    most = random.choice((8, WORKSPACE // 10, WORKSPACE // 2, 3 * WORKSPACE)) // width  # elements of the longer side
    count = 0 if collective == "barrier" else random.randint(1, max(1, most // (size if row.blocks else 1)))
    table = [tuple(random.randint(0, count) for _ in range(size)) for _ in range(size)]
    sides = [sides_of(row, rank, size, root, count, table) for rank in range(size)]
    nbytes = max(side or 0 for pair in sides for side in pair) * width
    inputs = [[None if side is None else oracle.values(op, name, rank + variant, side)
               for rank, (side, _) in enumerate(sides)] for variant in range(VARIANTS)]
    choice, calls = Choice("shared", algorithm, random.choice((1, 1, 3))), []
    for rank, (source, target) in zip(ranks, sides, strict=True):
        same = collective == "broadcast" and rank.rank == root
        may = collective in ("all_reduce", "scan", "exscan", "all_to_all")
        in_place, symmetric = same or (may and random.random() < 0.4), random.random() < 0.3
        cut = Cut(0, lengths_of(collective, rank.rank, root, table)) if row.ragged else Cut(count)
        place = RankTopology(rank.rank, size, rank.rank, size, rank.nodes)
        sizes = tuple(None if one is None else one * width for one in (source, target))
        request = CallRequest(collective, algorithm, dtypes.DTYPES[name], OPS[op] if row.reduces else None, root,
                              nbytes, sizes, in_place, cut, symmetric=symmetric)
        request = replace(request, plan=make_plan(request, choice, place))
        results = [outcome(collective, op, name, root, some, rank.rank, table) for some in inputs]
        calls.append(Call(rank.plan(request), symmetric, in_place, [some[rank.rank] for some in inputs], results))
    return calls


def sides_of(row, rank, size, root, count, table):
    """Return the numbers of elements of a rank's input and output, None without such an array."""
    if row.ragged:
        sides = map(sum, lengths_of(row.name, rank, root, table))
    else:
        sides = (count * (size if side.blocks else 1) for side in (row.input, row.output))
    return [length if side.exists(rank, root) else None for side, length in zip((row.input, row.output), sides,
                                                                                strict=True)]


def numbers_of(plan):
    """Yield a plan's numbers for the driver, without Python's part (the first rank's result of an exscan)."""
    _, signature, sizes, kinds, flags, root, peers, readers, starts, steps, _ = plan
    steps = [step for step in steps if step[0] != tables.CALL]
    yield from (signature, *sizes, *kinds, flags, root)
    for some in (peers, readers, starts):
        yield len(some)
        for one in some:
            yield from one if isinstance(one, tuple) else (one,)
    yield len(steps)
    for opcode, peer, mark, to, nbytes, sources, copies in steps:
        yield from (opcode, peer, mark, *(to or (0, 0, 0)), nbytes, len(sources), len(copies))
        for part in (*sources, *copies):
            yield from part


def packed(*numbers):
    return struct.pack(f"{len(numbers)}q", *map(int, numbers))


def array(values):
    """Return an array for the driver: the length, and the bytes padded to whole words."""
    content = b"" if values is None else values.tobytes()
    return packed(len(content)) + content + bytes(-len(content) % 8)


def program(random, size, kinds, turns, *, copies=True, far=False, names=NAMES, alike=True):
    """Return a program: `turns` calls of `kinds` kinds by ranks in threads; `far` as if in processes of their own.

    Unless `alike`, no call has the signature of the call before, so that no call is eager.
    """
    ranks = [Rank(rank, size, copies) for rank in range(size)]
    made = [drawn(random, ranks, names) for _ in range(kinds)]
    if not alike:
        made += [[call._replace(plan=(call.plan[0], call.plan[1] ^ 1, *call.plan[2:])) for call in calls]
                 for calls in made]
    parts = [packed(size, head_bytes(size), WORKSPACE, copies, far, VARIANTS, len(made))]
    parts += [packed(*rank.engine.staged) for rank in ranks]
    for call in (one for calls in made for one in calls):
        parts += [packed(call.symmetric, call.in_place, *numbers_of(call.plan))]
        parts += [array(values) for pair in zip(call.given, call.expected, strict=True) for values in pair]
    # Repeat a kind until calls become eager and slots are used more than once.
    order = [kind for _ in range(turns)
             for kind in [random.randrange(kinds)] * random.choice((1, 2, 5, random.randint(5, 20), 150))]
    if not alike:
        order = [kind + kinds * (turn % 2) for turn, kind in enumerate(order)]
    return b"".join([*parts, packed(turns, *order[:turns])])
