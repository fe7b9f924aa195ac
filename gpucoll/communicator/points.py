"""Messages between two ranks, groups of calls, and splits."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy

from gpucoll.arrays import HOST, Array, Space, Target, address, check_input, check_writable, flat, overlap, target
from gpucoll.communicator.core import nothing
from gpucoll.communicator.gpu import DeviceSpace
from gpucoll.communicator.metadata import MetadataExchange
from gpucoll.device import NO_CAPTURE, Part
from gpucoll.device.messages import Counted
from gpucoll.errors import ArgumentError, MismatchError, RevokedError, UsageError
from gpucoll.executors.mpi import BYTES, TAGS, cancel
from gpucoll.work import Operation, Pending, Work


class Points(MetadataExchange):
    """Methods of `Communicator`. NCCL has no tags: messages between two ranks' GPU arrays meet in their order."""

    @functools.cached_property
    def _points(self) -> Any:
        """What carries messages between two ranks."""
        return self._host.points(self._link)

    @functools.cached_property
    def _exchange_here(self) -> Callable[..., Any]:
        """What does blocking messages between ranks of a node; it returns None for those that are not for it."""
        is_here = self._points is not self._link.points and self._host_engine() is not None
        return self._engine.exchange if is_here else nothing

    def _sender(self, tag: int) -> int | None:
        """Return a rank whose message with `tag` could be received now, None where there is none."""
        carrier: Any = self._link if self._points is self._link.points else self._points
        found: int | None = carrier.sender(tag)
        return found

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` (shape s) to rank `dst`, where `recv` takes it with the same `tag`, 0 .. 32767. MPI-5.0, 3.2.

        To mpi4py's ``PROC_NULL`` nothing is sent, and from there nothing comes: `out` stays as it is.
        """
        if not async_op and self._group is None:
            begun = self._exchange_here(x, dst, None, -1, tag)
            if begun is not None:
                return self._rest("send", begun, x, None, -1)
        if not async_op and self._is_plain(x, dst, tag):
            return self._soon("send", x, dst, None, -1, tag)
        return self._point(self._message("send", tag, x, dst), async_op)

    def recv(self, out: Any, src: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Receive into `out` (shape s) from `src` and return it; MismatchError for another length. MPI-5.0, 3.2."""
        if not async_op and self._group is None:
            begun = self._exchange_here(None, -1, out, src, tag)
            if begun is not None:
                return self._rest("recv", begun, None, out, src)
        if not async_op and self._is_plain(out, src, tag) and out.flags.writeable:
            return self._soon("recv", None, -1, out, src, tag)
        return self._point(self._message("recv", tag, out=out, src=src), async_op)

    def sendrecv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` to rank `dst` while receiving `out` from rank `src`; return `out`. MPI-5.0, 3.11."""
        if not async_op and self._group is None:
            begun = self._exchange_here(x, dst, out, src, tag)
            if begun is not None:
                return self._rest("sendrecv", begun, x, out, src)
        if not async_op and self._is_plain(x, dst, tag) and self._is_plain(out, src, tag) and out.flags.writeable \
                and not numpy.may_share_memory(x, out):
            return self._soon("sendrecv", x, dst, out, src, tag)
        message = self._message("sendrecv", tag, x, dst, out, src)
        if message.given is not None and message.taken is not None and overlap(message.given, message.taken):
            raise ArgumentError("sendrecv: x and out overlap; pass another array", code="GC-OVERLAP")
        return self._point(message, async_op)

    def _is_plain(self, array: Any, peer: Any, tag: Any) -> bool:
        """Return whether MPI may work on an array itself, in a message that nothing must come before."""
        return type(array) is numpy.ndarray and type(peer) is type(tag) is int and 0 <= peer < self.size \
            and 0 <= tag < TAGS and array.dtype.char in PLAIN and array.dtype.isnative and array.flags.c_contiguous \
            and array.nbytes <= PIECE and self._link.mpi is not None and self._group is None \
            and not self.options.emulated and not self._waits.has_messages

    def _rest(self, name: str, begun: Any, x: Any, out: Any, src: int) -> Any:
        """Return `out` once a message that the engine has begun has ended; True stands for one that has."""
        if begun is True:
            return out
        came, sent = begun
        work = self._waits.soon(_ends(came, sent, x, out, src), name, out)
        return out if work is None else work.wait()

    def _soon(self, name: str, x: Any, dst: int, out: Any, src: int, tag: int) -> Any:
        """Send `x` and receive `out`, unless they are None; return `out`. Only what takes long runs behind a `Work`."""
        self._check_usable()
        work = self._waits.soon(self._whole(x, dst, out, src, tag), name, out)
        return out if work is None else work.wait()

    def _whole(self, x: Any, dst: int, out: Any, src: int, tag: int) -> Generator[Pending, None, None]:
        came = sent = None
        try:
            if out is not None:
                came = self._points.Irecv([out, BYTES], src, tag)
            if x is not None:
                sent = self._points.Isend([x, BYTES], dst, tag)
        except BaseException:
            cancel([] if came is None else [came], (x, out, sent))
            raise
        yield from _ends(came, sent, x, out, src)

    def _message(self, name: str, tag: Any, x: Any = None, dst: Any = None, out: Any = None,
                 src: Any = None) -> PointMessage:
        """Return what is to be sent or received, checked."""
        self._check_usable()
        given = None if name == "recv" else check_input(name, x)
        taken = None if name == "send" else check_input(name, out)
        space = self._space(name, given if taken is None else taken)
        if isinstance(space, DeviceSpace) and not space.gpu.points.capturable and space.is_captured():
            raise UsageError(f"{name}: {NO_CAPTURE}", code="GC-CAPTURED")
        for what, array in (("x", given), ("out", taken)):
            if array is not None:
                space.check(name, what, array)
        if taken is not None:
            check_writable(name, "out", taken)
        to = -1 if given is None or _is_nobody(dst) else self._check_rank(name, "dst", dst)
        came = -1 if taken is None or _is_nobody(src) else self._check_rank(name, "src", src)
        return PointMessage(name, None if to < 0 else given, to, None if came < 0 else taken, came,
                            _check_tag(name, tag), out, space)

    def _point(self, message: PointMessage, async_op: bool) -> Any:
        if self._group is not None:
            work = self._in_group(message, self._group)
            return work if async_op else message.result
        (work,) = self._start_together([message], beside=async_op)
        return work if async_op else work.wait()

    def _in_group(self, message: PointMessage, group: list[Work]) -> Work:
        if isinstance(message.space, DeviceSpace):
            if self._batch is None:
                self._batch = Batch(message.space)
                group.insert(0, Work(self._waits, self._batch.run(), message.name, None, self._batch.completion))
                self._batch.work = group[0]
            self._batch.add(message)
            group.append(Work(self._waits, _end_of(self._batch.work), message.name, message.result,
                              self._batch.completion))
            return group[-1]
        work = Work(self._waits, self._host_operation(message), message.name, message.result)
        group.append(work)
        return work

    def _start_together(self, messages: Sequence[PointMessage], *, beside: bool = True) -> list[Work]:
        """Begin messages of which none waits for another; on a GPU `beside` the current stream, not in it."""
        if not messages:
            return []
        space = messages[0].space
        if any(one.space.device != space.device for one in messages):
            raise ArgumentError("messages between GPU arrays and between arrays on the host do not go together; pass "
                                "them in two calls", code="GC-DEVICE")
        if not isinstance(space, DeviceSpace):
            return [self._waits.start(Work(self._waits, self._host_operation(one), one.name, one.result))
                    for one in messages]
        batch = Batch(space.beside(space.gpu.device.new_stream()) if beside else space)
        for message in messages:
            batch.add(message)
        works = [Work(self._waits, iter(()), one.name, one.result, batch.completion) for one in messages]
        works[0].operation = batch.run()
        for work in works[1:]:
            work.operation = _end_of(works[0])
        return [self._waits.start(work) for work in works]

    def _host_operation(self, message: PointMessage) -> Operation:
        sent = None if message.given is None else self._send(message.given, message.to, message.tag)
        received = None if message.taken is None else self._recv(message.taken, message.came_from, message.tag)
        return _together(*(part for part in (received, sent) if part is not None))

    def _send(self, x: Array, dst: int, tag: int) -> Generator[Pending, None, None]:
        row = flat(x, HOST)  # a copy, where x is strided, that must live as long as this generator
        requests = [self._points.Isend([piece, BYTES], dst, tag) for piece in _pieces(row)]
        try:
            yield lambda: all(request.Test() for request in requests)
        except BaseException:
            cancel([], (requests, row))
            raise

    def _recv(self, out: Array, src: int, tag: int) -> Generator[Pending, None, None]:
        row = out.reshape(-1) if out.flags.c_contiguous else numpy.empty(out.size, out.dtype)
        pieces = _pieces(row)
        ended = [Counted(self._points.Irecv([piece, BYTES], src, tag)) for piece in pieces]
        try:
            for piece, count in zip(pieces, ended, strict=True):
                yield count
                count.check(src, len(piece))
        except BaseException:
            cancel([count.request for count in ended], (out, row))
            raise
        if not out.flags.c_contiguous:
            numpy.copyto(out, row.reshape(out.shape))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Send together all calls of the block; their results are valid after it.

        Messages between two ranks are all under way before the first is waited for, and collectives follow in the
        order of the calls. Groups do not nest: UsageError.
        """
        self._check_usable()
        if self._group is not None:
            raise UsageError("a group is open already; groups do not nest", code="GC-GROUP")
        self._group = []
        try:
            yield
            works, self._group = self._group, None
        finally:
            self._group = self._batch = None
        points = [self._waits.start(work) for work in works if work.name in POINTS]
        try:
            for work in works:
                if work.name not in POINTS:
                    self._waits.submit(work)
        except RevokedError as revoked:  # by one of them
            raise next((work.error for work in works if work.error is not None), revoked) from None
        for work in (*points, *works):
            work.wait()

    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Return a communicator of the ranks of the same `color`, ordered by `key` and rank; None where it is None.

        A collective call; it inherits the options. MPI-5.0, 7.4.2.
        """
        self._check_usable()
        mine = _wrong_split(color, key)
        self._all_gather_metadata({"error": str(mine)} if mine else {}, "split", mine)
        self._all_gather_metadata({}, "split")  # nobody was taken out of that wait
        part = functools.partial(self._link.split, None if color is None else int(color), int(key))
        link = self._waits.beside(part, "split") if self._link.threads else part()
        return None if link is None else type(self)(link, self.options)


class PointMessage(NamedTuple):
    """What `send`, `recv` and `sendrecv` do: arrays, and ranks where there is an array."""

    name: str
    given: Array | None
    to: int
    taken: Array | None
    came_from: int
    tag: int
    result: Any
    space: Space


class Batch:
    """Messages of GPU arrays that are under way together: one group of the transport, for which they would wait."""

    def __init__(self, space: DeviceSpace) -> None:
        self._space = space
        self.work: Any = None  # that of its `run`
        self._messages: list[PointMessage] = []
        self._rows: list[Array] = []
        self._targets: list[Target] = []
        self._sends: list[Part] = []
        self._receives: list[Part] = []
        self.completion = space.completion()

    def add(self, message: PointMessage) -> None:
        """Put a message in; those between two ranks meet in this order. It may be on another stream than the first."""
        self._messages.append(message)
        if message.space.stream != self._space.stream:
            DeviceSpace(self._space.gpu, message.space.stream).lead(self._space.stream)
        if message.given is not None:
            self._rows.append(flat(message.given, self._space))
            self._sends.append(_part(self._rows[-1], message.to, message.tag))
        if message.taken is not None:
            self._targets.append(target(message.taken, self._space))
            self._receives.append(_part(self._targets[-1].row, message.came_from, message.tag))

    def run(self) -> Operation:
        """Enqueue the group, and what brings the data to strided arrays."""
        gpu, stream = self._space.gpu, self._space.stream
        sends, receives = ([part for part in parts if part.nbytes] for parts in (self._sends, self._receives))
        try:
            self._space.begin()
            yield from gpu.points.group(sends, receives, stream)
            for one in self._targets:
                one.deliver(self._space)
            yield from self._space.end_message(self)
        except MismatchError:  # of a message that has ended
            raise
        except BaseException:
            self._space.cancel(self)
            raise


def _wrong_split(color: Any, key: Any) -> ArgumentError | None:
    """Return what is wrong with the arguments of `split`; MPI counts in 32 bits."""
    for what, value in (("color", 0 if color is None else color), ("key", key)):
        if not isinstance(value, int | numpy.integer) or isinstance(value, bool):
            return ArgumentError(f"split: {what} {value!r} is not a whole number", code="GC-SPLIT")
        if not -1 << 31 <= value < 1 << 31:
            return ArgumentError(f"split: {what} {value} has more than 31 bits", code="GC-SPLIT")
    if color is not None and color < 0:
        return ArgumentError(f"split: color {color} is negative; pass None on the ranks that join nobody",
                             code="GC-SPLIT")
    return None


def _ends(came: Any, sent: Any, x: Any, out: Any, src: int) -> Generator[Pending, None, None]:
    """Wait for the requests of a message, unless they are None, and check the length of what came."""
    try:
        if came is not None:
            count = Counted(came)
            yield count
            count.check(src, out.nbytes)
        if sent is not None:
            yield sent.Test
    except BaseException:
        cancel([] if came is None else [came], (x, out, sent))
        raise


def _end_of(work: Work) -> Operation:
    """Come to an end when `work` has, and as it has."""
    yield work.is_enqueued
    if work.error is not None:
        raise work.error


def _part(row: Array, peer: int, tag: int) -> Part:
    return Part(address(row), row.nbytes, peer, tag)


POINTS = ("send", "recv", "sendrecv")
PIECE = 1 << 30  # bytes
PLAIN = "?bBhHiIlLqQefdFD"  # codes of the dtypes that NumPy has and we have


def _pieces(row: Array) -> list[Array]:
    """Return the bytes of a row in pieces: MPI counts them in 31 bits. An empty row is one piece."""
    everything = row.view(numpy.uint8)
    return [everything[start:start + PIECE] for start in range(0, len(everything), PIECE)] or [everything]


def _is_nobody(rank: Any) -> bool:
    """Return whether `rank` is MPI's PROC_NULL, which nothing is sent to, and nothing comes from."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and type(rank) is int and rank == mpi.PROC_NULL


def _check_tag(name: str, tag: Any) -> int:
    if isinstance(tag, bool) or not isinstance(tag, int | numpy.integer) or not 0 <= tag < TAGS:
        raise ArgumentError(f"{name}: tag {tag!r} is not in 0..{TAGS - 1}", code="GC-TAG")
    return int(tag)


def _together(*operations: Generator[Pending, None, None]) -> Operation:
    """Run operations side by side: each has begun before the first is waited for."""
    pending = [(operation, next(operation, None)) for operation in operations]
    try:
        for operation, done in pending:
            while done is not None:
                yield done
                done = next(operation, None)
    finally:
        for operation in operations:
            operation.close()
