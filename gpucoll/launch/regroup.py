"""New groups of ranks: survivors after a failure, members with newcomers.

The ranks go as applicants to the join port of a single rank, the leader (`gpucoll.transport.join_ports`). The leader
decides the new ranks, opens a new store, and sends each applicant its place. After a failure the leader is the eldest
rank alive. When a group grows, the leader is the rank with the process that lets newcomers in.

A rank may die while the new group is made. Some ranks then have the new group, others not, and nobody knows of all. A
new group therefore inherits from the old one what ranks need to meet, its `Lineage`: the key, the token, the names of
its ranks and their order of age. Whether a rank comes from the old group or from the new one, it meets the others.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.errors import (
    CollectiveTimeout,
    GpucollError,
    MismatchError,
    RankFailedError,
    UsageError,
    listed,
    minority,
)
from gpucoll.launch.launchers import SECRET
from gpucoll.launch.places import address_of, text_of
from gpucoll.transport.applicants import APPLICANTS, NEWCOMERS, Applicant
from gpucoll.transport.connections import GREETING, StoreError
from gpucoll.transport.join_ports import Answer, ask, ask_for_a_place, holds, join_port
from gpucoll.transport.kvstore import Address, KeyStore, StoreServer, host_store, reach_store

LOOK = 0.05  # seconds between two looks for dead ranks while applicants are awaited
COMES = 5.0  # seconds that a leader waits for the other members after the loss of a member
ANSWERS = 5.0  # seconds after the leader's deadline for the leader's error to arrive


class Membership(NamedTuple):
    """The data that the ranks of a communicator need to find each other again.

    `key` and `token` are inherited by the groups made of this one; `token` proves the ranks. `names` has a name of each
    rank that stays the same in these groups, `elders` has the ranks in order of age: those of older groups come first.
    `ports` has an address per rank. `known` is the address given
    by the user; with `named` the address is the secret if there is no other. The process of rank `admitting_rank` lets
    newcomers in at `address`. Newcomers prove `secret`; without a secret they are refused. `host` names this host in
    the network of the ranks.
    """

    key: str
    token: str
    rank: int
    names: tuple[str, ...]
    elders: tuple[int, ...]
    ports: tuple[Address, ...]
    known: Address | None
    named: bool
    admitting_rank: int
    address: Address
    secret: str | None
    host: str

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ports)

    def leave(self) -> None:
        """Tell the other ranks, once these regroup, that this rank does not take part."""
        APPLICANTS.leave(self.key)
        join_port(self.host).serve()

    def free(self) -> None:
        """Forget the communicator: no rank will regroup."""
        APPLICANTS.release(self.key)
        join_port(self.host, -1)


class Lineage(NamedTuple):
    """What a group inherits, see `Membership`; `name` is this rank's, "" for a newcomer."""

    key: str
    token: str
    name: str
    elders: tuple[int, ...]


class Offer(NamedTuple):
    """This rank's part in the making of a `Membership`, gathered from all ranks."""

    port: Address
    holds: bool  # whether newcomers come to this process at the known address
    name: str


def let_in(known: Address | None, *, named: bool) -> str | None:
    """Let newcomers in at this process' ports, and return their secret; None if there is none.

    With `named` the known address is itself the secret if there is no GPUCOLL_SECRET, as for the first ranks.
    """
    secret = os.environ.get(SECRET) or (text_of(known) if named and known is not None else None)
    APPLICANTS.expect(NEWCOMERS, secret)
    return secret


def offer(known: Address | None, host: str, name: str = "", *, named: bool, may_hold: bool) -> Offer:
    """Return this rank's part, with a new name unless it has a `name`.

    With `may_hold` the process takes over the known address if no process has it.
    """
    if known is not None and may_hold:
        let_in(known, named=named)  # before the port is open: a newcomer may be waiting
    return Offer(join_port(host, 1).address, known is not None and may_hold and holds(known),
                 name or secrets.token_hex(16))


def membership(rank: int, everyone: Sequence[Any], token: str, host: str, known: Address | None = None, *,
               named: bool = False, lineage: Lineage | None = None) -> Membership:
    """Return the membership made of the `Offer`s of all ranks; `named` as in `let_in`."""
    offers = [Offer(tuple(place), has, name) for place, has, name in everyone]  # lists from JSON
    admitting = [one for one, given in enumerate(offers) if given.holds]
    admitting_rank = admitting[0] if admitting else 0
    address = known if admitting and known is not None else offers[0].port
    # By the environment of this rank alone: `grow` compares the ranks.
    secret = let_in(known if admitting else None, named=named)
    names = tuple(given.name for given in offers)
    key, proves, _, elders = lineage or Lineage(
        names[0], hmac.new(token.encode(), names[0].encode(), "sha256").hexdigest(), "", tuple(range(len(offers))))
    made = Membership(key, proves, rank, names, elders, tuple(given.port for given in offers), known, named,
                      admitting_rank, address, secret, host)
    APPLICANTS.hold(made.key, made.token)
    return made


class Place(NamedTuple):
    """This process' place in a new group: rank, size, the open store, the group's secret, the options in JSON."""

    rank: int
    size: int
    store: KeyStore
    token: str
    known: Address | None
    named: bool
    options: list[Any]
    lineage: Lineage


# ---------------------------------------------------------------- an applicant's side

_TOLD: Mapping[Any, type[GpucollError]] = {kind.__name__: kind for kind in (CollectiveTimeout, RankFailedError)}


def place_of(found: Answer, name: str, timeout: float) -> Place:
    """Return the place told by the leader to the rank `name`, with the store opened; raise the leader's error."""
    frame = found.frame
    with contextlib.closing(found.connection.socket):  # closed once the store is open: the leader waits for either
        if "raise" in frame:
            kind = _TOLD.get(frame["raise"], GpucollError)
            raise kind(str(frame["text"]), code=str(frame["code"]), ranks=tuple(map(int, frame["ranks"])))
        try:
            rank, size, known = int(frame["rank"]), int(frame["size"]), frame["known"]
            address: Address = (str(frame["host"]), int(frame["port"]))
            token = found.secret()
            lineage = Lineage(str(frame["key"]), _veiled(str(frame["proves"]), token), name,
                              tuple(map(int, frame["elders"])))
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"the leader's answer is not of this version of gpucoll: {error!r}") from None
        store = reach_store(rank, size, token, timeout, address)
        return Place(rank, size, store, token, (str(known[0]), int(known[1])) if known else None,
                     frame["named"] is True, frame["options"], lineage)


def _veiled(proves: str, secret: str) -> str:
    """Return a lineage's token hidden by the secret of a new store, or the hidden token revealed."""
    pad = hmac.new(secret.encode(), b"lineage", "sha256").digest()
    return bytes(a ^ b for a, b in zip(bytes.fromhex(proves), pad, strict=True)).hex()


def _follow(ranks: Membership, leader: int, deadline: float, timeout: float, call: str) -> Place | None:
    """Return the place told by the rank `leader`; None if that rank has ended, or takes no part in the call."""
    name = ranks.names[ranks.rank]
    try:
        found = ask(ranks.ports[leader], ranks.key, ranks.token, deadline + ANSWERS, name, call)
    except CollectiveTimeout:
        raise CollectiveTimeout(f"{call}: rank {leader} did not answer within {deadline - time.monotonic():.0f} s of "
                                "the deadline", ranks=(leader,)) from None
    except StoreError:  # another process has the port, or the process has forgotten this group
        return None
    if found is not None and "left" in found.frame:
        found.connection.socket.close()
        return None
    return None if found is None else place_of(found, name, timeout)


def newcomer(store: str, timeout: float, deadline: float) -> Place:
    """Return the place of a newcomer at the ranks of `store`.

    CollectiveTimeout if these do not grow until `deadline`, `timeout` seconds after the call.
    """
    address = address_of(store)
    if address is None:
        raise UsageError(f"join: {store!r} is not of the form tcp://host:port", code="GC-STORE")
    while True:
        try:
            found = ask_for_a_place(address, os.environ.get(SECRET) or text_of(address), deadline)
        except CollectiveTimeout as error:
            raise CollectiveTimeout(f"join: waited {timeout:g} s for the ranks at {store} to grow: "
                                    f"{error.args[0]}") from None
        except StoreError as error:
            raise StoreError(f"join: the ranks at {store} refused this process: {error.args[0]}; give newcomers the "
                             f"same {SECRET} as the ranks") from None
        try:
            return place_of(found, "", timeout)
        except StoreError:  # the leader has died
            if time.monotonic() > deadline:
                raise


# ---------------------------------------------------------------- the leader's side


class _Roll:
    """The leader's roll of the other ranks for a call: come, gone, or awaited."""

    def __init__(self, ranks: Membership, call: str, gone: Collection[int], ended: Callable[[], Collection[int]],
                 deadline: float) -> None:
        self._ranks, self._call, self._ended, self._deadline = ranks, call, ended, deadline
        self.gone = set(gone)  # ranks dead or left
        self._asked: set[int] = set()
        join_port(ranks.host).serve()

    def come(self) -> dict[int, Applicant]:
        """Return the ranks that have come."""
        found = {one.name: one for one in APPLICANTS.here(self._ranks.key) if one.call == self._call}
        for name in found.keys() - {*self._ranks.names}:
            found.pop(name).notify({"left": True})  # of a group that was never complete
        return {rank: found[name] for rank, name in enumerate(self._ranks.names)
                if name in found and rank not in self.gone}

    def elsewhere(self) -> set[int]:
        """Return the ranks that have come for another call."""
        other = {one.name for one in APPLICANTS.here(self._ranks.key) if one.call not in (self._call, "")}
        return {rank for rank, name in enumerate(self._ranks.names) if name in other}

    def awaited(self) -> set[int]:
        """Return the ranks neither come nor gone."""
        here = self.come().keys()
        self.gone |= set(self._ended()) - here
        left = {*range(self._ranks.size)} - {self._ranks.rank} - self.gone - here
        for rank in left - self._asked:
            # The rank may be dead on another host, or may have left: its port shows that.
            self._asked.add(rank)
            threading.Thread(target=self._look, args=[rank], name="gpucoll regroup", daemon=True).start()
        return left

    def _look(self, rank: int) -> None:
        found: Answer | None = None
        try:
            found = ask(self._ranks.ports[rank], self._ranks.key, self._ranks.token, self._deadline)
            if found is None or "left" in found.frame:
                self.gone.add(rank)
        except StoreError:  # another process has the port, or the process has forgotten this group
            self.gone.add(rank)
        except GpucollError:
            pass  # the rank lives: the deadline decides
        finally:
            if found is not None:
                found.connection.socket.close()


def _invite(ranks: Membership, seats: Mapping[int, Applicant], mine: int, size: int, elders: Sequence[int],
            options: Sequence[Any], deadline: float) -> Place:
    """Open the store of a new group and send all applicants their places; return this rank's own place, `mine`.

    `elders` has the ranks of the new group in order of age.
    """
    secret = secrets.token_bytes(32)
    store, (host, port) = host_store(mine, size, secret.hex(), ranks.ports[ranks.rank][0])
    for rank, applicant in seats.items():
        applicant.notify({"rank": rank, "size": size, "host": host, "port": port, "known": ranks.known,
                          "named": ranks.named, "options": list(options), "sealed": applicant.seal(secret),
                          "key": ranks.key, "proves": _veiled(ranks.token, secret.hex()), "elders": list(elders)})
    _await_arrivals(store, seats, deadline)
    return Place(mine, size, store, secret.hex(), ranks.known, ranks.named, list(options),
                 Lineage(ranks.key, ranks.token, ranks.names[ranks.rank], tuple(elders)))


def _await_arrivals(store: StoreServer, seats: Mapping[int, Applicant], deadline: float) -> None:
    """Wait until each applicant has opened the store or has ended; an ended applicant counts as gone in the store."""
    while time.monotonic() < deadline + GREETING:
        here = APPLICANTS.stay(seats.values())
        if not here:
            break
        APPLICANTS.wait(LOOK)
    for rank in seats:
        store.hub.lose(rank)


def _refuse(applicants: Collection[Applicant], error: GpucollError) -> GpucollError:
    """Send an error to all applicants, and return the error."""
    for applicant in applicants:
        applicant.notify({"raise": type(error).__name__, "text": error.args[0], "code": error.code,
                          "ranks": list(error.ranks)})
    return error


# ---------------------------------------------------------------- the calls


def survivors(ranks: Membership, ended: Callable[[], Collection[int]], timeout: float,
              options: Sequence[Any]) -> Place:
    """Return this rank's place among the ranks that are left; a collective call of these ranks.

    `ended` returns the ranks known to be dead. Raises CollectiveTimeout if a living rank does not come, and StoreError
    if the leader dies once it has decided.
    """
    deadline, gone = time.monotonic() + timeout, set[int]()
    APPLICANTS.leave(ranks.key, "grow")  # members that still come to grow would wait in vain
    join_port(ranks.host).serve()
    for leader in ranks.elders[:ranks.elders.index(ranks.rank)]:
        place = None if leader in ended() else _follow(ranks, leader, deadline, timeout, "shrink")
        if place is not None:
            return place
        gone.add(leader)
    roll = _Roll(ranks, "shrink", gone, ended, deadline)
    while awaited := roll.awaited():
        if time.monotonic() > deadline:
            raise _refuse(roll.come().values(), CollectiveTimeout(
                f"shrink: waited {timeout:g} s for ranks {listed(sorted(awaited))}, which are alive but do not join",
                ranks=tuple(sorted(awaited))))
        APPLICANTS.wait(LOOK)
    come = roll.come()
    order = sorted([ranks.rank, *come])
    seats = {order.index(rank): applicant for rank, applicant in come.items()}
    return _invite(ranks, seats, order.index(ranks.rank), len(order),
                   [order.index(rank) for rank in ranks.elders if rank in order], options, time.monotonic() + timeout)


def grown(ranks: Membership, size: int, seats: Sequence[int], ended: Callable[[], Collection[int]], timeout: float,
          options: Sequence[Any]) -> Place:
    """Return this rank's place in a group of `size` ranks: member i has rank ``seats[i]``, newcomers the others.

    A collective call of all members. Raises CollectiveTimeout after `timeout` seconds without enough newcomers, and
    RankFailedError if a member dies or shrinks the group, on every member.
    """
    deadline = time.monotonic() + timeout
    if ranks.rank != ranks.admitting_rank:
        place = _follow(ranks, ranks.admitting_rank, deadline, timeout, "grow")
        if place is None:
            raise RankFailedError(f"grow: rank {ranks.admitting_rank} has ended", ranks=(ranks.admitting_rank,))
        return place
    roll = _Roll(ranks, "grow", (), ended, deadline)
    needed = size - ranks.size
    while True:
        shrink, newcomers = roll.elsewhere(), APPLICANTS.here(NEWCOMERS)
        awaited, is_broken = roll.awaited() - shrink, bool(roll.gone or shrink)
        if not is_broken and not awaited and len(newcomers) >= needed:
            break
        if is_broken:  # the members on their way must be told, too
            deadline = min(deadline, time.monotonic() + COMES)
        if (is_broken and not awaited) or time.monotonic() > deadline:
            error = _not_grown(roll.gone, awaited, needed, len(newcomers), ranks, timeout)
            if shrink and not roll.gone:
                error = RankFailedError(f"grow: ranks {listed(sorted(shrink))} shrink the group")
            raise _refuse(roll.come().values(), error)
        APPLICANTS.wait(LOOK)
    free = [rank for rank in range(size) if rank not in seats]
    applicants = {seats[rank]: applicant for rank, applicant in roll.come().items()}
    applicants |= dict(zip(free, newcomers, strict=False))
    return _invite(ranks, applicants, seats[ranks.rank], size, [*(seats[rank] for rank in ranks.elders), *free],
                   options, deadline)


def _not_grown(gone: Collection[int], awaited: Collection[int], needed: int, came: int, ranks: Membership,
               timeout: float) -> GpucollError:
    if gone:
        return RankFailedError(f"grow: ranks {listed(sorted(gone))} have ended", ranks=tuple(sorted(gone)))
    if awaited:
        return CollectiveTimeout(f"grow: waited {timeout:g} s for ranks {listed(sorted(awaited))}",
                                 ranks=tuple(sorted(awaited)))
    return CollectiveTimeout(f"grow: waited {timeout:g} s for {needed} newcomers, and {came} came; start each with "
                             f"gpucoll.join({text_of(ranks.address)!r})")


def check_secrets(everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise UsageError or MismatchError, on every member, unless the members have a secret for newcomers, the same."""
    lacking = tuple(rank for rank, one in enumerate(everyone) if one["secret"] is None)
    if lacking:
        raise UsageError(f"grow: newcomers prove themselves by {SECRET}, not set on ranks {listed(lacking)}; set the "
                         "same secret for all ranks and newcomers", code="GC-GROW", ranks=lacking)
    differ = minority([one["secret"] for one in everyone])
    if differ:
        raise MismatchError(f"grow: {SECRET} differs on ranks {listed(differ)}", code="GC-GROW", ranks=differ)


def fingerprint(secret: str | None) -> str | None:
    """Return a text that lets ranks compare their secrets without revealing them."""
    return None if secret is None else hmac.new(secret.encode(), b"newcomers", "sha256").hexdigest()[:16]
