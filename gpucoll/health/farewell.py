"""Farewells: the last message of a rank to the other ranks of a communicator.

A rank leaves by `close`, at the end of its process, or after a failure. The farewell has the reason, the numbers of
calls made, and words for the errors of the other ranks. A rank may fail in `close`, after its farewell, and then sends
a second one; the last farewell counts. A rank that closes a communicator also sends a farewell to the parts made of it
by `split`, because it makes no call of a part while it waits in `close`; these parts may go on once all have closed.
A rank that waits in `from_mpi` tells the open communicators in the same way.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.progress.operations import keep_for_ever
from gpucoll.transport.tags import BYTES, FAREWELL_BYTES, Tag

CULPRITS = 8  # at most, in a farewell


class Why(enum.IntEnum):
    """The reason of a farewell."""

    AWAY = -1  # the rank waits for the others in `close` of a larger communicator, or in `from_mpi`, and is here still
    CLOSES = 0  # the rank has called `close`, and waits there for the others
    ENDS = 1  # the process ends without `close`
    FAILED = 2  # a call has failed on this rank, or the program has left its `with` block by an exception
    LATE = 3  # a wait has lasted until the deadline


class Farewell(NamedTuple):
    """A farewell: the reason, the ranks to blame, the numbers of calls, and the sender's words.

    `calls` are the calls made on the host, `device_calls` those compared by messages or in mapped memory. The sender
    has refused the last `refused` of these calls, so other ranks need not have made such calls. `meeting` is the number
    of the sender's call of `from_mpi`, 0 outside. `words` follow the name of the rank: "has closed the
    communicator after its call 3, ...".
    """

    why: Why
    culprits: tuple[int, ...] = ()
    calls: int = 0
    device_calls: int = 0
    refused: int = 0
    words: str = ""
    meeting: int = 0

    def encode(self) -> Any:
        """Return the message, a row of uint8; words that are too long lose their end."""
        numbers = json.dumps([self.why, self.culprits[:CULPRITS], *self[2:5], self.meeting], default=int)
        text = f"{numbers}\n{self.words}".encode()[:FAREWELL_BYTES].ljust(FAREWELL_BYTES, b"\0")
        return numpy.frombuffer(text, numpy.uint8).copy()

    @classmethod
    def decode(cls, row: Any) -> Farewell:
        """Return the farewell in a message.

        >>> Farewell.decode(Farewell(Why.FAILED, (2,), 7, words="has failed").encode())
        Farewell(why=<Why.FAILED: 2>, culprits=(2,), calls=7, device_calls=0, refused=0, words='has failed', meeting=0)
        """
        numbers, _, words = row.tobytes().rstrip(b"\0").partition(b"\n")
        why, culprits, calls, device_calls, refused, meeting = json.loads(numbers)
        return cls(Why(why), tuple(culprits), calls, device_calls, refused, words.decode(errors="ignore"), meeting)

    def has_made(self, other: Farewell) -> bool:
        """Return whether the sender has made all calls of another rank, but for those that the other rank refused.

        >>> Farewell(Why.CLOSES, calls=3).has_made(Farewell(Why.CLOSES, calls=4, refused=1))
        True
        """
        return other.calls - other.refused <= self.calls and other.device_calls - other.refused <= self.device_calls


class Sent:
    """The sends of one rank's farewell to the `others`. Never waits."""

    def __init__(self, wire: Any, others: Collection[int], farewell: Farewell) -> None:
        self._row = farewell.encode()
        self._requests = [wire.Isend([self._row, BYTES], other, Tag.FAREWELL) for other in others]

    def has_ended(self) -> bool:
        """Return whether all messages have left; drives their transport."""
        # Drop completed requests, so that no request is tested again after its end.
        self._requests = [request for request in self._requests if not request.Test()]
        return not self._requests

    def abandon(self) -> None:
        """Keep the message for ever: sends to a rank that never receives may never complete."""
        keep_for_ever(self)


def by_mpi(comm: Any) -> dict[int, Farewell]:
    """Receive the farewells that have arrived over an mpi4py communicator; return the last one of each rank."""
    from mpi4py import MPI

    found, status, row = dict[int, Farewell](), MPI.Status(), numpy.zeros(FAREWELL_BYTES, numpy.uint8)
    # A matched probe: of two threads that look at once, one would wait for ever for a farewell received by the other.
    while (message := comm.Improbe(MPI.ANY_SOURCE, Tag.FAREWELL, status)) is not None:
        message.Recv([row, BYTES])
        found[status.source] = Farewell.decode(row)
    return found


def named(farewells: Sequence[tuple[int, Farewell]]) -> str:
    """Return farewells as a sentence, each with the number of its rank."""
    return "; ".join(f"rank {rank} {one.words}" for rank, one in farewells)
