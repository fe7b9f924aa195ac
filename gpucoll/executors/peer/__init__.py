"""The `peer` executor: one kernel per rank carries out a whole collective, in GPU memory shared by the ranks of a node.

    tables     the layout of that memory, and a plan as tables for the step kernel, which runs any schedule
    memory     slabs (a slab is a rank's piece of shared memory), how the ranks get access to each other's slabs, and
               arrays in symmetric memory; one communicator at a time on a GPU that ranks share
    multicast  GPU memory that the NVLink switch reduces and writes

Some algorithms have special kernels (`Traits.kernel`), and short messages are sent in packets. The host enqueues the
kernel and returns. The kernel waits for the other ranks until the deadline; after a timeout the communicator has
failed. All counters are in the slabs, so kernels can be captured in a CUDA graph. Launches of such a graph and calls of
the communicator must not overlap.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy

from gpucoll.algorithms import find
from gpucoll.arrays import address
from gpucoll.core.ops import EXACT_NAMES
from gpucoll.device import Device, Stream
from gpucoll.device.launch import WORD, Enqueue, StreamOrder, Workspace
from gpucoll.device.sources import IN_PACKETS, UNIT_TYPES, Instance, instance, is_switched, reducing
from gpucoll.errors import CollectiveTimeout, UsageError
from gpucoll.executors import Call, CallLauncher, CallRequest, Executor
from gpucoll.executors.peer import tables
from gpucoll.executors.peer.memory import Handshake, SymmetricMemory
from gpucoll.plan import Plan, Ragged
from gpucoll.progress.operations import Operation
from gpucoll.progress.waits import Progress

BLOCKING_STREAM = ("kernels of ranks that share a GPU wait for each other, and on a blocking stream, or the null one, "
                   "they would not run side by side: pass stream=cupy.cuda.Stream(non_blocking=True), or be in one")
CACHED_ADDRESSES = 256  # addresses of one call
# Bytes of a message for one block. Small calls are bound by latency, and a GPU has many SMs, so a block gets little.
BLOCK_BYTES = 1 << 13
# Threads of a block for packets, at least: blocks on several SMs issue the packets faster than a single block.
FEWEST_PACKET_THREADS = 128
STEPS, PACKETS, LL128 = "steps", "packets", "ll128"  # kernels for any schedule, and for short messages
# The most bytes in packets of 16 bytes, if packets of 128 bytes can be used. In longer messages the bytes saved on the
# links outweigh the votes of `ll128`: an estimate, not measured.
SHORTEST = 1 << 14
FOLD_ALL, FOLD_SHARE = "fold_all", "fold_share"  # kernels: a rank reduces all elements, or its share
SWITCH_SHARE, SWITCH_GATHER = "multimem_share", "multimem_gather"  # kernels: the NVLink switch reduces, or writes
# Places equal on every rank, and never used: in kernel `FOLD_ALL` no rank reads another rank's result.
NO_MATTER = tables.Places(1)


class PeerCall(Call):
    """A request as kernel launches, by the addresses of the arrays, on the ranks' slabs and buffers of this rank.

    Arrays in symmetric memory are read in place.
    """

    def __init__(self, peer: PeerExecutor, request: CallRequest, plan: Plan) -> None:
        super().__init__(peer, request)
        self._peer, self._plan, self._device = peer, plan, peer._device
        self._handshake, self._workspace = peer._handshake, peer._workspace
        self._bound: dict[tuple[int, int], list[Enqueue]] = {}
        self._kernel = self._chosen_kernel()
        # Loading code may block until the GPU is idle: load here, before any kernel waits for another rank.
        self._device.kernels.load(self._instance, request.collective, request.op, request.dtype)
        for width in UNIT_TYPES:
            self._device.kernels.launcher(instance("copy", width))

    def run(self, source: Any, target: Any, stream: Any = None, *, repeated: bool = False) -> Operation:
        """Enqueue the call on a stream.

        Loading code or allocating memory may block until the GPU is idle. If ranks share a GPU, a kernel waiting for
        another rank's kernel would then wait for ever. So all ranks finish loading and allocating, for this call too,
        and meet before the first kernel is enqueued.
        """
        peer = self._peer
        peer.check()
        if peer.minds_blocking and self._device.is_blocking(stream):
            raise UsageError(f"{self.request.collective}: {BLOCKING_STREAM}", code="GC-STREAM")
        launches = self._launches(source, target, stream)
        if not self._device.asynchronous:
            yield from self._awaited(launches, stream)
            return
        peer.order.follow(stream)
        # No rank's kernel may wait before every rank has allocated: see above.
        if self._handshake.ranks_share_gpu and not stream.is_capturing():
            yield from self._handshake.meet()
        for launch in launches:
            launch(stream)

    def _awaited(self, launches: list[Enqueue], stream: Any) -> Operation:
        """Enqueue the call, and wait for its end: then the host looks at the control record. For a GPU see `Gpu.check`.
        """
        for launch in launches:
            launch(stream)
        yield from self._device.settle(stream)
        self._peer.check()

    def launcher(self, source: Any, target: Any) -> CallLauncher | None:
        """Return a function that enqueues the call on the same arrays, and keeps the call's tables."""
        if not self._device.asynchronous:
            return functools.partial(self._awaited, self._launches(source, target, self._device.stream(None)))
        launches = None if self._handshake.ranks_share_gpu else self._bound.get((address(source), address(target)))
        if launches is None:
            return None
        look = self._peer.check

        def launch(stream: Any, keep: object = self) -> None:
            look()
            for one in launches:
                one(stream)

        return launch

    def _launches(self, source: Any, target: Any, stream: Stream) -> list[Enqueue]:
        """Return the functions to be called in order, with the stream, to enqueue the call."""
        ends = address(source), address(target)
        if ends not in self._bound:
            if len(self._bound) == CACHED_ADDRESSES:
                self._bound.clear()
            self._bound[ends] = self._walk(*ends, stream) if self._kernel == STEPS else self._direct(*ends)
        return self._bound[ends]

    @functools.cached_property
    def _instance(self) -> Instance:
        if self._kernel == SWITCH_GATHER:
            return instance(SWITCH_GATHER, self.request.dtype.itemsize)
        return reducing(self._kernel, self.request.op, self.request.dtype)

    def _chosen_kernel(self) -> str:
        """Return the name of the kernel: the algorithm's own, or the kernel for any schedule."""
        request, room = self.request, self._handshake.room
        if room.ranks == 1:
            return STEPS
        kernel = find(request.collective, request.algorithm).traits.kernel or STEPS
        if kernel == SWITCH_GATHER:
            return kernel if self._handshake.multicast is not None else STEPS
        # The order of summation in the switch is unknown.
        if kernel == FOLD_SHARE and self._handshake.multicast is not None and request.order == "any" \
                and request.op is not None and is_switched(request.op, request.dtype):
            return SWITCH_SHARE
        if kernel != FOLD_ALL or (request.op is not None and request.op.name in EXACT_NAMES):
            return kernel
        if self._handshake.moves_rows and SHORTEST < request.nbytes <= room.ll128:
            return LL128
        return PACKETS if request.nbytes <= room.packets else kernel

    def _blocks(self) -> int:
        return max(1, min(self._handshake.room.channels, self.request.nbytes // BLOCK_BYTES))

    def _direct(self, source: int, target: int) -> list[Enqueue]:
        """Return the single launch of an algorithm's own kernel; all ranks launch equally many blocks."""
        request, heap, nan_bytes = self.request, self._handshake.heap, _nan_bytes(self.request)
        count = (request.sizes[1] or 0) // request.dtype.itemsize
        if not count:
            return []
        blocks, threads = self._blocks(), self._device.most_threads
        if self._kernel in IN_PACKETS:
            arguments = heap.packets(source, target, count, nan_bytes)
            words = -(-request.nbytes // WORD)
            wanted = words if self._kernel == PACKETS else tables.ROW * -(-words // tables.GROUP_WORDS)
            blocks, threads = packet_grid(wanted, self._handshake.room.channels, threads)
        elif self._kernel == SWITCH_GATHER:
            count //= self._handshake.room.ranks
            arguments = heap.shots(source, target, count, nan_bytes=nan_bytes, multicast=self._handshake.multicast)
        elif self._kernel in (FOLD_SHARE, SWITCH_SHARE):
            places = self._places(source), self._places(target)
            multicast = self._handshake.multicast if self._kernel == SWITCH_SHARE else None
            arguments = heap.shots(source, target, count, *places, nan_bytes, multicast)
        # In place, the result of `FOLD_ALL` would overwrite an input still read by other ranks: then inputs are staged.
        else:
            inputs = tables.NO_PLACES if source == target else self._places(source)
            arguments = heap.shots(source, target, count, inputs, NO_MATTER, nan_bytes)
        return [self._device.kernels.launcher(self._instance)(blocks, threads, arguments)]

    def _places(self, start: int) -> tables.Places:
        symmetric = self._peer.symmetric
        return tables.NO_PLACES if symmetric is None else symmetric.places(start, self.request.nbytes)

    def _walk(self, source: int, target: int, stream: Stream) -> list[Enqueue]:
        request, width, channels = self.request, self.request.dtype.itemsize, self._channels()

        def room(name: str, nbytes: int) -> int:
            return address(self._workspace.row(name, nbytes, stream))

        made, places, _ = self._program
        here = target if request.in_place else source
        if source and self._plan.copy_input:
            here = room("input", request.sizes[0] or 0)
        region, scratch = made.region * width, self._plan.workspace["scratch"] * width
        buffers = [here, target, room("scratch", scratch), room("staging", region * channels)]
        kernels = self._device.kernels
        enqueued = [] if here == source else kernels.copiers(source, here, (request.sizes[0] or 0) // width, width)
        if made.steps:
            movers = self._device.most_threads // 2
            arguments = self._handshake.heap.steps(buffers, region, places, len(made.steps), movers,
                                                   _nan_bytes(request))
            enqueued.append(kernels.launcher(self._instance)(channels, movers + self._device.warp, arguments))
        return enqueued

    def _channels(self) -> int:
        """Return the number of blocks, equal on all ranks: with unlike blocks no rank knows the total size."""
        if isinstance(self._plan.layouts.input, Ragged):
            return self._handshake.room.channels
        return self._blocks()

    @functools.cached_property
    def _program(self) -> tuple[tables.Program, dict[str, int], Any]:
        """The program of the plan, the addresses of its tables, and their memory."""
        made = tables.program(self._plan, self._plan.layouts, self._channels(), self.request.dtype.itemsize,
                              empty=self.request.collective == "barrier")
        rows = {name: table.view(numpy.uint8).reshape(-1) for name, table in tables.tables(made.steps).items()}
        padded = [numpy.pad(row, (0, -row.nbytes % WORD)) for row in rows.values()]
        starts = [0, *itertools.accumulate(row.nbytes for row in padded)]
        there = self._handshake.memory.upload(numpy.concatenate(padded))
        return made, {name: address(there) + start for name, start in zip(rows, starts, strict=False)}, there


class PeerExecutor(Executor):
    """An executor of schedules on `device`, made by all ranks together.

    `link` joins the ranks, `waits` are those of their communicator; `order` is the order of the communicator's
    operations over all streams. Arrays in `symmetric` memory are read in place; `symmetric` is None if the ranks cannot
    share memory. If ranks share a GPU with the peer executor of another communicator, all ranks raise UsageError, or
    without `required` have no peer memory.
    """

    name = "peer"

    def __init__(self, device: Device, order: StreamOrder, link: Any, waits: Progress, *, required: bool) -> None:
        self._device = device
        self.order: StreamOrder = order
        self._timeout = waits.timeout
        self._handshake = Handshake(device, link, waits, required=required)
        self.minds_blocking: bool = self._handshake.shares_context
        self.symmetric: SymmetricMemory | None = None if self.unavailable_reason else \
            SymmetricMemory(link.place.size, device, self._handshake, order)
        self._workspace = Workspace(device)

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why the ranks cannot share memory; None if all ranks can."""
        return self._handshake.unavailable_reason

    @property
    def links(self) -> dict[str, bool]:
        """What the links between the GPUs allow."""
        return {"packets_of_128_bytes": self._handshake.moves_rows,
                "reductions_by_switch": self._handshake.multicast is not None}

    def serves(self, request: CallRequest) -> str | None:
        """Return None for ranks on one node, on a stream allowed there."""
        if self.unavailable_reason:
            return self.unavailable_reason
        return BLOCKING_STREAM if self.minds_blocking and request.blocking else None

    def compile(self, request: CallRequest) -> Call:
        """Compile the kernels."""
        assert request.plan is not None
        return PeerCall(self, request, request.plan)

    def check(self) -> None:
        """Raise CollectiveTimeout if a kernel has given up waiting for another rank."""
        control = self._handshake.control
        if control["where"]:
            what, peer = tables.WAIT_NAMES[int(control["where"])], int(control["peer"])
            raise CollectiveTimeout(f"a kernel waited {self._timeout:g} s for a {what} from rank {peer}; is every rank "
                                    "in the same call, with the same shape, dtype and algorithm? timeout= sets the "
                                    "deadline", ranks=(peer,))

    def abort(self) -> None:
        """End every wait of this rank's kernels, without the other ranks."""
        self._handshake.control["aborted"] = 1
        self._handshake.leave()

    def close(self) -> None:
        """Release all memory; idempotent. A collective call."""
        self._workspace.clear()
        self._handshake.close()
        if self.symmetric is not None:
            self.symmetric.heap.close()


def packet_grid(wanted: int, channels: int, most_threads: int) -> tuple[int, int]:
    """Return the numbers of blocks and threads for packets: `wanted` threads in all, if possible.

    >>> packet_grid(1, 16, 512), packet_grid(512, 16, 512), packet_grid(2100, 16, 512), packet_grid(4096, 16, 512)
    ((1, 128), (4, 128), (9, 256), (16, 256))
    """
    fewest = min(FEWEST_PACKET_THREADS, most_threads)
    blocks = min(channels, -(-wanted // fewest))
    threads = min(most_threads, max(fewest, 1 << (-(-wanted // blocks) - 1).bit_length()))
    return min(blocks, -(-wanted // threads)), threads


def _nan_bytes(request: CallRequest) -> int:
    """Return the bytes of a result to be set to NaN if a rank does not come; 0 for integers, or a root's array."""
    stays = request.collective == "broadcast" and request.sizes[0] is not None
    return 0 if stays or request.dtype.kind not in ("float", "complex") else request.sizes[1] or 0
