"""All data to all ranks over the links of a graph, round by round: a link sends whenever its sender has a new piece.

Trees in a pipeline cost time to fill and to empty. Here every rank takes, in each round, as many new pieces as its
links can bring: a matching of pieces with links, as in TACOS (Won et al., MICRO 2024). A round is as long as it brings
the rank with the most time to go the most pieces per second: long rounds save latency, and bandwidths without a large
common divisor are nearly used up. Random numbers of a fixed seed decide between pieces.
"""

from __future__ import annotations

import collections
import itertools
import random

import numpy

from gpucoll.internal import PieceMessage, Transfers, backwards
from gpucoll.lab.graphs.link_graph import LinkGraph

MOST_MESSAGES = 1 << 16  # of a schedule: every message stands in the file
CUTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # pieces of a block
MOST_PIECES = 16  # of a link in a round, on the links that decide the length of the round
MOST_LATEST = 4  # ranks that decide the length: with symmetries all ranks have the most time to go
SERVED = ("all_gather", "reduce_scatter", "all_reduce")


def in_link_order(graph: LinkGraph, name: str, nbytes: int) -> Transfers | None:
    """Return a schedule of a collective for `nbytes`; None if the graph has switches, or the messages are too many."""
    messages = graph.ranks * (graph.ranks - 1) * (1 + (name == "all_reduce"))
    if graph.size > graph.ranks or name not in SERVED or messages > MOST_MESSAGES:
        return None
    back = graph.reversed()
    made = []
    for cut, is_short in itertools.product(CUTS, (True, False)):
        if messages * cut <= MOST_MESSAGES:
            down, seconds = _Gather(back if name == "reduce_scatter" else graph, cut, nbytes, is_short).rounds()
            up, more = down, seconds if name == "all_reduce" else 0.0
            if name == "all_reduce" and back.edges != graph.edges:
                up, more = _Gather(back, cut, nbytes, is_short).rounds()
            made.append((seconds + more, cut, up, down))
    _, cut, up, down = min(made)
    if name == "reduce_scatter":
        return Transfers(name, graph.ranks, cut, backwards(down), len(down))
    sums = backwards(up) if name == "all_reduce" else []
    return Transfers(name, graph.ranks, cut, [*sums, *down], len(sums))


class _Gather:
    """An all-gather with blocks of `cut` pieces: the pieces that each rank has so far.

    With `is_short` a round may be too short for a piece on the slowest links.
    """

    def __init__(self, graph: LinkGraph, cut: int, nbytes: int, is_short: bool) -> None:
        pieces = graph.ranks * cut
        self._ties = random.Random(1)
        self._latency = 1e-6 * max(float(edge.us) for edge in graph.edges.values())
        # Of each link the seconds of a piece, and of each rank the seconds of a piece on all its links together.
        self._seconds = {link: nbytes / pieces / 1e9 / float(edge.GBps) for link, edge in graph.edges.items()}
        self._into = [[src for src, end in graph.edges if end == dst] for dst in range(graph.ranks)]
        self._each = numpy.array([1 / sum(1 / self._seconds[src, dst] for src in into)
                                  for dst, into in enumerate(self._into)])
        lengths = {count * seconds for seconds in self._seconds.values() for count in range(1, MOST_PIECES + 1)}
        self._lengths = sorted(length for length in lengths if is_short or length >= max(self._seconds.values()))
        self._has = numpy.arange(graph.ranks)[:, None] == numpy.arange(pieces) // cut

    def rounds(self) -> tuple[list[list[PieceMessage]], float]:
        """Return the messages of each round, and the seconds of all rounds."""
        rounds, total = [], 0.0
        while not self._has.all():
            came = self._came(self._length()) or self._came(self._lengths[-1])
            for piece, _, rank in came:
                self._has[rank, piece] = True
            loads = collections.Counter((sender, receiver) for _, sender, receiver in came)
            total += self._latency + max(count * self._seconds[link] for link, count in loads.items())
            rounds.append(came)
        return rounds, total

    def _came(self, length: float) -> list[PieceMessage]:
        """Return the messages of a round; none if all new pieces are on links without room in a short round."""
        return [message for rank in range(len(self._has)) for message in self._matched(rank, length)]

    def _length(self) -> float:
        """Return the seconds of the next round, without latency."""
        left = numpy.count_nonzero(~self._has, axis=1) * self._each
        latest = numpy.flatnonzero(left >= left.max() * (1 - 1e-9))[:MOST_LATEST]
        return max(self._lengths, key=lambda length: min(
            len(self._matched(rank, length)) for rank in latest) / (self._latency + length))

    def _matched(self, rank: int, length: float) -> list[PieceMessage]:
        """Return the messages to a rank in a round: the largest matching of missing pieces with the rank's links."""
        room = {src: int(length / self._seconds[src, rank] + 1e-9) for src in self._into[rank]}
        missing = numpy.flatnonzero(~self._has[rank])
        holders: dict[int, list[int]] = collections.defaultdict(list)
        for src in self._into[rank]:
            for piece in missing[self._has[src, missing]].tolist():
                holders[piece].append(src)
        taken: dict[int, list[int]] = {src: [] for src in self._into[rank]}

        def place(piece: int, seen: set[int]) -> bool:
            """Give a piece to a link with room, or to a link that can give another piece to another link."""
            for src in holders[piece]:
                if src not in seen and len(taken[src]) < room[src]:
                    taken[src].append(piece)
                    return True
            for src in holders[piece]:
                if src not in seen:
                    seen.add(src)
                    for number, other in enumerate(taken[src]):
                        if place(other, seen):
                            taken[src][number] = piece
                            return True
            return False

        free = sum(room.values())
        for piece in self._ties.sample([*holders], len(holders)):
            if not free:
                break
            free -= place(piece, set())
        return [(piece, src, rank) for src, pieces in taken.items() for piece in pieces]
