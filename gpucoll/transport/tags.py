"""The tags of the library's messages, on a duplicated communicator that no other program uses."""

from __future__ import annotations

import enum

BYTES = "B"  # MPI's unsigned char
PIECE = 1 << 30  # bytes of a message: MPI counts them in 31 bits
TAGS = 1 << 15  # MPI promises tags up to 32767


class Tag(enum.IntEnum):
    """What a message is about.

    A call has a tag of its own, `FIRST_CALL` or above: a late message of the call before cannot be mistaken for one of
    this call.
    """

    SHUTDOWN = 0  # a rank leaves the communicator in order
    DEVICE = 1  # the transport of an emulated device
    HANDSHAKE = 2  # ranks of a node that look for ways into each other's memory
    ABORT = 3  # a rank goes no further
    COMPARISON = 4  # ranks that compare their calls before data move
    FIRST_CALL = 5


def tag_of_call(number: int) -> int:
    """Return the tag of a communicator's call of that number.

    >>> tag_of_call(0), tag_of_call(TAGS - 5)
    (5, 5)
    """
    return Tag.FIRST_CALL + number % (TAGS - Tag.FIRST_CALL)
