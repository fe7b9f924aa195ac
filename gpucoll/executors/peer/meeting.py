"""How the ranks of a node come to share their slabs: each tells where its own is, and then all tell how it went."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, cast

import numpy

from gpucoll.arrays import Array
from gpucoll.arrays.symmetric import Block, Slab
from gpucoll.device import Device
from gpucoll.device.launch import Launch
from gpucoll.device.peer import CONTROL, MOST_RANKS, PeerHeap, Room
from gpucoll.device.sources import Instance
from gpucoll.executors.peer.fibers import CHANNELS, FiberMemory
from gpucoll.waits import Waits, keep_for_ever
from gpucoll.work import Pending

TAG = 2  # of messages that come before those of any call
WORDS = 12  # of a message


class PeerSlab(Slab, Protocol):
    """Memory that kernels of all ranks read and write."""

    def told(self) -> list[int]:
        """Return what another rank needs to reach it; raise OSError where it cannot be reached."""


class Memory(Protocol):
    """A rank's slab, ways to the others', and what runs kernels on them."""

    threads: int  # in a block
    slab: Any
    control: numpy.ndarray[Any, Any]  # what a kernel leaves when it gives up; the host may write it at any time

    def new_slab(self, nbytes: int) -> PeerSlab:
        """Return another slab, all zeros; raise OSError where there is no memory."""

    def array(self, block: Block, shape: tuple[int, ...], dtype: numpy.dtype) -> Any:
        """Return an array on a block of such a slab."""

    def reach(self, told: list[int]) -> int:
        """Return the address of another rank's slab; raise OSError where there is no way."""

    def upload(self, row: Array) -> Any:
        """Return the bytes where kernels can read them."""

    def load(self, instance: Instance) -> Launch:
        """Return a kernel."""

    def close(self) -> None:
        """Let go of the others' slabs."""

    def free(self) -> None:
        """Free the slab, once nobody maps it any more."""


class Meeting:
    """What a rank has of the others. `trouble` is why they cannot share memory, None where they can."""

    memory: Memory
    heap: PeerHeap

    def __init__(self, device: Device, link: Any, timeout: float, check: Callable[[], None]) -> None:
        self._device, self._timeout, self._check = device, timeout, check
        self._place, self._wire = link.place, link.wire
        self._waits = Waits(timeout, foreign=link.foreign)
        self._open, self._between_processes = False, link.mpi is not None
        self.control = numpy.zeros((), CONTROL)
        self.room = Room(link.place.size)
        self.trouble = _unfit(link.place)
        if self.trouble is None:
            self._waits.run(self._meet(), "peer memory")

    @property
    def on_one_gpu(self) -> bool:
        """Whether kernels of several ranks of this process wait for each other on one GPU."""
        return not self._between_processes and self._place.size > 1 and self._device.asynchronous

    def meet(self) -> Iterator[Pending]:
        """Come to an end once every rank has come here."""
        yield from exchange(self._place, self._wire, [])

    def close(self) -> None:
        """Give all memory back; idempotent. A collective call, but of threads: those map nobody's memory."""
        if self._open:
            self._open = False
            mine = [self.memory] if hasattr(self, "memory") else []
            for memory in mine:
                memory.close()
            if self._between_processes:
                self._waits.run(exchange(self._place, self._wire, []), "peer memory")  # it is mapped nowhere
            for memory in mine:
                memory.free()

    def _meet(self) -> Iterator[Pending]:
        proposed = yield from exchange(self._place, self._wire, [_channels(self._device, self._place.size)])
        self.room = Room(self._place.size, min(words[0] for words in proposed))
        told: list[int] = []
        try:
            self.memory = make_memory(self._device, self.room.offsets["end"], self._check)
            self.control = self.memory.control
            told = self.memory.slab.told()
        except OSError as error:
            self.trouble = f"there is no memory that ranks could share: {error}"
        everybody = yield from exchange(self._place, self._wire, [bool(told), *told])
        reached = self._reach(everybody)
        everybody = yield from exchange(self._place, self._wire, [reached])
        failed = [rank for rank, words in enumerate(everybody) if not words[0]]
        if failed:
            self.trouble = self.trouble or f"rank {failed[0]} cannot reach the memory of every other rank"
        self._open = True

    def _reach(self, everybody: list[list[int]]) -> bool:
        """Find a way to every slab; return whether there is one."""
        if self.trouble or not all(words[0] for words in everybody):
            return False
        try:
            slabs = [self.memory.reach(words[1:]) for words in everybody]
        except OSError as error:
            self.trouble = f"this rank cannot reach the memory of another one: {error}"
            return False
        self.heap = PeerHeap(self.room, self._place.rank, slabs, self.control.ctypes.data, self._timeout)
        return True


def exchange(place: Any, wire: Any, words: Sequence[int]) -> Generator[Pending, None, list[list[int]]]:
    """Return what every rank tells, in the order of ranks, over a link's `wire`; what there is less of is 0."""
    rows = numpy.zeros((place.size, WORDS), numpy.int64)
    rows[place.rank, :len(words)] = words
    others = [other for other in range(place.size) if other != place.rank]
    requests = [wire.Irecv([rows[other].view(numpy.uint8), "B"], other, TAG) for other in others]
    requests += [wire.Isend([rows[place.rank].view(numpy.uint8), "B"], other, TAG) for other in others]
    try:
        for request in requests:
            while not request.Test():
                yield request.Test
    except BaseException:
        keep_for_ever((rows, requests))
        raise
    return rows.tolist()


def make_memory(device: Device, nbytes: int, check: Callable[[], None]) -> Memory:
    """Return a slab of so many bytes on `device`, all zeros; raise OSError where there is none to be had."""
    if device.name == "emulated":
        return FiberMemory(nbytes, check)
    from gpucoll.executors.peer.ipc import IpcMemory

    return IpcMemory(cast(Any, device), nbytes)


def _channels(device: Device, size: int) -> int:
    """Return how many blocks of every rank can be under way at a time."""
    if device.name == "emulated":
        return CHANNELS
    from gpucoll.executors.peer.ipc import channels_of

    return channels_of(cast(Any, device), size)


def _unfit(place: Any) -> str | None:
    if len(set(place.nodes)) > 1:
        return "the ranks are on several nodes"
    if place.size > MOST_RANKS:
        return f"{place.size} ranks are more than {MOST_RANKS}"
    return None
