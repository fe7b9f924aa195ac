"""The substitute for NCCL between ranks that are threads sharing a GPU: copies in GPU memory, ordered by events.

The sender offers its memory, with an event marking the data as ready. The receiver makes its stream wait for this
event, enqueues the copy, and answers with a second event. After the second event the sender may reuse the memory.
"""

from __future__ import annotations

import collections
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpucoll.device import DeviceTransport, Event, GroupPart, Waiting
from gpucoll.errors import BackendError, MismatchError, UsageError


@dataclass(slots=True)
class CopyOffer:
    """A message: the sender's memory and GPU, the event before the copy and, once the copy is enqueued, that after it.
    """

    address: int
    nbytes: int
    ordinal: int
    ready: Event
    done: Event = None

    def has_ended(self) -> bool:
        return self.done is not None


class LocalTransport(DeviceTransport):
    """Groups of copies to and from rank `rank`; all ranks share the table `offers`, by sender, receiver, tag, number.

    A message of another length than expected is an error of the program if the messages `are_users`, and the
    communicator stays usable; else the ranks are in different collectives.
    """

    # The ranks exchange events on the host for every group, and a CUDA graph does not repeat calls on the host.
    capturable = False

    def __init__(self, rank: int, offers: dict[Any, CopyOffer], device: Any, *, are_users: bool = False) -> None:
        self._rank, self._offers, self._device, self._are_users = rank, offers, device, are_users
        self._sent, self._received = (collections.defaultdict[Any, Any](itertools.count) for _ in range(2))

    def group(self, sends: Sequence[GroupPart], receives: Sequence[GroupPart], stream: Any) -> Waiting:
        offers, rank, ordinal, ready = self._offers, self._rank, self._device.ordinal, self._device.mark(stream)
        taken, wrong = list[CopyOffer](), list[MismatchError]()
        mine = [CopyOffer(part.address, part.nbytes, ordinal, ready) for part in sends]
        # Send all offers and number all receives before the first wait: otherwise two ranks may wait for each other.
        for part, offer in zip(sends, mine, strict=True):
            offers[rank, part.peer, part.tag, next(self._sent[part.peer, part.tag])] = offer
        keys = [(part.peer, rank, part.tag, next(self._received[part.peer, part.tag])) for part in receives]
        for part, key in zip(receives, keys, strict=True):
            if key not in offers:
                yield functools.partial(offers.__contains__, key)
            taken.append(offers.pop(key))
            self._copy(taken[-1], part, stream, wrong)
        done = self._device.mark(stream)
        for offer in taken:
            offer.done = done
        for offer in mine:
            if offer.done is None:
                yield offer.has_ended
            stream.wait_event(offer.done)
        if wrong:
            raise wrong[0]

    def _copy(self, offer: CopyOffer, part: GroupPart, stream: Any, wrong: list[MismatchError]) -> None:
        if offer.ordinal != self._device.ordinal:
            raise UsageError(f"rank {part.peer} is on GPU {offer.ordinal}, this rank on GPU {self._device.ordinal}; "
                             "ranks that are threads can only share one GPU", code="GC-DEVICE")
        stream.wait_event(offer.ready)
        # A copy of a wrong length would write past the end of the receive buffer.
        if offer.nbytes != part.nbytes and self._are_users:
            wrong.append(MismatchError(f"recv: rank {part.peer} sent {offer.nbytes} bytes, out has {part.nbytes}",
                                       code="GC-SHAPE", ranks=(part.peer,), settled=True))  # it is consumed
        elif offer.nbytes != part.nbytes:
            raise BackendError(f"rank {part.peer} sent {offer.nbytes} bytes, expected {part.nbytes}", code="GC-SHAPE",
                               ranks=(part.peer,))
        else:
            self._device.kernels.copy(offer.address, part.address, part.nbytes, 1, stream)
