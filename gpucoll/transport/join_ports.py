"""Join ports: the TCP ports of this process where applicants come, and the way to another process' join port.

Every process of a communicator keeps a port open from the start. The system completes connections to the port as long
as the process lives, and ends them with the process: a refused or broken connection shows that the process is dead. The
port is served, by a thread, from the first regrouping on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gpucoll.errors import CollectiveTimeout
from gpucoll.transport.applicants import APPLICANTS, ASKS, NEWCOMERS
from gpucoll.transport.connections import APPLICANT, POLL_INTERVAL, Connection, Hub, StoreError
from gpucoll.transport.kvstore import Address, listener_at

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # connections completed by the system before the port is served; the system has its own limit
REACH = 5.0  # seconds to connect to another process: a host that does not answer counts as dead


class JoinPort:
    """A port of this process where applicants come."""

    def __init__(self, address: Address) -> None:
        self._listener = listener_at("", address)
        self._listener.listen(BACKLOG)
        self.address: Address = address[0], int(self._listener.getsockname()[1])
        self._hub: Hub | None = None
        self.users = 0  # the number of this process' communicators with ranks that know the port

    def serve(self) -> None:
        """Let applicants in, from now on."""
        if self._hub is None:
            # No rank knows the hub's own token: the hub has applicants only.
            self._hub = Hub(1, secrets.token_hex(16), lambda rank, frame: None, applicants=APPLICANTS)
            self._hub.serve(self._listener)

    def close(self) -> None:
        """Close the port, and end the connections of all applicants."""
        if self._hub is not None:
            self._hub.close()
        self._listener.close()

    def drop(self) -> None:
        """Close the sockets in the child of a fork; the parent keeps the port."""
        if self._hub is not None:
            self._hub.drop()
        self._listener.close()


_ports: dict[str, JoinPort] = {}  # of this process, by the name of the host
# Addresses given by users where this process lets newcomers in; None is the port of a store.
_held: dict[Address, JoinPort | None] = {}
_lock = threading.Lock()  # guards `_ports` and the users


def join_port(host: str, use: int = 0) -> JoinPort:
    """Return the port of this process in the network where this host is named `host`; "" is this host alone.

    `use` is 1 for a new communicator and -1 for the end of a communicator: the last end closes the port.
    """
    name = host or LOOPBACK
    with _lock:
        if name not in _ports:
            _ports[name] = JoinPort((name, 0))
        found = _ports[name]
        found.users += use
        if use < 0 and found.users == 0:
            del _ports[name]
            found.close()
        return found


def serves(address: Address) -> None:
    """Note that a store of this process lets newcomers in at `address`."""
    _held.setdefault(address, None)


def holds(address: Address) -> bool:
    """Return whether this process lets newcomers in at `address`, after an attempt to take over the port."""
    if address not in _held:
        try:
            family, *_, found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
            # A host may call itself by a loopback address, in its own file of names alone.
            if str(found[0]).startswith("127.") and address[0] not in ("localhost", found[0]):
                return False
            # Only an address of this host: the port may be free here, and the address another host's.
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((found[0], 0))
            _held[address] = JoinPort(address)
        except (OSError, StoreError):  # the port belongs to another process, or the address to another host
            return False
    taken = _held[address]
    if taken is not None:
        taken.serve()
    return True


def let_go(address: Address) -> None:
    """Close the port at an address given by users if this process has taken it over."""
    taken = _held.get(address)
    if taken is not None:
        del _held[address]
        taken.close()


class Answer(NamedTuple):
    """A frame sent to this applicant, and the connection, to be closed once the applicant has its place."""

    frame: dict[str, Any]
    connection: Connection

    def secret(self) -> str:
        """Return the secret in the frame; see `Applicant.seal`."""
        sealed = bytes.fromhex(self.frame["sealed"])
        return bytes(a ^ b for a, b in zip(sealed, self.connection.pad, strict=True)).hex()


def ask(address: Address, key: str, token: str, deadline: float, was: str = ASKS, call: str = "") -> Answer | None:
    """Go to another process' join port as an applicant and return the answer; None if the process has ended, or ends.

    `was` is the name of this rank, and `call` the call that needs the answer. Raises CollectiveTimeout at `deadline`,
    by the monotonic clock, and StoreError if the port refuses this applicant.
    """
    left = deadline - time.monotonic()
    try:
        connection = Connection(socket.create_connection(address, max(POLL_INTERVAL, min(REACH, left))))
    except OSError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(connection.socket.close)
        try:
            if connection.socket.getsockname() == connection.socket.getpeername():
                return None  # the system has chosen the dead process' port for this end
            connection.join(APPLICANT, 0, token, max(POLL_INTERVAL, deadline - time.monotonic()), key=key, was=was,
                            call=call)
            frame, _ = connection.read(0, deadline)
        except TimeoutError:
            raise CollectiveTimeout(f"no answer from {address[0]}:{address[1]}") from None
        except (OSError, EOFError):
            return None
        if "error" in frame:
            raise StoreError(str(frame["error"])[:500])
        undo.pop_all()
        return Answer(frame, connection)
    return None


def ask_for_a_place(address: Address, token: str, deadline: float) -> Answer:
    """Wait at `address` as a newcomer until the ranks there grow; CollectiveTimeout at `deadline`."""
    while True:
        found = ask(address, NEWCOMERS, token, deadline)
        if found is not None:
            return found
        if time.monotonic() > deadline:
            raise CollectiveTimeout(f"no rank accepts newcomers at {address[0]}:{address[1]}")
        time.sleep(POLL_INTERVAL)


def close_ports(end: Callable[[JoinPort], None] = JoinPort.close) -> None:
    """Close all ports of this process; the process then counts as gone."""
    for port in (*_ports.values(), *filter(None, _held.values())):
        end(port)
    _ports.clear()
    _held.clear()


# The child of a fork must not keep the sockets: other ranks must see the parent's end.
os.register_at_fork(after_in_child=lambda: close_ports(JoinPort.drop))
atexit.register(close_ports)
