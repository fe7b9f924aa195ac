"""Memory that ranks share on one node, as the peer kernels see it: how a slab is cut, and the kernels' arguments.

Every rank has a slab, all of them cut alike, and reaches the others'. What is in it only the kernels know
(``kernels/peer.h``); a new slab is all zeros. The control block stands elsewhere, where the host may write it any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.device.launch import Arguments, opaque

# As in the kernels.
MOST_RANKS, BUFFERS = 16, 4
LINE = 128
STATE = numpy.dtype([("epoch", "u8"), ("started", "u4"), ("ended", "u4")])
BOOK = numpy.dtype([("sent", "u8"), ("received", "u8")])
CONTROL = numpy.dtype([(name, "u8") for name in ("aborted", "failures", "where", "peer", "wanted", "seen")])
HEAP = numpy.dtype([("slabs", "u8", MOST_RANKS), ("control", "u8"), ("patience", "u8"),
                    ("rank", "u4"), ("ranks", "u4"), ("depth", "u4"),
                    *((name, "u8") for name in ("lines", "books", "packets", "slots", "staging", "packet_room",
                                                "slot_bytes", "staging_bytes"))], align=True)
_ENDS = [("src", "u8"), ("dst", "u8"), ("count", "u8")]
PACKETS = numpy.dtype([("heap", HEAP), *_ENDS, ("nan_bytes", "u8")], align=True)
SHOTS = numpy.dtype([("heap", HEAP), *_ENDS, ("nan_bytes", "u8"), ("source_mark", "u8"), ("result_mark", "u8"),
                     ("sources", "u8", MOST_RANKS), ("results", "u8", MOST_RANKS)], align=True)
STEPS = numpy.dtype([("heap", HEAP), ("buffers", "u8", BUFFERS), ("region", "u8"), *(
    (name, "u8") for name in ("nan_bytes", "rounds", "lanes", "parts", "writes", "round_count", "movers"))], align=True)
PART = numpy.dtype([("start", "u8"), ("count", "u8"), ("buffer", "u4"), ("combine", "u4")])
LANE = numpy.dtype([("peer", "u4"), ("receives", "u4"), ("first", "u4"), ("parts", "u4")])
WRITE = numpy.dtype([("first", "u4"), ("operands", "u4")])
ROUND = numpy.dtype([("first_lane", "u4"), ("lanes", "u4"), ("first_write", "u4"), ("before", "u4"), ("after", "u4")])

WAITS = {1: "meeting", 2: "packet", 3: "piece"}  # what `Control.where` says was waited for


class Room(NamedTuple):
    """How much there is of everything in a slab; the same on every rank.

    `channels` are the most blocks of a launch. `packets` are the bytes of the largest message in packets, `slot` those
    of a piece of which `depth` are under way between two blocks, `staging` those of a section of an array. There is
    room for two sections, so that the next is copied while one is reduced. All are multiples of 16.
    """

    ranks: int
    channels: int = 8
    depth: int = 4
    packets: int = 1 << 16
    slot: int = 1 << 15
    staging: int = 1 << 22

    @property
    def offsets(self) -> dict[str, int]:
        """Where every part begins, on a line of its own, and as "end" the bytes of the whole.

        >>> Room(ranks=2, channels=1, depth=1, packets=16, slot=16, staging=16).offsets["lines"]
        128
        """
        lines, begins, end = self.channels * self.ranks, {}, 0
        parts = {"state": STATE.itemsize, "lines": lines * LINE, "books": lines * BOOK.itemsize,
                 "packets": 2 * self.ranks * 2 * self.packets, "slots": lines * self.depth * self.slot,
                 "staging": 2 * self.staging}
        for name, nbytes in parts.items():
            begins[name] = end
            end += -(-nbytes // LINE) * LINE
        return {**begins, "end": end}


class Places(NamedTuple):
    """Where the ranks' parts of an array are, as this rank reaches them, should all pass what has the same `mark`."""

    mark: int
    addresses: Sequence[int] = ()


NOWHERE = Places(0)


class PeerHeap:
    """The slabs of all ranks at the addresses that `rank` reaches them by, and its kernels' arguments.

    Of a result `nan_bytes` become NaN where a rank does not come within the deadline: all of a floating-point one.
    """

    def __init__(self, room: Room, rank: int, slabs: Sequence[int], control: int, patience: float) -> None:
        self.room, self.rank = room, rank
        offsets = {name: room.offsets[name] for name in ("lines", "books", "packets", "slots", "staging")}
        values = {"slabs": _filled(slabs), "control": control, "patience": int(min(patience, 1e9) * 1e9), "rank": rank,
                  "ranks": room.ranks, "depth": room.depth, **offsets, "packet_room": 2 * room.packets,
                  "slot_bytes": room.slot, "staging_bytes": room.staging}
        self._heap = numpy.zeros((), HEAP)
        for name, value in values.items():
            self._heap[name] = value

    def packets(self, src: int, dst: int, count: int, nan_bytes: int = 0) -> Arguments:
        """The arguments of an all-reduce in packets; its bytes are at most `Room.packets`."""
        return self._arguments(PACKETS, src=src, dst=dst, count=count, nan_bytes=nan_bytes)

    def shots(self, src: int, dst: int, count: int, sources: Places = NOWHERE, results: Places = NOWHERE,
              nan_bytes: int = 0) -> Arguments:
        """The arguments of an all-reduce by `fold_all` or `fold_share`.

        `sources` are where each rank's input is read. `results`, for `fold_share`, are where each rank's result is
        written. Both serve if the ranks find, on the device, that all have the same mark there. Otherwise data go
        through the slabs.
        """
        return self._arguments(SHOTS, src=src, dst=dst, count=count, nan_bytes=nan_bytes, source_mark=sources.mark,
                               result_mark=results.mark, sources=_filled(sources.addresses),
                               results=_filled(results.addresses))

    def steps(self, buffers: Sequence[int], region: int, program: dict[str, int], rounds: int, movers: int,
              nan_bytes: int = 0) -> Arguments:
        """The arguments of a program whose tables are at the addresses `program`.

        `buffers` are input, output, scratch and staging, of which every block has `region` bytes. Of a block `movers`
        threads move data, a power of two; the launch has at least one more, which signals.
        """
        return self._arguments(STEPS, buffers=buffers, region=region, round_count=rounds, movers=movers,
                               nan_bytes=nan_bytes, **program)

    def _arguments(self, dtype: numpy.dtype, **fields: Any) -> Arguments:
        arguments = numpy.zeros(1, dtype)
        arguments["heap"] = self._heap
        for name, value in fields.items():
            arguments[name] = value
        return arguments.view(opaque(dtype))


def _filled(addresses: Sequence[int]) -> list[int]:
    return [*addresses, *(0,) * (MOST_RANKS - len(addresses))]
