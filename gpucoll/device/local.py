"""What stands for NCCL between threads that share a GPU: copies within its memory, ordered by events.

The sender sends address and an event that stands for "it is there"; the receiver lets its stream wait for that,
enqueues the copy, and answers with an event that stands for "it may be overwritten".
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import cupy
import numpy

from gpucoll.device import Part, Transport, Waiting
from gpucoll.errors import BackendError

WORDS = 3  # int64 words of a message: address, bytes, event
EVENTS = 4096  # kept; no rank is so many groups ahead of another


class LocalTransport(Transport):
    """Groups of copies; `wire` is a `gpucoll.communicator.links.Link`'s of threads, with `tag` and the next one."""

    capturable = False  # ranks must meet on the host for every group

    def __init__(self, wire: Any, tag: int, device: Any) -> None:
        self._wire, self._device = wire, device
        self._offers, self._answers = tag, tag + 1
        # An event sent to a peer must live until that peer's stream waits for it; so many groups later it does.
        self._sent: collections.deque[Any] = collections.deque(maxlen=EVENTS)

    def group(self, sends: Sequence[Part], receives: Sequence[Part], stream: Any) -> Waiting:
        ready = self._device.mark(stream)
        offers = [self._send(part.peer, [part.address, part.nbytes, ready.ptr], self._offers + 2 * part.tag)
                  for part in sends]
        posted = [self._await(part.peer, self._answers + 2 * part.tag) for part in sends]
        awaited = [(part, *self._await(part.peer, self._offers + 2 * part.tag)) for part in receives]
        for part, words, request in awaited:
            yield request.Test
            self._copy(part, words, stream)
        done = self._device.mark(stream)
        answers = [self._send(part.peer, [0, 0, done.ptr], self._answers + 2 * part.tag) for part in receives]
        for answer, request in posted:
            yield request.Test
            cupy.cuda.runtime.streamWaitEvent(stream.ptr, int(answer[2]))
        for request in [*answers, *offers]:
            yield request.Test
        self._sent += [ready, done]

    def _send(self, peer: int, words: list[int], tag: int) -> Any:
        return self._wire.Isend([numpy.array(words, numpy.int64).view(numpy.uint8), "B"], peer, tag)

    def _await(self, peer: int, tag: int) -> tuple[Any, Any]:
        words = numpy.zeros(WORDS, numpy.int64)
        return words, self._wire.Irecv([words.view(numpy.uint8), "B"], peer, tag)

    def _copy(self, part: Part, words: Any, stream: Any) -> None:
        address, nbytes, ready = (int(word) for word in words)
        cupy.cuda.runtime.streamWaitEvent(stream.ptr, ready)
        if nbytes != part.nbytes:
            raise BackendError(f"rank {part.peer} sent {nbytes} bytes, expected {part.nbytes}", code="GC-SHAPE",
                               ranks=(part.peer,))
        self._device.kernels.copy(address, part.address, nbytes, 1, stream)

    def close(self, *, captured: bool) -> None:
        self._sent.clear()
