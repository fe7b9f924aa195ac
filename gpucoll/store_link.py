"""What joins ranks that have a store alone: torchrun's, those of ``gpucoll run --standalone``, children of a notebook.

By the store go the few small messages by which ranks meet and part, as JSON and bytes. Inside a node the engine does
all else.
"""

from __future__ import annotations

import base64
import collections
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import numpy

from gpucoll import errors
from gpucoll.bootstrap import RankTopology
from gpucoll.errors import CollectiveTimeout, GpucollError, RankFailedError, UsageError
from gpucoll.executors import ABORTED
from gpucoll.guard.processes import Processes, process_namespace, visible
from gpucoll.store import KeyStore, MemoryStore, PrefixedStore, StoreError, open_store
from gpucoll.tuner import built_in
from gpucoll.work import Seen

WAIT = 0.05  # seconds of one look for what another rank has still to tell
_worlds = itertools.count()  # links of all ranks that this process has made: each has a part of the store of its own


def encode(value: Any) -> bytes:
    """Return a value as JSON: numbers, strings, None, lists, and marked as such tuples, dicts, bytes and errors.

    >>> decode(encode([1, ("a", b"b"), {"c": None}]))
    [1, ('a', b'b'), {'c': None}]
    """
    return json.dumps(_marked(value)).encode()


def decode(text: bytes) -> Any:
    """Return what was encoded; StoreError for anything else."""
    try:
        return _unmarked(json.loads(text))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise StoreError(f"another rank told {text[:40]!r}, which is nothing of ours: {error}") from None


def _marked(value: Any) -> Any:
    if isinstance(value, list):
        return [_marked(one) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_marked(one) for one in value]}
    if isinstance(value, dict):
        return {"dict": {key: _marked(one) for key, one in value.items()}}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, GpucollError):
        public = next(kind.__name__ for kind in type(value).__mro__ if kind.__module__ == errors.__name__)
        return {"error": [public, str(value.args[0]), value.code, [*value.ranks]]}
    if isinstance(value, Exception):
        return {"error": ["BackendError", repr(value), "GC-BACKEND", []]}
    return value


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(one) for one in value]
    if not isinstance(value, dict):
        return value
    (mark, inner), = value.items()
    if mark == "dict":
        return {key: _unmarked(one) for key, one in inner.items()}
    if mark == "bytes":
        return base64.b64decode(inner, validate=True)
    if mark == "error":
        name, message, code, ranks = inner
        kind = getattr(errors, name)
        if not issubclass(kind, GpucollError):
            raise ValueError(f"{name} is no error of ours")
        return kind(message, code=code, ranks=tuple(ranks))
    return {"tuple": tuple}[mark](map(_unmarked, inner))


class StoreRanks:
    """What mpi4py's communicators have for Python objects, over a store. All its calls are collective."""

    def __init__(self, store: KeyStore, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._timeout = store, timeout
        self._calls = 0

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order."""
        self._calls += 1
        self._store.set(f"{self._calls}/{self.rank}", encode(value))
        everyone = self._take()
        self._store.delete(f"{self._calls - 1}/{self.rank}")  # all have come here, and so have read that
        return everyone

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's `value`."""
        return self.allgather(value if self.rank == root else None)[root]

    def Ibarrier(self) -> _Meeting:
        """Return what tells by `Test` whether all ranks have come."""
        self._calls += 1
        return _Meeting(self._store, f"{self._calls}", self.size)

    def _take(self) -> list[Any]:
        """Return what the ranks tell in this call; raise CollectiveTimeout, and RankFailedError for one that is gone.
        """
        deadline, came = time.monotonic() + self._timeout, dict[int, Any]()
        while missing := [rank for rank in range(self.size) if rank not in came]:
            text = self._store.get(f"{self._calls}/{missing[0]}", WAIT)
            if text is not None:
                came[missing[0]] = decode(text)
            elif missing[0] in self._store.gone():
                raise RankFailedError(f"rank {missing[0]} has ended before all ranks had met", ranks=(missing[0],))
            elif time.monotonic() > deadline:
                late = tuple(rank for rank in missing if self._store.get(f"{self._calls}/{rank}") is None)
                raise CollectiveTimeout(f"waited {self._timeout:g} s for ranks {', '.join(map(str, late))} of "
                                        f"{self.size} to meet the others; has each been started, with the same "
                                        "WORLD_SIZE?", ranks=late)
        return [came[rank] for rank in range(self.size)]


class _Meeting:
    def __init__(self, store: KeyStore, key: str, size: int) -> None:
        self._store, self._key, self._size = store, key, size
        store.add(key, 1)

    def Test(self) -> bool:
        return int(self._store.get(self._key, WAIT) or 0) >= self._size


class StoreMessages:
    """Messages as mpi4py sends them, each of which is a key of the store until it is received."""

    def __init__(self, store: KeyStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._counts: collections.Counter[tuple[int, int, int]] = collections.Counter()

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0) -> StoredMessage:
        """Send ``[array, "B"]`` to rank `dest`."""
        key = self._key(self._rank, dest, tag)
        self._counts[self._rank, dest, tag] += 1
        self._store.set(key, buffer[0].tobytes())
        if tag == ABORTED:
            self._store.add("aborted", 1)
        return StoredMessage(None, key, numpy.empty(0, numpy.uint8))

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0) -> StoredMessage:
        """Begin to receive from rank `source` into ``[array, "B"]``, C-ordered."""
        key = self._key(source, self._rank, tag)
        self._counts[source, self._rank, tag] += 1
        return StoredMessage(self._store, key, buffer[0].reshape(-1).view(numpy.uint8))

    def length(self, source: int, tag: int) -> int | None:
        """Return the bytes of the message from `source` that could be received now, None where there is none."""
        found = self._store.get(self._key(source, self._rank, tag))
        return None if found is None else len(found)

    def count_aborted(self) -> int:
        """Return how many messages have told that their ranks go no further."""
        return int(self._store.get("aborted") or 0)

    def _key(self, source: int, dest: int, tag: int) -> str:
        return f"{source} {dest} {tag} {self._counts[source, dest, tag]}"


class StoredMessage:
    """One message under way. `length` are the bytes that came, None until they have; without a store it was sent."""

    def __init__(self, store: KeyStore | None, key: str, row: Any) -> None:
        self._store, self._key, self._row, self._length = store, key, row, 0 if store is None else None

    @property
    def length(self) -> int | None:
        if self._length is None and self._store is not None:
            value = self._store.get(self._key)
            if value is not None:
                self._store.delete(self._key)
                came = numpy.frombuffer(value, numpy.uint8)
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


class StoreLink:
    """Ranks are processes, joined by a store of which no other link has the same part."""

    threads = True
    has_collectives = False

    def __init__(self, store: KeyStore, rank: int, size: int, timeout: float) -> None:
        self._store, self._timeout, self._splits = store, timeout, 0
        self.foreign = store.foreign
        self.mpi: Any = StoreRanks(PrefixedStore("ranks", store), rank, size, timeout)
        self.wire, self.points = (StoreMessages(PrefixedStore(name, store), rank, size) for name in ("wire", "points"))
        everyone = self.mpi.allgather((os.getpid(), process_namespace(), socket.gethostname()))
        self.place = place(rank, [namespace or host for _, namespace, host in everyone])
        self.processes = Processes(visible((process, namespace) for process, namespace, _ in everyone))
        self.table = built_in()  # a machine's own is measured under its MPI
        self._aborted: dict[int, int] = {}
        self._count_aborted = 0

    @classmethod
    def world(cls, rank: int, size: int, token: str, timeout: float) -> StoreLink:
        """Return the link of all ranks that have the same `token`. A collective call."""
        store: KeyStore = open_store(rank, size, token, timeout) if size > 1 else MemoryStore()
        return cls(PrefixedStore(f"world {next(_worlds)}", store), rank, size, timeout)

    def split(self, color: int | None, key: int) -> StoreLink | None:
        self._splits += 1
        everyone = self.mpi.allgather((color, key))
        if color is None:
            return None
        ranks = [rank for _, rank in sorted((other, rank) for rank, (shade, other) in enumerate(everyone)
                                            if shade == color)]
        store = PrefixedStore(f"split {self._splits} {color}", self._store)
        return StoreLink(store, ranks.index(self.place.rank), len(ranks), self._timeout)

    def aborted(self) -> Mapping[int, int]:
        before, self._count_aborted = self._count_aborted, self.wire.count_aborted()  # one look, where nobody has
        if self._count_aborted <= before:
            return self._aborted
        for other in {*range(self.place.size)} - {self.place.rank, *self._aborted}:
            if self.wire.length(other, ABORTED) is not None:
                said = numpy.zeros(1, numpy.int64)
                self.wire.Irecv([said.view(numpy.uint8), "B"], other, ABORTED).Test()
                self._aborted[other] = int(said[0])
        return self._aborted

    def seen(self, source: int | None, tag: int | None) -> Seen | None:
        """Return a message that could be received now, from anybody where `source` is None; or None. A tag is named."""
        if tag is None:
            raise UsageError("recv: ranks that a store joins name the tag of a message", code="GC-WILDCARD")
        ranks = range(self.place.size) if source is None else [source]
        return next((Seen(rank, tag, length) for rank in ranks
                     if (length := self.points.length(rank, tag)) is not None), None)

    def has_ended(self) -> bool:
        return False

    def free(self) -> None:
        """Nothing to give back: the store lasts as long as its process."""


def place(rank: int, hosts: list[str]) -> RankTopology:
    """Return a rank's place, where each rank is on the node of that name.

    >>> place(2, ["a", "b", "a"])
    RankTopology(rank=2, size=3, local_rank=1, local_size=2, nodes=(0, 1, 0))
    """
    order = {host: node for node, host in enumerate(dict.fromkeys(hosts))}
    nodes = tuple(order[host] for host in hosts)
    return RankTopology(rank, len(hosts), nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank]), nodes)
