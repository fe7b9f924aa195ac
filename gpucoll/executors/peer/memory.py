"""Slabs, and how the ranks of a node get access to each other's slabs: export handles, open them, agree on the outcome.

Other processes open a slab through CUDA's IPC handles, threads by its address.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy

from gpucoll.arrays import address
from gpucoll.arrays.segments import Heap, Slab
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import Device, Event
from gpucoll.device.launch import StreamOrder
from gpucoll.device.sources import reducing
from gpucoll.errors import UsageError
from gpucoll.executors.peer.multicast import Lacking, MemoryDriver, MulticastMemory
from gpucoll.executors.peer.tables import CONTROL, MOST_RANKS, NO_PLACES, Multicast, PeerHeap, Places, Room
from gpucoll.progress.operations import Pending
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import exchange

BUSY = ("another communicator uses the GPU of rank {} by peer memory, and ranks share this GPU: the kernels of both "
        "need all its blocks, and would wait for each other; close the other one first")
_OFFSETS = 48  # bits of a mark for the offset in a slab; the slab's number is above


class Handshake:
    """This rank's access to the other ranks' slabs; `unavailable_reason` says why there is none, or is None."""

    heap: PeerHeap

    def __init__(self, device: Device, link: Any, waits: Progress, *, required: bool) -> None:
        self._device, self._waits = device, waits
        self._place = link.place
        self._exchange = functools.partial(exchange, link.wire, link.place.rank, range(link.place.size))
        self._open, self._between_processes = False, link.mpi is not None
        self._seat: GpuSeat | None = None  # of this communicator on the GPU
        self._is_busy = False  # whether another communicator has a place that this one needs
        self.memory: Any = None  # a `PeerMemory`, once this rank has one
        self.control: Any = numpy.zeros((), CONTROL)  # written by a kernel that gives up, or by the host
        self.room: Room = Room(link.place.size)
        self.ranks_share_gpu: bool = False  # of threads or processes: kernels of one rank wait for the other's
        self.moves_rows: bool = False  # whether the ranks may use packets of 128 bytes
        self.driver: MemoryDriver | None = None  # of memory in which a switch can reduce
        self.multicast: Multicast | None = None  # such memory for arrays that lie elsewhere
        self.mapped: list[Any] = []  # memory that other ranks map
        self.unavailable_reason: str | None = None
        if len(set(link.place.nodes)) > 1:
            self.unavailable_reason = "the ranks are on several nodes"
        elif link.place.size > MOST_RANKS:
            self.unavailable_reason = f"{link.place.size} ranks are more than {MOST_RANKS}"
        if self.unavailable_reason is None:
            with device.current:
                self._waits.run(self._meet(), "peer memory")
            if self._is_busy and required:
                raise UsageError(f"executor peer: {self.unavailable_reason}", code="GC-SHARED-GPU",
                                 settled=True)  # on all ranks in the same exchange

    @property
    def shares_context(self) -> bool:
        """Whether ranks that share a GPU are threads: then a blocking stream of one waits for kernels of another."""
        return self.ranks_share_gpu and not self._between_processes

    def meet(self) -> Iterator[Pending]:
        """Wait for every rank."""
        yield from self._exchange([])

    def close(self) -> None:
        """Release all memory; idempotent. A collective call between processes; threads map no other rank's memory."""
        if self._open:
            self._open = False
            held = [*self.mapped, *([] if self.memory is None else [self.memory])]
            for one in held:
                one.unmap()
            if self._between_processes:
                # CUDA memory must not be freed while mapped elsewhere: wait until all ranks have unmapped the slabs.
                self._waits.run(self._exchange([]), "peer memory")
            for one in held:
                one.free()
            self.mapped.clear()
            self.leave()

    def join(self, slab: MulticastMemory, everybody: Sequence[list[int]]) -> Multicast | None:
        """Map the slabs of all ranks, see `MulticastMemory.join`."""
        found: list[Multicast | None] = []

        def joined() -> Generator[Pending, None, None]:
            found.append((yield from slab.join(self._exchange, everybody)))

        self._waits.run(joined(), "symmetric memory")
        return found[0]

    def leave(self) -> None:
        """Let another communicator use the GPU: this one enqueues no more kernels."""
        if self._seat is not None:
            self._seat.leave()

    def _meet(self) -> Iterator[Pending]:
        linked = yield from self._exchange(self._device.linked_gpu)
        there = [row[0] for row in linked]
        mine, rank = there[self._place.rank], self._place.rank
        # The emulated device has no GPU to share.
        self.ranks_share_gpu = self._device.asynchronous and len({*there}) < self._place.size
        # The first rank on a GPU takes the place for the others.
        if self._device.asynchronous and len(there) > 1 and there.index(mine) == rank:
            self._seat = GpuSeat(mine, alone=there.count(mine) > 1)
        # All ranks must cut their slabs in the same way: use the smallest number of channels proposed.
        proposed = yield from self._exchange([self._device.channels(there.count(mine)),
                                              self._seat is None or self._seat.is_free])
        self.room = Room(self._place.size, min(row[0] for row in proposed), staging=self._device.staging)
        busy = [rank for rank, row in enumerate(proposed) if not row[1]]
        if busy:
            self.leave()
            self._is_busy, self.unavailable_reason = True, BUSY.format(busy[0])
            return
        # After a failure the exchanges still follow: the other ranks wait for this rank, and all must agree on the
        # outcome.
        exported: list[int] = []
        try:
            self.memory = _memory(self._device, self.room.offsets["end"])
            self.control, exported = self.memory.control, self.memory.export(self.memory.slab)
        except OSError as error:
            self.unavailable_reason = f"there is no memory that ranks could share: {error}"
        everybody = yield from self._exchange([bool(exported), *exported])
        reached = all(row[0] for row in everybody)
        if reached:
            try:
                slabs = [self.memory.reach(row[1:]) for row in everybody]
                self.heap = PeerHeap(self.room, self._place.rank, slabs, self.control.ctypes.data, self._waits.timeout)
            except OSError as error:
                reached, self.unavailable_reason = False, f"this rank cannot reach the memory of another one: {error}"
        moves_rows = self._device.moves_rows([(row[0], row[1]) for row in linked])
        everybody = yield from self._exchange([reached, moves_rows])
        self.moves_rows = all(row[1] for row in everybody)
        failed = [rank for rank, row in enumerate(everybody) if not row[0]]
        if failed:
            self.unavailable_reason = self.unavailable_reason or \
                f"rank {failed[0]} cannot reach the memory of every other rank"
        elif self._between_processes and self._device.asynchronous:
            self.unavailable_reason = yield from self._loss(slabs)
        # Ranks sharing a GPU have no common multicast memory.
        if self.unavailable_reason is None and self._place.size > 1 and not self.ranks_share_gpu:
            yield from self._switch(by_fabric=True)
        self._open = True

    def _loss(self, slabs: Sequence[int]) -> Generator[Pending, None, str | None]:
        """Return why the memory of the ranks cannot be used although it opens, or None; collective."""
        everybody = yield from self._exchange((yield from self._lost(slabs)))
        lost = sorted(sorted((rank, other)) for rank, row in enumerate(everybody)
                      for other in range(self._place.size) if row[other])
        return None if not lost else (
            f"data that ranks {lost[0][0]} and {lost[0][1]} exchange in each other's memory do not arrive, "
            "although it opens; an IOMMU or ACS between their GPUs is the usual reason")

    def _lost(self, slabs: Sequence[int]) -> Generator[Pending, None, list[bool]]:
        """Return for every rank whether data exchanged with this rank through the slabs are lost.

        Another GPU's memory may open and then lose writes: behind an IOMMU, under a hypervisor, between switches of
        PCIe. So each rank writes a pattern into every slab by a kernel, as calls do later. After a barrier the rank
        reads the patterns back, and reads the patterns written by the others into its own slab.
        """
        rank, size, begin = self._place.rank, self._place.size, self.room.offsets["staging"]
        mine = numpy.stack([_pattern(rank, owner) for owner in range(size)])
        row, all_rows, stream, copy = mine[0].nbytes, mine.nbytes, self._device.new_stream(), self._device.kernels.copy
        given = self.memory.upload(mine.view(numpy.uint8).reshape(-1))
        taken = self._device.empty(2 * all_rows, numpy.dtype("u1"), stream)
        for owner, slab in enumerate(slabs):
            copy(address(given) + owner * row, slab + begin + rank * row, row, 1, stream)
        yield from _until_done(self._device.mark(stream))
        # No rank reads before all ranks have written.
        yield from self.meet()
        for owner, slab in enumerate(slabs):
            copy(slab + begin + rank * row, address(taken) + owner * row, row, 1, stream)
        copy(slabs[rank] + begin, address(taken) + all_rows, all_rows, 1, stream)
        yield from _until_done(self._device.mark(stream))
        found = self.memory.download(taken).view(numpy.int64).reshape(2, size, -1)
        theirs = numpy.stack([_pattern(writer, rank) for writer in range(size)])
        return [bool((found[0, other] != mine[other]).any() or (found[1, other] != theirs[other]).any())
                for other in range(size)]

    def _switch(self, *, by_fabric: bool) -> Generator[Pending, None, None]:
        """Make multicast memory that has reduced integers and narrow floats rightly on all ranks, if there is any.

        A wrong sum of a sample means that the switch is not used.
        """
        room, driver = self.room, MemoryDriver(self._device, self._place.rank, self.room.ranks, by_fabric=by_fabric)
        made: list[MulticastMemory] = []

        def make() -> list[int]:
            made.append(MulticastMemory(driver, 2 * room.staging))
            return made[0].export()

        found: Multicast | None = None
        try:
            yield from driver.agree(self._exchange)
            words = yield from driver.together(self._exchange, make)
            found = yield from made[0].join(self._exchange, words)
        except Lacking:
            pass
        right = found is not None and found.group != 0
        for name in ("int64", "float16") if right else ():
            samples = [(_pattern(rank, rank) % 64).astype(name) for rank in range(self._place.size)]
            right = (yield from self._reduces(name, samples, found)) and right  # on all ranks, whatever this one found
        right = all(row[0] for row in (yield from self._exchange([right])))
        if right:
            self.driver, self.multicast = driver, found
            self.mapped.append(made[0])
        elif made:
            made[0].close()
            made[0].drop()
        if by_fabric and not right:
            yield from self._switch(by_fabric=False)

    def _reduces(self, name: str, samples: Sequence[numpy.ndarray[Any, Any]],
                 multicast: Multicast | None) -> Generator[Pending, None, bool]:
        """Return whether the switch sums the ranks' samples rightly.

        No rank launches the kernel before all ranks have loaded it and have memory: the kernels wait for each other.
        """
        device, stream = self._device, self._device.new_stream()
        try:
            kernel = device.kernels.launcher(reducing("multimem_share", OPS["sum"], DTYPES[name]))
            given = self.memory.upload(samples[self._place.rank].view(numpy.uint8))
            taken = device.empty(given.nbytes, numpy.dtype("u1"), stream)
            ready = True
        except Exception:
            ready = False
        if not all(row[0] for row in (yield from self._exchange([ready]))):
            return False
        arguments = self.heap.shots(address(given), address(taken), samples[0].size, multicast=multicast)
        kernel(1, device.most_threads, arguments)(stream)
        yield from _until_done(device.mark(stream))
        return bool((self.memory.download(taken).view(name) == sum(samples)).all())


def _pattern(writer: int, owner: int) -> numpy.ndarray[Any, Any]:
    """Return 4 KiB unique to this writer and owner of a slab."""
    return numpy.arange(512, dtype=numpy.int64) * 0x9E3779B97F4A7C1 + (writer << 40) + (owner << 20) + 1


def _until_done(event: Event) -> Iterator[Pending]:
    while not event.done:
        yield lambda: event.done


def _memory(device: Device, nbytes: int) -> Any:
    """Return a slab of `nbytes` zeros on `device`; raise OSError if there is no memory."""
    from gpucoll.device.cuda import PeerMemory

    return PeerMemory(device, nbytes, CONTROL)


class GpuSeat:
    """The place of a communicator on the GPU with a PCI number, taken by one rank for all its ranks on this GPU.

    Ranks that share a GPU use the peer executor in one communicator at a time. All blocks of a kernel must run at once,
    as they wait for the blocks of the other ranks. The blocks of ranks that share a GPU fill the GPU: a second
    communicator's blocks may find no room, and all would wait until the deadline. Processes see each other by a lock on
    a file of the temporary folder; the system releases the locks of a dead process.
    """

    def __init__(self, gpu: int, *, alone: bool) -> None:
        """Take the place, if it `is_free`; `alone`: several ranks of the communicator use the GPU."""
        self._held, self.is_free = -1, True
        file = os.path.join(tempfile.gettempdir(), f"gpucoll-{os.geteuid()}-{gpu:x}.lock")
        try:
            self._held = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._held, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:  # a folder without files or locks tells nothing
            self.leave()
            self.is_free = not isinstance(error, BlockingIOError)

    def leave(self) -> None:
        """Free the place; idempotent."""
        if self._held >= 0:
            held, self._held = self._held, -1
            with contextlib.suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)  # a forked child may have inherited the file
            os.close(held)


class SymmetricMemory:
    """Arrays at the same place in the slabs of all ranks, readable by all ranks' kernels.

    `heap` allocates on this rank; the addresses of the other ranks' slabs are kept, too. `size` is the number of
    ranks. The slabs are multicast memory where a switch reduces, for the kernels with the switch.
    """

    def __init__(self, size: int, device: Device, handshake: Handshake, order: StreamOrder) -> None:
        self._handshake = handshake
        self._starts: dict[int, tuple[int, Multicast]] = {}  # by slab key: number, and the ranks' addresses
        self._slabs = 0
        make = functools.partial(MulticastMemory, handshake.driver) if handshake.driver else None
        self.heap: Heap = device.new_heap(size, order, make)

    def export(self, slab: Slab) -> list[int]:
        """Return the words that `reach` needs on the other ranks; no words if the system forbids access."""
        try:
            found: list[int] = slab.export() if self._handshake.driver else self._handshake.memory.export(slab)
        except OSError:
            return []
        return found

    def reach(self, slab: Slab, everybody: Sequence[list[int]]) -> None:
        """Gain access to the new slabs of all ranks, given each rank's result of `export`; `slab`: that of this rank.

        A collective call. If this rank fails, its arrays on the slab get no mark (see `places`), and no rank reads the
        others' arrays in place.
        """
        self._slabs += 1
        # Some rank's slab cannot be reached. All ranks see this, and use none of the new slabs in place.
        if not all(everybody):
            return
        if self._handshake.driver:
            self._handshake.mapped.append(slab)
            found = self._handshake.join(slab, everybody)
        else:
            try:
                found = Multicast(slab.start, 0, [self._handshake.memory.reach(exported) for exported in everybody])
            except OSError:
                return
        if found is not None:
            self._starts[slab.key] = self._slabs, found

    def places(self, start: int, nbytes: int) -> Places:
        """Return the addresses of these bytes on all ranks, with a mark equal on all ranks for equal places."""
        slab, offset = self.heap.find(start, nbytes) or (0, 0)
        if slab not in self._starts:
            return NO_PLACES
        number, found = self._starts[slab]
        return Places(number << _OFFSETS | offset, [there + offset for there in found.addresses], found.group, offset)
