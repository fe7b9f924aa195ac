"""Ports where processes apply for a place in a new communicator, and the applicants at this process' ports.

Every process of a communicator keeps a TCP port open from the start. The system completes connections to the port as
long as the process lives, and ends them with the process: a refused or broken connection shows that the process is
dead. The port is served, by a thread, from the first regrouping on.

An applicant is a rank of a failed or growing communicator, or a newcomer of `gpucoll.join`. The applicant's greeting
names the key of the communicator ("" for a newcomer). The applicant then waits for a frame of JSON, and leaves by
ending the connection.
"""

from __future__ import annotations

import time

from gpucoll.transport.connections import CHANGED, RETRY_INTERVAL, Address, Connection, Hub, Name, connect
from gpucoll.transport.kvstore import HAS_LEFT, StoreServer, listener_at
from gpucoll.transport.process import PROCESS

LOOPBACK = "127.0.0.1"
BACKLOG = 4096  # connections completed by the system before the port is served; the system has its own limit
REACH = 5.0  # seconds to connect to another process: a host that does not answer counts as dead
NEWCOMERS = "newcomers"  # the key of newcomers, in place of a communicator's


def applicants(key: str, token: str, use: int = 0) -> StoreServer:
    """Return the applicants of the communicator `key`, let in with this token.

    `use` is 1 for one more communicator with this key, in which this process takes part.
    """
    with CHANGED:
        found = PROCESS.applicants.setdefault(key, StoreServer())
        found.token, found.uses = token, found.uses + use
        found.has_left &= not use
        return found


def release(key: str, *, leaves: bool) -> None:
    """Forget a communicator with the key `key`. After the last one, applicants are refused.

    With `leaves` they learn that this process takes no part, now and later.
    """
    with CHANGED:
        found = PROCESS.applicants.get(key)
        if found is not None:
            found.uses = max(0, found.uses - 1)
            found.has_left = leaves and not found.uses
            for name in [*found.members] if found.has_left else ():
                found.notify(name, HAS_LEFT)
            if not found.uses and not leaves:
                del PROCESS.applicants[key]
                found.end()


class Port(Hub):
    """A port of this process where applicants come; `users` counts the communicators with ranks that know the port."""

    def __init__(self, address: Address, *, exact: bool = False) -> None:
        listener = listener_at("", address, exact=exact)
        listener.listen(BACKLOG)
        super().__init__({}, listener)
        self.address: tuple[str, int] = (address[0], self.port)
        self.users: int = 0


def port(host: str, use: int = 0) -> Port:
    """Return the port of this process in the network where this host is named `host`; "" is this host alone.

    `use` is 1 for a new communicator and -1 for the end of a communicator: the last end closes the port.
    """
    name = host or LOOPBACK
    with CHANGED:
        found = PROCESS.ports.get(name) or PROCESS.ports.setdefault(name, Port((name, 0)))
        found.users += use
        if is_last := use < 0 and found.users == 0:
            del PROCESS.ports[name]
    if is_last:
        found.close()
        if NEWCOMERS in PROCESS.applicants:  # they look for another port
            PROCESS.applicants[NEWCOMERS].end()
    return found


def holds(address: Address, *, is_open: bool = False) -> bool:
    """Return whether this process lets newcomers in at `address`, after an attempt to take over the port.

    `is_open` tells that a store of this process has the port.
    """
    if is_open:
        PROCESS.held.setdefault(address, None)
    if address not in PROCESS.held:
        try:
            PROCESS.held[address] = Port(address, exact=True)
        except OSError:  # the port belongs to another process, or the address to another host
            return False
    if (taken := PROCESS.held[address]) is not None:
        taken.serve()
    return True


def let_go(address: Address) -> None:
    """Close the port at an address given by users if this process has taken it over."""
    if (taken := PROCESS.held.get(address)) is not None:
        del PROCESS.held[address]
        taken.close()


def apply(address: Address, key: str, name: Name, token: str, deadline: float, size: int = 0,
          reach: float = REACH) -> Connection | None:
    """Go to another process' port as an applicant; return None if the process has ended.

    Raises TimeoutError at `deadline`, by the monotonic clock, and StoreError if the port refuses this applicant.
    """
    try:
        connection = connect(address, max(RETRY_INTERVAL, min(reach, deadline - time.monotonic())))
    except OSError:
        return None
    try:
        connection.join(name, size, token, max(RETRY_INTERVAL, deadline - time.monotonic()), key)
    except TimeoutError:
        raise
    except (OSError, EOFError):
        return None
    return connection
