"""Schedules of all ranks run by the step kernel, with results compared with NumPy."""

import functools

import numpy

from gpucoll.algorithms import schedule
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.core.schedule import Copy, Recv, Schedule, Send, Slice
from gpucoll.device import sources
from gpucoll.executors.peer.tables import STEP_BUFFERS, Room, program, tables
from gpucoll.plan import Layout, Layouts, Plan
from oracles import oracle
from peer.world import World, placed, zeros

UNWRITTEN = 0xA5


class Case:
    """A collective of `size` ranks on blocks of `count` elements."""

    def __init__(self, collective, algorithm, size, count, *, name="int32", op="sum", root=0, segments=1,
                 in_place=False):
        self.row, self.algorithm, self.size, self.root = COLLECTIVES[collective], algorithm, size, root
        self.count, self.name, self.op, self.segments, self.in_place = count, name, op, segments, in_place
        self.width = oracle.kind(name).itemsize

    def length(self, side):
        return self.count * (self.size if side.blocks else 1)

    def schedule(self, rank):
        return schedule(self.row.name, self.algorithm, rank=rank, size=self.size, root=self.root,
                        segments=self.segments)

    def plan(self, rank):
        made = self.schedule(rank)
        layout = Layout(self.count, made.chunks // self.size if self.row.blocks else made.chunks)
        layouts = Layouts(layout, layout)
        return Plan(made, layouts, in_place=self.in_place, schedules=self.schedule), layouts

    def programs(self, channels):
        empty = self.row.name == "barrier"
        return [program(*self.plan(rank), channels, self.width, empty=empty) for rank in range(self.size)]

    @functools.cached_property
    def inputs(self):
        """Return the input of every rank, None for no input: random bits, unless sums must be exact."""
        return [self.values(rank) if self.row.input.exists(rank, self.root) else None for rank in range(self.size)]

    def values(self, rank):
        count = self.length(self.row.input)
        if self.row.reduces and self.name != "int32":
            return oracle.values(self.op, self.name, rank, count)
        return numpy.frombuffer(numpy.random.default_rng([rank, count]).bytes(count * self.width),
                                oracle.kind(self.name))

    def output(self, rank):
        """Return the expected output of `rank`, None for no output, by the contract of the collective."""
        if not self.row.output.exists(rank, self.root):
            return None
        op = "sum" if self.op == "avg" else self.op  # the executor divides an average
        return oracle.outcome(self.row.name, self.inputs, rank, self.root, op).reshape(-1)

    def instance(self):
        return sources.reducing("steps", OPS[self.op] if self.row.reduces else None, DTYPES[self.name])


class Swap(Case):
    """No collective: every rank copies two chunks crosswise and exchanges the chunks again and again.

    The last copy of the first round and the next round's read of the same chunk differ in alignment. Threads therefore
    read elements written by other threads; with equal alignment, each thread would read its own elements only.
    """

    def __init__(self, size, count):
        super().__init__("all_gather", "swap", size, count)

    def schedule(self, rank):
        low, high = (Slice("output", first) for first in (0, 1))
        copies = Copy(Slice("input", 0), high), Copy(Slice("input", 1), low)
        swap = Copy(low, high), Copy(high, low)
        return Schedule("all_gather", "swap", rank, self.size, 2 * self.size,
                        lambda: [copies, *[swap] * 4])

    def output(self, rank):
        first = -(-self.count // 2)
        found = unwritten(oracle.kind(self.name), self.count * self.size)
        found[:self.count] = numpy.concatenate([self.inputs[rank][first:], self.inputs[rank][:first]])
        return found


class Turn(Swap):
    """A cycle of two ranks: a rank's first chunk becomes its second, the second becomes the other rank's first."""

    def schedule(self, rank):
        low, high = (Slice("output", first) for first in (0, 1))
        copies = Copy(Slice("input", 0), low), Copy(Slice("input", 1), high)
        turn = Send(high, 1 - rank), Recv(low, 1 - rank), Copy(low, high)
        return Schedule("all_gather", "turn", rank, self.size, 2 * self.size, lambda: [copies, *[turn] * 5])

    def output(self, rank):
        halves = [numpy.split(given, 2) for given in self.inputs]
        for _ in range(5):
            halves = [[halves[1 - one][1], halves[one][0]] for one in range(2)]
        found = unwritten(oracle.kind(self.name), self.count * self.size)
        found[:self.count] = numpy.concatenate(halves[rank])
        return found


class Rank:
    """The buffers of a rank, and the tables of its program `made` for `channels` blocks."""

    def __init__(self, case, rank, made, channels):
        plan, _ = case.plan(rank)
        self.tables, self.region = tables(made.steps), made.region * case.width
        source, dtype = case.inputs[rank], oracle.kind(case.name)
        self.output = unwritten(dtype, case.length(case.row.output))
        self.input = None if source is None else placed(source)
        rows = [self.input, self.output,
                *(unwritten(dtype, count) for count in (plan.workspace["scratch"], made.region * channels))]
        assert len(rows) == len(STEP_BUFFERS)
        self.kept, self.buffers = rows, [0 if row is None else row.ctypes.data for row in rows]

    def launch(self, world, case, rank, channels, threads, nan_bytes=0):
        addresses = {name: table.ctypes.data for name, table in self.tables.items()}
        arguments = world.heaps[rank].steps(self.buffers, self.region, addresses, len(self.tables["rounds"]), threads,
                                              nan_bytes)
        world.launch(rank, case.instance().entry, arguments, channels, threads + 1)


def ranks_of(case, channels):
    return [Rank(case, rank, made, channels) for rank, made in enumerate(case.programs(channels))]


def unwritten(dtype, count):
    row = zeros(count * dtype.itemsize)
    row[:] = UNWRITTEN
    return row.view(dtype)


def run(libraries, *cases, channels=2, depth=2, slot=32, threads=4, **world):
    """Run `cases` back to back on every rank's stream; raise AssertionError for a wrong element."""
    size = cases[0].size
    where = World(Room(size, channels, depth, packets=16, ll128=16, slot=slot, staging=16), libraries, **world)
    ranks = [ranks_of(case, channels) for case in cases]
    for case, own in zip(cases, ranks, strict=True):
        for rank in range(size):
            own[rank].launch(where, case, rank, channels, threads)
    where.run()
    for case, own in zip(cases, ranks, strict=True):
        for rank in range(size):
            expected, found = case.output(rank), own[rank].output
            assert expected is None or oracle.same_bits(found, expected), (case.row.name, case.algorithm, rank)
            if own[rank].input is not None:
                assert own[rank].input.tobytes() == case.inputs[rank].tobytes()
