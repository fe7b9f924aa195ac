"""A task as launches: kernels, grids and memory; launches are kept, and found again by similar calls."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy

from gpucoll.algorithms import find
from gpucoll.arrays import address
from gpucoll.core.chunks import Ragged
from gpucoll.core.ops import EXACT_NAMES
from gpucoll.device import Device, Stream
from gpucoll.device.launch import WORD, Arguments
from gpucoll.device.peer import NOWHERE, Places
from gpucoll.device.sources import UNITS, Instance, instance, reducing
from gpucoll.device.streams import StreamOrder, Workspace
from gpucoll.executors import Task
from gpucoll.executors.peer.handshake import Handshake
from gpucoll.executors.peer.memory import SymmetricMemory
from gpucoll.executors.peer.step_tables import Program, check, everyone, program, tables
from gpucoll.plan import Plan

KEPT = 256  # calls
# Bytes of a message for one block. Small calls are bound by latency, and a GPU has many SMs, so a block gets little.
SHARE = 1 << 13
# Threads of a block for packets, at least: blocks on several SMs issue the packets faster than a single block.
FEWEST_THREADS = 128
STEPS, PACKETS = "steps", "packets"  # kernels for any schedule, and for short messages
ALL, SHARE_OF_ALL = "fold_all", "fold_share"  # kernels: a rank reduces all elements, or its share
# Places equal on every rank, and never used: in kernel `ALL` no rank reads another rank's result.
NO_MATTER = Places(1)

Enqueue: TypeAlias = Callable[[Stream], object]


class PeerBinder:
    """The launches of tasks on the ranks' slabs, on buffers of this rank, and on arrays in `symmetric` memory."""

    def __init__(self, device: Device, order: StreamOrder, handshake: Handshake,
                 symmetric: SymmetricMemory | None) -> None:
        self._device, self._order, self._handshake, self._symmetric = device, order, handshake, symmetric
        self._loaded: set[Any] = set()
        # Launches; then programs with their tables' addresses and memory. The plans are kept, so that ids stay unique.
        self._bound: dict[Any, tuple[Plan, list[Enqueue]]] = {}
        self._walks: dict[Any, tuple[Plan, Program, dict[str, int], Any]] = {}
        self._workspace = Workspace(device)

    def load(self, task: Task) -> None:
        kind = self._kernel(task), task.dtype.name, task.op and task.op.cuda
        if kind not in self._loaded:
            self._device.kernels.load(self._instance(task), task.collective, task.op, task.dtype)
            for width in UNITS:
                self._device.kernels.launcher(instance("copy", width))
            self._loaded.add(kind)

    def bind(self, task: Task) -> list[Enqueue]:
        """Return the functions to be called in order, with the stream, to enqueue `task`."""
        ends = address(task.input), address(task.output)
        key = id(task.plan), ends, task.dtype.name, task.op and task.op.cuda
        bound = self._bound.get(key)
        if bound is None:
            # Kernels on the stream, and graphs captured by the user, may still read the tables: release them later.
            if len(self._bound) >= KEPT:
                self._order.hold(task.stream, self._walks)
                self._bound, self._walks = {}, {}
            assert task.plan is not None
            make = self._walk if self._kernel(task) == STEPS else self._direct
            bound = self._bound[key] = task.plan, make(task, task.plan, *ends)
        self._order.keep_captured(task.stream, self._walks)
        return bound[1]

    @property
    def tables(self) -> object:
        """The tables read by the bound launches; must live as long as the launches may run."""
        return self._walks

    def clear(self) -> None:
        for kept in (self._bound, self._walks, self._workspace):
            kept.clear()

    def _instance(self, task: Task) -> Instance:
        return reducing(self._kernel(task), task.op, task.dtype)

    def _kernel(self, task: Task) -> str:
        """Return the name of the kernel for `task`: the algorithm's own, or the kernel for any schedule."""
        if self._handshake.room.ranks == 1:
            return STEPS
        kernel = find(task.collective, task.algorithm).traits.kernel or STEPS
        # Packets are read once, and combined on arrival: an exact sum may read its operands twice.
        is_exact = task.op is not None and task.op.name in EXACT_NAMES
        return PACKETS if kernel == ALL and task.nbytes <= self._handshake.room.packets and not is_exact else kernel

    def _launch(self, task: Task, blocks: int, threads: int, arguments: Arguments) -> Enqueue:
        launch = self._device.kernels.launcher(self._instance(task))
        return functools.partial(launch, blocks, threads, arguments)

    def _blocks(self, nbytes: int) -> int:
        return max(1, min(self._handshake.room.channels, nbytes // SHARE))

    def _direct(self, task: Task, plan: Plan, source: int, target: int) -> list[Enqueue]:
        """Return the single launch of an algorithm's own kernel; all ranks launch equally many blocks."""
        heap, count, nan_bytes = self._handshake.heap, task.output.size, _nan_bytes(task)
        if not count:
            return []
        kernel = self._kernel(task)
        blocks, threads = self._blocks(task.nbytes), self._device.most_threads
        if kernel == PACKETS:
            arguments = heap.packets(source, target, count, nan_bytes)
            blocks, threads = packet_grid(-(-task.nbytes // WORD), self._handshake.room.channels, threads)
        elif kernel == SHARE_OF_ALL:
            places = self._places(source, task), self._places(target, task)
            arguments = heap.shots(source, target, count, *places, nan_bytes)
        # In place, the result of `ALL` would overwrite an input still read by other ranks: then inputs are staged.
        else:
            inputs = NOWHERE if source == target else self._places(source, task)
            arguments = heap.shots(source, target, count, inputs, NO_MATTER, nan_bytes)
        return [self._launch(task, blocks, threads, arguments)]

    def _places(self, start: int, task: Task) -> Places:
        return self._symmetric.places(start, task.nbytes) if self._symmetric is not None else NOWHERE

    def _walk(self, task: Task, plan: Plan, source: int, target: int) -> list[Enqueue]:
        width, channels = task.dtype.itemsize, self._channels(task, plan)
        made, places = self._program(task, plan, channels)
        here, there = self._ends(task, plan, source, target)
        region, scratch = made.region * width, plan.workspace["scratch"] * width
        buffers = [here, there, self._room("scratch", scratch, task), self._room("staging", region * channels, task)]
        enqueued: list[Enqueue] = []
        if here != source:
            enqueued.append(functools.partial(self._device.kernels.copy, source, here, task.input.size, width))
        if made.steps:
            movers = self._device.most_threads // 2
            arguments = self._handshake.heap.steps(buffers, region, places, len(made.steps), movers, _nan_bytes(task))
            enqueued.append(self._launch(task, channels, movers + self._device.warp, arguments))
        if there != target:
            enqueued.append(functools.partial(self._device.kernels.copy, there, target, task.output.size, width))
        return enqueued

    def _channels(self, task: Task, plan: Plan) -> int:
        """Return the number of blocks, equal on all ranks: with unlike blocks no rank knows the total size."""
        if isinstance(plan.layouts.input, Ragged):
            return self._handshake.room.channels
        return self._blocks(task.nbytes)

    def _ends(self, task: Task, plan: Plan, source: int, target: int) -> tuple[int, int]:
        """Return the addresses of input and output for the kernel: of the arrays, or of buffers in place of arrays.

        Buffers are used if the plan needs a copy of the input, or if arrays are not aligned to the element size: a
        kernel that only moves data moves whole elements, but a complex array need only be aligned to the real parts.
        """
        misaligned = task.op is None and (source | target) % task.dtype.itemsize != 0
        there = self._room("output", task.output.nbytes, task) if misaligned and target else target
        here = source
        if task.in_place and not plan.copy_input:
            here = there
        elif source and (misaligned or plan.copy_input):
            here = self._room("input", task.input.nbytes, task)
        return here, there

    def _program(self, task: Task, plan: Plan, channels: int) -> tuple[Program, dict[str, int]]:
        """Return the program of `plan` and the addresses of its tables; raise ScheduleError for a deadlock."""
        key = id(plan), channels, task.dtype.itemsize
        if key not in self._walks:
            room, width, empty = self._handshake.room, task.dtype.itemsize, task.collective == "barrier"
            check(everyone(plan, room.ranks, channels, width, empty=empty), channels, room.depth, room.slot // width)
            made = program(plan, plan.layouts, channels, width, empty=empty)
            self._walks[key] = plan, made, *self._uploaded(made)
        return self._walks[key][1:3]

    def _uploaded(self, made: Program) -> tuple[dict[str, int], Any]:
        rows = {name: table.view(numpy.uint8).reshape(-1) for name, table in tables(made.steps).items()}
        padded = [numpy.pad(row, (0, -row.nbytes % WORD)) for row in rows.values()]
        starts = [0, *itertools.accumulate(row.nbytes for row in padded)]
        there = self._handshake.memory.upload(numpy.concatenate(padded))
        return {name: address(there) + start for name, start in zip(rows, starts, strict=False)}, there

    def _room(self, name: str, nbytes: int, task: Task) -> int:
        return address(self._workspace.row(name, nbytes, task.stream))


def packet_grid(words: int, channels: int, most_threads: int) -> tuple[int, int]:
    """Return the numbers of blocks and threads for `words` words in packets: a thread for each word, if possible.

    >>> packet_grid(1, 16, 512), packet_grid(512, 16, 512), packet_grid(2100, 16, 512), packet_grid(4096, 16, 512)
    ((1, 128), (4, 128), (9, 256), (16, 256))
    """
    fewest = min(FEWEST_THREADS, most_threads)
    blocks = min(channels, -(-words // fewest))
    threads = min(most_threads, max(fewest, 1 << (-(-words // blocks) - 1).bit_length()))
    return min(blocks, -(-words // threads)), threads


def _nan_bytes(task: Task) -> int:
    """Return the bytes of a result to be set to NaN if a rank does not come; 0 for integers, or a root's array."""
    stays = task.output is None or (task.collective == "broadcast" and task.input is not None)
    return 0 if stays or task.dtype.kind not in ("float", "complex") else task.output.nbytes
