"""What joins ranks that have a store of torch's alone, as torchrun starts them.

By the store go the few small messages by which ranks meet and part. Inside a node the engine does all else.
"""

from __future__ import annotations

import collections
import datetime
import os
import pickle
import socket
from collections.abc import Mapping
from typing import Any

import numpy
from torch.distributed import DistError, PrefixStore, Store

from gpucoll.bootstrap import RankTopology
from gpucoll.executors.mpi import LEFT
from gpucoll.guard.processes import Processes, process_namespace, visible
from gpucoll.tuner import built_in


class StoreRanks:
    """What mpi4py's communicators have for Python objects, over a store. All its calls are collective."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._patience = store, datetime.timedelta(seconds=timeout)
        self._calls = 0

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], pickle.dumps(value))
        return [self._take(key) for key in keys]

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's `value`."""
        self._calls += 1
        if self.rank == root:
            self._store.set(f"{self._calls}", pickle.dumps(value))
        return self._take(f"{self._calls}")

    def Ibarrier(self) -> _Meeting:
        """Return what tells by `Test` whether all ranks have come."""
        self._calls += 1
        return _Meeting(self._store, f"{self._calls}", self.size)

    def _take(self, key: str) -> Any:
        self._store.wait([key], self._patience)
        return pickle.loads(self._store.get(key))


class _Meeting:
    def __init__(self, store: Store, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        store.add(key, 1)

    def Test(self) -> bool:
        return self._store.add(self._key, 0) >= self._size


class StoreMessages:
    """Messages as mpi4py sends them, each of which is a key of the store until it is received."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._counts: collections.Counter[tuple[int, int, int]] = collections.Counter()

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0) -> StoredMessage:
        """Send ``[bytes, "B"]`` to rank `dest`."""
        key = self._key(self._rank, dest, tag)
        self._counts[self._rank, dest, tag] += 1
        self._store.set(key, buffer[0].tobytes())
        return StoredMessage(None, key, numpy.empty(0, numpy.uint8))

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0) -> StoredMessage:
        """Begin to receive from rank `source` into ``[bytes, "B"]``."""
        key = self._key(source, self._rank, tag)
        self._counts[source, self._rank, tag] += 1
        return StoredMessage(self._store, key, buffer[0])

    def has_come(self, source: int, tag: int) -> bool:
        """Return whether a message from `source` could be received now."""
        return self._store.check([self._key(source, self._rank, tag)])

    def _key(self, source: int, dest: int, tag: int) -> str:
        return f"{source} {dest} {tag} {self._counts[source, dest, tag]}"


class StoredMessage:
    """One message under way. `length` are the bytes that came, None until they have; without a store it was sent."""

    def __init__(self, store: Store | None, key: str, row: Any) -> None:
        self._store, self._key, self._row, self._length = store, key, row, 0 if store is None else None

    @property
    def length(self) -> int | None:
        if self._length is None and self._store is not None and self._store.check([self._key]):
            came = numpy.frombuffer(self._store.get(self._key), numpy.uint8)
            self._store.delete_key(self._key)
            count = min(len(came), len(self._row))
            numpy.copyto(self._row[:count], came[:count])
            self._length = len(came)
        return self._length

    def Test(self, status: Any = None) -> bool:
        """Return whether it has ended."""
        return self.length is not None

    def Cancel(self) -> None:
        """Receive it no more."""
        self._length = 0

    def Wait(self) -> None:
        """Nothing to wait for after `Cancel`."""


class StoreLink:
    """Ranks are processes, joined by a store of which no other link has the same prefix."""

    threads = True
    has_collectives = False
    foreign: tuple[type[Exception], ...] = (DistError,)

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        self._store, self._timeout, self._splits = store, timeout, 0
        self.mpi: Any = StoreRanks(PrefixStore("ranks", store), rank, size, timeout)
        self.wire, self.points = (StoreMessages(PrefixStore(name, store), rank, size) for name in ("wire", "points"))
        everyone = self.mpi.allgather((os.getpid(), process_namespace(), socket.gethostname()))
        self.place = place(rank, [namespace or host for _, namespace, host in everyone])
        self.processes = Processes(visible((process, namespace) for process, namespace, _ in everyone))
        self.table = built_in()  # a machine's own is measured under its MPI
        self._left: dict[int, int] = {}

    def split(self, color: int | None, key: int) -> StoreLink | None:
        self._splits += 1
        everyone = self.mpi.allgather((color, key))
        if color is None:
            return None
        ranks = [rank for _, rank in sorted((other, rank) for rank, (shade, other) in enumerate(everyone)
                                            if shade == color)]
        store = PrefixStore(f"split {self._splits} {color}", self._store)
        return StoreLink(store, ranks.index(self.place.rank), len(ranks), self._timeout)

    def left(self) -> Mapping[int, int]:
        for other in {*range(self.place.size)} - {self.place.rank, *self._left}:
            if self.wire.has_come(other, LEFT):
                said = numpy.zeros(1, numpy.int64)
                self.wire.Irecv([said.view(numpy.uint8), "B"], other, LEFT).Test()
                self._left[other] = int(said[0])
        return self._left

    def sender(self, tag: int) -> int | None:
        """Return a rank whose message with `tag` could be received now, None where there is none."""
        return next((rank for rank in range(self.place.size) if self.points.has_come(rank, tag)), None)

    def has_ended(self) -> bool:
        return False

    def free(self) -> None:
        """Nothing to give back: the store is torch's."""


def place(rank: int, hosts: list[str]) -> RankTopology:
    """Return a rank's place, where each rank is on the node of that name.

    >>> place(2, ["a", "b", "a"])
    RankTopology(rank=2, size=3, local_rank=1, local_size=2, nodes=(0, 1, 0))
    """
    order = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
    nodes = tuple(order[host] for host in hosts)
    return RankTopology(rank, len(hosts), nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]), nodes)
