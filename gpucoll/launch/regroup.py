"""New groups of ranks: survivors after a failure, members with newcomers.

The ranks go as applicants to the port of a single rank, the leader (`gpucoll.transport.ports`). The leader decides the
new ranks, makes a store of the applicants' connections, and sends each applicant its place. After a failure the leader
is the eldest rank alive. When a group grows, the leader is the rank with the process that lets newcomers in.

A rank may die while the new group is made. Some ranks then have the new group, others not, and nobody knows of all. A
new group therefore inherits from the old one what ranks need to meet, its `Lineage`. Whether a rank comes from the old
group or from the new one, it meets the others.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.errors import CollectiveTimeout, MismatchError, RankFailedError, UsageError, listed, minority
from gpucoll.launch.launchers import SECRET
from gpucoll.launch.places import address_of, text_of
from gpucoll.transport import ports
from gpucoll.transport.connections import CHANGED, RETRY_INTERVAL, Connection, StoreError, keyed_digest
from gpucoll.transport.kvstore import HAS_LEFT, Address, KeyStore, StoreClient, StoreServer, kept

APPLICANT_INTERVAL = 0.05  # seconds between two looks for dead ranks while applicants are awaited
ANSWERS = 5.0  # seconds after the leader's deadline for the leader's error to arrive
ASKS = "?"  # begins the name of an applicant that only asks whether the process has left the communicator
GROWS = "grow "  # begins the name of a member, when the group grows


class Lineage(NamedTuple):
    """What a group inherits from the group that it was made of.

    `token` proves the ranks: it follows from the key and the secret of newcomers, or of the first ranks. Newcomers
    prove `secret`; without a secret they are refused. `entry` is the address given by the user. `elders` has the ranks
    in order of age: those of older groups come first.
    """

    token: str = ""
    secret: str | None = None
    entry: Address | None = None
    key: str = ""  # "" for the first group
    name: str = ""  # of this rank, in all groups
    elders: tuple[int, ...] = ()


class Membership(NamedTuple):
    """The data that the ranks of a communicator need to find each other again.

    `names` and `addresses` have a name and a port's address per rank. The process of rank `admitting_rank` lets
    newcomers in at `address`. `host` names this host in the network of the ranks.
    """

    lineage: Lineage
    rank: int
    names: tuple[str, ...]
    addresses: tuple[Address, ...]
    admitting_rank: int
    address: Address
    host: str

    def applicants(self) -> StoreServer:
        """Return the ranks that have come to this process to regroup, let in from now on."""
        ports.port(self.host).serve()
        return ports.applicants(self.lineage.key, self.lineage.token)

    def leave(self) -> None:
        """Tell the other ranks, once these regroup, that this rank does not take part."""
        ports.release(self.lineage.key, leaves=True)
        ports.port(self.host).serve()

    def free(self) -> None:
        """Forget the communicator: no rank will regroup."""
        ports.release(self.lineage.key, leaves=False)
        ports.port(self.host, -1)


class Offer(NamedTuple):
    """This rank's part in the making of a `Membership`, gathered from all ranks."""

    port: Address
    holds: bool  # whether newcomers come to this process at the user's address
    name: str
    proves: str  # lets ranks compare their secrets without revealing them; "" without a secret


def first_lineage(token: str = "", entry: Address | None = None) -> Lineage:
    """Return the lineage of the first ranks, before they meet; `token` is the secret by which they meet.

    Where the address is itself the token, as on a trusted network, newcomers prove the address, too.
    """
    is_named = entry is not None and token == text_of(entry)
    return _let_in(Lineage(token, os.environ.get(SECRET) or (token if is_named else None), entry))


def _let_in(lineage: Lineage) -> Lineage:
    """Let newcomers in at this process' ports, from now on; they may be waiting for an open port."""
    if lineage.secret:
        ports.applicants(ports.NEWCOMERS, lineage.secret)
    return lineage


def proves(lineage: Lineage) -> str:
    """Return a text that lets ranks compare their secrets without revealing them; "" if newcomers cannot come."""
    is_known = lineage.secret and (not lineage.key or lineage.token == keyed_digest(lineage.secret, lineage.key))
    return keyed_digest(lineage.secret, "newcomers") if lineage.secret and is_known else ""


def offer(lineage: Lineage, host: str) -> Offer:
    """Return this rank's part; the process takes over the user's address if no process has it."""
    return Offer(ports.port(host, 1).address, lineage.entry is not None and ports.holds(lineage.entry),
                 lineage.name or secrets.token_hex(16), proves(lineage))


def membership(rank: int, everyone: Sequence[Any], lineage: Lineage, host: str) -> Membership:
    """Return the membership made of the `Offer`s of all ranks."""
    offers = [Offer(tuple(place), *more) for place, *more in everyone]  # lists from JSON
    names, addresses = tuple(one.name for one in offers), tuple(one.port for one in offers)
    admitting = [one for one, given in enumerate(offers) if given.holds]
    if not lineage.key:
        proved = lineage.secret if len({one.proves for one in offers}) == 1 else None
        lineage = lineage._replace(key=names[0], token=keyed_digest(proved or lineage.token, names[0]),
                                   elders=tuple(range(len(offers))))
    if lineage.entry is not None and not admitting and lineage.secret == text_of(lineage.entry):
        lineage = lineage._replace(secret=None)  # no newcomer comes to this address
    ports.applicants(lineage.key, lineage.token, 1)
    return Membership(lineage._replace(name=names[rank]), rank, names, addresses, (*admitting, 0)[0],
                      lineage.entry if lineage.entry is not None and admitting else addresses[0], host)


class Place(NamedTuple):
    """This process' place in a new group."""

    rank: int
    size: int
    store: KeyStore
    lineage: Lineage
    options: list[Any]


# ---------------------------------------------------------------- an applicant's side


def _apply(ranks: Membership, rank: int, name: str, deadline: float) -> Connection | None:
    return ports.apply(ranks.addresses[rank], ranks.lineage.key, name, ranks.lineage.token, deadline)


def _place_of(connection: Connection, lineage: Lineage, deadline: float, timeout: float) -> Place | None:
    """Return the place told by the leader, None if the leader has left; raise the leader's error.

    The connection becomes the one to the new group's store. Raises EOFError or OSError if the leader has ended.
    """
    with contextlib.ExitStack() as undo:
        undo.enter_context(connection.socket)
        frame, _ = connection.read(0, deadline)
        if frame == HAS_LEFT:
            return None
        try:
            if "late" in frame:
                raise CollectiveTimeout(str(frame["text"]), ranks=tuple(map(int, frame["late"])))
            rank, size, leader, host, key, elders, entry, options = frame["place"]
            lineage = _let_in(lineage._replace(key=key, token=lineage.token or keyed_digest(lineage.secret or "", key),
                                               elders=tuple(elders), entry=tuple(entry) if entry else None))
            place = Place(rank, size, kept(StoreClient(connection, timeout, host, leader)), lineage, options)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"the leader's answer is not of this version of gpucoll: {error!r}") from None
        undo.pop_all()
        return place
    return None


def newcomer(store: str, timeout: float, deadline: float) -> Place:
    """Return the place of a newcomer at the ranks of `store`.

    CollectiveTimeout if these do not grow until `deadline`, `timeout` seconds after the call.
    """
    address = address_of(store)
    if address is None:
        raise UsageError(f"join: {store!r} is not of the form tcp://host:port", code="GC-STORE")
    secret, why = os.environ.get(SECRET) or text_of(address), "no rank accepts newcomers there"
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, EOFError):  # the leader has died
            try:
                connection = ports.apply(address, ports.NEWCOMERS, secrets.token_hex(16), secret, deadline)
            except StoreError as error:
                raise StoreError(f"join: the ranks at {store} refused this process: {error.args[0]}; give newcomers "
                                 f"the same {SECRET} as the ranks") from None
            if connection is not None:
                why = "no answer came"
                if (place := _place_of(connection, Lineage(secret=secret), deadline, timeout)) is not None:
                    return place
        time.sleep(RETRY_INTERVAL)
    raise CollectiveTimeout(f"join: waited {timeout:g} s for the ranks at {store} to grow: {why}")


# ---------------------------------------------------------------- the leader's side


def _look(ranks: Membership, rank: int, gone: set[int], deadline: float) -> None:
    """Add a rank to `gone` if it is dead, perhaps on another host, or has left: its port shows that."""
    try:
        if (connection := _apply(ranks, rank, ASKS + secrets.token_hex(16), deadline)) is not None:
            with connection.socket:
                connection.read(0, deadline)
    except TimeoutError:  # the rank lives: the deadline decides
        return
    except (OSError, EOFError, StoreError):
        pass
    gone.add(rank)


def _invite(ranks: Membership, seats: Mapping[int, Connection], mine: int, size: int, elders: Sequence[int],
            options: Sequence[Any]) -> Place:
    """Make the store of a new group and send all applicants their places; return this rank's own place, `mine`.

    `elders` has the ranks of the new group in order of age.
    """
    lineage = ranks.lineage._replace(elders=tuple(elders))
    store = StoreServer(size, lineage.token, mine, ranks.addresses[ranks.rank][0])
    for rank in {*range(size)} - {mine}:
        if rank not in seats:
            store.gone[rank] = None
            continue
        store.take(seats[rank], rank)
        with contextlib.suppress(OSError):
            seats[rank].send({"place": [rank, size, mine, store.host, lineage.key, elders, lineage.entry, options]})
    return Place(mine, size, kept(store), lineage, list(options))


# ---------------------------------------------------------------- the calls


def survivors(ranks: Membership, ended: Callable[[], Collection[int]], timeout: float, options: Sequence[Any]) -> Place:
    """Return this rank's place among the ranks that are left; a collective call of these ranks.

    `ended` returns the ranks known to be dead. Raises CollectiveTimeout if a living rank does not come, and StoreError
    if the leader dies once it has decided.
    """
    deadline, gone, asked = time.monotonic() + timeout, set[int](), set[int]()
    mine, lineage, here = ranks.rank, ranks.lineage, ranks.applicants()
    for leader in lineage.elders[:lineage.elders.index(mine)]:
        # Where another process has the port, or the process has forgotten this group, the rank has ended, too.
        try:
            connection = None if leader in ended() else _apply(ranks, leader, lineage.name, deadline + ANSWERS)
            if connection is not None and \
                    (place := _place_of(connection, lineage, deadline + ANSWERS, timeout)) is not None:
                return place
        except CollectiveTimeout:
            raise
        except (EOFError, OSError, StoreError):
            pass
        if time.monotonic() > deadline + ANSWERS:
            raise CollectiveTimeout(f"shrink: rank {leader} did not answer within {ANSWERS:g} s of the deadline",
                                    ranks=(leader,))
        gone.add(leader)

    while True:
        dead = {*ended()}
        with CHANGED:
            for name in [one for one in here.members if one not in ranks.names and not str(one).startswith(ASKS)]:
                here.notify(name, HAS_LEFT)  # of a group that was never complete
            come = {rank: here.members[name] for rank, name in enumerate(ranks.names)
                    if name in here.members and rank not in gone}
            gone |= dead - come.keys()
            order = sorted([mine, *come])
            awaited = {*range(len(ranks.names))} - gone - {*order}
            if not awaited:
                return _invite(ranks, {order.index(rank): one for rank, one in come.items()}, order.index(mine),
                               len(order), [order.index(rank) for rank in lineage.elders if rank in order], options)
            CHANGED.wait(APPLICANT_INTERVAL)
        for rank in awaited - asked:
            threading.Thread(target=_look, args=[ranks, rank, gone, deadline], name="gpucoll regroup",
                             daemon=True).start()
        asked |= awaited
        if time.monotonic() > deadline:
            error = CollectiveTimeout(f"shrink: waited {timeout:g} s for ranks {listed(sorted(awaited))}, which are "
                                      "alive but do not join", ranks=tuple(sorted(awaited)))
            for rank in come:
                here.notify(ranks.names[rank], {"late": error.ranks, "text": error.args[0]})
            raise error


def grown(ranks: Membership, size: int, seats: Sequence[int], exchange: Callable[[Mapping[str, Any]], list[Any]],
          is_broken: Callable[[], bool], timeout: float, patience: float, options: Sequence[Any], *,
          awaits_another: bool) -> Place:
    """Return this rank's place in a group of `size` ranks: member i has rank ``seats[i]``, newcomers the others.

    A collective call of all members, by `exchange`: it returns the facts of all ranks, and finds deaths. Between two
    exchanges the leader waits `patience` seconds for newcomers, if not `is_broken`. Raises CollectiveTimeout after
    `timeout` seconds without enough newcomers, RankFailedError if a newcomer dies meanwhile, unless the group
    `awaits_another`, and StoreError if the leader dies once it has decided.
    """
    deadline, needed, lineage = time.monotonic() + timeout, size - len(ranks.names), ranks.lineage
    leader, here, connection = ranks.admitting_rank, ranks.applicants(), None
    group = ports.applicants(ports.NEWCOMERS, lineage.secret) if lineage.secret else StoreServer()
    newcomers, before = group.members, len(group.gone)

    def has_lost() -> bool:
        return not awaits_another and len(group.gone) > before

    with contextlib.ExitStack() as undo:
        if ranks.rank != leader:
            connection = _apply(ranks, leader, GROWS + lineage.name, deadline + ANSWERS)
            undo.enter_context(contextlib.nullcontext() if connection is None else connection.socket)
        while True:
            late = min(deadline, time.monotonic() + patience)
            while ranks.rank == leader and len(newcomers) < needed and time.monotonic() < late \
                    and not (is_broken() or has_lost()):
                with CHANGED:
                    CHANGED.wait(APPLICANT_INTERVAL)
            told = exchange({"came": len(newcomers), "late": time.monotonic() > deadline, "lost": has_lost()})[leader]
            if told["came"] >= needed:
                break
            if told["lost"]:
                raise RankFailedError(f"grow: a newcomer has ended before {needed} had come")
            if told["late"]:
                raise CollectiveTimeout(f"grow: waited {timeout:g} s for {needed} newcomers, and {told['came']} came; "
                                        f"start each with gpucoll.join({text_of(ranks.address)!r})")
        undo.pop_all()
    if ranks.rank != leader:
        with contextlib.suppress(OSError, EOFError):
            if connection is not None and \
                    (place := _place_of(connection, lineage, time.monotonic() + timeout, timeout)) is not None:
                return place
        raise StoreError(f"rank {leader} has ended, or cannot be reached")
    free = [rank for rank in range(size) if rank not in seats]
    with CHANGED:
        came = {seats[rank]: here.members[GROWS + name] for rank, name in enumerate(ranks.names)
                if GROWS + name in here.members}
        return _invite(ranks, came | dict(zip(free, newcomers.values(), strict=False)), seats[ranks.rank], size,
                       [*(seats[rank] for rank in lineage.elders), *free], options)


def check_secrets(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError or MismatchError, on every member, unless the members have a secret for newcomers, the same."""
    lacking = tuple(rank for rank, one in enumerate(everyone) if not one["secret"])
    if lacking:
        raise UsageError(f"grow: newcomers prove themselves by {SECRET}, not set on ranks {listed(lacking)}; set the "
                         "same secret for all ranks and newcomers", code="GC-GROW", ranks=lacking)
    differ = minority([one["secret"] for one in everyone])
    if differ:
        raise MismatchError(f"grow: {SECRET} differs on ranks {listed(differ)}", code="GC-GROW", ranks=differ)
