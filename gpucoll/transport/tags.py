"""The tags of the library's messages, sent on a duplicated communicator of the library's own."""

from __future__ import annotations

import enum

BYTES = "B"  # mpi4py's name of MPI_UNSIGNED_CHAR
MAX_MESSAGE = 1 << 30  # bytes: MPI counts elements with 31 bits, so longer arrays are sent in pieces
FAREWELL_BYTES = 512  # of a farewell: a line of JSON with numbers, then the words
TAGS = 1 << 15  # the number of tags that every MPI has: 0 to 32767
# The first tag of the engines' messages, and the number of tags of each of a communicator's two engines. A tag grows
# with the number of the call (`Walker::tag`): a late message of the previous call is not taken for one of this call.
ENGINE_TAGS, ENGINE_CALLS = 1 << 13, 1 << 13


class Tag(enum.IntEnum):
    """The subject of a message outside of calls."""

    FAREWELL = 0  # a rank leaves the communicator: see `gpucoll.health.farewell`
    HANDSHAKE = 2  # ranks agree on memory, devices, and ways to reach each other's memory
    COMPARISON = 3  # ranks compare their calls before data is sent
    PAIR = 4  # the first GPU message of two ranks
