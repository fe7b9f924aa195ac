"""Messages between two ranks, groups of calls, and splits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Self

import numpy

from gpucoll.arrays import HOST, Array, check_input, check_writable, flat, overlap
from gpucoll.communicator.backends import not_known
from gpucoll.communicator.gpu import DeviceSpace
from gpucoll.communicator.links import Link
from gpucoll.communicator.metadata import MetadataExchange
from gpucoll.communicator.overloads import Probing, Receiving, shaped
from gpucoll.communicator.wildcards import (
    ANY_SOURCE,
    ANY_TAG,
    PROC_NULL,
    Batch,
    PointMessage,
    Status,
    end_of,
    ends,
    fill_status,
    pieces_of,
    together,
)
from gpucoll.core.dtypes import code_of, is_whole
from gpucoll.device import NO_CAPTURE
from gpucoll.device.messages import Counted
from gpucoll.errors import ArgumentError, RevokedError, UsageError
from gpucoll.progress.operations import Operation, Pending, ProbeResult, Work, in_thread
from gpucoll.transport.control import cancel
from gpucoll.transport.tags import BYTES, MAX_MESSAGE, TAGS


class PointToPoint(MetadataExchange):
    """Methods of `Communicator`: messages, groups, splits. NCCL has no tags: GPU messages match in calling order."""

    @functools.cached_property
    def _points(self) -> Any:
        """The carrier of messages between two ranks."""
        return self._host.points(self._link)

    @functools.cached_property
    def _exchange_here(self) -> Callable[..., Any]:
        """The engine's function for blocking messages inside a node; any other message gives NotImplemented."""
        is_here = self._points is not self._link.points and self._host_engine() is not None
        return self._engine.exchange if is_here else not_known

    def _seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a message ready to be received, or None; `source` and `tag` None mean any rank and any tag."""
        carrier: Any = self._link if self._points is self._link.points else self._points
        found: ProbeResult | None = carrier.seen(source, tag)
        return found

    def _sender(self, tag: int) -> int | None:
        """Return a rank whose message with `tag` is ready to be received, None without a message."""
        found = self._seen(None, tag)
        return None if found is None else found.source

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` (shape s) to rank `dst`, for a `recv` there with the same `tag`, 0 .. 32767. MPI-5.0, 3.2.

        Returns None, or a `Work` with ``async_op=True``. To ``gpucoll.PROC_NULL``, or mpi4py's, nothing is sent; `recv`
        from PROC_NULL receives nothing, and `out` is unchanged. Raises ArgumentError.
        """
        if not async_op and self._group is None and x is not None:
            # The engine does most blocking messages inside a node, with few steps of Python.
            begun = self._exchange_here(x, dst, None, -1, tag)
            if begun is True:
                return None
            if begun is not NotImplemented:
                return self._rest("send", begun, x, None, -1)
        if not async_op and self._is_plain(x, dst, tag):
            return self._soon("send", x, dst, None, -1, tag)
        return self._point(self._message("send", tag, x, dst), async_op)

    @shaped(Receiving)
    def recv(self, out: Any, src: int = ANY_SOURCE, tag: int = 0, status: Any = None, *, async_op: bool = False) -> Any:
        """Receive a message from rank `src` into `out` (shape s) and return `out`. MPI-5.0, 3.2.

        Raises MismatchError for a message of another length, or on the host of another dtype. `out` is unchanged then,
        with one exception: a message of another length, carried by MPI, UCX, a store or between threads, may fill the
        first part of `out`.

        On the host `src` may be ``gpucoll.ANY_SOURCE`` and `tag` ``gpucoll.ANY_TAG``, or mpi4py's. NCCL has neither:
        such a receive into a GPU array raises UsageError. So does ``ANY_TAG`` if messages travel through a store.
        The receive takes the first message available, and messages of one rank in sending order. A receive from a named
        rank has precedence if it begins before the message is available. `status`, a `Status` or mpi4py's, is set to
        source, tag and bytes of the message.
        """
        if status is None and not async_op and self._group is None and out is not None:
            begun = self._exchange_here(None, -1, out, src, tag)
            if begun is True:
                return out
            if begun is not NotImplemented:
                return self._rest("recv", begun, None, out, src)
        if status is None and not async_op and self._is_plain(out, src, tag) and out.flags.writeable:
            return self._soon("recv", None, -1, out, src, tag)
        message = self._message("recv", tag, out=out, src=src, wildcards=True)._replace(status=status)
        if message.taken is None:
            fill_status(status, ProbeResult(PROC_NULL, ANY_TAG, 0))
        elif message.came_from is not None and message.tag is not None:
            fill_status(status, ProbeResult(message.came_from, message.tag, message.taken.nbytes))
        return self._point(message, async_op)

    @shaped(Probing)
    def probe(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Wait for a message available to `recv`; return its `Status`, or `status`. The message stays available.

        `count` is in bytes, for a message above 1 GiB perhaps of its first piece only. Host only: UsageError on the
        emulated device. MPI-5.0, 3.8.1.
        """
        status = Status() if status is None else status
        pattern = self._pattern("probe", src, tag)
        if pattern is None:
            fill_status(status, ProbeResult(PROC_NULL, ANY_TAG, 0))
            return status
        work = self._waits.soon(self._found(*pattern, status), "probe", status)
        return status if work is None else work.wait()

    def iprobe(self, src: int = ANY_SOURCE, tag: int = ANY_TAG, status: Status | None = None) -> Status | None:
        """Return the status as `probe` does if a message is available now, else None; never wait. MPI-5.0, 3.8.1."""
        status = Status() if status is None else status
        pattern = self._pattern("iprobe", src, tag)
        self._waits.advance()
        seen = ProbeResult(PROC_NULL, ANY_TAG, 0) if pattern is None else self._seen(*pattern)
        if seen is not None:
            fill_status(status, seen)
        return None if seen is None else status

    def _pattern(self, name: str, src: Any, tag: Any) -> tuple[int | None, int | None] | None:
        """Return the rank and tag asked for, each None for any; return None for PROC_NULL."""
        self._check_usable()
        if self.options.emulated:
            raise UsageError(f"{name}: {NO_WILDCARD}", code="GC-WILDCARD")
        if PROC_NULL.is_meant(src):
            return None
        return None if ANY_SOURCE.is_meant(src) else self._check_rank(name, "src", src), \
            None if ANY_TAG.is_meant(tag) else check_tag(name, tag)

    def _found(self, source: int | None, tag: int | None, status: Any = None) -> Generator[Pending, None, ProbeResult]:
        """Wait for a message from `source` with `tag`, None for any; set `status` to source, tag and bytes."""
        found: ProbeResult | None = None

        def is_here() -> bool:
            nonlocal found
            found = self._seen(source, tag)
            return found is not None

        if not is_here():
            yield is_here
        assert found is not None
        fill_status(status, found)
        return found

    def sendrecv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` to rank `dst` while receiving `out` from rank `src`; return `out`. MPI-5.0, 3.11."""
        if not async_op and self._group is None and x is not None and out is not None:
            begun = self._exchange_here(x, dst, out, src, tag)
            if begun is True:
                return out
            if begun is not NotImplemented:
                return self._rest("sendrecv", begun, x, out, src)
        if not async_op and self._is_plain(x, dst, tag) and self._is_plain(out, src, tag) and out.flags.writeable \
                and not numpy.may_share_memory(x, out):
            return self._soon("sendrecv", x, dst, out, src, tag)
        return self._point(self._message("sendrecv", tag, x, dst, out, src), async_op)

    def _is_plain(self, array: Any, peer: Any, tag: Any) -> bool:
        """Return whether MPI or a store may work on `array` itself, and no earlier message must come first."""
        return type(array) is numpy.ndarray and type(peer) is type(tag) is int and 0 <= peer < self.size \
            and 0 <= tag < TAGS and array.dtype.char in PLAIN and array.dtype.isnative and array.flags.c_contiguous \
            and array.nbytes <= MAX_MESSAGE and self._link.mpi is not None and self._group is None \
            and not self.options.emulated and not self._waits.has_messages

    def _rest(self, name: str, begun: Any, x: Any, out: Any, src: int) -> Any:
        """Wait for the messages begun by the engine; return `out`."""
        came, sent = begun
        work = self._waits.soon(ends(came, sent, x, out, src), name, out)
        return out if work is None else work.wait()

    def _soon(self, name: str, x: Any, dst: int, out: Any, src: int, tag: int) -> Any:
        """Send `x` and receive `out`, each unless None; return `out`. Only a long message needs a `Work`."""
        self._check_usable()
        work = self._waits.soon(self._whole(x, dst, out, src, tag), name, out)
        return out if work is None else work.wait()

    def _whole(self, x: Any, dst: int, out: Any, src: int, tag: int) -> Generator[Pending, None, None]:
        came = sent = None
        code, points = code_of((x if out is None else out).dtype), self._points
        try:
            # Post the receive first: a message for it then stays out of the unexpected queue.
            if out is not None:
                came = points.Irecv([out, BYTES], src, tag, code)
            if x is not None:
                sent = points.Isend([x, BYTES], dst, tag, code if out is None else code_of(x.dtype))
        except BaseException:
            cancel([] if came is None else [came], (x, out, sent))
            raise
        yield from ends(came, sent, x, out, src, points, tag, code)

    def _message(self, name: str, tag: Any, x: Any = None, dst: Any = None, out: Any = None,
                 src: Any = None, *, wildcards: bool = False) -> PointMessage:
        """Return a checked message to send or receive; `wildcards` allows any rank and any tag."""
        self._check_usable()
        space = self._space(name, x if name == "send" else out)
        with space.current:
            given = None if name == "recv" else check_input(name, x)
            taken = None if name == "send" else check_input(name, out)
        if isinstance(space, DeviceSpace) and not space.gpu.points.capturable and space.is_captured():
            raise UsageError(f"{name}: {NO_CAPTURE}", code="GC-CAPTURED")
        for what, array in (("x", given), ("out", taken)):
            if array is not None:
                space.check(name, what, array)
        if taken is not None:
            check_writable(name, "out", taken)
        given = None if PROC_NULL.is_meant(dst) else given
        taken = None if PROC_NULL.is_meant(src) else taken
        to = -1 if given is None else self._check_rank(name, "dst", dst)
        is_from_any = wildcards and ANY_SOURCE.is_meant(src)
        came = None if is_from_any else -1 if taken is None else self._check_rank(name, "src", src)
        tagged = None if wildcards and ANY_TAG.is_meant(tag) else check_tag(name, tag)
        if taken is not None and None in (came, tagged) and isinstance(space, DeviceSpace):
            raise UsageError(f"{name}: {NO_WILDCARD}", code="GC-WILDCARD")
        if given is not None and taken is not None and overlap(given, taken):
            raise ArgumentError(f"{name}: x and out overlap; pass another array", code="GC-OVERLAP")
        return PointMessage(name, given, to, taken, came, tagged, out, space)

    def _point(self, message: PointMessage, async_op: bool) -> Any:
        if self._group is not None:
            work = self._in_group(message, self._group)
            return work if async_op else message.result
        (work,) = self._start_together([message], overlaps=async_op)
        return work if async_op else work.wait()

    def _in_group(self, message: PointMessage, group: list[Work]) -> Work:
        # GPU messages of a group form one transport group: enqueued singly, one could wait for another for ever.
        if isinstance(message.space, DeviceSpace):
            if self._batch is None:
                self._batch = Batch(message.space)
                group.insert(0, Work(self._waits, self._batch.run(), message.name, None, self._batch.completion))
                self._batch.work = group[0]
            self._batch.add(message)
            group.append(Work(self._waits, end_of(self._batch.work), message.name, message.result,
                              self._batch.completion))
            return group[-1]
        work = Work(self._waits, self._host_operation(message), message.name, message.result)
        group.append(work)
        return work

    def _start_together(self, messages: Sequence[PointMessage], *, overlaps: bool = True) -> list[Work]:
        """Start messages together; if they overlap with the current stream of a GPU, in a stream of their own."""
        if not messages:
            return []
        space = messages[0].space
        if any(one.space.device != space.device for one in messages):
            raise ArgumentError("messages between GPU arrays and between arrays on the host do not go together; pass "
                                "GPU arrays in a call of their own", code="GC-DEVICE")
        if not isinstance(space, DeviceSpace):
            return [self._waits.start(Work(self._waits, self._host_operation(one), one.name, one.result))
                    for one in messages]
        batch = Batch(space.on_side_stream(space.gpu.device.new_stream()) if overlaps else space)
        for message in messages:
            batch.add(message)
        works = [Work(self._waits, iter(()), one.name, one.result, batch.completion) for one in messages]
        works[0].operation = batch.run()
        # A transport group has one end, known by the first work.
        for work in works[1:]:
            work.operation = end_of(works[0])
        return [self._waits.start(work) for work in works]

    def _host_operation(self, message: PointMessage) -> Operation:
        sent = None if message.given is None else self._send(message.given, message.to, message.tag)
        received = None if message.taken is None else self._recv(message, message.taken)
        return together(*(part for part in (received, sent) if part is not None))

    def _send(self, x: Array, dst: int, tag: int | None) -> Generator[Pending, None, None]:
        row = flat(x, HOST)  # a copy if `x` is strided: keep it until the send has ended
        code = code_of(row.dtype)
        requests = [self._points.Isend([piece, BYTES], dst, tag, code) for piece in pieces_of(row)]
        try:
            yield lambda: all(request.Test() for request in requests)
        except BaseException:
            cancel([], (requests, row))
            raise

    def _recv(self, message: PointMessage, out: Array) -> Generator[Pending, None, None]:
        src, tag = message.came_from, message.tag
        if src is None or tag is None:
            src, tag, _ = yield from self._found(src, tag, message.status)
        row = out.reshape(-1) if out.flags.c_contiguous else numpy.empty(out.size, out.dtype)
        pieces, code, points = pieces_of(row), code_of(row.dtype), self._points
        ended = [Counted(points.Irecv([piece, BYTES], src, tag, code), points, src, tag, code) for piece in pieces]
        try:
            for piece, count in zip(pieces, ended, strict=True):
                yield count
                count.check(src, len(piece))
        except BaseException:
            cancel([count.request for count in ended], (out, row, ended))
            raise
        if not out.flags.c_contiguous:
            numpy.copyto(out, row.reshape(out.shape))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Run all calls of the block together at its end; their results are valid after the block.

        All messages between two ranks are under way before the first wait; collectives follow in the order of the
        calls. Groups do not nest: UsageError.
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
        # Begin all messages before any wait: a message of one rank may need a later one of another rank.
        points = [self._waits.start(work) for work in works if work.name in POINTS]
        try:
            for work in works:
                if work.name not in POINTS:
                    self._waits.submit(work)
        except RevokedError as revoked:  # an earlier call of the group failed: raise its own error
            raise next((work.error for work in works if work.error is not None), revoked) from None
        for work in (*points, *works):
            work.wait()

    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Return a communicator of the ranks of the same `color`, ordered by `key` and rank; None if `color` is None.

        A collective call; the options are inherited. Raises ArgumentError, and PeerError on the other ranks. MPI-5.0,
        7.4.2.
        """
        self._check_usable()
        mine = _wrong_split(color, key)
        self._all_gather_metadata({"error": str(mine)} if mine else {}, "split", mine)
        # A rank interrupted in the first exchange never comes to the second. All other ranks then stop here, and not in
        # a split by MPI, which nothing can interrupt.
        self._all_gather_metadata({}, "split")
        link = self._part(None if color is None else int(color), int(key))
        return None if link is None else self._over(link)

    def _part(self, color: int | None, key: int) -> Link | None:
        """Return the link of the ranks of `color`; wait with a deadline, if threads may call the link."""
        part = functools.partial(self._link.split, color, key)
        link: Link | None = in_thread(self._waits.run, part, "split") if self._link.threads else part()
        return link

    def _over(self, link: Link) -> Any:
        """Return a communicator of the ranks joined by `link`, with the options of this communicator."""
        return type(self)(link, self.options)


def _wrong_split(color: Any, key: Any) -> ArgumentError | None:
    """Return the error in the arguments of `split`, or None; MPI's numbers have 32 bits."""
    for what, value in (("color", 0 if color is None else color), ("key", key)):
        if not is_whole(value):
            return ArgumentError(f"split: {what} {value!r} is not a whole number", code="GC-SPLIT")
        if not -1 << 31 <= value < 1 << 31:
            return ArgumentError(f"split: {what} {value} has more than 31 bits", code="GC-SPLIT")
    if color is not None and color < 0:
        return ArgumentError(f"split: color {color} is negative; pass None on ranks outside of all new communicators",
                             code="GC-SPLIT")
    return None


POINTS = ("send", "recv", "sendrecv")
NO_WILDCARD = ("NCCL has no tags, and takes no message from anybody: a GPU array, or one on the emulated device, takes "
               "a message from a named rank; pass src= and tag=, or receive into an array on the host")
PLAIN = "?bBhHiIlLqQefdFD"  # codes of the dtypes common to NumPy and this library


def check_tag(name: str, tag: Any) -> int:
    """Return the tag of a message; raise ArgumentError outside of 0..32767."""
    if not is_whole(tag) or not 0 <= tag < TAGS:
        raise ArgumentError(f"{name}: tag {tag!r} is not in 0..{TAGS - 1}", code="GC-TAG")
    return int(tag)
