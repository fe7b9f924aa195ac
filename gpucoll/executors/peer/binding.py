"""A call as launches: kernels, grids and memory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy

from gpucoll.algorithms import find
from gpucoll.arrays import address
from gpucoll.core.ops import EXACT_NAMES
from gpucoll.device import Device, Stream
from gpucoll.device.launch import WORD, Arguments
from gpucoll.device.peer import GROUP_WORDS, NOWHERE, ROW, Places
from gpucoll.device.sources import IN_PACKETS, UNITS, Instance, instance, is_switched, reducing
from gpucoll.device.streams import Workspace
from gpucoll.executors import CallRequest
from gpucoll.executors.peer.handshake import Handshake
from gpucoll.executors.peer.memory import SymmetricMemory
from gpucoll.executors.peer.step_tables import Program, check, everyone, program, tables
from gpucoll.plan import Plan, Ragged

KEPT = 256  # addresses of one call
# Bytes of a message for one block. Small calls are bound by latency, and a GPU has many SMs, so a block gets little.
SHARE = 1 << 13
# Threads of a block for packets, at least: blocks on several SMs issue the packets faster than a single block.
FEWEST_THREADS = 128
STEPS, PACKETS, LL128 = "steps", "packets", "ll128"  # kernels for any schedule, and for short messages
# The most bytes in packets of 16 bytes, if packets of 128 bytes can be used. In longer messages the bytes saved on the
# links outweigh the votes of `ll128`: an estimate, not measured.
SHORTEST = 1 << 14
ALL, SHARE_OF_ALL = "fold_all", "fold_share"  # kernels: a rank reduces all elements, or its share
SWITCH_SHARE, SWITCH_GATHER = "multimem_share", "multimem_gather"  # kernels: the NVLink switch reduces, or writes
# Places equal on every rank, and never used: in kernel `ALL` no rank reads another rank's result.
NO_MATTER = Places(1)

Enqueue: TypeAlias = Callable[[Stream], object]


class Binding:
    """The launches of one request, by the addresses of the arrays, on the ranks' slabs and buffers of this rank.

    Arrays in `symmetric` memory are read in place. `workspace` has the buffers of all calls of the executor.
    """

    def __init__(self, request: CallRequest, plan: Plan, device: Device, handshake: Handshake,
                 symmetric: SymmetricMemory | None, workspace: Workspace) -> None:
        self._request, self._plan, self._device = request, plan, device
        self._handshake, self._symmetric, self._workspace = handshake, symmetric, workspace
        self._bound: dict[tuple[int, int], list[Enqueue]] = {}
        self._kernel = self._chosen_kernel()
        # Loading code may block until the GPU is idle: load here, before any kernel waits for another rank.
        device.kernels.load(self._instance, request.collective, request.op, request.dtype)
        for width in UNITS:
            device.kernels.launcher(instance("copy", width))

    def launches(self, source: Any, target: Any, stream: Stream) -> list[Enqueue]:
        """Return the functions to be called in order, with the stream, to enqueue the call."""
        ends = address(source), address(target)
        if ends not in self._bound:
            if len(self._bound) == KEPT:
                self._bound.clear()
            self._bound[ends] = self._walk(*ends, stream) if self._kernel == STEPS else self._direct(*ends)
        return self._bound[ends]

    def known(self, source: Any, target: Any) -> list[Enqueue] | None:
        """Return the launches made before for these arrays, or None."""
        return self._bound.get((address(source), address(target)))

    @functools.cached_property
    def _instance(self) -> Instance:
        if self._kernel == SWITCH_GATHER:
            return instance(SWITCH_GATHER, self._request.dtype.itemsize)
        return reducing(self._kernel, self._request.op, self._request.dtype)

    def _chosen_kernel(self) -> str:
        """Return the name of the kernel: the algorithm's own, or the kernel for any schedule."""
        request, room = self._request, self._handshake.room
        if room.ranks == 1:
            return STEPS
        kernel = find(request.collective, request.algorithm).traits.kernel or STEPS
        if kernel == SWITCH_GATHER:
            return kernel if self._handshake.multicast is not None else STEPS
        # The order of summation in the switch is unknown.
        if kernel == SHARE_OF_ALL and self._handshake.multicast is not None and request.order == "any" \
                and request.op is not None and is_switched(request.op, request.dtype):
            return SWITCH_SHARE
        if kernel != ALL or (request.op is not None and request.op.name in EXACT_NAMES):
            return kernel
        if self._handshake.moves_rows and SHORTEST < request.nbytes <= room.ll128:
            return LL128
        return PACKETS if request.nbytes <= room.packets else kernel

    def _launch(self, blocks: int, threads: int, arguments: Arguments) -> Enqueue:
        launch = self._device.kernels.launcher(self._instance)
        return functools.partial(launch, blocks, threads, arguments)

    def _blocks(self) -> int:
        return max(1, min(self._handshake.room.channels, self._request.nbytes // SHARE))

    def _direct(self, source: int, target: int) -> list[Enqueue]:
        """Return the single launch of an algorithm's own kernel; all ranks launch equally many blocks."""
        request, heap, nan_bytes = self._request, self._handshake.heap, _nan_bytes(self._request)
        count = (request.sizes[1] or 0) // request.dtype.itemsize
        if not count:
            return []
        blocks, threads = self._blocks(), self._device.most_threads
        if self._kernel in IN_PACKETS:
            arguments = heap.packets(source, target, count, nan_bytes)
            words = -(-request.nbytes // WORD)
            wanted = words if self._kernel == PACKETS else ROW * -(-words // GROUP_WORDS)
            blocks, threads = packet_grid(wanted, self._handshake.room.channels, threads)
        elif self._kernel == SWITCH_GATHER:
            count //= self._handshake.room.ranks
            arguments = heap.shots(source, target, count, nan_bytes=nan_bytes, multicast=self._handshake.multicast)
        elif self._kernel in (SHARE_OF_ALL, SWITCH_SHARE):
            places = self._places(source), self._places(target)
            multicast = self._handshake.multicast if self._kernel == SWITCH_SHARE else None
            arguments = heap.shots(source, target, count, *places, nan_bytes, multicast)
        # In place, the result of `ALL` would overwrite an input still read by other ranks: then inputs are staged.
        else:
            inputs = NOWHERE if source == target else self._places(source)
            arguments = heap.shots(source, target, count, inputs, NO_MATTER, nan_bytes)
        return [self._launch(blocks, threads, arguments)]

    def _places(self, start: int) -> Places:
        return self._symmetric.places(start, self._request.nbytes) if self._symmetric is not None else NOWHERE

    def _walk(self, source: int, target: int, stream: Stream) -> list[Enqueue]:
        request, width, channels = self._request, self._request.dtype.itemsize, self._channels()
        room = functools.partial(self._room, stream=stream)
        made, places, _ = self._program
        here = target if request.in_place else source
        if source and self._plan.copy_input:
            here = room("input", request.sizes[0] or 0)
        region, scratch = made.region * width, self._plan.workspace["scratch"] * width
        buffers = [here, target, room("scratch", scratch), room("staging", region * channels)]
        enqueued: list[Enqueue] = []
        if here != source:
            enqueued.append(functools.partial(self._device.kernels.copy, source, here, (request.sizes[0] or 0) // width,
                                              width))
        if made.steps:
            movers = self._device.most_threads // 2
            arguments = self._handshake.heap.steps(buffers, region, places, len(made.steps), movers,
                                                   _nan_bytes(request))
            enqueued.append(self._launch(channels, movers + self._device.warp, arguments))
        return enqueued

    def _channels(self) -> int:
        """Return the number of blocks, equal on all ranks: with unlike blocks no rank knows the total size."""
        if isinstance(self._plan.layouts.input, Ragged):
            return self._handshake.room.channels
        return self._blocks()

    @functools.cached_property
    def _program(self) -> tuple[Program, dict[str, int], Any]:
        """The program of the plan, the addresses of its tables, and their memory; ScheduleError for a deadlock."""
        room, width, channels = self._handshake.room, self._request.dtype.itemsize, self._channels()
        empty = self._request.collective == "barrier"
        check(everyone(self._plan, room.ranks, channels, width, empty=empty), channels, room.depth, room.slot // width)
        made = program(self._plan, self._plan.layouts, channels, width, empty=empty)
        rows = {name: table.view(numpy.uint8).reshape(-1) for name, table in tables(made.steps).items()}
        padded = [numpy.pad(row, (0, -row.nbytes % WORD)) for row in rows.values()]
        starts = [0, *itertools.accumulate(row.nbytes for row in padded)]
        there = self._handshake.memory.upload(numpy.concatenate(padded))
        return made, {name: address(there) + start for name, start in zip(rows, starts, strict=False)}, there

    def _room(self, name: str, nbytes: int, stream: Stream) -> int:
        return address(self._workspace.row(name, nbytes, stream))


def packet_grid(wanted: int, channels: int, most_threads: int) -> tuple[int, int]:
    """Return the numbers of blocks and threads for packets: `wanted` threads in all, if possible.

    >>> packet_grid(1, 16, 512), packet_grid(512, 16, 512), packet_grid(2100, 16, 512), packet_grid(4096, 16, 512)
    ((1, 128), (4, 128), (9, 256), (16, 256))
    """
    fewest = min(FEWEST_THREADS, most_threads)
    blocks = min(channels, -(-wanted // fewest))
    threads = min(most_threads, max(fewest, 1 << (-(-wanted // blocks) - 1).bit_length()))
    return min(blocks, -(-wanted // threads)), threads


def _nan_bytes(request: CallRequest) -> int:
    """Return the bytes of a result to be set to NaN if a rank does not come; 0 for integers, or a root's array."""
    stays = request.collective == "broadcast" and request.sizes[0] is not None
    return 0 if stays or request.dtype.kind not in ("float", "complex") else request.sizes[1] or 0
