"""How ranks reach rank 0 by sockets: frames, who may come in, and the store by which ranks of a node meet without MPI.

Frames are two lengths, a JSON object and bytes; nothing is ever unpickled. Both ends of a connection prove that they
know the job's token, and what is no frame is refused. The ranks' watch (`gpucoll.guard.network`) goes by TCP. The
store, keys and bytes that rank 0 keeps, goes by a Unix socket of an abstract name, made of the token: no file is left
behind, and the kernel says whose process is at the other end, so that another user's is refused. Only the few small
messages by which ranks meet and part go by it; arrays go through shared memory.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from gpucoll.errors import BackendError, CollectiveTimeout
from gpucoll.rendezvous import becomes
from gpucoll.version import __version__

LENGTHS = struct.Struct("!II")  # of the JSON and of the bytes that follow
MOST_JSON, MOST_BYTES = 1 << 16, 1 << 31  # a longer frame is none of ours
HELLO = 10.0  # seconds that who connects has to say who it is
ANSWER = 1.0  # seconds after which a look for a key has found nothing: rank 0 may be stopped
LINGER = 300.0  # seconds that rank 0 stays for those who are still there when it ends
NAP = 1e-2

Frame = tuple[dict[str, Any], bytes]


class StoreError(BackendError):
    """The store does not answer, or what came from its other end is nothing of ours."""

    default_code = "GC-STORE"


# ---------------------------------------------------------------- connections


class Connection:
    """A socket, frame by frame; a frame that came in part is completed later."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._came = bytearray()
        self._sending = threading.Lock()

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a JSON object and bytes; any thread may."""
        text = json.dumps(head).encode()
        with self._sending:
            self.socket.sendall(LENGTHS.pack(len(text), len(body)) + text)
            if body:
                self.socket.sendall(body)

    def read(self, most: int = MOST_BYTES) -> Frame:
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
            part = self.socket.recv(min(1 << 20, count - len(self._came)))
            if not part:
                raise EOFError
            self._came += part

    def is_own_users(self) -> bool:
        """Return whether this user's process is at the other end, as the kernel has it; of TCP it does not know."""
        if self.socket.family != socket.AF_UNIX:
            return True
        _, user, _ = struct.unpack("3i", self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(user) == os.geteuid()

    def join(self, rank: int, size: int, token: str) -> dict[str, Any]:
        """Say who this is; return rank 0's welcome. StoreError where either end does not believe the other."""
        if not self.is_own_users():
            raise StoreError("init: another user's process has taken the place where the ranks of this job meet")
        nonce = self.read(0)[0].get("nonce")
        self.send({"rank": rank, "size": size, "version": __version__, "proof": proof(token, nonce, rank)})
        welcome = self.read(0)[0]
        if welcome.get("error"):
            raise StoreError(f"init: rank 0 refused this process: {welcome['error']}")
        if not _same(welcome.get("proof"), proof(token, nonce, 0)):
            raise StoreError("init: what answers in the place of rank 0 does not know the token of this job")
        return welcome


def proof(token: str, nonce: object, who: object) -> str:
    """Return what shows that `who` knows the token, asked by a nonce."""
    return hmac.new(token.encode(), f"{nonce} {who}".encode(), "sha256").hexdigest()


def _same(given: object, right: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(errors="replace"), right.encode())


class Hub:
    """Rank 0's end of all connections; each has a thread, from `serve` on. `gone` are the ranks that broke off.

    `hear` is told what a rank says, in frames with at most so many bytes, and returns what it is answered, or None.
    `lost` is called when a rank is gone.
    """

    def __init__(self, listener: socket.socket, size: int, token: str, hear: Callable[[int, Frame], Frame | None],
                 lost: Callable[[], None] = lambda: None, most: int = 0) -> None:
        self.gone: set[int] = set()
        self._size, self._token, self._listener = size, token, listener
        self._hear, self._lost, self._most = hear, lost, most
        self._here: dict[int, Connection] = {}
        self._changed = threading.Condition()
        listener.listen(size)

    def serve(self) -> None:
        """Let ranks in: `hear` and `lost`, of who has made this hub, may be called from now on, by other threads."""
        threading.Thread(target=self._accept, name="gpucoll hub", daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connected, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[connected], name="gpucoll hub", daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        """Hear one process until it leaves; one that is no rank of this job is told why, and sent away."""
        rank, said_bye = -1, False
        connection = Connection(connected)
        with connected, contextlib.suppress(OSError, EOFError):
            try:
                connected.settimeout(HELLO)
                rank = self._greet(connection)
                connected.settimeout(None)
                while not said_bye:
                    frame = connection.read(self._most)
                    said_bye = "bye" in frame[0]
                    answer = None if said_bye else self._hear(rank, frame)
                    if answer is not None:
                        connection.send(*answer)
            except StoreError as error:
                connection.send({"error": error.args[0]})
        with self._changed:
            is_lost = self._here.pop(rank, None) is not None and not said_bye
            self.gone.update([rank] if is_lost else [])
            self._changed.notify_all()
        if is_lost:
            self._lost()

    def _greet(self, connection: Connection) -> int:
        """Return the rank that has connected; raise StoreError for a stranger."""
        nonce = secrets.token_hex(16)
        connection.send({"nonce": nonce})
        head, _ = connection.read(0)
        rank, size = head.get("rank"), head.get("size")
        if not connection.is_own_users() or not _same(head.get("proof"), proof(self._token, nonce, rank)):
            raise StoreError("this process does not belong to the job: it has another user or another token")
        if head.get("version") != __version__ or size != self._size:
            raise StoreError(f"rank {rank} says that there are {size} ranks of gpucoll {head.get('version')}, rank 0 "
                             f"that there are {self._size} of {__version__}; start all ranks alike")
        with self._changed:
            if type(rank) is not int or not 0 < rank < self._size or rank in self._here:
                raise StoreError(f"rank {rank!r} is not in 1..{self._size - 1}, or is there already; RANK must be "
                                 "another one in each process, and WORLD_SIZE how many there are")
            connection.send({"proof": proof(self._token, nonce, 0), "gone": sorted(self.gone)})
            self._here[rank] = connection
        return rank

    def tell(self, head: dict[str, Any], *, last: bool = False) -> None:
        """Send all who are there a frame, with `last` the last one: what breaks off after it is no death."""
        with self._changed:
            for connection in self._here.values():
                with contextlib.suppress(OSError):
                    connection.send(head)
                    if last:
                        connection.socket.shutdown(socket.SHUT_RDWR)
            if last:
                self._here.clear()

    def close(self, patience: float = 0.0) -> None:
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
            connection.socket.close()


# ---------------------------------------------------------------- keys and bytes


class KeyStore:
    """Keys and bytes that ranks share. `foreign` are the exceptions that it raises."""

    foreign: tuple[type[Exception], ...] = (StoreError,)

    def set(self, key: str, value: bytes) -> None:
        """Keep `value` under `key`."""
        raise NotImplementedError

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        """Return what is under `key`, None where nothing is, nor comes within about `wait` seconds."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        """Forget `key`."""
        raise NotImplementedError

    def gone(self) -> Collection[int]:
        """Return the ranks that are known to have ended without a word."""
        return ()


class MemoryStore(KeyStore):
    """The store itself, in the memory of one process.

    >>> store = MemoryStore()
    >>> store.set("here", b"1")
    >>> store.get("here"), store.get("gone")
    (b'1', None)
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: key in self._values, wait)
            return self._values.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


def socket_name(token: str) -> str:
    """Return the abstract name under which the ranks with this token meet; it does not give the token away."""
    return "\0gpucoll-" + hashlib.sha256(f"{os.geteuid()} {token}".encode()).hexdigest()[:32]


class StoreServer(MemoryStore):
    """The store of `size` ranks, which rank 0 keeps and uses itself."""

    def __init__(self, size: int, token: str) -> None:
        super().__init__()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(socket_name(token))
        except OSError as error:
            listener.close()
            raise StoreError(f"init: rank 0 cannot open the place where ranks meet ({error}): another job, or another "
                             "process that says it is rank 0, has the same MASTER_ADDR and MASTER_PORT; give each job "
                             "a port of its own") from error
        self.hub = Hub(listener, size, token, self._answer, most=MOST_BYTES)
        self.drop = self.hub.drop
        self.hub.serve()

    def _answer(self, rank: int, frame: Frame) -> Frame:
        """Do what a rank has asked for; StoreError for what is nothing of ours."""
        head, value = frame
        answer: dict[str, Any] = {"number": head.get("number"), "gone": sorted(self.gone())}
        match head:
            case {"call": "set", "key": str(key)}:
                self.set(key, value)
            case {"call": "get", "key": str(key), "wait": int() | float() as wait}:
                found = self.get(key, max(0.0, min(wait, ANSWER / 2)))
                return {**answer, "found": found is not None}, found or b""
            case {"call": "delete", "key": str(key)}:
                self.delete(key)
            case _:
                raise StoreError(f"what came is no call of gpucoll's store: {str(head)[:80]}")
        return answer, b""

    def gone(self) -> Collection[int]:
        return frozenset(self.hub.gone)

    def close(self) -> None:
        """Wait for those who are still there, and end."""
        self.hub.close(min(_patience))


class StoreClient(KeyStore):
    """The store that rank 0 keeps, as another rank reaches it; any thread may call."""

    def __init__(self, rank: int, size: int, token: str, timeout: float) -> None:
        self._timeout, self._numbers, self._gone = timeout, 0, list[int]()
        self._lock = threading.Lock()
        self._connection = _connected(socket_name(token), timeout)
        self._connection.socket.settimeout(timeout)
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop)
            try:
                self._connection.join(rank, size, token)
            except TimeoutError:
                raise CollectiveTimeout(f"init: rank 0 did not answer within {timeout:g} s", ranks=(0,)) from None
            except (OSError, EOFError) as error:
                raise _unreachable(error) from None
            undo.pop_all()

    def _call(self, call: str, key: str, body: bytes = b"", patience: float | None = None, **given: Any) -> Frame:
        """Return the answer to a call; StoreError for trouble, and where there is none in time, without `patience`."""
        deadline = time.monotonic() + (self._timeout if patience is None else patience)
        with self._lock:
            self._numbers += 1
            try:
                self._connection.socket.settimeout(self._timeout)
                self._connection.send({"call": call, "key": key, "number": self._numbers, **given}, body)
                while True:
                    self._connection.socket.settimeout(max(1e-3, deadline - time.monotonic()))
                    answer, value = self._connection.read()
                    if answer.get("error"):
                        raise StoreError(f"init: rank 0 refused this process: {answer['error']}")
                    if answer.get("number") == self._numbers:  # and not of an earlier call that was not waited for
                        self._gone = answer.get("gone", [])
                        return answer, value
            except TimeoutError:
                if patience is not None:
                    return {}, b""
                raise StoreError("rank 0, which keeps the store of this job, did not answer within "
                                 f"{self._timeout:g} s") from None
            except (OSError, EOFError) as error:
                raise _unreachable(error) from None

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        answer, value = self._call("get", key, patience=ANSWER, wait=wait)
        return value if answer.get("found") is True else None

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def gone(self) -> Collection[int]:
        """Return those that rank 0 named when it answered last."""
        return self._gone

    def close(self) -> None:
        """Say good-bye."""
        with contextlib.suppress(OSError), self._lock:
            self._connection.socket.settimeout(ANSWER)
            self._connection.send({"bye": True})
        self.drop()

    def drop(self) -> None:
        """Close what this process has open."""
        self._connection.socket.close()


def _unreachable(error: Exception) -> StoreError:
    return StoreError(f"rank 0, which keeps the store of this job, is not to be reached: {error!r}")


def _connected(name: str, timeout: float) -> Connection:
    """Return a connection to rank 0, which may not have come yet."""
    found: list[socket.socket] = []

    def connects() -> bool:
        connected = socket.socket(socket.AF_UNIX)
        try:
            connected.connect(name)
            found.append(connected)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
            connected.close()
        return bool(found)

    if not becomes(connects, timeout, NAP):
        raise CollectiveTimeout(f"init: waited {timeout:g} s for rank 0 to come to where ranks meet; has it been "
                                "started on this host, with the same MASTER_ADDR and MASTER_PORT?", ranks=(0,))
    return Connection(found[0])


_open: dict[str, StoreServer | StoreClient] = {}  # by token; open as long as the process lives
_patience = [LINGER]  # for those who stay: the least counts


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
        _open.popitem()[1].close()


def _after_fork() -> None:
    """In a fork's child: the connections are the parent's, and end with it."""
    while _open:
        _open.popitem()[1].drop()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)  # after the communicators' last words, which are registered later
