"""Parts of messages between two ranks: any rank, any tag, no rank; the status; batches between GPU arrays."""

from __future__ import annotations

import enum
import sys
from collections.abc import Generator
from typing import Any, NamedTuple, cast

import numpy

from gpucoll.arrays import Array, Space, Target, address, flat, target
from gpucoll.communicator.gpu import DeviceSpace
from gpucoll.core.dtypes import code_of
from gpucoll.device import Part
from gpucoll.device.messages import Counted
from gpucoll.errors import MismatchError
from gpucoll.progress.operations import Operation, Pending, ProbeResult, Work
from gpucoll.progress.partners import RECEIVE, End, State
from gpucoll.transport.control import cancel
from gpucoll.transport.tags import MAX_MESSAGE


class Special(enum.IntEnum):
    """A number in place of a rank or a tag. mpi4py's constants of the same names are accepted, too."""

    ANY_SOURCE = -32101
    ANY_TAG = -32102
    PROC_NULL = -32103

    def is_meant(self, value: Any) -> bool:
        """Return whether `value` is this constant, or mpi4py's."""
        mpi = sys.modules.get("mpi4py.MPI")
        return value is self or (mpi is not None and type(value) is int and value == getattr(mpi, self.name))


ANY_SOURCE, ANY_TAG, PROC_NULL = Special


class Status:
    """The `source`, `tag` and `count` (bytes) of a message received or probed."""

    def __init__(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, count: int = 0) -> None:
        self.source, self.tag, self.count = source, tag, count

    def __repr__(self) -> str:
        return f"Status(source={self.source}, tag={self.tag}, count={self.count})"


def fill_status(status: Any, seen: ProbeResult) -> None:
    """Write source, tag and bytes of a message into `status`: a `Status`, mpi4py's, or None."""
    if status is None:
        return
    status.source, status.tag = seen.source, seen.tag
    if hasattr(status, "Set_elements"):  # mpi4py's: its count is read-only
        status.Set_elements(sys.modules["mpi4py.MPI"].BYTE, seen.nbytes)
    else:
        status.count = seen.nbytes


class PointMessage(NamedTuple):
    """The checked arguments of `send`, `recv` or `sendrecv`.

    `given` is the array to send to rank `to`, `taken` the array to receive from rank `came_from`. If an array is None,
    its rank has no meaning. `came_from` None means any rank, `tag` None any tag; `status` is then set to source and
    tag.
    """

    name: str
    given: Array | None
    to: int
    taken: Array | None
    came_from: int | None
    tag: int | None
    result: Any
    space: Space
    status: Any = None


class Batch:
    """Messages between GPU arrays, under way together in one group of the transport: alone each might wait."""

    def __init__(self, space: DeviceSpace) -> None:
        self._space = space
        self.work: Any = None  # the `Work` of `run`
        self._messages: list[PointMessage] = []
        self._rows: list[Array] = []
        self._targets: list[Target] = []
        self._sends: list[Part] = []
        self._receives: list[Part] = []
        self.ends: list[End] = []
        self.completion = space.completion()

    def add(self, message: PointMessage) -> None:
        """Add a message, perhaps on another stream. Messages between two ranks match in the order of these calls."""
        self._messages.append(message)
        if message.space.stream != self._space.stream:
            DeviceSpace(self._space.gpu, message.space.stream).lead(self._space.stream)
        if message.given is not None:
            self._rows.append(flat(message.given, self._space))
            self._sends.append(_part(self._rows[-1], message.to, message.tag))
            self.ends.append(End("send", message.to, message.tag, self._rows[-1].nbytes, [None, ()]))
        if message.taken is not None:
            self._targets.append(target(message.taken, self._space))
            self._receives.append(_part(self._targets[-1].row, message.came_from, message.tag))
            self.ends.append(End("recv", message.came_from, message.tag, self._targets[-1].row.nbytes, [(), None]))

    def run(self) -> Operation:
        """Enqueue the group, then the copies into strided arrays."""
        gpu, stream = self._space.gpu, self._space.stream
        sends, receives = ([part for part in parts if part.nbytes] for parts in (self._sends, self._receives))
        try:
            self._space.begin()
            yield from gpu.points.group(sends, receives, stream)
            for one in self._targets:
                one.deliver(self._space)
            yield from self._space.end_message(self)
        except BaseException as error:
            if not isinstance(error, MismatchError):  # after one the messages have ended: nothing is left to cancel
                self._space.cancel(self)
            raise


def _part(row: Array, peer: int | None, tag: int | None) -> Part:
    # Wildcards are refused for GPU arrays.
    return Part(address(row), row.nbytes, cast("int", peer), cast("int", tag))


def ends(state: State, came: Any, sent: Any, x: Any, out: Any, src: int, points: Any = None, tag: int = 0,
         code: int = 0) -> Generator[Pending, None, None]:
    """Wait for the requests of a message, unless None; check length and dtype of the received data.

    Note the end of the receive in `state`.
    """
    count = None
    try:
        if came is not None:
            count = Counted(came, points, src, tag, code or code_of(out.dtype))
            yield count
            count.check(src, out.nbytes)
            state[RECEIVE] = None
        if sent is not None:
            yield sent.Test
    except BaseException:
        cancel([] if count is None else [count.request], (x, out, sent, count))
        raise


def pieces_of(row: Array) -> list[Array]:
    """Return the bytes of a row in pieces, as MPI counts bytes in 31 bits. An empty row is one piece."""
    everything = row.view(numpy.uint8)
    return [everything[start:start + MAX_MESSAGE] for start in range(0, len(everything), MAX_MESSAGE)] or [everything]


def end_of(work: Work) -> Operation:
    yield work.is_enqueued
    if work.error is not None:
        raise work.error
