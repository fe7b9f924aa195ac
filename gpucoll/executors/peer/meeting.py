"""How the ranks of a node come to share their slabs: each tells where its own is, and then all tell how it went."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy

from gpucoll.device import Device
from gpucoll.device.peer import MOST_RANKS, PeerHeap, Room
from gpucoll.executors.peer.memory import HostMemory, PeerMemory
from gpucoll.waits import Waits
from gpucoll.work import Pending, keep_for_ever

TAG = 2  # of messages that come before those of any call
WORDS = 12  # of a message


class Meeting:
    """What a rank has of the others. `trouble` is why they cannot share memory, None where they can."""

    heap: PeerHeap

    def __init__(self, device: Device, link: Any, timeout: float) -> None:
        self._device, self._timeout = device, timeout
        self._place, self._wire = link.place, link.wire
        self._waits = Waits(timeout, foreign=link.foreign)
        self._open, self._between_processes = False, link.mpi is not None
        self.memory = PeerMemory()
        self.room = Room(link.place.size)
        self.trouble: str | None = None
        if len(set(link.place.nodes)) > 1:
            self.trouble = "the ranks are on several nodes"
        elif link.place.size > MOST_RANKS:
            self.trouble = f"{link.place.size} ranks are more than {MOST_RANKS}"
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
            self.memory.close()
            if self._between_processes:
                self._waits.run(exchange(self._place, self._wire, []), "peer memory")  # it is mapped nowhere
            self.memory.free()

    def _meet(self) -> Iterator[Pending]:
        proposed = yield from exchange(self._place, self._wire, [self._device.channels(self._place.size)])
        self.room = Room(self._place.size, min(words[0] for words in proposed))
        told: list[int] = []
        try:
            self.memory = _memory(self._device, self.room.offsets["end"])
            told = self.memory.told(self.memory.slab)
        except OSError as error:
            self.trouble = f"there is no memory that ranks could share: {error}"
        everybody = yield from exchange(self._place, self._wire, [bool(told), *told])
        reached = all(words[0] for words in everybody)
        if reached:
            try:
                slabs = [self.memory.reach(words[1:]) for words in everybody]
                control = self.memory.control.ctypes.data
                self.heap = PeerHeap(self.room, self._place.rank, slabs, control, self._timeout)
            except OSError as error:
                reached, self.trouble = False, f"this rank cannot reach the memory of another one: {error}"
        everybody = yield from exchange(self._place, self._wire, [reached])
        failed = [rank for rank, words in enumerate(everybody) if not words[0]]
        if failed:
            self.trouble = self.trouble or f"rank {failed[0]} cannot reach the memory of every other rank"
        self._open = True


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


def _memory(device: Any, nbytes: int) -> PeerMemory:
    """Return a slab of so many bytes on `device`, all zeros; raise OSError where there is none to be had."""
    if device.name == "emulated":
        return HostMemory(nbytes)
    from gpucoll.executors.peer.ipc import IpcMemory

    return IpcMemory(device, nbytes)
