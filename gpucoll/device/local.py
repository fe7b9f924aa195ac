"""The substitute for NCCL between ranks that are threads sharing a GPU: copies in GPU memory, ordered by events.

The sender sends the address and an event marking the data as ready. The receiver makes the receiver's stream wait for
this event, enqueues the copy, and answers with a second event. After the second event the sender may reuse the memory.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy

from gpucoll.device import DeviceTransport, GroupPart, Waiting
from gpucoll.device.gpus import cupy
from gpucoll.errors import BackendError, MismatchError, UsageError

MESSAGE_WORDS = 4  # int64 words of a message: address, number of bytes, handle of the event, number of the GPU
EVENTS = 4096  # events kept alive: no rank is 2048 groups ahead of another rank


class LocalTransport(DeviceTransport):
    """Groups of copies. `wire` carries messages of a `gpucoll.Transport` of threads; tags begin at `tag`.

    A message of another length than expected is an error of the program if the messages `are_users`, and the
    communicator stays usable; else the ranks are in different collectives.
    """

    # The ranks exchange events on the host for every group, and a CUDA graph does not repeat calls on the host.
    capturable = False

    def __init__(self, wire: Any, tag: int, device: Any, *, are_users: bool = False) -> None:
        self._wire, self._device, self._are_users = wire, device, are_users
        # Even offsets carry offers, odd offsets answers, so the part's tag is doubled when added.
        self._offers, self._answers = tag, tag + 1
        # An event sent to a peer must live until the peer's stream waits for the event. A group adds two events.
        self._sent: collections.deque[Any] = collections.deque(maxlen=EVENTS)

    def group(self, sends: Sequence[GroupPart], receives: Sequence[GroupPart], stream: Any) -> Waiting:
        ready = self._device.mark(stream)
        # Send all offers and post all receives before the first wait: otherwise two ranks may wait for each other.
        ordinal = self._device.ordinal
        offers = [self._send(part.peer, [part.address, part.nbytes, ready.ptr, ordinal], self._offers + 2 * part.tag)
                  for part in sends]
        posted = [self._await(part.peer, self._answers + 2 * part.tag) for part in sends]
        awaited = [(part, *self._await(part.peer, self._offers + 2 * part.tag)) for part in receives]
        mismatches: list[MismatchError] = []
        for part, words, request in awaited:
            yield request.Test
            self._copy(part, words, stream, mismatches)
        done = self._device.mark(stream)
        answers = [self._send(part.peer, [0, 0, done.ptr, 0], self._answers + 2 * part.tag) for part in receives]
        for answer, request in posted:
            yield request.Test
            cupy.cuda.runtime.streamWaitEvent(stream.ptr, int(answer[2]))
        for request in [*answers, *offers]:
            yield request.Test
        self._sent += [ready, done]
        if mismatches:
            raise mismatches[0]

    def _send(self, peer: int, words: list[int], tag: int) -> Any:
        return self._wire.Isend([numpy.array(words, numpy.int64).view(numpy.uint8), "B"], peer, tag)

    def _await(self, peer: int, tag: int) -> tuple[Any, Any]:
        words = numpy.zeros(MESSAGE_WORDS, numpy.int64)
        return words, self._wire.Irecv([words.view(numpy.uint8), "B"], peer, tag)

    def _copy(self, part: GroupPart, words: Any, stream: Any, mismatches: list[MismatchError]) -> None:
        address, nbytes, ready, ordinal = words.tolist()
        if ordinal != self._device.ordinal:
            raise UsageError(f"rank {part.peer} is on GPU {ordinal}, this rank on GPU {self._device.ordinal}; ranks "
                             "that are threads can only share one GPU", code="GC-DEVICE")
        cupy.cuda.runtime.streamWaitEvent(stream.ptr, ready)
        # A copy of a wrong length would write past the end of the receive buffer.
        if nbytes != part.nbytes and self._are_users:
            mismatches.append(MismatchError(f"recv: rank {part.peer} sent {nbytes} bytes, out has {part.nbytes}",
                                            code="GC-SHAPE", ranks=(part.peer,), settled=True))  # it is consumed
            return
        if nbytes != part.nbytes:
            raise BackendError(f"rank {part.peer} sent {nbytes} bytes, expected {part.nbytes}", code="GC-SHAPE",
                               ranks=(part.peer,))
        self._device.kernels.copy(address, part.address, nbytes, 1, stream)

    def close(self, *, captured: bool) -> None:
        self._sent.clear()
