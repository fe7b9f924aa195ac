"""What ranks tell each other without MPI: objects and messages by a store, messages between threads by memory.

By a store go the few small messages by which ranks meet and part, as JSON and bytes. Requests are tested as
mpi4py's are.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.errors import CollectiveTimeout, RankFailedError
from gpucoll.progress.operations import Seen
from gpucoll.transport.connections import StoreError
from gpucoll.transport.kvstore import KeyStore
from gpucoll.transport.tags import Tag

WAIT = 0.05  # seconds of one look for what another rank has still to tell
MARKS: dict[str, Callable[[Any], Any]] = {"bytes": bytes.fromhex, "tuple": tuple, "dict": dict}  # of what JSON has not


def encode(value: Any) -> bytes:
    """Return a value as JSON: numbers, strings, None and lists, and marked as such bytes, tuples and dicts.

    >>> decode(encode([1, ("a", b"b"), {"c": None}]))
    [1, ('a', b'b'), {'c': None}]
    """
    return json.dumps(_marked(value)).encode()


def decode(text: bytes) -> Any:
    """Return what was encoded; StoreError for anything else, of which nothing is run."""
    try:  # not Python's literals, which CPython 3.11 parses in one state for all threads
        return json.loads(text, object_hook=_unmarked)
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"another rank told {text[:40]!r}, which is nothing of ours: {error}") from None


def _marked(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {"dict": [[_marked(one) for one in item] for item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_marked(one) for one in value]
        return items if isinstance(value, list) else {"tuple": items}
    return value


def _unmarked(given: dict[str, Any]) -> Any:
    (mark, value), = given.items()
    if mark not in MARKS:
        raise ValueError(f"{mark!r} is no mark")
    return MARKS[mark](value)


class StoreRanks:
    """What mpi4py's communicators have for Python objects, over the keys of a store that begin with `name`.

    All its calls are collective.
    """

    def __init__(self, store: KeyStore, name: str, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._name, self._timeout = store, name, timeout
        self._calls = 0

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order.

        Raises CollectiveTimeout, and RankFailedError for a rank that is gone.
        """
        before, self._calls = self._key(self.rank), self._calls + 1
        self._store.set(self._key(self.rank), encode(value))
        deadline, came = time.monotonic() + self._timeout, list[Any]()
        while (rank := len(came)) < self.size:
            text = self._store.get(self._key(rank), WAIT)
            if text is not None:
                came.append(decode(text))
            elif rank in self._store.gone():
                raise RankFailedError(f"rank {rank} has ended before all ranks had met", ranks=(rank,))
            elif time.monotonic() > deadline:
                late = tuple(one for one in range(rank, self.size) if self._store.get(self._key(one)) is None)
                raise CollectiveTimeout(f"waited {self._timeout:g} s for ranks {', '.join(map(str, late))} of "
                                        f"{self.size} to meet the others; has each been started, with the same "
                                        "WORLD_SIZE?", ranks=late)
        self._store.delete(before)  # all have come here, and so have read that
        return came

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's `value`."""
        return self.allgather(value if self.rank == root else None)[root]

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._calls}/{rank}"


class StoreMessages:
    """Messages as mpi4py sends them, each of which is a key of the store, with `name`, until it is received."""

    def __init__(self, store: KeyStore, name: str, rank: int) -> None:
        self._store, self._name, self._rank = store, name, rank
        # By the other rank and the tag. A message to this rank itself is counted once as sent and once as received.
        self._sent: collections.Counter[tuple[int, int]] = collections.Counter()
        self._received: collections.Counter[tuple[int, int]] = collections.Counter()

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> StoredMessage:
        """Send ``[array, "B"]`` of a dtype of that code to rank `dest`."""
        key = self._key(self._rank, dest, tag, self._sent[dest, tag])
        self._sent[dest, tag] += 1
        self._store.set(key, bytes([dtype]) + buffer[0].tobytes())
        if tag == Tag.ABORT:
            self._store.set(f"{self._name}/aborted", b"")
        return StoredMessage(None, key, numpy.empty(0, numpy.uint8))

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> StoredMessage:
        """Begin to receive from rank `source` into ``[array, "B"]``, C-ordered, of a dtype of that code."""
        key = self._key(source, self._rank, tag, self._received[source, tag])
        self._received[source, tag] += 1
        return StoredMessage(self._store, key, buffer[0].reshape(-1).view(numpy.uint8), dtype)

    def length(self, source: int, tag: int) -> int | None:
        """Return the bytes of the message from `source` that could be received now, None where there is none."""
        found = self._store.get(self._key(source, self._rank, tag, self._received[source, tag]))
        return None if found is None else len(found) - 1

    def any_aborted(self) -> bool:
        """Return whether a message has told that its rank goes no further."""
        return self._store.get(f"{self._name}/aborted") is not None

    def _key(self, source: int, dest: int, tag: int, number: int) -> str:
        return f"{self._name}/{source} {dest} {tag} {number}"


class StoredMessage:
    """One message under way. `length` are the bytes that came, None until they have; without a store it was sent.

    `came` is the code of their dtype, the first byte of what is stored. Of another dtype nothing is written.
    """

    def __init__(self, store: KeyStore | None, key: str, row: Any, dtype: int = 0) -> None:
        self._store, self._key, self._row, self._length = store, key, row, 0 if store is None else None
        self._dtype, self.came = dtype, 0

    @property
    def length(self) -> int | None:
        if self._length is None and self._store is not None:
            value = self._store.get(self._key)
            if value is not None:
                self._store.delete(self._key)
                self.came, came = value[0], numpy.frombuffer(value, numpy.uint8, offset=1)
                count = min(len(came), len(self._row)) if _alike(self.came, self._dtype) else 0
                numpy.copyto(self._row[:count], came[:count])
                self._length = len(came)
        return self._length

    def Test(self, status: Any = None) -> bool:
        """Return whether it has ended."""
        return self.length is not None

    def Cancel(self) -> None:
        """Receive it no more."""
        self._length = 0


def _alike(came: int, wanted: int) -> bool:
    """Return whether a message of one dtype may be received as another one; 0 is any."""
    return came == wanted or 0 in (came, wanted)


class _Message:
    """One end of a message that waits for the other; also the request that its owner tests."""

    def __init__(self, row: numpy.ndarray[Any, Any], dtype: int) -> None:
        self.row, self.dtype = row, dtype
        self.came = 0  # the dtype of what came
        self.number = 0  # counted from the first that had to wait
        self.length: int | None = None  # of what came, once it has

    def Test(self, status: Any = None) -> bool:
        """Return whether the message has been copied; as mpi4py's requests do."""
        return self.length is not None

    def Cancel(self) -> None:
        """Let go of the memory: what comes later goes nowhere."""
        self.row = self.row[:0].copy()


class Mail:
    """The messages under way between the threads: the k-th send from a to b with a tag meets the k-th receive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted = 0
        self._waiting: dict[Any, collections.deque[_Message]] = {}

    def post(self, mine: _Message, key: tuple[int, int, int], *, sends: bool) -> _Message:
        """Return `mine`: copied if the other end waits already, as much as both have room for; else it waits."""
        with self._lock:
            others = self._waiting.get((key, not sends))
            if others is None:
                self._posted += 1
                mine.number = self._posted
                self._waiting.setdefault((key, sends), collections.deque()).append(mine)
                return mine
            other = others.popleft()
            if not others:
                del self._waiting[key, not sends]
        sent, received = (mine, other) if sends else (other, mine)
        count = min(len(sent.row), len(received.row)) if _alike(sent.dtype, received.dtype) else 0
        numpy.copyto(received.row[:count], sent.row[:count])
        received.came = sent.dtype
        received.length = sent.length = len(sent.row)  # which tells each whether that was all
        return mine

    def seen(self, source: int | None, target: int, tag: int | None) -> Seen | None:
        """Return the first message to `target` that waits, from anybody and with any tag where they are None."""
        with self._lock:
            found = [(messages[0].number, key, len(messages[0].row))
                     for (key, sends), messages in self._waiting.items() if sends and key[1] == target
                     and source in (None, key[0]) and tag in (None, key[2])]
        if not found:
            return None
        _, (sender, _, its_tag), nbytes = min(found)
        return Seen(sender, its_tag, nbytes)


class ThreadMessages:
    """One rank's side of the mail, with the two calls of mpi4py's communicators that executors use."""

    def __init__(self, rank: int, mail: Mail) -> None:
        self._rank, self._mail = rank, mail

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> _Message:
        """Begin to send ``[bytes, "B"]`` of a dtype of that code to rank `dest`."""
        return self._mail.post(_Message(buffer[0], dtype), (self._rank, dest, tag), sends=True)

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> _Message:
        """Begin to receive from rank `source` into ``[bytes, "B"]`` of a dtype of that code."""
        return self._mail.post(_Message(buffer[0], dtype), (source, self._rank, tag), sends=False)
