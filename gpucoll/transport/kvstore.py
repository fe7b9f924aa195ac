"""The store by which ranks of a node meet without MPI: keys and bytes that rank 0 keeps.

The others reach it by a Unix socket of an abstract name, made of the job's token: no file is left behind, and the
kernel says whose process is at the other end, so that another user's is refused. How a connection begins, and what goes
by it, is in `gpucoll.transport.connections`. Only the few small messages by which ranks meet and part go by the store;
arrays go through shared memory.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import socket
import threading
import time
from collections.abc import Collection
from typing import Any

from gpucoll.errors import CollectiveTimeout
from gpucoll.transport.connections import MOST_BYTES, NAP, Connection, Frame, Hub, StoreError, refused
from gpucoll.transport.rendezvous import becomes

ANSWER = 1.0  # seconds after which a look for a key has found nothing: rank 0 may be stopped
LINGER = 300.0  # seconds that rank 0 stays for those who are still there when it ends



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
        self.hub = Hub(size, token, self._answer, most=MOST_BYTES)
        self.drop = self.hub.drop
        self.hub.serve(listener)

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
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop)
            try:
                self._connection.join(rank, size, token, timeout)
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
                    answer, value = self._connection.read(deadline=deadline)
                    if "error" in answer:
                        raise refused(answer)
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
        connected.settimeout(timeout)  # without one it would wait for ever where as many wait already as may
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
