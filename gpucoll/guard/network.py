"""Who has died on other hosts, and who waits: a connection of every rank to rank 0.

The kernel closes it however a process ends; rank 0 passes on whose has broken off. Who waits for long tells so, so that
at a deadline those are named that do not. Frames are those of `gpucoll.store`. Both ends show that they know the token,
which MPI has passed on; a stranger is sent away.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
import socket
import struct
import termios
import threading
import time
from typing import Any

from gpucoll.rendezvous import becomes
from gpucoll.store import HELLO, Connection, Frame, Hub, StoreError

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


class Watch:
    """One rank's view of the others; made by all ranks of `mpi` together. `nodes` is the node of each.

    Who cannot reach rank 0 within some seconds is not watched, which is logged.
    """

    def __init__(self, mpi: Any, nodes: tuple[int, ...]) -> None:
        self._rank, self._nodes = mpi.rank, nodes
        self._gone: set[int] = set()
        self._told: dict[int, tuple[int, float]] = {}  # rank 0: in which call a rank waits, and when it said so
        self._heard: dict[int, int] = {}
        self._asked = self._answered = 0
        self._tells = 0.0  # when this rank has told of its wait
        self._lock = threading.Lock()
        self._hub: Hub | None = None
        self._connection: Connection | None = None
        port, token = 0, secrets.token_hex(16)
        if self._rank == 0:
            with contextlib.suppress(OSError):
                listener = socket.create_server(("", 0), backlog=mpi.size)
                port = listener.getsockname()[1]
                self._hub = Hub(listener, mpi.size, token, self._hear, self._tell_gone)
                self._hub.serve()
        where, port, token = mpi.bcast((addresses(), port, token))
        if self._rank and port:
            becomes(lambda: any(self._connects(one, port, mpi.size, token) for one in where), CONNECT, nap=1e-2)
        there = mpi.allgather(self._hub is not None or self._connection is not None)
        if not all(there) and self._rank == 0:
            log.warning("ranks %s cannot reach rank 0 by TCP at %s: that they have died is known on other hosts at the "
                        "deadline only", [rank for rank, came in enumerate(there) if not came], where)

    def _connects(self, address: str, port: int, size: int, token: str) -> bool:
        with contextlib.suppress(OSError, EOFError, StoreError), contextlib.ExitStack() as stack:
            connected = stack.enter_context(socket.create_connection((address, port), CONNECT / 4))
            connected.settimeout(HELLO)
            connection = Connection(connected)
            self._take(connection.join(self._rank, size, token))
            connected.setblocking(False)
            self._connection = connection
            stack.pop_all()
            return True
        return False

    def _hear(self, rank: int, frame: Frame) -> Frame | None:
        """Rank 0: note what a rank says; return what it has asked for."""
        head, _ = frame
        if type(head.get("waits")) is int:
            self._told[rank] = head["waits"], time.monotonic()
        return ({"heard": [*self.heard().items()], "ask": head["ask"]}, b"") if "ask" in head else None

    def heard(self) -> dict[int, int]:
        """Return the ranks that have told rank 0 that they wait, and the numbers of their calls."""
        return {rank: number for rank, (number, when) in list(self._told.items()) if time.monotonic() < when + SILENT}

    def _tell_gone(self) -> None:
        if self._hub is not None:
            self._hub.tell({"gone": sorted(self._hub.gone)})

    def fileno(self) -> int | None:
        """Return what is readable when there is news; None where there is nothing to be read."""
        return self._connection.socket.fileno() if self._connection is not None else None

    def gone(self) -> set[int]:
        """Return the ranks whose processes have ended."""
        if self._hub is not None:
            return set(self._hub.gone)
        if self._connection is not None and self._lock.acquire(blocking=False):  # another thread may be at it
            try:
                while self._connection is not None:
                    self._take(self._connection.read(0)[0])
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
        if time.monotonic() > self._tells + TELL:
            self._tells = time.monotonic()
            self._send({"waits": number})

    def _send(self, head: dict[str, Any]) -> None:
        if self._hub is not None:
            self._hear(0, (head, b""))
        elif self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(head)

    def silent(self, number: int) -> set[int] | None:
        """Return the ranks that do not wait in call `number` or a later one, but for this one; None where nobody knows.

        Where rank 0 does not say, it is it that is silent, or where nothing reaches its host, all that are there.
        """
        everyone = {*range(len(self._nodes))} - {self._rank}
        if self._hub is None and self._connection is None:
            return None
        heard = self.heard() if self._hub is not None else self._ask()
        if heard is not None:
            return everyone - {rank for rank, its in heard.items() if its >= number}
        if self._connection is not None and _unacknowledged(self._connection.socket):
            return {rank for rank in everyone if self._nodes[rank] == self._nodes[0]}
        return {0}

    def _ask(self) -> dict[int, int] | None:
        self._asked += 1
        self._send({"ask": self._asked})
        becomes(self._is_answered, ANSWER, nap=1e-3)
        return self._heard if self._answered >= self._asked else None

    def _is_answered(self) -> bool:
        """Return whether rank 0 has answered, or is gone."""
        self.gone()
        return self._connection is None or self._answered >= self._asked

    def close(self) -> None:
        """Leave: what breaks off now is no death."""
        if self._hub is not None:
            self._hub.tell({"bye": True}, last=True)
            self._hub.close()
        self._send({"bye": True})
        self.drop()

    def drop(self) -> None:
        """Close what is open, without a word: in a fork's child it is its parent's."""
        hub, connection, self._hub, self._connection = self._hub, self._connection, None, None
        if hub is not None:
            hub.drop()
        if connection is not None:
            connection.socket.close()


def _unacknowledged(connection: socket.socket) -> bool:
    """Return whether the other host has not taken what was sent: a stopped process' host does."""
    waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return bool(struct.unpack("i", waiting)[0])
