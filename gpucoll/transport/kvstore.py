"""The key-value store of ranks that meet without MPI: keys and bytes, held by rank 0.

Ranks of one host connect to a Unix socket with an abstract name, derived from the job's token. No file is left behind,
and the kernel identifies the user at the other end, so other users' processes are refused. Ranks of several hosts
connect to rank 0's address, a host and a TCP port. Greeting and frames are defined in `gpucoll.transport.connections`.
The store carries only small messages, when ranks meet and part. Arrays go through shared memory, and between
hosts by UCX; through the store only where neither serves (docs/guide/launching.md).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from gpucoll.errors import CollectiveTimeout
from gpucoll.progress.deadlines import deadline_of
from gpucoll.transport.applicants import APPLICANTS
from gpucoll.transport.connections import MOST_BYTES, POLL_INTERVAL, Connection, Frame, Hub, StoreError, refused
from gpucoll.transport.rendezvous import becomes

# Seconds for the answer to a request. If rank 0 is stopped, the caller's own deadline and checks for dead ranks must
# still run: a `get` then counts as "no such key", and all other requests as carried out. The store carries them out, in
# order, when rank 0 goes on. Until an answer comes, later requests wait for SILENT seconds only.
ANSWER, SILENT = 1.0, 1e-3
# Seconds for which rank 0, at exit, waits for ranks still connected, because the store ends with rank 0.
LINGER = 300.0


class KeyStore:
    """The interface of a store shared by all ranks. `foreign` lists the exceptions raised by the methods."""

    foreign: tuple[type[Exception], ...] = (StoreError,)
    host = ""  # the name or number of this host in the network of the ranks; "" if all ranks are on this host

    def set(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        """Return the value of `key`, waiting about `wait` seconds (ANSWER / 2 at most over a connection); else None."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError

    def gone(self) -> Collection[int]:
        """Return the ranks known to have ended without a goodbye."""
        return ()


class MemoryStore(KeyStore):
    """A store in the memory of one process, safe for several threads.

    >>> store = MemoryStore()
    >>> store.set("here", b"1")
    >>> store.get("here"), store.get("gone")
    (b'1', None)
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()  # guards `_values`; notified after each `set`, for waiting `get`s

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        with self._changed:
            # The condition releases the lock while waiting: other threads go on to set and get.
            if wait:
                self._changed.wait_for(lambda: key in self._values, wait)
            return self._values.get(key)

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


def socket_name(token: str) -> str:
    """Return the abstract socket name of the job with this token; the name does not reveal the token."""
    # The leading zero byte makes the name abstract. A hash, because every user can list the names of open sockets.
    return "\0gpucoll-" + hashlib.sha256(f"{os.geteuid()} {token}".encode()).hexdigest()[:32]


Address = tuple[str, int]  # a host's name or number, and a TCP port


def listener_at(token: str, address: Address | None) -> socket.socket:
    """Return a socket bound to rank 0's `address`, or without an address to the abstract name of the job."""
    if address is None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(socket_name(token))
        except OSError:
            listener.close()
            raise
        return listener
    try:
        family, *_, found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        # A host may call itself by a loopback address, in its own file of names alone.
        if not str(found[0]).startswith("127.") or address[0] in ("localhost", found[0]):
            return socket.create_server(address, family=family)
    except OSError as error:
        # The other hosts may reach this host by an address that no interface here has, as behind a Kubernetes service,
        # or by a name not yet known here.
        if error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror):
            raise
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", address[1]), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", address[1]))


class StoreServer(MemoryStore):
    """The store of `size` ranks, held and used by rank `own`: rank 0, or after a regrouping any rank."""

    def __init__(self, size: int, token: str, address: Address | None = None, own: int = 0) -> None:
        super().__init__()
        try:
            listener = listener_at(token, address)
        except OSError as error:
            where = "of this host" if address is None else f"{address[0]}:{address[1]}"
            why = ": another job, or another process with RANK=0, has the same place; give each job a separate port" \
                if error.errno == errno.EADDRINUSE else ""
            raise StoreError(f"init: rank 0 cannot open its store at {where} ({error}){why}") from error
        self.host = "" if address is None else address[0]
        self.port = 0 if address is None else int(listener.getsockname()[1])
        self.hub = Hub(size, token, self._answer, most=MOST_BYTES, own=own, applicants=APPLICANTS)
        self.drop = self.hub.drop
        # Last: from here on, other threads call `_answer`, which needs `hub`.
        self.hub.serve(listener)

    def _answer(self, rank: int, frame: Frame) -> Frame:
        """Carry out a rank's request and return the answer; StoreError for an unknown request."""
        head, value = frame
        answer: dict[str, Any] = {"number": head.get("number"), "gone": [*self.gone()]}
        match head:
            case {"call": "set", "key": str(key)}:
                self.set(key, value)
            case {"call": "get", "key": str(key), "wait": int() | float() as wait}:
                # Wait for half of the client's patience at most, so that the answer arrives in time.
                found = self.get(key, max(0.0, min(wait, ANSWER / 2)))
                return {**answer, "found": found is not None}, found or b""
            case {"call": "delete", "key": str(key)}:
                self.delete(key)
            case _:
                raise StoreError(f"the data received is not a call of gpucoll's store: {str(head)[:80]}")
        return answer, b""

    def gone(self) -> Collection[int]:
        return tuple(self.hub.gone)

    def close(self) -> None:
        """Wait for the ranks still connected, by the least limit set, and shut the store."""
        late = time.monotonic() + min(_patience)
        while not self.hub.is_left() and time.monotonic() < late:
            for go_on in while_lingering:
                go_on()
        self.hub.close()


class StoreClient(KeyStore):
    """Another rank's access to the store held by rank 0; any thread may call."""

    def __init__(self, rank: int, size: int, token: str, timeout: float, address: Address | None = None, *,
                 is_open: bool = False) -> None:
        self._timeout, self._numbers, self._gone = timeout, 0, list[int]()
        self._is_silent = False  # whether the last request has had no answer yet
        self._lock = threading.Lock()  # held from a request to its answer: one request at a time on the connection
        deadline = time.monotonic() + timeout  # to connect and to be let in
        if is_open and address is not None:
            try:  # once: what refuses a connection now has ended
                self._connection = Connection(socket.create_connection(address, timeout))
            except OSError as error:
                raise _unreachable(error) from None
        else:
            self._connection = _connected(socket_name(token) if address is None else address, timeout)
        # Close the connection if the greeting fails.
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop)
            try:
                self._connection.join(rank, size, token, max(SILENT, deadline - time.monotonic()))
            except TimeoutError:
                raise CollectiveTimeout(f"init: rank 0 did not answer within {timeout:g} s", ranks=(0,)) from None
            except (OSError, EOFError) as error:
                raise _unreachable(error) from None
            undo.pop_all()
        own = "" if address is None else str(self._connection.socket.getsockname()[0])
        self.host = address[0] if address and (own == "::1" or own.startswith("127.")) else own

    def _call(self, call: str, key: str, body: bytes = b"", **given: Any) -> Frame:
        """Send a request to rank 0 and return the answer, empty if none comes within ANSWER seconds.

        A wait around the request ends it earlier. Raises StoreError for a lost connection, or an error answered by
        rank 0.
        """
        deadline = deadline_of(min(ANSWER, self._timeout))
        with self._lock:
            try:
                if self._is_silent:
                    deadline = min(deadline, time.monotonic() + SILENT)
                    if call == "get":  # ask no more before the last answer: many questions would fill the connection
                        self._read(deadline)
                        deadline = deadline_of(min(ANSWER, self._timeout))
                self._numbers += 1
                self._send({"call": call, "key": key, "number": self._numbers, **given}, body)
                return self._read(deadline)
            except TimeoutError:
                self._is_silent = True
                return {}, b""
            except (OSError, EOFError) as error:
                raise _unreachable(error) from None

    def _read(self, deadline: float) -> Frame:
        """Return the answer to the last request. Requests that ran out of patience may be answered before."""
        while True:
            answer, value = self._connection.read(deadline=deadline)
            if "error" in answer:
                raise refused(answer)
            if answer.get("number") == self._numbers:
                self._gone, self._is_silent = answer.get("gone", []), False
                return answer, value

    def _send(self, head: dict[str, Any], body: bytes) -> None:
        """Send a frame, by the deadline of the wait: a stopped rank 0 receives no more than the system keeps."""
        self._connection.socket.settimeout(max(SILENT, deadline_of(self._timeout) - time.monotonic()))
        try:
            self._connection.send(head, body)
        except TimeoutError:
            self._connection.hang_up()  # part of the frame may have left: nothing can follow it
            raise EOFError("a request did not leave this process by the deadline") from None

    def set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        answer, value = self._call("get", key, wait=wait)
        return value if answer.get("found") is True else None

    def delete(self, key: str) -> None:
        self._call("delete", key)

    def gone(self) -> Collection[int]:
        """Return the ranks named as gone in rank 0's last answer; asks nothing."""
        return self._gone

    def close(self) -> None:
        """Say goodbye, so that rank 0 does not count this rank as gone, and close the connection."""
        # A short timeout: a stopped rank 0 must not delay the end of this process.
        with contextlib.suppress(OSError), self._lock:
            self._connection.socket.settimeout(ANSWER)
            self._connection.send({"bye": True})
        self.drop()

    def hang_up(self) -> None:
        """End the connection without a goodbye; a request under way on another thread then fails."""
        self._connection.hang_up()
        with self._lock:
            self.drop()

    def drop(self) -> None:
        """Close the socket without a goodbye."""
        self._connection.socket.close()


def _unreachable(error: Exception) -> StoreError:
    return StoreError(f"the store of this job, on rank 0, cannot be reached: {error!r}")


def _connected(place: str | Address, timeout: float) -> Connection:
    """Return a connection to rank 0, trying until rank 0 has opened the store; CollectiveTimeout at the deadline."""
    found: list[socket.socket] = []
    reason, deadline = "", time.monotonic() + timeout

    def left() -> float:
        return max(POLL_INTERVAL, deadline - time.monotonic())

    def connects() -> bool:
        nonlocal reason
        try:
            if isinstance(place, tuple):
                # A host may be unknown, or out of reach, until the job's network is complete.
                connected = socket.create_connection(place, left())
                # The system may have chosen rank 0's port for this end: the socket is then connected to itself.
                if connected.getsockname() != connected.getpeername():
                    found.append(connected)
                    return True
                connected.close()
                return False
        except OSError as error:
            reason = f" ({error})"
            return False
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(left())  # `connect` would block for ever if the listener's queue stays full
        try:
            connected.connect(place)
            found.append(connected)
        except (ConnectionRefusedError, FileNotFoundError, BlockingIOError):
            connected.close()
        return bool(found)

    # Poll: a socket of an abstract name gives no notice of its creation.
    if not becomes(connects, timeout, POLL_INTERVAL):
        where = "on this host" if isinstance(place, str) else f"at {place[0]}:{place[1]}{reason}"
        raise CollectiveTimeout(f"init: waited {timeout:g} s for the store of rank 0; was rank 0 "
                                f"started {where}, with the same MASTER_ADDR and MASTER_PORT? For ranks of several "
                                "hosts MASTER_ADDR is an address that all reach, not localhost", ranks=(0,))
    return Connection(found[0])


# By token and address; open as long as the process lives.
_open: dict[tuple[str, Address | None], StoreServer | StoreClient] = {}
while_lingering: list[Callable[[], None]] = []  # called while rank 0 waits at exit
_patience = [LINGER]  # limits on rank 0's wait at exit; the least counts


def open_store(rank: int, size: int, token: str, timeout: float, address: Address | None = None) -> KeyStore:
    """Return the store of the job with this token, opened at the first call in this process.

    `address` is where rank 0 listens for ranks of several hosts; None: on this host.
    """
    key = token, address
    if key not in _open:
        _open[key] = StoreClient(rank, size, token, timeout, address) if rank else StoreServer(size, token, address)
    return _open[key]


def host_store(rank: int, size: int, token: str, host: str) -> tuple[StoreServer, Address]:
    """Open a store at a free port of this host, named `host`, on rank `rank`; return the store and the address."""
    store = StoreServer(size, token, (host, 0), own=rank)
    _open[token, (host, store.port)] = store
    return store, (host, store.port)


def reach_store(rank: int, size: int, token: str, timeout: float, address: Address) -> StoreClient:
    """Return the store opened by `host_store` at `address` on another rank; `rank` is this process'.

    Raises StoreError if the other rank has ended.
    """
    store = _open[token, address] = StoreClient(rank, size, token, timeout, address, is_open=True)
    return store


def abandon(store: KeyStore) -> None:
    """End a store opened by `host_store` or `reach_store`: the other ranks count this rank as gone, or lose the store.

    So no rank goes on in a group that this rank has given up.
    """
    for place in [place for place, one in _open.items() if one is store]:
        del _open[place]
    if isinstance(store, StoreServer):
        store.hub.close()
    elif isinstance(store, StoreClient):
        store.hang_up()


def linger_at_most(seconds: float) -> None:
    """Limit the wait of rank 0, at exit, for ranks still connected."""
    _patience.append(seconds)


def close_stores() -> None:
    """Close all stores of this process; rank 0 waits for the ranks still connected, see `linger_at_most`."""
    while _open:
        _open.popitem()[1].close()


def _after_fork() -> None:
    """Close the sockets in the child of a fork: the connections must end with the parent."""
    while _open:
        _open.popitem()[1].drop()


os.register_at_fork(after_in_child=_after_fork)
# Runs after the communicators' last messages: exit handlers run in reverse order, and theirs is registered later.
atexit.register(close_stores)
