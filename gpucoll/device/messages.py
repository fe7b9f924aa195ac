"""What stands for NCCL on the emulated device: messages between the host memories of ranks."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy

from gpucoll.core.dtypes import CODES
from gpucoll.device import Part, Transport, Waiting
from gpucoll.errors import BackendError, MismatchError

Found: TypeAlias = tuple[int, Callable[[], tuple[Any, Any]]]
LOOKS = 256  # in vain, before one for a message of another dtype: that costs a call of MPI's for each dtype
NAMES = {code: name for name, code in CODES.items()}


class MessageTransport(Transport):
    """Groups of messages over `wire`, that of a `gpucoll.communicator.links.Link`, with `tag` and a part's own added.

    A send ends only when its receive has begun, as a large one does with NCCL, so that a schedule which would stop
    there stops here; unless `buffered`, as MPI's small ones are.
    """

    def __init__(self, wire: Any, tag: int, *, buffered: bool = False) -> None:
        self.receive, self._tag, self.buffered = receiver(wire).Irecv, tag, buffered
        self.send = wire.Isend if buffered else getattr(wire, "Issend", wire.Isend)  # threads' are never buffered

    def group(self, sends: Sequence[Part], receives: Sequence[Part], stream: Any) -> Waiting:
        stream.enqueue_action(lambda: _Group(self, sends, receives))
        return iter(())

    def begin(self, call: Callable[..., Any], part: Part) -> Any:
        """Return the request of a message that `call` begins."""
        memory = numpy.ctypeslib.as_array((ctypes.c_ubyte * part.nbytes).from_address(part.address))
        return call([memory, "B"], part.peer, self._tag + part.tag)


@functools.cache
def _mpi() -> Any:
    from mpi4py import MPI  # which starts MPI: only with messages of its

    return MPI


@functools.cache
def overruns() -> bool:
    """Return whether MPI writes the whole of a message that is longer than the room for it, as Open MPI 5.0 does.

    It reports the truncation (MPI_ERR_TRUNCATE), but has overwritten what lies behind the room.
    """
    return str(_mpi().Get_library_version()).startswith("Open MPI")


def receiver(wire: Any) -> Any:
    """Return what has `Irecv` as `wire`, a link's, has it, and writes nothing of a message that is too long."""
    return MatchedReceives(wire) if hasattr(wire, "Improbe") and overruns() else wire


class MatchedReceives:
    """Receives of an mpi4py communicator that look at the length of a message before they take it.

    Receives from one rank with one tag take messages in the order in which they began. One thread at a time matches
    messages: another thread's look finds nothing then.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self._status = comm, _mpi().Status()
        self._lock = threading.Lock()
        self._waiting: dict[tuple[int, int], collections.deque[MatchedReceive]] = {}

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0) -> MatchedReceive:
        """Begin to receive ``[bytes, "B"]``."""
        request = MatchedReceive(self, buffer, (source, tag))
        self._waiting.setdefault((source, tag), collections.deque()).append(request)
        self.match((source, tag))
        return request

    def match(self, *keys: tuple[int, int]) -> None:
        """Let the receives of these ranks and tags, or all, take the messages that have come for them."""
        if self._lock.acquire(blocking=False):
            try:
                for key in keys or list(self._waiting):
                    waiting = self._waiting.get(key, ())
                    while waiting and waiting[0].takes(self._comm, self._status):
                        waiting.popleft()
                    if not waiting:
                        self._waiting.pop(key, None)
            finally:
                self._lock.release()

    def forget(self, request: MatchedReceive, key: tuple[int, int]) -> None:
        """Let a receive that has taken no message take none any more."""
        with self._lock, contextlib.suppress(KeyError, ValueError):
            self._waiting[key].remove(request)


class MatchedReceive:
    """One of them: a request as mpi4py's are. A message that is too long is raised as MPI's exception."""

    def __init__(self, receives: MatchedReceives, buffer: list[Any], key: tuple[int, int]) -> None:
        self._receives, self._buffer, self._key = receives, buffer, key
        self._request: Any = None  # once it has taken a message
        self._is_long = self._is_cancelled = False

    def takes(self, comm: Any, status: Any) -> bool:
        """Take the message that has come for it; return whether there is one. `status` is written."""
        message = comm.Improbe(*self._key, status)
        if message is None:
            return False
        self._is_long = status.count > self._buffer[0].nbytes
        if self._is_long:
            self._buffer = [numpy.empty(status.count, numpy.uint8), "B"]
        self._request = message.Irecv(self._buffer)
        return True

    def Test(self, status: Any = None) -> bool:
        """Return whether it has ended."""
        if self._is_cancelled:
            return True
        if self._request is None:
            self._receives.match(self._key)
        if self._request is None or not self._request.Test(status):
            return False
        if self._is_long:
            self._is_long = False  # MPI tells it once
            raise _mpi().Exception(_mpi().ERR_TRUNCATE)
        return True

    def Cancel(self) -> None:
        """Receive nothing, if no message has been taken."""
        self._receives.forget(self, self._key)
        self._is_cancelled = self._request is None

    def Wait(self, status: Any) -> None:
        """Wait for the end of a receive that has been cancelled, or has taken a message."""
        if self._is_cancelled:
            status.Set_cancelled(True)
        else:
            self._request.Wait(status)


class Counted:
    """A receive that knows how many bytes came: `length`, None where they were more than there is room.

    `came` is the code of their dtype, 0 where it is not known. Over MPI, whose receives wait for one dtype only,
    `points.other` finds a message of another dtype than `dtype` that has come in its place from `source` with `tag`:
    the code, and what begins to receive it elsewhere.
    """

    came, length, _looks, _kept = 0, cast("int | None", None), 0, None  # at first: a short message sets few of them

    def __init__(self, request: Any, points: Any = None, source: int = 0, tag: int = 0, dtype: int = 0) -> None:
        self.request, self._points, self._where = request, points, (source, tag, dtype)
        self._status: Any = None if hasattr(request, "length") else _mpi().Status()

    def __call__(self) -> bool:
        """Return whether it has ended."""
        if self._status is None:  # between threads: the other one may tell it at any time
            self.length = self.request.length
            self.came = getattr(self.request, "came", 0)
            return self.length is not None
        try:
            if not self.request.Test(self._status):
                self._looks += 1
                return self._looks % LOOKS == 0 and self._gives_way()
        except _mpi().Exception as error:
            if error.Get_error_class() != _mpi().ERR_TRUNCATE:
                raise
            return True
        self.length = self._status.count
        return True

    def _gives_way(self) -> bool:
        """Look now and then for a message of another dtype, which is received in place of this one's; return False."""
        found: Found | None = None if self._points is None or self.came else self._points.other(*self._where)
        if found is not None:
            self.request.Cancel()
            self.request.Wait(self._status)
            if self._status.Is_cancelled():
                self.came, begin = found
                self.request, self._kept = begin()
            else:  # its own has come meanwhile
                self.length = self._status.count
                return True
        return False

    def check(self, source: int, room: int) -> None:
        """Raise MismatchError where what came is not of its dtype, or not as long as the `room` for it."""
        if self.came and self._where[2] not in (0, self.came):
            error = MismatchError(f"recv: rank {source} sent {NAMES[self.came]}, out is {NAMES[self._where[2]]}",
                                  code="GC-DTYPE", ranks=(source,))
            error.settled = True
            raise error
        if self.length != room:
            sent = "more bytes" if self.length is None else f"{self.length} bytes"
            error = MismatchError(f"recv: rank {source} sent {sent}, out has {room}", code="GC-SHAPE", ranks=(source,))
            error.settled = True
            raise error


class _Group:
    """A group in a stream's queue: its messages begin when its turn has come."""

    def __init__(self, transport: MessageTransport, sends: Sequence[Part], receives: Sequence[Part]) -> None:
        self._transport, self._parts = transport, (sends, receives)
        self._receives: list[tuple[Counted, Part]] | None = None  # before they have begun
        self._waiting: list[Callable[[], bool]] = []

    def __call__(self) -> bool:
        if self._receives is None:
            begin, (sends, receives) = self._transport.begin, self._parts
            self._receives = [(Counted(begin(self._transport.receive, part)), part) for part in receives]
            self._waiting = [*(count for count, _ in self._receives),
                             *(begin(self._transport.send, part).Test for part in sends)]
        self._waiting = [ended for ended in self._waiting if not ended()]
        if not self._waiting:
            self._check(self._receives)
        return not self._waiting

    def _check(self, received: Sequence[tuple[Counted, Part]]) -> None:
        """Raise where a length is wrong: MismatchError of a message that ends alone, else the collective has failed."""
        try:
            for count, part in received:
                count.check(part.peer, part.nbytes)
        except MismatchError as error:
            if self._transport.buffered:
                raise
            raise BackendError(f"ranks {error.ranks} are in another call, or pass arrays of another length: {error}",
                               code="GC-SHAPE", ranks=error.ranks) from error

    def cancel(self) -> None:
        """Call back what may still be received, without a wait: its memory is kept for ever by who cancels."""
        for count, _ in self._receives or ():
            if count in self._waiting and not count():
                count.request.Cancel()
                count.request.Test()
