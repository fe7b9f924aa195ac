"""Who has died on other hosts, and who waits: a connection of every rank to rank 0.

The kernel closes it however a process ends; rank 0 passes on whose has broken off. Who waits for long tells so, so that
at a deadline those are named that do not. Frames are those of `gpucoll.store`. Both ends show that they know the token,
which MPI has passed on; a stranger is sent away.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import logging
import secrets
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable
from typing import Any

from gpucoll.store import HELLO, FrameReader, StoreError, send_frame, serve_all

CONNECT = 2.0  # seconds in which a connection must be made
TELL = 0.5  # seconds of a wait after which one tells of it, and between two times
ANSWER = 0.5  # seconds that rank 0 has to say who waits
SILENT = 4 * TELL  # seconds after which who has told of a wait is no longer believed to
SIOCGIFADDR = 0x8915  # the address of a network interface, of Linux

log = logging.getLogger("gpucoll")


def addresses() -> list[str]:
    """Return this host's IPv4 addresses, those that only it can reach last."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return sorted(found, key=lambda address: address.startswith("127."))


def _proof(token: bytes, nonce: str, who: int) -> str:
    return hmac.new(token, f"{nonce} {who}".encode(), "sha256").hexdigest()


class Hub:
    """Rank 0's end of all connections; each has a thread. `gone` are the ranks whose connections broke off."""

    def __init__(self, size: int, token: bytes) -> None:
        self.gone: set[int] = set()
        self._size, self._token = size, token
        self._heard: dict[int, tuple[int, float]] = {}  # by rank: the number of the call it waits in, and when it said
        self._here: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("", 0), backlog=size)
        self.port = self._listener.getsockname()[1]
        serve_all(self._listener, self._serve, "gpucoll watch")

    def _serve(self, connection: socket.socket) -> None:
        """Hear one rank until it leaves; tell the others where its connection breaks off."""
        with connection:
            rank, said_bye = -1, False
            with contextlib.suppress(OSError, EOFError, StoreError):
                connection.settimeout(HELLO)
                reader, nonce = FrameReader(connection), secrets.token_hex(16)
                send_frame(connection, {"nonce": nonce})
                rank = self._greet(connection, nonce, reader.read(0)[0])
                connection.settimeout(None)
                while not said_bye:
                    said_bye = self._hear(rank, reader.read(0)[0])
            with self._lock:
                if rank >= 0 and self._here.pop(rank, None) is not None and not said_bye:
                    self.gone.add(rank)
                    for other in self._here.values():
                        with contextlib.suppress(OSError):
                            send_frame(other, {"gone": sorted(self.gone)})

    def _greet(self, connection: socket.socket, nonce: str, head: dict[str, Any]) -> int:
        rank, proof = head.get("rank"), head.get("proof")
        with self._lock:
            if type(rank) is not int or not 0 < rank < self._size or rank in self._here \
                    or not isinstance(proof, str) or not proof.isascii() \
                    or not hmac.compare_digest(proof, _proof(self._token, nonce, rank)):
                raise StoreError("no rank of this job")
            send_frame(connection, {"proof": _proof(self._token, nonce, 0), "gone": sorted(self.gone)})
            self._here[rank] = connection
        return rank

    def _hear(self, rank: int, head: dict[str, Any]) -> bool:
        """Note what a rank says, or answer it; return whether that was its last word."""
        if type(head.get("waits")) is int:
            self.note(rank, head["waits"])
        if "ask" in head:
            with self._lock:
                send_frame(self._here[rank], {"heard": [*self.heard().items()], "ask": head["ask"]})
        return "bye" in head

    def note(self, rank: int, number: int) -> None:
        """Note that a rank waits in its call of that number."""
        self._heard[rank] = number, time.monotonic()

    def heard(self) -> dict[int, int]:
        """Return the ranks that wait, and the numbers of their calls."""
        return {rank: number for rank, (number, when) in list(self._heard.items())
                if time.monotonic() < when + SILENT}

    def close(self) -> None:
        """Leave: what breaks off now is no death."""
        with self._lock:
            for connection in self._here.values():
                with contextlib.suppress(OSError):
                    send_frame(connection, {"bye": True})
                    connection.shutdown(socket.SHUT_RDWR)
            self._here.clear()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self.drop()

    def drop(self) -> None:
        """Close what is open; in a fork's child that is its parent's."""
        self._listener.close()
        for connection in self._here.values():
            connection.close()


class Watch:
    """One rank's view of the others; made by all ranks of `mpi` together. `nodes` is the node of each.

    Who cannot reach rank 0 within some seconds is not watched, which is logged.
    """

    def __init__(self, mpi: Any, nodes: tuple[int, ...]) -> None:
        self._rank, self._nodes = mpi.rank, nodes
        self._gone: set[int] = set()
        self._heard: dict[int, int] = {}
        self._asked = self._answered = 0
        self._told = 0.0
        self._lock = threading.Lock()
        self._hub: Hub | None = None
        self._connection: socket.socket | None = None
        token = secrets.token_bytes(16)
        if self._rank == 0:
            with contextlib.suppress(OSError):
                self._hub = Hub(mpi.size, token)
        where, port, token = mpi.bcast((addresses(), self._hub and self._hub.port, token))
        deadline = time.monotonic() + CONNECT
        while port and self._rank and self._connection is None and time.monotonic() < deadline:
            self._connection = next(filter(None, (self._connected(one, port, token) for one in where)), None)
        there = mpi.allgather(self._hub is not None or self._connection is not None)
        if not all(there) and self._rank == 0:
            log.warning("ranks %s cannot reach rank 0 by TCP at %s: that they have died is known on other hosts at the "
                        "deadline only", [rank for rank, came in enumerate(there) if not came], where)

    def _connected(self, address: str, port: int, token: bytes) -> socket.socket | None:
        with contextlib.suppress(OSError, EOFError, StoreError), contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((address, port), CONNECT / 4))
            connection.settimeout(HELLO)
            self._reader = FrameReader(connection)
            nonce = str(self._reader.read(0)[0].get("nonce"))
            send_frame(connection, {"rank": self._rank, "proof": _proof(token, nonce, self._rank)})
            head = self._reader.read(0)[0]
            if head.get("proof") == _proof(token, nonce, 0):
                self._take(head)
                connection.setblocking(False)
                stack.pop_all()
                return connection
        return None

    def fileno(self) -> int | None:
        """Return what is readable when there is news; None where there is nothing to be read."""
        return self._connection.fileno() if self._connection is not None else None

    def gone(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        if self._hub is not None:
            return set(self._hub.gone)
        if self._connection is not None and self._lock.acquire(blocking=False):  # another thread may be at it
            try:
                while self._connection is not None:
                    self._take(self._reader.read(0)[0])
            except BlockingIOError:
                pass
            except (OSError, EOFError, StoreError):
                self._gone.add(0)
                self.drop()
            finally:
                self._lock.release()
        return set(self._gone)

    def _take(self, head: dict[str, Any]) -> None:
        self._gone.update(head.get("gone", ()))
        if "heard" in head:
            self._heard, self._answered = dict(head["heard"]), head["ask"]
        if "bye" in head:
            self.drop()

    def tell(self, number: int) -> None:
        """Let it be known, now and then, that this rank waits in its call of that number."""
        if time.monotonic() > self._told + TELL:
            self._told = time.monotonic()
            self._send({"waits": number})

    def _send(self, head: dict[str, Any]) -> None:
        if self._hub is not None and "waits" in head:
            self._hub.note(self._rank, head["waits"])
        elif self._connection is not None:
            with contextlib.suppress(OSError):
                send_frame(self._connection, head)

    def silent(self, number: int) -> set[int] | None:
        """Return the ranks that do not wait in call `number` or a later one, but for this one; None where nobody knows.

        Where rank 0 does not say, it is it that is silent, or where nothing reaches its host, all that are there.
        """
        everyone = {*range(len(self._nodes))} - {self._rank}
        if self._hub is None and self._connection is None:
            return None
        heard = self._hub.heard() if self._hub is not None else self._ask()
        if heard is not None:
            return everyone - {rank for rank, its in heard.items() if its >= number}
        if self._connection is not None and _unacknowledged(self._connection):
            return {rank for rank in everyone if self._nodes[rank] == self._nodes[0]}
        return {0}

    def _ask(self) -> dict[int, int] | None:
        self._asked += 1
        self._send({"ask": self._asked})
        deadline = time.monotonic() + ANSWER
        while self._answered < self._asked:
            self.gone()
            if self._connection is None or time.monotonic() > deadline:
                return None
            time.sleep(1e-3)
        return self._heard

    def close(self) -> None:
        """Leave: what breaks off now is no death."""
        if self._hub is not None:
            self._hub.close()
        self._send({"bye": True})
        self.drop()

    def drop(self) -> None:
        """Close what is open, without a word: in a fork's child it is its parent's."""
        close: list[Callable[[], None]] = [one.drop if isinstance(one, Hub) else one.close
                                           for one in (self._hub, self._connection) if one is not None]
        self._hub = self._connection = None
        for each in close:
            each()


def _unacknowledged(connection: socket.socket) -> bool:
    """Return whether the other host has not taken what was sent: a stopped process' host does."""
    waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return bool(struct.unpack("i", waiting)[0])
