"""A store by which the ranks of one node meet without MPI: keys and bytes, kept by rank 0 and reached by a Unix socket.

Frames are two lengths, a JSON object and bytes; nothing is ever unpickled. The socket has an abstract name, made of the
job's token: no file is left behind, and the kernel says whose process is at the other end. A process of another user,
one without the token, and what is no frame are refused. Only the few small messages by which ranks meet and part go by
it; arrays go through shared memory.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from gpucoll.errors import BackendError, CollectiveTimeout
from gpucoll.version import __version__

LENGTHS = struct.Struct("!II")  # of the JSON and of the bytes that follow
MOST_JSON, MOST_BYTES = 1 << 16, 1 << 31  # a longer frame is none of ours
HELLO = 10.0  # seconds that who connects has to say who it is
ANSWER = 1.0  # seconds after which a look for a key has found nothing: rank 0 may be stopped
LINGER = 300.0  # seconds that rank 0 stays for those who are still there when it ends
NAP = 1e-2


class StoreError(BackendError):
    """The store does not answer, or what came from its other end is nothing of ours."""

    default_code = "GC-STORE"


class KeyStore(Protocol):
    """Keys and bytes that ranks share. `foreign` are the exceptions that it raises."""

    foreign: tuple[type[Exception], ...]

    def set(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`."""

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        """Return what is under `key`, None where nothing is, nor comes within about `wait` seconds."""

    def add(self, key: str, amount: int) -> int:
        """Return the number under `key`, 0 at first, once `amount` is added; `get` has it in digits."""

    def delete(self, key: str) -> None:
        """Forget `key`."""

    def gone(self) -> Collection[int]:
        """Return the ranks that are known to have ended without a word."""


class PrefixedStore:
    """A part of a store, whose keys meet no others'."""

    def __init__(self, prefix: str, store: KeyStore) -> None:
        self._prefix, self._store, self.foreign = prefix + "/", store, store.foreign
        self.gone = store.gone

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        return self._store.get(self._prefix + key, wait)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._prefix + key, amount)

    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + key)


class MemoryStore:
    """The store itself, in the memory of one process.

    >>> store = MemoryStore()
    >>> store.add("came", 2), store.get("came"), store.get("gone")
    (2, b'2', None)
    """

    foreign: tuple[type[Exception], ...] = (StoreError,)

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._gone = set[int]()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: key in self._values, wait)
            return self._values.get(key)

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            number = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(number).encode()
            self._changed.notify_all()
            return number

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def gone(self) -> Collection[int]:
        return frozenset(self._gone)

    def lose(self, rank: int) -> None:
        """Note that a rank has ended without a word."""
        with self._changed:
            self._gone.add(rank)
            self._changed.notify_all()


# ---------------------------------------------------------------- frames


def send_frame(connection: socket.socket, head: dict[str, Any], body: bytes = b"") -> None:
    """Send a JSON object and bytes."""
    text = json.dumps(head).encode()
    connection.sendall(LENGTHS.pack(len(text), len(body)) + text)
    if body:
        connection.sendall(body)


class FrameReader:
    """What comes from a socket, frame by frame; one that came in part is completed later."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._came = bytearray()

    def read(self, most: int = MOST_BYTES) -> tuple[dict[str, Any], bytes]:
        """Return the next frame, of at most so many bytes beside its JSON.

        Raises EOFError at the end, TimeoutError where the socket has a time-out, StoreError for what is no frame.
        """
        self._fill(LENGTHS.size)
        length, count = LENGTHS.unpack_from(self._came)
        if length > MOST_JSON or count > most:
            raise StoreError(f"what came is no frame of gpucoll's store: it would be {length} and {count} bytes long")
        self._fill(LENGTHS.size + length + count)
        text = bytes(self._came[LENGTHS.size:LENGTHS.size + length])
        body = bytes(self._came[LENGTHS.size + length:LENGTHS.size + length + count])
        del self._came[:LENGTHS.size + length + count]
        try:
            head = json.loads(text)
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict):
            raise StoreError(f"what came is no frame of gpucoll's store: {text[:40]!r} is no JSON object")
        return head, body

    def _fill(self, count: int) -> None:
        while len(self._came) < count:
            part = self._connection.recv(min(1 << 20, count - len(self._came)))
            if not part:
                raise EOFError
            self._came += part


def socket_name(token: str) -> str:
    """Return the abstract name under which the ranks with this token meet; it does not give the token away."""
    return "\0gpucoll-" + hashlib.sha256(f"{os.geteuid()} {token}".encode()).hexdigest()[:32]


def _user_of(connection: socket.socket) -> int:
    """Return whose process is at the other end, as the kernel has it."""
    form = struct.Struct("3i")
    _, user, _ = form.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size))
    return int(user)


# ---------------------------------------------------------------- rank 0's side


def serve_all(listener: socket.socket, serve: Callable[[socket.socket], None], name: str) -> None:
    """Let `serve` have each connection in a thread of its own, so named, until the listener is closed."""
    def accept() -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=[connection], name=name, daemon=True).start()

    threading.Thread(target=accept, name=name, daemon=True).start()


class StoreServer(MemoryStore):
    """The store of `size` ranks, which rank 0 keeps and uses itself; each other rank has a thread here."""

    def __init__(self, size: int, token: str) -> None:
        super().__init__()
        self._size, self._token = size, token
        self._here: dict[int, socket.socket] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(socket_name(token))
        except OSError as error:
            self._listener.close()
            raise StoreError(f"init: rank 0 cannot open the place where ranks meet ({error}): another job, or another "
                             "process that says it is rank 0, has the same MASTER_ADDR and MASTER_PORT; give each job "
                             "a port of its own") from error
        self._listener.listen(size)
        serve_all(self._listener, self._serve, "gpucoll store")

    def _serve(self, connection: socket.socket) -> None:
        """Answer one process until it leaves; one that is no rank of this job is told why, and sent away."""
        rank, left = -1, False
        with connection, contextlib.suppress(OSError, EOFError):
            try:
                connection.settimeout(HELLO)
                reader = FrameReader(connection)
                rank = self._greet(connection, *reader.read(0))
                connection.settimeout(None)
                send_frame(connection, {"error": ""})
                while not left:
                    head, body = reader.read()
                    left = head.get("call") == "bye"
                    send_frame(connection, *self._answer(head, body))
            except StoreError as error:
                with contextlib.suppress(OSError):
                    send_frame(connection, {"error": error.args[0]})
        with self._changed:
            if rank >= 0:
                del self._here[rank]
            self._changed.notify_all()
        if rank >= 0 and not left:
            self.lose(rank)

    def _greet(self, connection: socket.socket, head: dict[str, Any], body: bytes) -> int:
        """Return the rank that has connected; raise StoreError for a stranger."""
        rank, size, token = (head.get(name) for name in ("rank", "size", "token"))
        if _user_of(connection) != os.geteuid() or not isinstance(token, str) \
                or not hmac.compare_digest(token.encode(), self._token.encode()):
            raise StoreError("this process does not belong to the job: it has another user or another token")
        if head.get("version") != __version__ or size != self._size:
            raise StoreError(f"rank {rank} says that there are {size} ranks of gpucoll {head.get('version')}, rank 0 "
                             f"that there are {self._size} of {__version__}; start all ranks alike")
        with self._changed:
            if type(rank) is not int or not 0 < rank < self._size or rank in self._here:
                raise StoreError(f"rank {rank!r} is not in 1..{self._size - 1}, or is there already; RANK must be "
                                 "another one in each process, and WORLD_SIZE how many there are")
            self._here[rank] = connection
        return rank

    def _answer(self, head: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        """Do what a rank has asked for; StoreError for what is nothing of ours."""
        call, key, number, wait = (head.get(name) for name in ("call", "key", "number", "wait"))
        answer: dict[str, Any] = {"number": number, "error": ""}
        if call in ("bye", "gone"):
            return {**answer, "ranks": sorted(self.gone())}, b""
        if isinstance(key, str) and call == "set":
            self.set(key, body)
        elif isinstance(key, str) and call == "get" and isinstance(wait, int | float):
            value = self.get(key, max(0.0, min(wait, ANSWER / 2)))
            return {**answer, "found": value is not None}, value or b""
        elif isinstance(key, str) and call == "add" and type(head.get("amount")) is int:
            answer["sum"] = self.add(key, head["amount"])
        elif isinstance(key, str) and call == "delete":
            self.delete(key)
        else:
            raise StoreError(f"what came is no call of gpucoll's store: {str(head)[:80]}")
        return answer, b""

    def close(self, patience: float = LINGER) -> None:
        """Let nobody in any more, once all who are there have left, or after `patience` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not self._here, patience)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread that accepts
        self.drop()

    def drop(self) -> None:
        """Close what this process has open; in a fork's child that is its parent's."""
        self._listener.close()
        for connection in list(self._here.values()):
            connection.close()


# ---------------------------------------------------------------- the other ranks' side


class StoreClient:
    """The store that rank 0 keeps, as another rank reaches it; any thread may call."""

    foreign: tuple[type[Exception], ...] = (StoreError,)

    def __init__(self, rank: int, size: int, token: str, timeout: float) -> None:
        self._timeout, self._numbers = timeout, 0
        self._lock = threading.Lock()
        self._connection = _connected(socket_name(token), timeout)
        self._reader = FrameReader(self._connection)
        try:
            if _user_of(self._connection) != os.geteuid():
                raise StoreError("init: another user's process has taken the place where the ranks of this job meet")
            self._exchange({"rank": rank, "size": size, "token": token, "version": __version__}, b"", timeout)
        except TimeoutError:
            self.drop()
            raise CollectiveTimeout(f"init: rank 0 did not answer within {timeout:g} s", ranks=(0,)) from None
        except BaseException:
            self.drop()
            raise

    def _exchange(self, head: dict[str, Any], body: bytes, patience: float) -> tuple[dict[str, Any], bytes]:
        """Return the answer to a frame; TimeoutError where there is none in time, StoreError for trouble."""
        with self._lock:
            if "call" in head:
                self._numbers += 1
                head["number"] = self._numbers
            deadline = time.monotonic() + patience
            try:
                self._connection.settimeout(self._timeout)
                send_frame(self._connection, head, body)
                while True:
                    self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
                    answer, value = self._reader.read()
                    if answer.get("error") or answer.get("number") == head.get("number"):
                        break  # and not of an earlier call that was not waited for
            except TimeoutError:
                raise
            except (OSError, EOFError) as error:
                raise StoreError("rank 0, which keeps the store of this job, is not to be reached: "
                                 f"{error!r}") from None
        if answer.get("error"):
            raise StoreError(f"init: rank 0 refused this process: {answer['error']}")
        return answer, value

    def _call(self, call: str, key: str, body: bytes = b"", **given: Any) -> dict[str, Any]:
        try:
            return self._exchange({"call": call, "key": key, **given}, body, self._timeout)[0]
        except TimeoutError:
            raise StoreError(f"rank 0, which keeps the store of this job, did not answer within {self._timeout:g} s"
                             ) from None

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        try:
            answer, value = self._exchange({"call": "get", "key": key, "wait": wait}, b"", ANSWER)
        except TimeoutError:
            return None
        return value if answer.get("found") is True else None

    def add(self, key: str, amount: int) -> int:
        total = self._call("add", key, amount=amount).get("sum")
        if type(total) is not int:
            raise StoreError(f"rank 0's store answered with {total!r} where a number was asked for")
        return total

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def gone(self) -> Collection[int]:
        ranks = self._call("gone", "").get("ranks")
        return [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else []

    def close(self, patience: float = 0.0) -> None:
        """Say good-bye."""
        with contextlib.suppress(StoreError, OSError), self._lock:
            self._connection.settimeout(ANSWER)
            send_frame(self._connection, {"call": "bye"})
        self.drop()

    def drop(self) -> None:
        """Close what this process has open."""
        self._connection.close()


def _connected(name: str, timeout: float) -> socket.socket:
    """Return a connection to rank 0, which may not have come yet."""
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(name)
            return connection
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
            connection.close()
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"init: waited {timeout:g} s for rank 0 to come to where ranks meet; has it been "
                                    "started on this host, with the same MASTER_ADDR and MASTER_PORT?", ranks=(0,))
        time.sleep(NAP)


_open: dict[str, StoreServer | StoreClient] = {}  # by token; open as long as the process lives
_patience: list[float] = []  # for those who stay, where a communicator has failed


def open_store(rank: int, size: int, token: str, timeout: float) -> KeyStore:
    """Return the store of a job, which rank 0 keeps; the same again in the same process."""
    if token not in _open:
        _open[token] = StoreClient(rank, size, token, timeout) if rank else StoreServer(size, token)
    return _open[token]


def linger_at_most(seconds: float) -> None:
    """Let rank 0 stay for nobody longer than that when it ends."""
    _patience.append(seconds)


def _at_exit() -> None:
    while _open:
        _open.popitem()[1].close(min([LINGER, *_patience]))


def _after_fork() -> None:
    """In a fork's child: the connections are the parent's, and end with it."""
    while _open:
        _open.popitem()[1].drop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)  # after the communicators' last words, which are registered later
