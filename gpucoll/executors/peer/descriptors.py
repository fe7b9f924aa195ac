"""A file descriptor given by a rank to the other ranks of a node, through Unix sockets.

CUDA exports multicast memory as a file descriptor, and a descriptor has a meaning in its own process only. The kernel
copies a descriptor sent through a Unix socket into the receiving process.
"""

from __future__ import annotations

import array
import secrets
import socket
from collections.abc import Generator

from gpucoll.progress.operations import Pending
from gpucoll.transport.connections import belongs_to_user, is_readable

NAME_BITS = 62  # of the name of an offer


class DescriptorOffer:
    """A descriptor on offer to processes of this user; `name` is a number for `reach`."""

    def __init__(self) -> None:
        self.name = secrets.randbits(NAME_BITS)
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            self._listener.bind(_place(self.name))
            self._listener.listen()
        except OSError:
            self._listener.close()
            raise

    def give(self, descriptor: int, count: int) -> Generator[Pending, None, None]:
        """Send the descriptor to `count` processes; a connection of another user is closed and not counted."""
        while count:
            while not is_readable(self._listener):
                yield lambda: is_readable(self._listener)
            connected, _ = self._listener.accept()
            with connected:
                if belongs_to_user(connected):
                    socket.send_fds(connected, [b"\0"], [descriptor])
                    count -= 1

    def close(self) -> None:
        self._listener.close()


def reach(name: int) -> socket.socket:
    """Return a connection to the offer `name`; raise OSError if the offer is in another container, or another user's.
    """
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.connect(_place(name))
        if not belongs_to_user(connected):
            raise OSError("the socket belongs to another user")
    except OSError:
        connected.close()
        raise
    return connected


def take(connected: socket.socket) -> Generator[Pending, None, int]:
    """Return the descriptor sent through a connection, and close the connection; raise OSError if none comes."""
    with connected:
        while not is_readable(connected):
            yield lambda: is_readable(connected)
        _, descriptors, _, _ = socket.recv_fds(connected, 1, array.array("i").itemsize)
    if len(descriptors) != 1:
        raise OSError("the other process has closed the connection")
    return descriptors[0]


def _place(name: int) -> str:
    # The leading zero byte makes the name abstract: no file remains.
    return f"\0gpucoll-descriptor-{name:016x}"
