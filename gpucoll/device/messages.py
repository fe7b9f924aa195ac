"""What stands for NCCL on the emulated device: messages between the host memories of ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy

from gpucoll.device import Part, Waiting


class MessageTransport:
    """Groups of messages over `wire`, a `gpucoll.links.Link`'s, with `tag`.

    A send ends only when its receive has begun, as a large one does with NCCL, so that a schedule which would stop
    there stops here.
    """

    capturable = True

    def __init__(self, wire: Any, tag: int) -> None:
        self._wire, self._tag = wire, tag
        self._send = getattr(wire, "Issend", wire.Isend)  # between threads a send meets its receive anyway

    def group(self, sends: Sequence[Part], receives: Sequence[Part], stream: Any) -> Waiting:
        stream.enqueue_action(lambda: _Group(self, sends, receives))
        return iter(())

    def receive(self, part: Part) -> Any:
        """Begin to receive; return the request."""
        return self._wire.Irecv([_memory(part), "B"], part.peer, self._tag)

    def send(self, part: Part) -> Any:
        """Begin to send; return the request."""
        return self._send([_memory(part), "B"], part.peer, self._tag)

    def check(self) -> None:
        """Failures are those of the wire, and raised there."""

    def close(self) -> None:
        """Nothing to give back."""

    def abort(self) -> None:
        """What is under way is called back with its stream: see `Device.abandon`."""


class _Group:
    """A group in a stream's queue: its messages begin when its turn has come."""

    def __init__(self, transport: MessageTransport, sends: Sequence[Part], receives: Sequence[Part]) -> None:
        self._transport, self._parts = transport, (sends, receives)
        self._begun = False
        self._receives: list[Any] = []
        self._sends: list[Any] = []

    def __call__(self) -> bool:
        if not self._begun:
            self._begun = True
            sends, receives = self._parts
            self._receives = [self._transport.receive(part) for part in receives]
            self._sends = [self._transport.send(part) for part in sends]
        self._receives = [request for request in self._receives if not request.Test()]
        self._sends = [request for request in self._sends if not request.Test()]
        return not self._receives and not self._sends

    def abandon(self) -> None:
        """Call back what may still be received."""
        for request in self._receives:
            if not request.Test():
                request.Cancel()
                request.Wait()


def _memory(part: Part) -> numpy.ndarray[Any, Any]:
    return numpy.ctypeslib.as_array((ctypes.c_ubyte * part.nbytes).from_address(part.address))
