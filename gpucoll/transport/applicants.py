"""Applicants: processes that wait at this process for their place in a new communicator.

An applicant is a rank of a failed or growing communicator, or a newcomer of `gpucoll.join`. The applicant's greeting
names the key of the communicator ("" for a newcomer) and the old rank. The applicant then waits, and leaves by ending
the connection.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpucoll.transport.connections import Connection, StoreError

NEWCOMERS = ""  # the key of newcomers, in place of a communicator's
ASKS = -1  # in place of the old rank: the other end only asks whether this process has left the communicator


class Applicant(NamedTuple):
    """An applicant: the connection, the key of the communicator, and the old rank."""

    connection: Connection
    key: str
    rank: int

    def notify(self, head: dict[str, Any]) -> None:
        """Send a frame; an applicant that has just left hears nothing."""
        with contextlib.suppress(OSError):
            self.connection.send(head)

    def seal(self, secret: bytes) -> str:
        """Return a secret of 32 bytes readable for this applicant alone, as the network may be overheard."""
        return bytes(a ^ b for a, b in zip(secret, self.connection.pad, strict=True)).hex()


class Applicants:
    """All applicants of this process, in the order of arrival. Any thread may call."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards the fields; notified when an applicant comes or leaves
        self._tokens: dict[str, str] = {}  # the secret of each communicator's ranks, by key
        self._left: set[str] = set()  # the keys of communicators left by this process
        self._here: list[Applicant] = []

    def expect(self, key: str, token: str | None) -> None:
        """Let in applicants of the communicator `key` with this secret; without a secret refuse new applicants."""
        with self._changed:
            self._tokens.pop(key, None)
            if token is not None:
                self._tokens[key] = token

    def leave(self, key: str) -> None:
        """Answer the applicants of the communicator `key` that this process has left, now and later."""
        with self._changed:
            self._left.add(key)
            here = [applicant for applicant in self._here if applicant.key == key]
        for applicant in here:
            applicant.notify({"left": True})

    def here(self, key: str) -> list[Applicant]:
        """Return the applicants of the communicator `key`, in the order of arrival."""
        with self._changed:
            return [applicant for applicant in self._here if applicant.key == key]

    def wait(self, patience: float) -> None:
        """Wait until an applicant comes or leaves, for `patience` seconds at most."""
        with self._changed:
            self._changed.wait(patience)

    def stay(self, applicants: Collection[Applicant]) -> list[Applicant]:
        """Return the `applicants` that have not left."""
        with self._changed:
            return [applicant for applicant in applicants if any(applicant is other for other in self._here)]

    # ---------------------------------------------------------------- called by a hub, see `connections.Receiver`

    def token(self, greeting: Mapping[str, Any]) -> str | None:
        """Return the secret that this applicant must prove; None for an unknown communicator."""
        key = greeting.get("key")
        with self._changed:
            return self._tokens.get(key) if isinstance(key, str) else None

    def receive(self, connection: Connection, greeting: Mapping[str, Any]) -> None:
        """Keep an applicant until the connection ends."""
        key, rank = greeting.get("key"), greeting.get("was")
        if not isinstance(key, str) or type(rank) is not int:
            raise StoreError("the greeting of an applicant is incomplete; start all processes with one version of "
                             "gpucoll")
        applicant = Applicant(connection, key, rank)
        with self._changed:
            self._here.append(applicant)
            has_left = key in self._left
            self._changed.notify_all()
        try:
            if has_left:
                applicant.notify({"left": True})
            connection.read(0)  # an applicant sends nothing: this ends with the connection
        finally:
            with self._changed:
                self._here = [other for other in self._here if other is not applicant]
                self._changed.notify_all()


APPLICANTS = Applicants()  # of this process
