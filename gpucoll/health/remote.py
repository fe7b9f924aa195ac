"""Detection of dead and late ranks on other hosts, by a store that all ranks are connected to.

The kernel closes a connection however a process ends, and the store tells all ranks of each broken connection. A rank
in a long wait reports the wait to the store; at a deadline, the ranks without a report are blamed. Ranks that meet by a
store are watched by this store. All others, such as those of MPI, make a store on rank 0 for each other; the token
travels by MPI. Rank 0 listens at one address at a time, announced to all ranks, only until the ranks have connected.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import secrets
import socket
import struct
import termios
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpucoll.transport import ports
from gpucoll.transport.connections import GREETING, RETRY_INTERVAL, Address, Hub, StoreError
from gpucoll.transport.kvstore import Hosted, KeyStore, StoreClient, StoreServer
from gpucoll.transport.rendezvous import route

# Seconds to connect, for all of rank 0's addresses together: an unreachable address must not delay the start for long.
CONNECT = 2.0
REPORT_INTERVAL = 0.5  # seconds of a wait before a rank reports the wait, and between two reports
REPORT_EXPIRY = 4 * REPORT_INTERVAL  # seconds after which a rank's report expires: longer, since reports may be delayed
# Seconds for the store to answer which ranks wait: long, so that no living rank on a busy host is blamed.
ANSWER_TIMEOUT = REPORT_EXPIRY
SIOCGIFADDR = 0x8915  # Linux's ioctl for the address of a network interface

log: logging.Logger = logging.getLogger("gpucoll")


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


def store_among(ranks: Any) -> tuple[Hosted | None, set[int]]:
    """Return a store of `ranks`, and the ranks that have reached it; None where this rank has not.

    A collective call; `ranks` has mpi4py's methods. Tries rank 0's addresses in turn until all ranks are connected.
    """
    everyone = ranks.allgather(addresses())
    server = None if ranks.rank else StoreServer(ranks.size, secrets.token_hex(16))
    client: StoreClient | None = None
    there, tries = [True] + [False] * (ranks.size - 1), True
    with contextlib.ExitStack() as undo:
        if server is not None:
            undo.callback(server.retire)  # if a rank dies while the ranks meet
        # The token travels by MPI, out of reach of strangers. It proves that a connection comes from a rank.
        where, token = ranks.bcast((reachable(everyone[0], everyone), server.token) if server else None)
        for address in where:
            with contextlib.ExitStack() as stack:
                port = 0
                if server is not None:
                    server.host = address
                    with contextlib.suppress(OSError):
                        hub = Hub({"": server}, socket.create_server((address, 0)), ranks.size)
                        stack.callback(hub.close)
                        hub.serve()
                        port = hub.port
                port = ranks.bcast(port)
                if ranks.rank and port and tries and client is None:
                    try:
                        client = client_at((address, port), ranks.rank, ranks.size, token, CONNECT / len(where))
                    except TimeoutError:
                        # No second try: rank 0 may have admitted this rank late, and then counts it as dead.
                        tries = False
                there = ranks.allgather(ranks.rank == 0 or client is not None)
            if all(there):
                break
        undo.pop_all()
    return server or client, {rank for rank, came in enumerate(there) if came}


def client_at(address: Address, rank: int, size: int, token: str, patience: float) -> StoreClient | None:
    """Return the access of `rank` to the store at an address, None if none lets this rank in there.

    Raises TimeoutError for an unanswered greeting.
    """
    give_up = time.monotonic() + patience
    with contextlib.suppress(StoreError):
        # Rank 0 may have hung up, for example because strangers filled its places: try again.
        while (left := give_up - time.monotonic()) > 0:
            late = time.monotonic() + GREETING
            if (connection := ports.apply(address, "", rank, token, late, size, left)) is not None:
                return StoreClient(connection, GREETING, address[0])
            time.sleep(RETRY_INTERVAL)
    return None


class Watch:
    """One rank's watch over all ranks; a collective constructor. `nodes` is the node of each rank.

    The ranks may have met by `store`, where the keys that begin with `name` are theirs. A rank that cannot reach rank
    0's store within CONNECT seconds is not watched, and rank 0 logs a warning.
    """

    def __init__(self, ranks: Any, nodes: tuple[int, ...], store: KeyStore | None = None, name: str = "") -> None:
        self._rank, self._nodes, self._prefix = ranks.rank, nodes, f"{name}/waits/"
        self._last_report = 0.0  # the time of this rank's last report
        self._store: Hosted | None
        # A part without the rank that holds the store makes another store, and so outlives this rank.
        self._is_own = not isinstance(store, StoreServer | StoreClient) or store.own not in ranks.numbers
        if not self._is_own and isinstance(store, StoreServer | StoreClient):
            self._store = store
            # The watched ranks, by their numbers among the ranks of the store.
            self._ranks = {number: rank for rank, number in enumerate(ranks.numbers)}
        else:
            self._store, came = store_among(ranks)
            self._ranks = {rank: rank for rank in came}
        # This host's address in the network of all ranks; None, on every rank, unless every rank reaches the store.
        self.host: str | None = self._store.host if self._store is not None and len(self._ranks) == ranks.size else None
        if len(self._ranks) < ranks.size and ranks.rank == 0:
            log.warning("ranks %s cannot reach rank 0 by TCP: that they have died is known on other hosts at the "
                        "deadline only", sorted({*range(ranks.size)} - {*self._ranks}))

    def gone(self) -> list[int]:
        """Return the watched ranks whose processes have ended, in the order of their ends; never waits."""
        ended = [] if self._store is None else self._store.news()
        return [self._ranks[number] for number in ended if number in self._ranks]

    def report(self, number: int) -> None:
        """Report, at most every REPORT_INTERVAL seconds, that this rank waits in its call `number`."""
        if self._store is not None and time.monotonic() > self._last_report + REPORT_INTERVAL:
            self._last_report = time.monotonic()
            with contextlib.suppress(StoreError):  # `gone` finds the lost connection
                self._store.set(f"{self._prefix}{self._rank}", str(number).encode())

    def heard(self) -> dict[int, int] | None:
        """Return the ranks with an unexpired report of a wait, and the numbers of their calls; None if unknown."""
        with contextlib.suppress(StoreError):
            if self._store is not None and (found := self._store.ages(self._prefix, ANSWER_TIMEOUT)) is not None:
                return {int(key.removeprefix(self._prefix)): int(number) for key, (number, age) in found.items()
                        if age < REPORT_EXPIRY}
        return None

    def silent(self, number: int) -> set[int] | None:
        """Return the other ranks that report no wait, or else a wait in a call before `number`; None if not connected.

        A rank that waits in an earlier call waits for a rank that reports no wait, if there is one. If the store does
        not answer, blame its rank; if its host acknowledges no data, blame all ranks of that host. Waits up to
        ANSWER_TIMEOUT seconds.
        """
        everyone = {*self._ranks.values()} - {self._rank}
        if self._store is None or not everyone:
            return None
        heard = self.heard()
        if heard is not None:
            return everyone - heard.keys() or {rank for rank in everyone if heard[rank] < number}
        if isinstance(self._store, StoreServer) or self._store.is_lost:
            return None
        host = self._ranks[self._store.own]
        # The host of a stopped process still acknowledges: this separates a lost host from a stopped process.
        sent = fcntl.ioctl(self._store.fileno(), termios.TIOCOUTQ, bytes(4))
        return {rank for rank in everyone if self._nodes[rank] == self._nodes[host]} \
            if struct.unpack("i", sent)[0] else {host}

    def close(self) -> None:
        """Leave in order: nobody takes this for a death."""
        if self._is_own and self._store is not None:
            self._store.retire()
