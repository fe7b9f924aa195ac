"""NCCL's connections: made by the host, inside ncclGroupEnd, when a direction to a peer is used for the first time.

After ncclTransportP2pSetup in NCCL's transport.cc: for every distance i a rank sends to rank + i and receives from
rank - i. It tells each peer what is new, then waits for the peer's answer, and a second time when all is connected.
There is no deadline: only an abort ends it. Who has nothing new meets nobody.
"""


class Truncated(Exception):
    """What a peer has sent is not what this rank connects."""


def connect(rank, size, sends, receives, put, take):
    """Connect these new directions. `put(peer, tag, value)` sends at once, `take(peer, tag)` waits for the value."""
    for again in (0, 1):
        for i in range(1, size):
            tag, to, of = 2 * i + again, (rank + i) % size, (rank - i) % size
            mine = int(to in sends), int(of in receives)
            if to == of:
                if any(mine):
                    put(to, tag, mine)
                    _compare(rank, to, mine, take(to, tag))
                continue
            for peer, new in ((of, mine[1]), (to, mine[0])):
                if new:
                    put(peer, tag, None)
            for peer, new in ((to, mine[0]), (of, mine[1])):
                if new:
                    take(peer, tag)


def _compare(rank, peer, mine, theirs):
    """One message has the data of both directions, which the receiver takes for as much as it expects itself."""
    if sum(mine) != sum(theirs):
        raise Truncated(f"Message truncated: rank {rank} received {sum(theirs)} of rank {peer}, not {sum(mine)}")
    if mine != theirs[::-1]:
        raise Truncated(f"rank {rank} has {mine} (sends, receives), rank {peer} {theirs}: taken for each other")


class Connections:
    """What a communicator has connected so far."""

    def __init__(self, rank, size):
        self._rank, self._size = rank, size
        self._sends, self._receives, self._ring = set(), set(), False

    def reach(self, sends, receives, collective, put, take):
        """Connect what is new of a group: messages by their peers, and the ring at the first collective."""
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
        """Meet all ranks, as NCCL does where a captured collective's buffers are registered for NVLink's switches."""
        if self._size > 1:
            self._meet({(self._rank + 1) % self._size}, {(self._rank - 1) % self._size}, 2, put, take)

    def _meet(self, sends, receives, channel, put, take):
        connect(self._rank, self._size, sends, receives, lambda peer, tag, value: put(peer, 3 * tag + channel, value),
                lambda peer, tag: take(peer, 3 * tag + channel))
