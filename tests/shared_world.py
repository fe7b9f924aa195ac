"""Orders of all ranks carried out together on memory of symbols, in any interleaving; no process, no array.

A chunk holds the contributions that it is made of, in order. A rank that has come to its end overwrites all it has, as
the caller may, so that whoever reads too late is found out.
"""

import random

from gpucoll.algorithms import schedule
from gpucoll.analysis.replay import replay
from gpucoll.collectives import COLLECTIVES
from gpucoll.executors.shared.order import Arranger, Form, Land, Source, Tell, Wait
from gpucoll.schedule import Copy, RecvReduce, Reduce, Send

GONE = ("gone",)


def chunks(part):
    return [(part.buffer, part.first + index) for index in range(part.count)]


def inputs(row, rank, root, count):
    """What a rank's input holds; a block is a rank's where there are blocks."""
    return {("input", chunk): ((rank, chunk),) for chunk in range(count)} if row.input.exists(rank, root) else {}


class Messages:
    """What the schedule itself says: an observer of `replay` that moves the symbols."""

    def __init__(self, memories):
        self.memories = memories
        self.steps, self.old, self.came = {}, {}, {}

    def begin(self, rank, steps):
        self.steps[rank], self.came[rank] = steps, {}
        self.old[rank] = dict(self.memories[rank])

    def meet(self, sender, sent, receiver, received):
        part = self.steps[sender][sent].src
        self.came[receiver][received] = [self.old[sender][chunk] for chunk in chunks(part)]

    def finish(self, rank):
        memory = self.memories[rank]
        for index, step in enumerate(self.steps[rank]):
            if isinstance(step, Send):
                continue
            local = isinstance(step, Copy | Reduce)
            values = [self.old[rank][chunk] for chunk in chunks(step.src)] if local else self.came[rank][index]
            for chunk, value in zip(chunks(step.dst), values, strict=True):
                memory[chunk] = memory[chunk] + value if isinstance(step, Reduce | RecvReduce) else value


class Stuck(Exception):
    """No rank can go on."""


class World:
    """All ranks of one collective on one node; `aliases` are the ranks that work in place."""

    def __init__(self, collective, algorithm, size, *, root=0, segments=1, aliases=(), fused=False, arranger=Arranger):
        self.row, self.size, self.root, self.aliases = COLLECTIVES[collective], size, root, aliases
        self.schedules = [schedule(collective, algorithm, rank=rank, size=size, root=root, segments=segments)
                          for rank in range(size)]
        arrangers = [arranger(rank, self.schedules.__getitem__, [*range(size)], rank in aliases)
                     for rank in range(size)]
        self.orders = [one.fused() if fused else one.order() for one in arrangers]

    def fresh(self):
        chunks = self.schedules[0].chunks
        count = chunks if self.row.input.blocks or not self.row.blocks else chunks // self.size
        return [inputs(self.row, rank, self.root, count) for rank in range(self.size)]

    def expected(self):
        """The outputs by message passing."""
        memories = self.fresh()
        replay(self.schedules, Messages(memories))
        return [outputs(memory) for memory in memories]

    def run(self, choose):
        """The outputs by the orders, `choose(ranks)` being who goes on."""
        self.memories = [{self.named(rank, chunk): value for chunk, value in memory.items()}
                         for rank, memory in enumerate(self.fresh())]
        self.marks = [-1] * self.size
        self.aside = [{} for _ in range(self.size)]
        self.results = [None] * self.size
        programs = [self.program(rank) for rank in range(self.size)]
        waiting = {rank: next(programs[rank]) for rank in range(self.size)}
        while waiting:
            able = [rank for rank, ready in waiting.items() if ready()]
            if not able:
                raise Stuck([(rank, self.marks[rank]) for rank in waiting])
            rank = choose(able)
            waiting[rank] = next(programs[rank], None)
            if waiting[rank] is None:
                del waiting[rank]
        return self.results

    def program(self, rank):
        """Yield, before every instruction of a rank, whether it can be carried out."""
        yield lambda: True
        self.marks[rank] = 0
        order = self.orders[rank]
        for peer in order.sources:
            yield lambda peer=peer: self.marks[peer] >= 0
        ends = [Wait(peer, mark) for readers in order.readers.values() for peer, mark in readers.items()]
        for one in (*order.instructions, *ends):
            yield lambda one=one: not isinstance(one, Wait) or self.marks[one.peer] >= one.mark
            self.carry_out(rank, one)
        self.results[rank] = outputs(self.memories[rank])
        self.memories[rank] = dict.fromkeys(self.memories[rank], GONE)

    def carry_out(self, rank, one):
        memory = self.memories[rank]
        match one:
            case Tell(mark):
                assert mark > self.marks[rank]
                self.marks[rank] = mark
            case Form(dst, operands, aside, copies):
                columns = zip(*(self.values(rank, part) for part in operands), strict=True)
                values = [sum(column[1:], column[0]) for column in columns]
                if aside:
                    self.aside[rank][dst] = values
                else:
                    memory.update(zip(chunks(dst), values, strict=True))
                for copy in copies:
                    self.memories[copy.peer].update(zip(self.parts(copy.peer, copy.part), values, strict=True))
            case Land(dst):
                memory.update(zip(chunks(dst), self.aside[rank].pop(dst), strict=True))

    def values(self, rank, part):
        peer, part = part if isinstance(part, Source) else (rank, part)
        return [self.memories[peer].get(chunk, GONE) for chunk in self.parts(peer, part)]

    def parts(self, rank, part):
        return [self.named(rank, chunk) for chunk in chunks(part)]

    def named(self, rank, chunk):
        return ("output", chunk[1]) if rank in self.aliases and chunk[0] == "input" else chunk


def outputs(memory):
    return {chunk: value for chunk, value in memory.items() if chunk[0] == "output"}


def interleavings(seeds):
    """Ways to choose who goes on: one rank as far as it can, the first or the last one first, and at random."""
    yield min
    yield max
    for seed in range(seeds):
        yield random.Random(seed).choice


def agrees(world, seeds=3):
    """Whether the orders do what the messages do, in all of some interleavings."""
    expected = world.expected()
    for choose in interleavings(seeds):
        for rank, found in enumerate(world.run(choose)):
            wanted = expected[rank] or {}
            if {chunk: found.get(chunk) for chunk in wanted} != wanted:
                return False
    return True
