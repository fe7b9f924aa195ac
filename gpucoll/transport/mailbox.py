"""Communication without MPI: objects and messages over a store, and messages between threads of one process.

The store carries only small messages, when ranks meet and part, as JSON and bytes. Requests have the methods of
mpi4py's requests. `Mailbox` is the table of unmatched sends and receives between threads.
"""

from __future__ import annotations

import collections
import contextlib
import json
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

import numpy

from gpucoll.errors import CollectiveTimeout, RankFailedError, UsageError
from gpucoll.progress.operations import ProbeResult
from gpucoll.progress.waits import limited
from gpucoll.transport.connections import StoreError
from gpucoll.transport.kvstore import KeyStore
from gpucoll.transport.tags import FAREWELL_BYTES, Tag

# Seconds of one wait for another rank's key: between two waits, `allgather` checks for dead ranks and the deadline.
MAIL_INTERVAL = 0.05
PARTING = 1.0  # seconds to send the message that this rank gives up
BYTES_IN_HEX = "bytes in hex"  # the one key of the object that stands for bytes, a type that JSON lacks


def encode(value: Any) -> bytes:
    """Return a value as JSON text: numbers, strings, None, lists, bytes, and dicts by strings; a tuple becomes a list.

    >>> decode(encode([1, ("a", b"b"), {"c": None}]))
    [1, ['a', b'b'], {'c': None}]
    """
    return json.dumps(value, default=lambda given: {BYTES_IN_HEX: given.hex()}).encode()


def decode(text: bytes) -> Any:
    """Return the value encoded by `encode`; StoreError for any other text, and no code is ever executed."""
    # JSON and not `ast.literal_eval`: CPython 3.11's parser of literals shares state between threads.
    try:
        return json.loads(text, object_hook=lambda given: bytes.fromhex(given[BYTES_IN_HEX])
                          if given.keys() == {BYTES_IN_HEX} else given)
    except (ValueError, TypeError, RecursionError) as error:
        raise StoreError(f"another rank sent {text[:40]!r}, not written by gpucoll: {error}") from None


class StoreRanks:
    """mpi4py's collectives on Python objects, over the keys of a store that begin with `name`.

    `numbers` are the numbers of these ranks among the ranks of the store; None: the same.
    """

    def __init__(self, store: KeyStore, name: str, rank: int, size: int, timeout: float,
                 numbers: Sequence[int] | None = None) -> None:
        self.rank: int = rank
        self.size: int = size
        self.numbers: range | Sequence[int] = range(size) if numbers is None else numbers
        self._store, self._name, self._timeout, self._calls = store, name, timeout, 0

    def allgather(self, value: Any) -> list[Any]:
        """Return every rank's `value`, in rank order.

        Raises CollectiveTimeout naming the late ranks, and RankFailedError for a rank that has ended.
        """
        before, self._calls = self._key(self.rank), self._calls + 1
        deadline, came = time.monotonic() + self._timeout, list[Any]()
        with limited(deadline):
            self._store.set(self._key(self.rank), encode(value))
            self._read(came, deadline)
        if len(came) < self.size:
            late = self.missing()
            raise CollectiveTimeout(f"waited {self._timeout:g} s for ranks {', '.join(map(str, late))} of {self.size} "
                                    "to join the others; was each of them started, with the same WORLD_SIZE?",
                                    ranks=late)
        self._store.delete(before)  # every rank is in this call, and so has read the values of the previous call
        return came

    def _read(self, came: list[Any], deadline: float) -> None:
        """Read rank after rank into `came` until `deadline`."""
        while (rank := len(came)) < self.size and time.monotonic() < deadline:
            text = self._store.get(self._key(rank), MAIL_INTERVAL)
            # A value present is taken even from a rank that has ended since.
            if text is not None:
                came.append(decode(text))
            elif self.numbers[rank] in self._store.gone:
                raise RankFailedError(f"rank {rank} ended before all ranks had joined", ranks=(rank,))

    def missing(self) -> tuple[int, ...]:
        """Return the ranks that have not come to the call under way."""
        return tuple(rank for rank in range(self.size) if self._store.get(self._key(rank)) is None)

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value if self.rank == root else None)[root]

    def _key(self, rank: int) -> str:
        return f"{self._name}/{self._calls}/{rank}"


class StoreMessages:
    """Messages between ranks over a store, with mpi4py's methods.

    Until received, each message is a key of the store that begins with `name`. The key contains sender, receiver, tag
    and a count, so the k-th send with a tag meets the k-th receive, and messages never overtake each other.
    """

    def __init__(self, store: KeyStore, name: str, rank: int, size: int) -> None:
        self._store, self._name, self._rank, self._size = store, name, rank, size
        # Counts by the other rank and the tag. Two counters, because a message of a rank to itself counts in both.
        self._sent: collections.Counter[tuple[int, int]] = collections.Counter()
        self._received: collections.Counter[tuple[int, int]] = collections.Counter()
        self._looking = threading.Lock()  # held by a thread that receives farewells

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> StoredMessage:
        """Send ``[array, "B"]`` with the dtype code `dtype` to rank `dest`; the message is complete on return."""
        key = self._key(self._rank, dest, tag, self._sent[dest, tag])
        self._sent[dest, tag] += 1
        # A rank that gives up waits no longer, not even if the store of a stopped rank takes nothing more.
        with limited(time.monotonic() + PARTING) if tag == Tag.FAREWELL else contextlib.nullcontext():
            self._store.set(key, bytes([dtype]) + buffer[0].tobytes())
            # One key for all farewells, so that a wait polls a single key instead of one per rank.
            if tag == Tag.FAREWELL:
                self._store.set(f"{self._name}/left", b"")
        return StoredMessage(None, key, numpy.empty(0, numpy.uint8))

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> StoredMessage:
        """Begin to receive from rank `source` into ``[array, "B"]``, C-ordered, with the dtype code `dtype`."""
        key = self._key(source, self._rank, tag, self._received[source, tag])
        self._received[source, tag] += 1
        return StoredMessage(self._store, key, buffer[0].reshape(-1).view(numpy.uint8), dtype)

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a message that could be received now, or None; `source` None: of any rank. UsageError without tag."""
        if tag is None:
            raise UsageError("recv: between ranks joined by a store, a message needs a tag", code="GC-WILDCARD")
        for rank in range(self._size) if source is None else [source]:
            found = self._store.get(self._key(rank, self._rank, tag, self._received[rank, tag]))
            if found is not None:
                return ProbeResult(rank, tag, len(found) - 1)
        return None

    def farewells(self, others: Collection[int]) -> dict[int, Any]:
        """Receive the farewells that have arrived from `others`, as rows of bytes."""
        found = dict[int, Any]()
        # This is asked in every wait: one request to the store, and more only after a farewell.
        if self._store.get(f"{self._name}/left") is None:
            return found
        with self._looking:  # of two threads that see a message, one would receive nothing
            for other in others:
                if self.seen(other, Tag.FAREWELL) is not None:
                    found[other] = numpy.zeros(FAREWELL_BYTES, numpy.uint8)
                    self.Irecv([found[other], "B"], other, Tag.FAREWELL).Test()
        return found

    def _key(self, source: int, dest: int, tag: int, number: int) -> str:
        return f"{self._name}/{source} {dest} {tag} {number}"


class StoredMessage:
    """The request of a message over the store: a receive, or without a `store` a completed send.

    `length` is the number of bytes received, None before the message has arrived. `came` is the dtype code of the
    message, stored as its first byte. A message of another dtype than `dtype` is received, but not written to `row`.
    """

    def __init__(self, store: KeyStore | None, key: str, row: Any, dtype: int = 0) -> None:
        self._store, self._key, self._row, self._length = store, key, row, 0 if store is None else None
        self._dtype = dtype
        self.came: int = 0

    @property
    def length(self) -> int | None:
        if self._length is None and self._store is not None:
            # The receive happens here, at the poll that finds the key.
            value = self._store.get(self._key)
            if value is not None:
                self._store.delete(self._key)
                # At most the shorter of message and array is copied; `length` shows the caller a truncated message.
                self.came = value[0]
                came = numpy.frombuffer(value, numpy.uint8, offset=1)
                count = min(len(came), len(self._row)) if are_compatible(self.came, self._dtype) else 0
                numpy.copyto(self._row[:count], came[:count])
                self._length = len(came)
        return self._length

    def Test(self, status: Any = None) -> bool:
        """Return whether the message has been sent or received."""
        return self.length is not None

    def Cancel(self) -> None:
        """Stop receiving: `row` is no longer written."""
        self._length = 0


def are_compatible(came: int, wanted: int) -> bool:
    """Return whether a message with dtype code `came` may be received as dtype code `wanted`; code 0 matches any."""
    return came == wanted or 0 in (came, wanted)


MessageKey: TypeAlias = tuple[int, int, int]  # sender, receiver and tag of a message


class _Message:
    """One end, send or receive, of a message between threads; also the request tested by the owner."""

    came: int = 0  # the dtype code of the received message
    number: int = 0  # the position in the order of all ends that had to wait
    length: int | None = None  # the length in bytes of the sent message, once copied

    def __init__(self, row: numpy.ndarray, dtype: int, key: MessageKey = (0, 0, 0), *, sends: bool = False) -> None:
        self.row: numpy.ndarray = row
        self.dtype: int = dtype
        self.key: MessageKey = key
        self.sends: bool = sends
        self.nbytes: int = len(row)

    def Test(self, status: Any = None) -> bool:
        """Return whether the message has been copied."""
        return self.length is not None

    def Cancel(self) -> None:
        """Release the memory: a message matched later copies nothing."""
        # An empty copy instead of removal from the table: the match with the k-th other end stays right.
        self.row = self.row[:0].copy()


class Mailbox:
    """The table of messages under way between the threads of one process.

    The k-th send from rank a to rank b with a tag meets the k-th receive with this tag. The later of the two ends
    copies the message, once, from the sender's array into the receiver's.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the table; not held while copying
        self._posted = 0
        # Unmatched ends by ((source, destination, tag), is a send), in order; never sends and receives of the same key.
        self._waiting: dict[Any, collections.deque[_Message]] = {}

    def post(self, mine: _Message) -> _Message:
        """Match `mine` with a waiting other end and copy the message, or else let `mine` wait; return `mine`."""
        key, sends = mine.key, mine.sends
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
        # The shorter of both arrays limits the copy; different dtypes copy nothing.
        count = min(len(sent.row), len(received.row)) if are_compatible(sent.dtype, received.dtype) else 0
        numpy.copyto(received.row[:count], sent.row[:count])
        received.came = sent.dtype
        # Set the length last: it completes both requests. The sender's length shows the receiver a truncated message.
        received.length = sent.length = len(sent.row)
        return mine

    def seen(self, source: int | None, target: int, tag: int | None) -> ProbeResult | None:
        """Return the first unmatched message to rank `target`; `source` and `tag` match any message if None."""
        # Search the whole table: probes are rare, and few messages wait at a time.
        with self._lock:
            found = [(messages[0].number, key, len(messages[0].row))
                     for (key, sends), messages in self._waiting.items() if sends and key[1] == target
                     and source in (None, key[0]) and tag in (None, key[2])]
        if not found:
            return None
        _, (sender, _, its_tag), nbytes = min(found)
        return ProbeResult(sender, its_tag, nbytes)


class ThreadMessages:
    """A rank's access to messages between threads, with mpi4py's methods used by executors."""

    def __init__(self, rank: int, mail: Mailbox) -> None:
        self._rank = rank
        self.mail: Mailbox = mail

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> _Message:
        """Begin to send ``[bytes, "B"]`` with the dtype code `dtype` to rank `dest`."""
        return self.mail.post(_Message(buffer[0], dtype, (self._rank, dest, tag), sends=True))

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> _Message:
        """Begin to receive from rank `source` into ``[bytes, "B"]`` with the dtype code `dtype`."""
        return self.mail.post(_Message(buffer[0], dtype, (source, self._rank, tag)))

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return the first unmatched message to this rank; see `Mailbox.seen`."""
        return self.mail.seen(source, self._rank, tag)
