"""The tags of the library's messages, sent on a duplicated communicator of the library's own."""

from __future__ import annotations

import enum

BYTES = "B"  # mpi4py's name of MPI_UNSIGNED_CHAR
MAX_MESSAGE = 1 << 30  # bytes: MPI counts elements with 31 bits, so longer arrays are sent in pieces
FAREWELL_BYTES = 512  # of a farewell: a line of JSON with numbers, then the words
TAGS = 1 << 15  # the number of tags that every MPI has: 0 to 32767
# Over UCX: the first tag of messages sent by an engine without Python, and the number of tags of each engine. The
# number of a call is added; see `Walker::tag`.
ENGINE_TAGS, ENGINE_CALLS = TAGS, 1 << 14


class Tag(enum.IntEnum):
    """The subject of a message.

    Each call has another tag, from `FIRST_CALL` on: a late message of the previous call is not taken for a message of
    this call.
    """

    FAREWELL = 0  # a rank leaves the communicator: see `gpucoll.health.farewell`
    HANDSHAKE = 2  # ranks agree on memory, devices, and ways to reach each other's memory
    COMPARISON = 3  # ranks compare their calls before data is sent
    PAIR = 4  # the first GPU message of two ranks
    FIRST_CALL = 5


def tag_of_call(number: int) -> int:
    """Return the tag of a communicator's call `number`; tags repeat after TAGS - FIRST_CALL calls.

    >>> tag_of_call(0), tag_of_call(TAGS - 5)
    (5, 5)
    """
    return Tag.FIRST_CALL + number % (TAGS - Tag.FIRST_CALL)
