"""Messages of MPI between two ranks: with their dtype and length, and none beyond the end of a buffer."""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy

from gpucoll.core.dtypes import CODES
from gpucoll.progress.operations import ProbeResult
from gpucoll.transport.tags import TAGS

if TYPE_CHECKING:
    from mpi4py import MPI

# Unsuccessful tests before a search for a message of another dtype, since a search costs one MPI_Iprobe per dtype.
TESTS_BEFORE_SEARCH = 256


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


class TypedMessages:
    """Messages over an mpi4py communicator. The tag carries the code of the dtype above the user's tag.

    A receive therefore takes the first message of its own dtype, at no cost, and `other` finds messages of other
    dtypes. A receive may take a message ahead of an earlier message of another dtype, but never misreads a message.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm, self._status, self._send, self._receiver = comm, _mpi().Status(), comm.Isend, receiver(comm)
        self.receive: Any = self._receiver.Irecv
        # MPI guarantees only the range of the user's tags. Without larger tags a message carries no dtype.
        self.step = TAGS if (comm.Get_attr(_mpi().TAG_UB) or 0) >= TAGS * (max(CODES.values()) + 1) else 0

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> MPI.Request:
        """Start to send ``[bytes, "B"]`` of the dtype with code `dtype`; return the request."""
        return self._send(buffer, dest, tag + dtype * self.step)

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> TypedReceive:
        """Start to receive ``[bytes, "B"]`` of the dtype with code `dtype`; return the request."""
        return TypedReceive(self, buffer, source, tag, dtype)

    def _match(self) -> None:
        """Let posted receives take their messages first: such messages are not for a probe."""
        if isinstance(self._receiver, MatchedReceives):
            self._receiver.match()

    def other(self, source: int, tag: int, dtype: int) -> tuple[int, int] | None:
        """Return code and bytes of a message of another dtype ready to be received, or None."""
        self._match()
        for code in CODES.values() if dtype and self.step else ():
            if code != dtype and self._comm.Iprobe(source, tag + code * self.step, self._status):
                return code, self._status.count
        return None

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a user's message ready to be received, or None; messages of a sender in sending order."""
        anybody, status = _mpi().ANY_SOURCE if source is None else source, self._status
        self._match()
        if not self._comm.Iprobe(anybody, _mpi().ANY_TAG, status):
            return None
        code, its_tag = divmod(status.tag, TAGS)
        if code != 1 and tag in (None, its_tag):
            return ProbeResult(status.source, its_tag, status.count)
        if tag is None:  # code 1: a message of gpucoll.distributed, soon taken by that package
            return None
        # The first message may not be the wanted one: probe the tag with each dtype, as MPI has no wildcard for that.
        tags = [tag + code * self.step for code in (0, *CODES.values())] if self.step and tag < TAGS else [tag]
        is_here = any(self._comm.Iprobe(anybody, one, status) for one in tags)
        return ProbeResult(status.source, tag, status.count) if is_here else None


class TypedReceive:
    """A receive of `TypedMessages`, with length and dtype of the received message.

    `length` is in bytes: None before the end, -1 for more bytes than the buffer holds. `came` is the code of the dtype,
    0 for the expected one. MPI matches messages of one dtype only, so from time to time `Test` looks for a message of
    another dtype.
    """

    # Class attributes as initial values, because most messages never set these attributes.
    came: int = 0
    _looks, _kept = 0, None
    length: int | None = None

    def __init__(self, messages: TypedMessages, buffer: list[Any], source: int, tag: int, dtype: int) -> None:
        self._messages, self._where, self._status = messages, (source, tag, dtype), _mpi().Status()
        self._request = messages.receive(buffer, source, tag + dtype * messages.step)

    def Test(self) -> bool:
        """Return whether the receive is complete."""
        if self.length is not None:
            return True
        try:
            if not self._request.Test(self._status):
                self._looks += 1
                return self._looks % TESTS_BEFORE_SEARCH == 0 and self._gives_way()
        except _mpi().Exception as error:
            if error.Get_error_class() != _mpi().ERR_TRUNCATE:
                raise
            self.length = -1
            return True
        self.length = self._status.count
        return True

    def Cancel(self) -> None:
        """Give up the receive, unless a message is already matched."""
        self._request.Cancel()

    def _gives_way(self) -> bool:
        """Look for a message of another dtype and receive it instead; return whether the expected message arrived."""
        found = None if self.came else self._messages.other(*self._where)
        if found is None:
            return False
        # MPI decides the race between cancellation and arrival, so the status is read after the wait.
        self._request.Cancel()
        self._request.Wait(self._status)
        if not self._status.Is_cancelled():
            self.length = self._status.count
            return True
        source, tag, _ = self._where
        self.came, nbytes = found
        self._kept = numpy.empty(nbytes, numpy.uint8)  # the substitute receive writes here
        self._request = self._messages.receive([self._kept, "B"], source, tag + self.came * self._messages.step)
        return False
