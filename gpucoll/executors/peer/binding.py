"""A task as launches: which kernels, in which grids, on which memory; for a call like one before they are there."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.arrays import address
from gpucoll.chunks import Ragged
from gpucoll.device import Device, Stream
from gpucoll.device.launch import WORD, Arguments
from gpucoll.device.peer import NOWHERE, Places
from gpucoll.device.sources import UNITS, Instance, copy, packets, shots, steps
from gpucoll.executors import Task
from gpucoll.executors.peer.check import check
from gpucoll.executors.peer.meeting import Meeting
from gpucoll.executors.peer.program import Program, everyone, program, tables
from gpucoll.executors.peer.symmetric import SymmetricMemory
from gpucoll.plan import Plan

KEPT = 256  # calls
SHARE = 1 << 15  # bytes of a message that keep a block busy
DIRECT = ("one_shot", "two_shot")
NO_MATTER = Places(1)  # on every rank: of one_shot's results nobody reads another one's

Enqueue: TypeAlias = Callable[[Stream], object]


class Bound(NamedTuple):
    """What is enqueued, one after the other; the plan is kept so that no other one gets its number."""

    plan: Plan
    calls: tuple[Enqueue, ...]


class Walk(NamedTuple):
    """A program, and where its tables are: addresses, and what is there."""

    plan: Plan
    program: Program
    tables: dict[str, int]
    row: Any


class Ends(NamedTuple):
    """Where a task reads and writes, and what is copied before and after: pairs of addresses, or None."""

    source: int
    target: int
    before: tuple[int, int] | None
    after: tuple[int, int] | None


class PeerBinder:
    """Binds tasks to the ranks' slabs, to rooms of this rank's, and to arrays in `symmetric` memory."""

    def __init__(self, device: Device, order: Any, meeting: Meeting, symmetric: SymmetricMemory | None) -> None:
        self._device, self._order, self._meeting, self._symmetric = device, order, meeting, symmetric
        self._loaded: set[Any] = set()
        self._bound: dict[Any, Bound] = {}
        self._walks: dict[Any, Walk] = {}
        self._rooms: dict[str, Any] = {}
        self._outgrown: list[Any] = []

    def load(self, task: Task) -> None:
        """Compile and load what `task` needs."""
        kind = self._is_direct(task) and task.algorithm, task.dtype.name, task.op and task.op.cuda, self._is_small(task)
        if kind not in self._loaded:
            self._meeting.memory.load(self._instance(task))
            for width in UNITS:
                self._device.kernels.ready(copy(width))
            self._loaded.add(kind)

    def bind(self, task: Task) -> Bound:
        """Return the launches of `task`."""
        ends = address(task.input), address(task.output)
        key = id(task.plan), ends, task.dtype.name, task.op and task.op.cuda
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= KEPT:  # kernels, and graphs of the user's, may still be reading the tables
                self._order.hold(task.stream, self._walks)
                self._bound, self._walks = {}, {}
            assert task.plan is not None
            make = self._direct if self._is_direct(task) else self._walk
            bound = self._bound[key] = Bound(task.plan, tuple(make(task, task.plan, *ends)))
        self._order.keep_captured(task.stream, self._walks)
        return bound

    @property
    def tables(self) -> object:
        """What must live as long as the launches that have been bound may run."""
        return self._walks

    def clear(self) -> None:
        """Let go of all memory."""
        for kept in (self._bound, self._walks, self._rooms, self._outgrown):
            kept.clear()

    def _instance(self, task: Task) -> Instance:
        """Return the kernel of `task`."""
        if task.op is None or not self._is_direct(task):
            return steps(task.op, task.dtype)
        if self._is_small(task):
            return packets(task.op, task.dtype)
        return shots("one_shot" if task.algorithm == "one_shot" else "two_shot", task.op, task.dtype)

    def _is_direct(self, task: Task) -> bool:
        return task.collective == "all_reduce" and task.algorithm in DIRECT and self._meeting.room.ranks > 1

    def _is_small(self, task: Task) -> bool:
        return task.algorithm == "one_shot" and task.nbytes <= self._meeting.room.packets

    def _launch(self, task: Task, blocks: int, arguments: Arguments) -> Enqueue:
        launch = self._meeting.memory.load(self._instance(task))
        return functools.partial(launch, blocks, self._meeting.memory.threads, arguments)

    def _blocks(self, nbytes: int) -> int:
        return max(1, min(self._meeting.room.channels, nbytes // SHARE))

    # ---------------------------------------------------------------- direct all-reduces

    def _direct(self, task: Task, plan: Plan, source: int, target: int) -> list[Enqueue]:
        """Return the one launch that there is, of as many blocks on every rank."""
        heap, count = self._meeting.heap, task.output.size
        if not count:
            return []
        if self._is_small(task):
            arguments = heap.packets(source, target, count)
        elif task.algorithm == "two_shot":
            arguments = heap.shots(source, target, count, self._places(source, task), self._places(target, task))
        else:  # which would overwrite in place what others still read
            inputs = NOWHERE if source == target else self._places(source, task)
            arguments = heap.shots(source, target, count, inputs, NO_MATTER)
        return [self._launch(task, self._blocks(task.nbytes), arguments)]

    def _places(self, start: int, task: Task) -> Places:
        """Return where the ranks' inputs or results are, if that is in symmetric memory."""
        return self._symmetric.places(start, task.nbytes) if self._symmetric is not None else NOWHERE

    # ---------------------------------------------------------------- walks through schedules

    def _walk(self, task: Task, plan: Plan, source: int, target: int) -> list[Enqueue]:
        width, channels = task.dtype.itemsize, self._channels(task, plan)
        walk = self._walk_of(task, plan, channels)
        ends = self._ends(task, plan, source, target)
        region, scratch = walk.program.region * width, plan.workspace["scratch"] * width
        rooms = self._room("scratch", scratch, task), self._room("staging", region * channels, task)
        arguments = self._meeting.heap.steps([ends.source, ends.target, *rooms], region, walk.tables,
                                             len(walk.program.steps))
        launches = [self._launch(task, channels, arguments)] if walk.program.steps else []
        return [*self._copies(ends.before, task.input, width), *launches,
                *self._copies(ends.after, task.output, width)]

    def _copies(self, pair: tuple[int, int] | None, row: Any, width: int) -> list[Enqueue]:
        return [] if pair is None else [functools.partial(self._device.kernels.copy, *pair, row.size, width)]

    def _channels(self, task: Task, plan: Plan) -> int:
        """Return how many blocks walk, the same on every rank: where blocks are not alike, none knows of all data."""
        if isinstance(plan.layouts.input, Ragged):
            return self._meeting.room.channels
        return self._blocks(task.nbytes)

    def _ends(self, task: Task, plan: Plan, source: int, target: int) -> Ends:
        """Return where the kernel works: elsewhere if it may not overwrite what it reads, or cannot read it as it lies.

        To copy is to move whole elements, of which complex ones need not be aligned as such.
        """
        misaligned = task.op is None and (source | target) % task.dtype.itemsize != 0
        there = self._room("output", task.output.nbytes, task) if misaligned and target else target
        here = source
        if task.in_place and not plan.copy_input:
            here = there
        elif source and (misaligned or plan.copy_input):
            here = self._room("input", task.input.nbytes, task)
        before = None if here == source else (source, here)
        return Ends(here, there, before, None if there == target else (there, target))

    def _walk_of(self, task: Task, plan: Plan, channels: int) -> Walk:
        """Return the program of `plan` where kernels can read it; raise ScheduleError for one that would stick."""
        key = id(plan), channels, task.dtype.itemsize
        if key not in self._walks:
            room, width, empty = self._meeting.room, task.dtype.itemsize, task.collective == "barrier"
            check(everyone(plan, room.ranks, channels, width, empty=empty), channels, room.depth, room.slot // width)
            made = program(plan, plan.layouts, channels, width, empty=empty)
            self._walks[key] = Walk(plan, made, *self._uploaded(made))
        return self._walks[key]

    def _uploaded(self, made: Program) -> tuple[dict[str, int], Any]:
        rows = {name: table.view(numpy.uint8).reshape(-1) for name, table in tables(made.steps).items()}
        padded = [numpy.pad(row, (0, -row.nbytes % WORD)) for row in rows.values()]
        starts = [0, *itertools.accumulate(row.nbytes for row in padded)]
        there = self._meeting.memory.upload(numpy.concatenate(padded))
        return {name: address(there) + start for name, start in zip(rows, starts, strict=False)}, there

    def _room(self, name: str, nbytes: int, task: Task) -> int:
        """Return the address of so much memory of this rank's. It only grows, and what was given out stays."""
        room = self._rooms.get(name)
        if nbytes and (room is None or room.nbytes < nbytes):
            self._outgrown.append(room)
            room = self._device.empty(1 << max(nbytes - 1, WORD).bit_length(), numpy.dtype("u1"), task.stream)
            self._rooms[name] = room
        return address(room) if nbytes else 0
