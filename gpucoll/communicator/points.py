"""Messages between two ranks, groups of calls, and splits."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any, Self

import numpy

from gpucoll.arrays import Array, check_input, check_writable, flat
from gpucoll.communicator.core import Core
from gpucoll.errors import ArgumentError, MismatchError, UsageError
from gpucoll.executors.mpi import BYTES, TAGS, abandon
from gpucoll.waits import Operation, Pending, Work


class Points(Core):
    """Methods of `Communicator`."""

    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` (shape s) to rank `dst`, where `recv` takes it with the same `tag`, 0 .. 32767. MPI-5.0, 3.2."""
        self._check_usable()
        array = check_input("send", x)
        operation = self._send(array, self._check_rank("send", "dst", dst), _check_tag("send", tag))
        return self._point("send", operation, None, async_op)

    def recv(self, out: Any, src: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Receive into `out` (shape s) from `src` and return it; MismatchError for another length. MPI-5.0, 3.2."""
        self._check_usable()
        array = check_input("recv", out)
        check_writable("recv", "out", array)
        operation = self._recv(array, self._check_rank("recv", "src", src), _check_tag("recv", tag))
        return self._point("recv", operation, out, async_op)

    def sendrecv(self, x: Any, out: Any, dst: int, src: int, tag: int = 0, *, async_op: bool = False) -> Any:
        """Send `x` to rank `dst` while receiving `out` from rank `src`; return `out`. MPI-5.0, 3.11."""
        self._check_usable()
        given, taken = check_input("sendrecv", x), check_input("sendrecv", out)
        check_writable("sendrecv", "out", taken)
        if numpy.may_share_memory(given, taken):
            raise ArgumentError("sendrecv: x and out overlap; pass another array", code="GC-OVERLAP")
        to, came = self._check_rank("sendrecv", "dst", dst), self._check_rank("sendrecv", "src", src)
        tag = _check_tag("sendrecv", tag)
        operation = _together(self._recv(taken, came, tag), self._send(given, to, tag))
        return self._point("sendrecv", operation, out, async_op)

    def _point(self, name: str, operation: Operation, result: Any, async_op: bool) -> Any:
        work = Work(self._waits, operation, name, result)
        if self._group is not None:
            self._group.insert(0, work) if name == "recv" else self._group.append(work)
            return work if async_op else result
        self._waits.start(work)
        return work if async_op else work.wait()

    def _send(self, x: Array, dst: int, tag: int) -> Generator[Pending, None, None]:
        row = flat(x)  # a copy, where x is strided, that must live as long as this generator
        requests = [self._link.points.Isend([piece, BYTES], dst, tag) for piece in _pieces(row)]
        try:
            yield lambda: all(request.Test() for request in requests)
        except BaseException:
            abandon([], (requests, row))
            raise

    def _recv(self, out: Array, src: int, tag: int) -> Generator[Pending, None, None]:
        row = out.reshape(-1) if out.flags.c_contiguous else numpy.empty(out.size, out.dtype)
        pieces = _pieces(row)
        ended = [_Counted(self._link.points.Irecv([piece, BYTES], src, tag), self.mpi is not None) for piece in pieces]
        try:
            for piece, count in zip(pieces, ended, strict=True):
                yield count
                if count.length != len(piece):
                    sent = "more bytes" if count.length is None else f"{count.length} bytes"
                    raise MismatchError(f"recv: rank {src} sent {sent}, out has {len(piece)}", code="GC-SHAPE",
                                        ranks=(src,))
        except BaseException:
            abandon([count.request for count in ended], (out, row))
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
            self._group = None
        points = [self._waits.start(work) for work in works if work.name in POINTS]
        for work in works:
            if work.name not in POINTS:
                self._waits.submit(work)
        for work in (*points, *works):
            work.synchronize()

    def split(self, color: int | None, key: int = 0) -> Self | None:
        """Return a communicator of the ranks of the same `color`, ordered by `key` and rank; None where it is None.

        A collective call; it inherits the options. MPI-5.0, 7.4.2.
        """
        self._check_usable()
        for what, value in (("color", 0 if color is None else color), ("key", key)):
            if isinstance(value, bool) or not isinstance(value, int | numpy.integer) or (what == "color" and value < 0):
                raise ArgumentError(f"split: {what} {value!r} is not a whole number", code="GC-SPLIT")
        self._meet("split")
        link = self._link.split(None if color is None else int(color), int(key))
        return None if link is None else type(self)(link, self.options)


POINTS = ("send", "recv", "sendrecv")
PIECE = 1 << 30  # bytes


class _Counted:
    """Asks whether a receive has ended, and keeps how many bytes came; None where they were more than there is room."""

    def __init__(self, request: Any, is_mpi: bool) -> None:
        self.request, self._is_mpi = request, is_mpi
        self.length: int | None = None

    def __call__(self) -> bool:
        if not self._is_mpi:
            self.length = self.request.length
            return self.request.Test()
        from mpi4py import MPI

        status = MPI.Status()
        try:
            ended = bool(self.request.Test(status))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            return True
        self.length = status.Get_count(MPI.BYTE) if ended else None
        return ended


def _pieces(row: Array) -> list[Array]:
    """Return the bytes of a row in pieces: MPI counts them in 31 bits. An empty row is one piece."""
    everything = row.view(numpy.uint8)
    return [everything[start:start + PIECE] for start in range(0, len(everything), PIECE)] or [everything]


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
