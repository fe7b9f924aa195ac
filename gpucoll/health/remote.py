"""Who has died on other hosts, and who waits: a connection of every rank to rank 0.

The kernel closes it however a process ends; rank 0 passes on whose has broken off. Who waits for long tells so, so that
at a deadline those are named that do not. Greeting and frames are those of `gpucoll.transport.connections`; MPI has
passed on the token. Rank 0 listens at one address at a time, the one that the ranks are told, and only until they have
come.
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
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpucoll.transport.connections import GREETING, NAP, Connection, Frame, Hub, StoreError
from gpucoll.transport.rendezvous import becomes

CONNECT = 2.0  # seconds in which a connection must be made, at all of rank 0's addresses together
TELL = 0.5  # seconds of a wait after which one tells of it, and between two times
SILENT = 4 * TELL  # seconds after which who has told of a wait is no longer believed to
ANSWER = SILENT  # seconds that rank 0 has to say who waits: a busy host must not make a culprit of a rank that lives
SIOCGIFADDR = 0x8915  # the address of a network interface, of Linux

log = logging.getLogger("gpucoll")


def addresses() -> list[str]:
    """Return the IPv4 addresses of this host's network interfaces."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def reachable(mine: Sequence[str], everyone: Sequence[Sequence[str]]) -> list[str]:
    """Return where other hosts may reach this one, the likeliest address first.

    The kernel's routes tell: the address from which this host would send to one of another host's is the other end of
    the same network. Where all ranks have this host's addresses, they are on it: the loopback interface comes
    first.
    """
    others = {address for addresses in everyone for address in addresses if not address.startswith("127.")}
    routes = Counter(filter(None, map(_route, others - {*mine})))
    told = sorted(routes, key=lambda address: (-routes[address], address))
    rest = sorted({*mine} - {*told}, key=lambda address: (not address.startswith("127."), address))
    return [*told, *(address for address in rest if not told or not address.startswith("127."))]


def _route(address: str) -> str | None:
    """Return the address from which this host would send to another one; None where it has no route there."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((address, 9))  # sends nothing
        return str(asked.getsockname()[0])
    return None


class Watch:
    """One rank's view of the others; made by all ranks of `mpi` together. `nodes` is the node of each.

    A rank that cannot reach rank 0 within some seconds is not watched, which is logged.
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
        everyone = mpi.allgather(addresses())
        if self._rank == 0:
            self._hub = Hub(mpi.size, secrets.token_hex(16), self._hear, self._tell_gone)
        where, token = mpi.bcast((reachable(everyone[0], everyone), self._hub.token) if self._hub else None)
        self._watched = self._meet(mpi, where, token)
        if len(self._watched) == 1:
            self.drop()
        if len(self._watched) < mpi.size and self._rank == 0:
            log.warning("ranks %s cannot reach rank 0 by TCP at %s: that they have died is known on other hosts at the "
                        "deadline only", sorted({*range(mpi.size)} - self._watched), where)

    def _meet(self, mpi: Any, where: Sequence[str], token: str) -> set[int]:
        """Connect the ranks, at one of rank 0's addresses after the other until all have come; return those that have.

        Rank 0 listens at no other address meanwhile, and at none afterwards: whoever is late is no rank of this job.
        """
        there, tries = [True] + [False] * (mpi.size - 1), True
        for address in where:
            port = mpi.bcast(self._listen(address))
            if self._rank and port and tries and self._connection is None:
                try:
                    self._connects(address, port, mpi.size, token, CONNECT / len(where))
                except TimeoutError:  # rank 0 may yet take this rank in, and see that it has left: no second try
                    tries = False
            there = mpi.allgather(self._rank == 0 or self._connection is not None)
            if self._hub is not None:
                self._hub.shut()
            if all(there):
                break
        return {rank for rank, came in enumerate(there) if came}

    def _listen(self, address: str) -> int:
        """Rank 0: let ranks in at this address; return the port, 0 where that cannot be."""
        if self._hub is not None:
            with contextlib.suppress(OSError):
                listener = socket.create_server((address, 0))
                self._hub.serve(listener)
                return int(listener.getsockname()[1])
        return 0

    def _connects(self, address: str, port: int, size: int, token: str, patience: float) -> bool:
        """Connect to rank 0 there, and return whether that was to be; TimeoutError where a greeting is not answered."""
        give_up = time.monotonic() + patience
        while (left := give_up - time.monotonic()) > 0:
            try:
                connected = socket.create_connection((address, port), left)
            except OSError:
                return False
            with contextlib.ExitStack() as stack:
                stack.enter_context(connected)
                connection = Connection(connected)
                try:
                    self._take(connection.join(self._rank, size, token, GREETING))
                except StoreError:
                    return False
                except TimeoutError:
                    raise
                except (EOFError, OSError):  # strangers have taken this rank's place
                    time.sleep(NAP)
                    continue
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
        asks = type(head.get("ask")) is int
        return ({"heard": [*self.heard().items()], "ask": head["ask"]}, b"") if asks else None

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
        """Return the ranks whose processes have ended, of those that are watched."""
        if self._hub is not None:
            return self._hub.gone & self._watched
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
        return self._gone & self._watched

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
        everyone = self._watched - {self._rank}
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
