"""Receives of messages on the host: with the length and dtype of the message, and none beyond the end of a buffer."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import numpy

from gpucoll.core.dtypes import CODES
from gpucoll.errors import MismatchError

# A message of another dtype: the code of the dtype, and a function that begins the receive into a new buffer. The
# function returns the request and the buffer.
Found: TypeAlias = tuple[int, Callable[[], tuple[Any, Any]]]
# Unsuccessful tests before a search for a message of another dtype, since a search costs one MPI_Iprobe per dtype.
LOOKS = 256
NAMES = {code: name for name, code in CODES.items()}


@functools.cache
def _mpi() -> Any:
    # The import initialises MPI. Programs whose ranks are threads must not need MPI.
    from mpi4py import MPI

    return MPI


@functools.cache
def overruns() -> bool:
    """Return whether MPI writes a message past the end of a receive buffer that is too short, as Open MPI 5.0 does.

    Open MPI reports MPI_ERR_TRUNCATE, but only after overwriting the memory behind the buffer.
    """
    return str(_mpi().Get_library_version()).startswith("Open MPI")


def receiver(wire: Any) -> Any:
    """Return an object with the `Irecv` of `wire`, safe from the overflow described at `overruns`."""
    return MatchedReceives(wire) if hasattr(wire, "Improbe") and overruns() else wire


class MatchedReceives:
    """Receives over an mpi4py communicator that check the length of a message before receiving the message.

    Posted receives from one rank with one tag match messages in the order of posting. Only one thread at a time
    matches messages. A second thread does not wait for the lock and matches nothing.
    """

    def __init__(self, comm: Any) -> None:
        self._comm, self._status = comm, _mpi().Status()
        self._lock = threading.Lock()
        # Posted receives without a message, in order of posting, by source and tag.
        self._waiting: dict[tuple[int, int], collections.deque[MatchedReceive]] = {}

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0) -> MatchedReceive:
        """Post a receive into ``[bytes, "B"]``; return the request."""
        request = MatchedReceive(self, buffer, (source, tag))
        with self._lock:  # else another thread may drop the empty queue between the two steps, with this request
            self._waiting.setdefault((source, tag), collections.deque()).append(request)
        self.match((source, tag))
        return request

    def match(self, *keys: tuple[int, int]) -> None:
        """Match arrived messages to the posted receives of `keys`, pairs of source and tag; without `keys`, to all."""
        # Do not block: `match` runs in every poll, and the thread holding the lock does the same work.
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
        """Remove a posted receive from the queue; do nothing if a message was matched before."""
        # The lock keeps another thread from matching a message to the receive during the removal.
        with self._lock, contextlib.suppress(KeyError, ValueError):
            self._waiting[key].remove(request)


class MatchedReceive:
    """A receive as an mpi4py request; a message longer than the buffer raises MPI's exception for truncation."""

    def __init__(self, receives: MatchedReceives, buffer: list[Any], key: tuple[int, int]) -> None:
        self._receives, self._buffer, self._key = receives, buffer, key
        self._request: Any = None  # MPI's request, once a message is matched
        self._is_long = self._is_cancelled = False

    def takes(self, comm: Any, status: Any) -> bool:
        """Match an arrived message and begin to receive; return whether a message was found. `status` is written."""
        # A matched probe removes the message from MPI's queue, so no other receive can match the message.
        message = comm.Improbe(*self._key, status)
        if message is None:
            return False
        self._is_long = status.count > self._buffer[0].nbytes
        # Receive a long message into a buffer of its own: a matched message must be received.
        if self._is_long:
            self._buffer = [numpy.empty(status.count, numpy.uint8), "B"]
        self._request = message.Irecv(self._buffer)
        return True

    def Test(self, status: Any = None) -> bool:
        if self._is_cancelled:
            return True
        if self._request is None:
            self._receives.match(self._key)
        if self._request is None or not self._request.Test(status):
            return False
        if self._is_long:
            self._is_long = False  # raise the error only once, as MPI does
            raise _mpi().Exception(_mpi().ERR_TRUNCATE)
        return True

    def Cancel(self) -> None:
        """Cancel the receive, unless a message is already matched."""
        self._receives.forget(self, self._key)
        self._is_cancelled = self._request is None

    def Wait(self, status: Any) -> None:
        """Wait for the end of a cancelled receive, or of a receive with a matched message."""
        if self._is_cancelled:
            status.Set_cancelled(True)
        else:
            self._request.Wait(status)


class Counted:
    """A receive that reports the length and the dtype of the received message.

    `length` is in bytes. After the end of the receive, None means more bytes than the buffer holds. `came` is the code
    of the message's dtype, 0 if unknown. A receive over MPI matches messages of one dtype only, `dtype`, so from time
    to time `points.other` looks for a message of another dtype from `source` with `tag`.
    """

    # Class attributes as initial values, because most messages never set these attributes.
    came, length, _looks, _kept = 0, cast("int | None", None), 0, None

    def __init__(self, request: Any, points: Any = None, source: int = 0, tag: int = 0, dtype: int = 0) -> None:
        self.request, self._points, self._where = request, points, (source, tag, dtype)
        # Requests of threads and of a store have a length of their own and need no status.
        self._status: Any = None if hasattr(request, "length") else _mpi().Status()

    def __call__(self) -> bool:
        """Return whether the receive is complete."""
        # The sending thread may set the request's length at any time: read the length first, then the dtype.
        if self._status is None:
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
        """Look for a message of another dtype and receive it instead; return whether the expected message arrived."""
        found: Found | None = None if self._points is None or self.came else self._points.other(*self._where)
        if found is not None:
            # MPI decides the race between cancellation and arrival, so the status is read after the wait.
            self.request.Cancel()
            self.request.Wait(self._status)
            if self._status.Is_cancelled():
                self.came, begin = found
                # `_kept` keeps the buffer of the substitute receive alive.
                self.request, self._kept = begin()
            else:
                self.length = self._status.count
                return True
        return False

    def check(self, source: int, room: int) -> None:
        """Raise MismatchError if the message has another dtype, or another length than `room` bytes."""
        # `settled`: the message is consumed, so the error does not make the communicator unusable.
        if self.came and self._where[2] not in (0, self.came):
            raise MismatchError(f"recv: rank {source} sent {NAMES[self.came]}, out is {NAMES[self._where[2]]}",
                                code="GC-DTYPE", ranks=(source,), settled=True)
        if self.length != room:
            sent = "more bytes" if self.length is None else f"{self.length} bytes"
            raise MismatchError(f"recv: rank {source} sent {sent}, out has {room}", code="GC-SHAPE", ranks=(source,),
                                settled=True)
