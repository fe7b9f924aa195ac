"""Applicants: processes that wait at this process for their place in a new communicator.

An applicant is a rank of a failed or growing communicator, or a newcomer of `gpucoll.join`. The applicant's greeting
names the key of the communicator ("" for a newcomer), the call, and the rank by a name: a rank's number changes from
group to group. The applicant then waits for an answer, and leaves by ending the connection.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from gpucoll.transport.connections import Connection, StoreError

ANY = "any"  # in place of a call: each call
NEWCOMERS = ""  # the key of newcomers, in place of a communicator's
ASKS = ""  # in place of the rank's name: the other end only asks whether this process has left the communicator


class Applicant(NamedTuple):
    """An applicant: the connection, the key of the communicator, the rank's name, and the call."""

    connection: Connection
    key: str
    name: str
    call: str

    def notify(self, head: dict[str, Any]) -> None:
        """Send the answer; an applicant that has just left hears nothing."""
        self.connection.is_answered = True
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
        self._uses: collections.Counter[str] = collections.Counter()  # this process' communicators with each key
        self._left: set[tuple[str, str]] = set()  # key and call (ANY for each call) that this process takes no part in
        self._here: list[Applicant] = []

    def expect(self, key: str, token: str | None) -> None:
        """Let in applicants of the communicator `key` with this secret; without a secret refuse new applicants."""
        with self._changed:
            self._tokens.pop(key, None)
            if token is not None:
                self._tokens[key] = token

    def hold(self, key: str, token: str) -> None:
        """Let in applicants of one more communicator with the key `key`, in which this process takes part again."""
        with self._changed:
            self._uses[key] += 1
            self._left = {(left, call) for left, call in self._left if left != key}
            self._tokens[key] = token

    def release(self, key: str) -> bool:
        """Forget a communicator with the key `key`; return whether it was the last, and refuse applicants then."""
        with self._changed:
            self._uses[key] -= 1
            is_last = self._uses[key] <= 0
            if is_last:
                del self._uses[key]
                self._tokens.pop(key, None)
            return is_last

    def leave(self, key: str, call: str = ANY) -> None:
        """Answer the applicants of the communicator `key` that this process takes no part in `call`, now and later."""
        with self._changed:
            # Another communicator with this key may go on: its ranks are awaited there.
            if call == ANY:
                self._uses[key] = max(0, self._uses[key] - 1)
                if self._uses[key]:
                    return
            self._left.add((key, call))
            here = [one for one in self._here if one.key == key and call in (ANY, one.call)]
        for applicant in here:
            applicant.notify({"left": True})

    def here(self, key: str) -> list[Applicant]:
        """Return the applicants of the communicator `key` that wait for an answer, in the order of arrival."""
        with self._changed:
            return [one for one in self._here if one.key == key and not one.connection.is_answered]

    def wait(self, patience: float) -> None:
        """Wait until an applicant comes or leaves, for `patience` seconds at most."""
        with self._changed:
            self._changed.wait(patience)

    def stay(self, applicants: Collection[Applicant]) -> list[Applicant]:
        """Return the `applicants` that have not left."""
        with self._changed:
            return [applicant for applicant in applicants if any(applicant is other for other in self._here)]

    # ---------------------------------------------------------------- called by a hub, `connections.Hub`

    def token(self, greeting: Mapping[str, Any]) -> str | None:
        """Return the secret that this applicant must prove; None for an unknown communicator."""
        key = greeting.get("key")
        with self._changed:
            return self._tokens.get(key) if isinstance(key, str) else None

    def receive(self, connection: Connection, greeting: Mapping[str, Any]) -> None:
        """Keep an applicant until the connection ends."""
        key, name, call = (greeting.get(field) for field in ("key", "was", "call"))
        if not isinstance(key, str) or not isinstance(name, str) or not isinstance(call, str):
            raise StoreError("the greeting of an applicant is incomplete; start all processes with one version of "
                             "gpucoll")
        applicant = Applicant(connection, key, name, call)
        with self._changed:
            self._here.append(applicant)
            has_left = not self._left.isdisjoint({(key, ANY), (key, call)})
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
