"""The key-value store of ranks that meet without MPI: keys and bytes, held by one rank, at first rank 0.

Ranks of one host connect to a Unix socket with an abstract name, derived from the job's token. No file is left behind,
and the kernel identifies the user at the other end, so other users' processes are refused. Ranks of several hosts
connect to rank 0's address, a host and a TCP port. Greeting and frames are defined in `gpucoll.transport.connections`.
The store carries only small messages, when ranks meet and part. Arrays go through shared memory, and between
hosts by UCX; through the store only where neither serves (docs/guide/launching.md).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, TypeAlias

from gpucoll.errors import CollectiveTimeout
from gpucoll.progress.waits import deadline_of
from gpucoll.transport.connections import (
    CHANGED,
    GREETING_TIME,
    RETRY_INTERVAL,
    Address,
    Connection,
    Frame,
    Hub,
    Name,
    StoreError,
    connect,
)
from gpucoll.transport.process import PROCESS
from gpucoll.version import __version__

# Seconds for the answer to a request. If rank 0 is stopped, the caller's own deadline and checks for dead ranks must
# still run: a `get` then counts as "no such key", and all other requests as carried out. The store carries them out, in
# order, when rank 0 goes on. Until an answer comes, later requests wait for UNANSWERED_TIMEOUT seconds only.
REQUEST_TIMEOUT, UNANSWERED_TIMEOUT = 1.0, 1e-3
# Seconds for which rank 0, at exit, waits for ranks still connected, because the store ends with rank 0.
STORE_LINGER = 300.0
HAS_LEFT = {"left": True}  # told to applicants of a communicator that this process has left


class KeyStore:
    """The interface of a store shared by all ranks. `foreign` lists the exceptions raised by the methods."""

    foreign: tuple[type[Exception], ...] = (StoreError,)
    gone: Any = ()  # a collection of the ranks known to have ended without a goodbye
    host = ""  # the name or number of this host in the network of the ranks; "" if all ranks are on this host
    own = 0  # the number of the rank that holds the store, among all its ranks
    is_lost = False  # whether the other end of a connection to the store has ended, or this one
    worlds = 0  # the groups of all ranks of the store that this process has made: each needs its own keys

    def set(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        """Return the value of `key`, or None; wait `wait` seconds, over a connection at most REQUEST_TIMEOUT / 2."""
        raise NotImplementedError

    def delete(self, key: str) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        """End this access: the other ranks count this rank as gone, or lose the store."""


class MemoryStore(KeyStore):
    """A store in the memory of one process, safe for several threads.

    >>> store = MemoryStore()
    >>> store.set("here", b"1")
    >>> store.get("here"), store.get("gone")
    (b'1', None)
    """

    def __init__(self) -> None:
        self._values: dict[str, tuple[bytes, float]] = {}  # by key: the value, and when it was set
        self._changed = threading.Condition()  # guards `_values`; notified after each `set`, for waiting `get`s

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value, time.monotonic()
            self._changed.notify_all()

    def get(self, key: str, wait: float = 0.0) -> bytes | None:
        with self._changed:
            # The condition releases the lock while waiting: other threads go on to set and get.
            if wait:
                self._changed.wait_for(lambda: key in self._values, wait)
            return self._values.get(key, (None,))[0]

    def ages(self, prefix: str, patience: float = 0.0) -> dict[str, tuple[str, float]] | None:
        """Return the values of the keys that begin with `prefix`, as text, and the seconds since each was set.

        None without an answer in `patience` seconds.
        """
        with self._changed:
            return {key: (value.decode("latin-1"), time.monotonic() - since)
                    for key, (value, since) in self._values.items() if key.startswith(prefix)}

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)


def socket_name(token: str) -> str:
    """Return the abstract socket name of the job with this token; the name does not reveal the token."""
    # The leading zero byte makes the name abstract. A hash, because every user can list the names of open sockets.
    return "\0gpucoll-" + hashlib.sha256(f"{os.geteuid()} {token}".encode()).hexdigest()[:32]


def listener_at(token: str, address: Address | None, *, exact: bool = False) -> socket.socket:
    """Return a socket bound to rank 0's `address`, or without an address to the abstract name of the job.

    Where this host has no such address, the socket is bound to all addresses; or with `exact`, OSError.
    """
    if address is None:
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(socket_name(token))
            undo.pop_all()
        return listener
    try:
        family, *_, found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        # A host may call itself by a loopback address, in its own file of names alone.
        if not str(found[0]).startswith("127.") or address[0] in ("localhost", found[0]):
            return socket.create_server(address, family=family)
        error = OSError(errno.EADDRNOTAVAIL, "an address for this host alone")
    except OSError as raised:
        error = raised
    # The other hosts may reach this host by an address that no interface here has, as behind a Kubernetes service, or
    # by a name not yet known here.
    if exact or (error.errno != errno.EADDRNOTAVAIL and not isinstance(error, socket.gaierror)):
        raise error
    has_both = socket.has_dualstack_ipv6()
    return socket.create_server(("", address[1]), dualstack_ipv6=has_both,
                                family=socket.AF_INET6 if has_both else socket.AF_INET)


class StoreServer(MemoryStore):
    """A store for the processes that prove its `token`: a group of ranks, held and used by rank `own`, or applicants.

    `members` are the connections of those that are there, in the order in which they came; `gone` are those whose
    connections have broken, in this order. With `size` the others are the ranks below; with 0 they have names of their
    own, and of several of one name the last counts. Other threads call the methods.
    """

    hub: Hub | None = None  # where the processes come; None if that is any port of this process
    uses = 0  # the number of this process' communicators whose ranks may come as applicants
    has_left = False  # whether this process has left the last of these communicators

    def __init__(self, size: int = 0, token: str = "", own: int = 0, host: str = "") -> None:
        super().__init__()
        self.size: int = size
        self.token: str = token
        self.own: int = own
        self.host: str = host
        self.members: dict[Name, Connection] = {}
        self.gone: dict[Name, None] = {}

    @classmethod
    def at(cls, address: Address | None, size: int, token: str) -> StoreServer:
        """Return the store of rank 0, open at `address`, or without an address on this host; raises StoreError."""
        try:
            listener = listener_at(token, address)
        except OSError as error:
            where = "of this host" if address is None else f"{address[0]}:{address[1]}"
            why = ": another job, or another process with RANK=0, has the same place; give each job a separate port" \
                if error.errno == errno.EADDRINUSE else ""
            raise StoreError(f"init: rank 0 cannot open its store at {where} ({error}){why}") from error
        store = cls(size, token, host="" if address is None else address[0])
        store.hub = Hub({"": store}, listener, max(size, 1))
        store.hub.serve()
        return store

    def refusal(self, name: Name, greeting: Mapping[str, Any]) -> str:
        """Return why a process with this name cannot come, "" if it can."""
        version, size = greeting.get("version"), greeting.get("size")
        if not self.size:
            return "" if version == __version__ else \
                f"this process has gpucoll {version}, and the ranks have {__version__}"
        if type(name) is not int or name == self.own or not 0 <= name < self.size or name in self.members:
            return f"its rank is not in 1..{self.size - 1}, or is taken; RANK must differ between processes, and " \
                "WORLD_SIZE must be the number of processes"
        return "" if (version, size) == (__version__, self.size) else \
            f"rank {name} counts {size} ranks of gpucoll {version}, rank 0 counts {self.size} of {__version__}; " \
            "start all ranks with the same version and number"

    def take(self, connection: Connection, name: Name) -> None:
        """Make a process a member; one that was a member of another store is gone if it has left that store."""
        with CHANGED:
            # The connection's thread looks under the same lock: the end of a process counts in one store alone.
            before, was = connection.group, connection.name
            connection.group, connection.name = self, name
            self.members.pop(name, None)
            if before is None or before.members.pop(was, None) is connection:
                self.members[name] = connection
            else:
                self.gone[name] = None
            if self.has_left:
                self.notify(name, HAS_LEFT)
            CHANGED.notify_all()

    def notify(self, name: Name, head: dict[str, Any]) -> None:
        """Send an applicant its answer; an applicant that has just left hears nothing."""
        with CHANGED, contextlib.suppress(OSError):
            self.members.pop(name).send(head)

    def leave(self, connection: Connection, *, said_bye: bool) -> None:
        """Forget a connection that has ended. A member is lost if it ends without a goodbye of either end."""
        # Another connection may have taken the place, of an applicant that came again.
        if self.members.get(connection.name) is connection:
            del self.members[connection.name]
            if not said_bye:
                self.gone[connection.name] = None
                self.broadcast({"gone": self.news()})

    def broadcast(self, head: dict[str, Any]) -> None:
        """Send a frame to all ranks, but to those that are stopped in a longer frame; applicants await an answer."""
        with CHANGED:
            # A stopped member may hold up a long answer for any time, and this lock must be free for the others.
            for connection in self.members.values() if self.size else ():
                with contextlib.suppress(OSError):
                    connection.send(head, patience=GREETING_TIME)

    def answer(self, name: Name, frame: Frame) -> Frame:
        """Carry out a request and return the answer; StoreError for an unknown request."""
        head, value = frame
        answer: dict[str, Any] = {"number": head.get("number"), "gone": self.news()}
        match head:
            case {"call": "set", "key": str(key)}:
                self.set(key, value)
            case {"call": "get", "key": str(key), "wait": int() | float() as wait}:
                # Wait for half of the client's patience at most, so that the answer arrives in time.
                found = self.get(key, max(0.0, min(wait, REQUEST_TIMEOUT / 2)))
                return {**answer, "found": found is not None}, found or b""
            case {"call": "delete", "key": str(key)}:
                self.delete(key)
            case {"call": "ages", "key": str(prefix)}:
                return answer, json.dumps(self.ages(prefix)).encode()
            case _:
                raise StoreError(f"the data received is not a call of gpucoll's store: {str(head)[:80]}")
        return answer, b""

    def news(self) -> list[Any]:
        """Return the ranks known to have ended, in the order of their ends; never waits."""
        return list(self.gone)

    def end(self, *last: dict[str, Any]) -> None:
        """Hang up on all members, after the `last` frame; none of them counts as gone."""
        with CHANGED:
            for head in last:
                self.broadcast(head)
            # Under the same lock, before the connections' threads see the end: `leave` then finds no loss.
            for connection in self.members.values():
                connection.hang_up()
            self.members.clear()

    def close(self) -> None:
        """Wait for the ranks still connected, in a job with failures not for long, and shut the store."""
        late = time.monotonic() + min(STORE_LINGER, max(PROCESS.limits, default=STORE_LINGER))
        while not self.is_left() and time.monotonic() < late:
            if PROCESS.ucx is not None and PROCESS.ucx.worker is not None:
                PROCESS.ucx.worker.progress()  # the last messages may not have left
        self.abandon()

    def is_left(self, patience: float = RETRY_INTERVAL) -> bool:
        """Return whether all members leave within `patience` seconds."""
        with CHANGED:
            return CHANGED.wait_for(lambda: not self.members, patience)

    def abandon(self) -> None:
        PROCESS.stores.pop(self, None)
        self.end({"bye": True})  # none of the ranks takes the closed connection for the death of this one
        if self.hub is not None:
            self.hub.close()

    retire = abandon  # where the ranks leave a store that they have for each other alone


class StoreClient(KeyStore):
    """Another rank's access to the store, by its `connection`; any thread may call."""

    def __init__(self, connection: Connection, timeout: float, host: str = "", own: int = 0) -> None:
        self._connection, self._timeout = connection, timeout
        self.own: int = own
        self.gone: Any = []
        self._numbers = 0
        self._is_silent = False  # whether the last request has had no answer yet
        self._lock = threading.Lock()  # held from a request to its answer: one request at a time on the connection
        mine = str(connection.socket.getsockname()[0]) if host else ""
        self.host: str = host if mine == "::1" or mine.startswith("127.") else mine

    @classmethod
    def at(cls, address: Address | None, rank: int, size: int, token: str, timeout: float) -> StoreClient:
        """Return the access of rank `rank` to the store of rank 0, waiting until that is open.

        Raises CollectiveTimeout after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout  # to connect and to be let in
        place, where = (socket_name(token), "on this host") if address is None else (address, "")
        # Poll: a socket of an abstract name gives no notice of its creation. A host may be unknown, or out of reach,
        # until the job's network is complete.
        while (left := deadline - time.monotonic()) > 0:
            try:
                connection = connect(place, max(RETRY_INTERVAL, left))
            except OSError as error:
                where = f"at {address[0]}:{address[1]} ({error})" if address else where
                time.sleep(RETRY_INTERVAL)
                continue
            try:
                connection.join(rank, size, token, max(UNANSWERED_TIMEOUT, deadline - time.monotonic()))
            except TimeoutError:
                raise CollectiveTimeout(f"init: rank 0 did not answer within {timeout:g} s", ranks=(0,)) from None
            except (OSError, EOFError) as error:
                raise _unreachable(error) from None
            return cls(connection, timeout, "" if address is None else address[0])
        raise CollectiveTimeout(f"init: waited {timeout:g} s for the store of rank 0; was rank 0 "
                                f"started {where}, with the same MASTER_ADDR and MASTER_PORT? For ranks of several "
                                "hosts MASTER_ADDR is an address that all reach, not localhost", ranks=(0,))

    def _call(self, call: str, key: str, body: bytes = b"", patience: float = 0.0, **given: Any) -> Frame:
        """Send a request to the store and return the answer, empty if none comes within REQUEST_TIMEOUT seconds.

        A wait around the request ends it earlier, unless `patience` is given instead. Raises StoreError for a lost
        connection, or an error answered by the store.
        """
        deadline = time.monotonic() + patience if patience else deadline_of(min(REQUEST_TIMEOUT, self._timeout))
        with self._lock:
            try:
                if self._is_silent and not patience:
                    deadline = min(deadline, time.monotonic() + UNANSWERED_TIMEOUT)
                    if call == "get":  # ask no more before the last answer: many questions would fill the connection
                        self._read(deadline)
                        deadline = deadline_of(min(REQUEST_TIMEOUT, self._timeout))
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
            answer, value = self._connection.answer(deadline)
            self._take(answer)
            if answer.get("number") == self._numbers:
                return answer, value

    def _take(self, head: dict[str, Any]) -> None:
        self.gone, self.is_lost = head.get("gone", self.gone), "bye" in head
        self._is_silent &= head.get("number") != self._numbers

    def _send(self, head: dict[str, Any], body: bytes) -> None:
        """Send a frame, by the deadline of the wait: a stopped rank 0 receives no more than the system keeps."""
        self._connection.socket.settimeout(max(UNANSWERED_TIMEOUT, deadline_of(self._timeout) - time.monotonic()))
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

    def news(self) -> list[int]:
        """Return the ranks known to have ended, in the order of their ends; never waits."""
        # Without blocking: if another thread has a request under way, that thread reads the news with the answer.
        if not self.is_lost and self._lock.acquire(blocking=False):
            try:
                self._connection.socket.setblocking(False)
                while not self.is_lost:  # read all frames that have arrived
                    self._take(self._connection.read()[0])
            except BlockingIOError:
                pass
            # The connection is broken, or the other end no longer speaks the protocol: its process has ended.
            except (OSError, EOFError, StoreError):
                self.is_lost, self.gone = True, [*self.gone, self.own]
            finally:
                self._lock.release()
        return self.gone

    def ages(self, prefix: str, patience: float) -> dict[str, tuple[str, float]] | None:
        answer, value = self._call("ages", prefix, patience=patience)
        return json.loads(value) if answer else None

    def fileno(self) -> int:
        """Return the descriptor of the connection."""
        return self._connection.socket.fileno()

    def close(self) -> None:
        """Say goodbye, so that the store does not count this rank as gone, and close the connection."""
        self.is_lost: bool = True
        # A short timeout: a stopped rank 0 must not delay the end of this process.
        with contextlib.suppress(OSError), self._lock:
            self._connection.socket.settimeout(REQUEST_TIMEOUT)
            self._connection.send({"bye": True})
        self._connection.socket.close()

    retire = close

    def abandon(self) -> None:
        PROCESS.stores.pop(self, None)
        self._connection.hang_up()  # a request under way on another thread then fails
        with self._lock:
            self._connection.socket.close()


def _unreachable(error: Exception) -> StoreError:
    # Without the number of a rank: in a part of the ranks, and in a later group, the rank with the store has another.
    return StoreError(f"the process with the store of these ranks cannot be reached: {error!r}")


Hosted: TypeAlias = StoreServer | StoreClient  # a store that knows which ranks have ended, and which wait


def open_store(rank: int, size: int, token: str, timeout: float, address: Address | None = None) -> KeyStore:
    """Return the store of the job with this token, opened at the first call in this process.

    `address` is where rank 0 listens for ranks of several hosts; None: on this host.
    """
    key, stores = (token, address), PROCESS.stores
    if key not in stores:
        stores[key] = StoreClient.at(address, rank, size, token, timeout) if rank else \
            StoreServer.at(address, size, token)
    store: KeyStore = stores[key]
    return store


def kept(store: Hosted) -> KeyStore:
    """Return the store of a later group, closed at the end of the process."""
    PROCESS.stores[store] = store
    return store
