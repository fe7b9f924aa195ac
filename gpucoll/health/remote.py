"""Detection of dead and late ranks on other hosts, by a TCP connection of every rank to rank 0.

The kernel closes the connection however a process ends, and rank 0 reports each broken connection to all ranks. A rank
in a long wait reports the wait to rank 0; at a deadline, the ranks without a report are blamed. The greeting and the
frames are defined in `gpucoll.transport.connections`; the token travels by MPI. Rank 0 listens at one address at a
time, announced to all ranks, and only until the ranks have connected.
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

from gpucoll.transport.connections import GREETING, POLL_INTERVAL, Connection, Frame, Hub, Ranks, StoreError, connect
from gpucoll.transport.rendezvous import becomes, route

# Seconds to connect, for all of rank 0's addresses together: an unreachable address must not delay the start for long.
CONNECT = 2.0
REPORT_INTERVAL = 0.5  # seconds of a wait before a rank reports the wait, and between two reports
SILENT = 4 * REPORT_INTERVAL  # seconds after which a rank's report expires: longer, since reports may be delayed
# Seconds for rank 0 to answer which ranks wait: long, so that no living rank on a busy host is blamed.
ANSWER = SILENT
SIOCGIFADDR = 0x8915  # Linux's ioctl for the address of a network interface

log = logging.getLogger("gpucoll")


def addresses() -> list[str]:
    """Return the IPv4 addresses of this host's network interfaces."""
    found: list[str] = []
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # the interface has no address
                # The IPv4 address follows the name (16 bytes), the family and the port (2 bytes each).
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return found


def reachable(mine: Sequence[str], everyone: Sequence[Sequence[str]]) -> list[str]:
    """Return the addresses by which other hosts may reach this host, the likeliest first.

    The kernel's routes decide: the local address used to send to another host lies on a network shared with that host.
    Addresses used for more of the other hosts' addresses come first. If all ranks are on this host, the loopback
    address comes first; otherwise loopback addresses are left out.
    """
    others = {address for addresses in everyone for address in addresses if not address.startswith("127.")}
    routes = Counter(filter(None, map(route, others - {*mine})))
    routed = sorted(routes, key=lambda address: (-routes[address], address))
    rest = sorted({*mine} - {*routed}, key=lambda address: (not address.startswith("127."), address))
    return [*routed, *(address for address in rest if not routed or not address.startswith("127."))]


class Watch:
    """One rank's watch over all ranks; a collective constructor. `nodes` is the node of each rank.

    A rank that cannot reach rank 0 within CONNECT seconds is not watched, and rank 0 logs a warning.
    """

    def __init__(self, mpi: Any, nodes: tuple[int, ...]) -> None:
        self._rank, self._nodes = mpi.rank, nodes
        self._gone: dict[int, None] = {}  # the ranks that have ended, in this order
        self._reported: dict[int, tuple[int, float]] = {}  # rank 0: a waiting rank's call, and the report's time
        self._heard: dict[int, int] = {}  # other ranks: the waiting ranks and their calls, as rank 0 answered last
        self._asked = self._answered = 0  # numbers of the last question to rank 0, and of the last answer
        self._last_report = 0.0  # the time of this rank's last report
        self._lock = threading.Lock()  # one reader of the connection at a time
        self._ranks: Ranks | None = None  # on rank 0: the ranks that have connected
        self._connection: Connection | None = None
        everyone = mpi.allgather(addresses())
        if self._rank == 0:
            ranks = self._ranks = Ranks(mpi.size, secrets.token_hex(16))
            ranks.answer, ranks.lost = self._answer, lambda: ranks.broadcast({"gone": [*ranks.gone]})
        with contextlib.ExitStack() as undo:
            undo.callback(self.drop)  # if a rank dies while the ranks meet
            # The token travels by MPI, out of reach of strangers. It proves that a connection comes from a rank.
            where, token = mpi.bcast((reachable(everyone[0], everyone), self._ranks.token) if self._ranks else None)
            self._watched, where_met = self._meet(mpi, where, token)
            undo.pop_all()
        # This host's address in the network of all ranks; None, on every rank, unless every rank reaches rank 0.
        self.host = where_met if len(self._watched) == mpi.size else None
        if len(self._watched) == 1:  # no rank reached rank 0, so there is nothing to watch
            self.drop()
        if len(self._watched) < mpi.size and self._rank == 0:
            log.warning("ranks %s cannot reach rank 0 by TCP at %s: that they have died is known on other hosts at the "
                        "deadline only", sorted({*range(mpi.size)} - self._watched), where)

    def _meet(self, mpi: Any, where: Sequence[str], token: str) -> tuple[set[int], str | None]:
        """Connect the ranks, trying rank 0's addresses in turn until all ranks are connected.

        Return the connected ranks, and the address of this end of the connection. A collective call. Rank 0 listens at
        the current address only, and at none afterwards: later connections come from strangers.
        """
        there, tries, mine = [True] + [False] * (mpi.size - 1), True, None
        for address in where:
            with contextlib.ExitStack() as stack:
                port = 0
                if self._ranks is not None:
                    mine = address
                    with contextlib.suppress(OSError):
                        hub = Hub({"": self._ranks}, socket.create_server((address, 0)), mpi.size)
                        stack.callback(hub.close)
                        hub.serve()
                        port = hub.port
                port = mpi.bcast(port)
                if self._rank and port and tries and self._connection is None:
                    try:
                        self._connects(address, port, mpi.size, token, CONNECT / len(where))
                    except TimeoutError:
                        # No second try: rank 0 may have admitted this rank late, and then counts it as dead.
                        tries = False
                there = mpi.allgather(self._rank == 0 or self._connection is not None)
            if all(there):
                break
        if self._connection is not None:
            mine = str(self._connection.socket.getsockname()[0])
        return {rank for rank, came in enumerate(there) if came}, mine

    def _connects(self, address: str, port: int, size: int, token: str, patience: float) -> None:
        """Connect to rank 0 at an address, if it answers there; TimeoutError for an unanswered greeting."""
        give_up = time.monotonic() + patience
        while (left := give_up - time.monotonic()) > 0:
            try:
                connection = connect((address, port), left)
            except OSError:
                return
            try:
                self._take(connection.join(self._rank, size, token, GREETING))
            except StoreError:
                return
            except TimeoutError:
                raise
            except (EOFError, OSError):  # rank 0 hung up, for example because strangers filled its places: retry
                time.sleep(POLL_INTERVAL)
                continue
            connection.socket.setblocking(False)
            self._connection = connection
            return

    def _answer(self, rank: Any, frame: Frame) -> Frame | None:
        """On rank 0, record a rank's report of a wait; return the answer if the rank has asked which ranks wait."""
        head, _ = frame
        if type(head.get("waits")) is int:
            self._reported[rank] = head["waits"], time.monotonic()
        asks = type(head.get("ask")) is int
        return ({"heard": [*self.heard().items()], "ask": head["ask"]}, b"") if asks else None

    def heard(self) -> dict[int, int]:
        """On rank 0, return the ranks with an unexpired report of a wait, and the numbers of their calls."""
        # `list` copies in one step: the connections' threads add reports meanwhile.
        return {rank: number for rank, (number, when) in list(self._reported.items())
                if time.monotonic() < when + SILENT}

    def fileno(self) -> int | None:
        """Return the file descriptor that becomes readable with news; None on rank 0 and without a connection."""
        return self._connection.socket.fileno() if self._connection is not None else None

    def gone(self) -> list[int]:
        """Return the watched ranks whose processes have ended, in the order of their ends; never waits."""
        if self._ranks is not None:
            return [int(rank) for rank in list(self._ranks.gone) if rank in self._watched]
        # Without blocking: if another thread is reading, that thread records the news.
        if self._connection is not None and self._lock.acquire(blocking=False):
            try:
                # Read all frames that have arrived; `_take` drops the connection at rank 0's farewell.
                while self._connection is not None:
                    self._take(self._connection.read(0)[0])
            except BlockingIOError:
                pass
            # The connection is broken, or the other end no longer speaks the protocol: rank 0 has died.
            except (OSError, EOFError, StoreError):
                self._gone[0] = None
                self.drop()
            finally:
                self._lock.release()
        return [rank for rank in list(self._gone) if rank in self._watched]

    def _take(self, head: dict[str, Any]) -> None:
        self._gone.update(dict.fromkeys(head.get("gone", ())))
        if "heard" in head:
            self._heard, self._answered = dict(head["heard"]), head["ask"]
        if "bye" in head:
            self.drop()

    def report(self, number: int) -> None:
        """Report to rank 0, at most every REPORT_INTERVAL seconds, that this rank waits in its call `number`."""
        if time.monotonic() > self._last_report + REPORT_INTERVAL:
            self._last_report = time.monotonic()
            self._send({"waits": number})

    def _send(self, head: dict[str, Any]) -> None:
        # Rank 0 has no connection to itself. A failed send is no error here: `gone` detects the lost connection.
        if self._ranks is not None:
            self._answer(0, (head, b""))
        elif self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.send(head)

    def silent(self, number: int) -> set[int] | None:
        """Return the other ranks that report no wait, or else a wait in a call before `number`; None if not connected.

        A rank that waits in an earlier call waits for a rank that reports no wait, if there is one. If rank 0 does not
        answer, blame rank 0; if rank 0's host acknowledges no data, blame all ranks of that host. Waits up to ANSWER
        seconds.
        """
        everyone = self._watched - {self._rank}
        if self._ranks is None and self._connection is None:
            return None
        heard = self.heard() if self._ranks is not None else self._ask()
        if heard is not None:
            return everyone - heard.keys() or {rank for rank in everyone if heard[rank] < number}
        if self._connection is not None and _unacknowledged(self._connection.socket):
            return {rank for rank in everyone if self._nodes[rank] == self._nodes[0]}
        return {0}

    def _ask(self) -> dict[int, int] | None:
        # Questions are numbered, so that a late answer to an earlier question does not count as this answer.
        self._asked += 1
        self._send({"ask": self._asked})
        becomes(self._is_answered, ANSWER, interval=1e-3)
        return self._heard if self._answered >= self._asked else None

    def _is_answered(self) -> bool:
        """Return whether rank 0 has answered the last question, or is gone."""
        self.gone()
        return self._connection is None or self._answered >= self._asked

    def close(self) -> None:
        """Leave in order: say goodbye, so that the closed connection is not taken for a death."""
        # Rank 0 tells all ranks before closing: none of them takes the closed connection for rank 0's death.
        if self._ranks is not None:
            self._ranks.end({"bye": True})
        self._send({"bye": True})
        self.drop()

    def drop(self) -> None:
        """Close the sockets without a goodbye: in the child of a fork the connections belong to the parent."""
        # Clear the fields before closing, so that `gone` and `fileno` do not use a closed socket.
        ranks, connection, self._ranks, self._connection = self._ranks, self._connection, None, None
        if ranks is not None:
            ranks.end()
        if connection is not None:
            connection.socket.close()


def _unacknowledged(connection: socket.socket) -> bool:
    """Return whether sent bytes are unacknowledged, that is, whether the other host is unreachable."""
    # The host of a stopped process still acknowledges: this separates a lost host from a stopped rank 0.
    waiting = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
    return bool(struct.unpack("i", waiting)[0])
