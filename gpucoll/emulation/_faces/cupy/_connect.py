"""NCCL's connections: made by the host inside ncclGroupEnd, at the first use of a direction to a peer.

The protocol is ncclTransportP2pSetup of NCCL's transport.cc. For every distance i, a rank sends to rank + i and
receives from rank - i. The rank announces new directions to both peers and waits for their announcements, and again
after connecting. Only an abort ends the wait, no deadline. A rank without new directions meets no other rank.
"""

import contextlib
import threading

from .hostile import report


class Truncated(Exception):
    """An announcement of a peer differs from the directions connected by this rank."""


def connect(rank, size, sends, receives, put, take):
    """Connect these new directions. `put(peer, tag, value)` sends at once, `take(peer, tag)` waits for the value."""
    # As in NCCL: the first exchange carries connection data, the second confirms the connections.
    for again in (0, 1):
        for i in range(1, size):
            tag, to, of = 2 * i + again, (rank + i) % size, (rank - i) % size
            mine = int(to in sends), int(of in receives)
            # At half the ring, both directions have the same peer, and a single message carries both.
            if to == of:
                if any(mine):
                    put(to, tag, mine)
                    _compare(rank, to, mine, take(to, tag))
                continue
            # Both announcements before both waits: otherwise two ranks could wait for each other.
            for peer, new in ((of, mine[1]), (to, mine[0])):
                if new:
                    put(peer, tag, None)
            for peer, new in ((to, mine[0]), (of, mine[1])):
                if new:
                    take(peer, tag)


def _compare(rank, peer, mine, theirs):
    """Raise Truncated unless the peer's message, with the data of both directions, has the directions of `rank`."""
    if sum(mine) != sum(theirs):
        raise Truncated(f"Message truncated: rank {rank} received {sum(theirs)} of rank {peer}, not {sum(mine)}")
    if mine != theirs[::-1]:
        raise Truncated(f"rank {rank} has {mine} (sends, receives), rank {peer} {theirs}: taken for each other")


class Connections:
    """The directions connected so far by a communicator."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size
        self._sends, self._receives, self._ring = set(), set(), False

    def reach(self, sends, receives, collective, put, take):
        """Connect the new directions of a group: messages to their peers, and the ring at the first collective."""
        if collective and not self._ring and self._size > 1:
            self._ring = True
            ring = {(self._rank + 1) % self._size}, {(self._rank - 1) % self._size}
            self._meet(*ring, 0, put, take)
        new = sends - self._sends - {self._rank}, receives - self._receives - {self._rank}
        if any(new):
            self._sends |= new[0]
            self._receives |= new[1]
            self._meet(*new, 1, put, take)

    def register(self, put, take):
        """Meet the ring neighbours, as NCCL meets all ranks to register buffers of a captured collective."""
        if self._size > 1:
            self._meet({(self._rank + 1) % self._size}, {(self._rank - 1) % self._size}, 2, put, take)

    def _meet(self, sends, receives, channel, put, take):
        connect(self._rank, self._size, sends, receives, lambda peer, tag, value: put(peer, 3 * tag + channel, value),
                lambda peer, tag: take(peer, 3 * tag + channel))


class SharedResources:
    """Communicators with common resources: a stream of their own orders their groups, and one abort ends them all."""

    def __init__(self):
        self.aborted, self.issued, self.ended, self._inside = False, 0, 0, None

    @contextlib.contextmanager
    def entered(self):
        before, self._inside = self._inside, threading.get_ident()
        if before not in (None, self._inside):
            report("two threads call NCCL on communicators with common resources")
        try:
            yield
        finally:
            self._inside = before
