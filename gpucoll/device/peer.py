"""Memory shared by the ranks of one node for the peer kernels: the layout of a slab, and the kernels' arguments.

Every rank has one slab, with the same layout on all ranks, and can access the slabs of all ranks. Only the kernels
read and write the slabs (``kernels/device/peer.h``); a new slab is all zeros. The control block lies outside the slab,
so that the host can write the block while a kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll.device.launch import WORD, Arguments, opaque

# Constants and structs of the kernels: peer.h, peer_packets.cu, peer_ll128.cu, peer_shots.cu, peer_multimem.cu,
# peer_steps.cu.
MOST_RANKS, BUFFERS = 16, 4
PROGRESS_BYTES = 128  # bytes of a progress record of two blocks, so that no two records share a cache line
TILE_BYTES = 32 * 16  # data of the packets lying together (TILE in peer_packets.cu)
# A group of the kernel `ll128` (peer_ll128.cu): two packets of 128 bytes carry 15 words, moved by a row of 8 threads.
GROUP_WORDS, ROW, GROUP_BYTES = 15, 8, 256
STATE = numpy.dtype([("epoch", "u8"), ("started", "u4"), ("ended", "u4"), ("renewed", "u8", 2)])
BOOK = numpy.dtype([("sent", "u8"), ("received", "u8")])
CONTROL = numpy.dtype([(name, "u8") for name in ("aborted", "failures", "where", "peer", "wanted", "seen")])
HEAP = numpy.dtype([("slabs", "u8", MOST_RANKS), ("control", "u8"), ("patience", "u8"),
                    ("rank", "u4"), ("ranks", "u4"), ("depth", "u4"),
                    *((name, "u8") for name in ("lines", "books", "packets", "ll128", "slots", "staging",
                                                "packet_room", "ll128_room", "slot_bytes", "staging_bytes"))],
                   align=True)
_ENDS = [("src", "u8"), ("dst", "u8"), ("count", "u8")]
PACKETS = numpy.dtype([("heap", HEAP), *_ENDS, ("nan_bytes", "u8")], align=True)
SHOTS = numpy.dtype([("heap", HEAP), *_ENDS, ("nan_bytes", "u8"), ("source_mark", "u8"), ("result_mark", "u8"),
                     ("sources", "u8", MOST_RANKS), ("results", "u8", MOST_RANKS), ("staged", "u8"),
                     ("multicast", "u8")], align=True)
STEPS = numpy.dtype([("heap", HEAP), ("buffers", "u8", BUFFERS), ("region", "u8"), *(
    (name, "u8") for name in ("nan_bytes", "rounds", "lanes", "parts", "writes", "round_count", "movers"))], align=True)
PART = numpy.dtype([("start", "u8"), ("count", "u8"), ("buffer", "u4"), ("combine", "u4")])
LANE = numpy.dtype([("peer", "u4"), ("receives", "u4"), ("first", "u4"), ("parts", "u4")])
WRITE = numpy.dtype([("first", "u4"), ("operands", "u4")])
ROUND = numpy.dtype([("first_lane", "u4"), ("lanes", "u4"), ("first_write", "u4"), ("before", "u4"), ("after", "u4")])

WAITS = {1: "meeting", 2: "packet", 3: "piece"}  # the object of the failed wait, by the field `where` of CONTROL


class Room(NamedTuple):
    """The capacities of a slab, the same on every rank.

    `channels` is the largest number of blocks in a launch. `packets` is the number of bytes in the largest message
    sent as packets of 16 bytes, `ll128` in the largest message sent as packets of 128 bytes. `depth` slots of `slot`
    bytes connect two blocks. `staging` is the number of bytes in a section of an array. A slab has space for two
    sections: one section is copied while the other is reduced. All numbers of bytes are multiples of 16.
    """

    ranks: int
    channels: int = 8
    depth: int = 4
    packets: int = 1 << 16
    ll128: int = 1 << 17
    slot: int = 1 << 15
    staging: int = 1 << 22

    @property
    def packet_room(self) -> int:
        """The number of bytes for the packets of one writing rank: whole tiles of 32 words, two packets a word."""
        return -(-self.packets // TILE_BYTES) * 2 * TILE_BYTES

    @property
    def ll128_room(self) -> int:
        """The number of bytes for the packets of 128 bytes of one writing rank."""
        return -(-self.ll128 // (GROUP_WORDS * WORD)) * GROUP_BYTES

    @property
    def offsets(self) -> dict[str, int]:
        """The offset of each part in bytes, a multiple of 128; "end" is the size of the slab.

        >>> Room(ranks=2, channels=1, depth=1, packets=16, ll128=16, slot=16, staging=16).offsets["lines"]
        128
        """
        lines, begins, end = self.channels * self.ranks, {}, 0
        parts = {"state": STATE.itemsize, "lines": lines * PROGRESS_BYTES, "books": lines * BOOK.itemsize,
                 "packets": 2 * self.ranks * self.packet_room, "ll128": 2 * self.ranks * self.ll128_room,
                 "slots": lines * self.depth * self.slot, "staging": 2 * self.staging}
        for name, nbytes in parts.items():
            begins[name] = end
            end += -(-nbytes // PROGRESS_BYTES) * PROGRESS_BYTES
        return {**begins, "end": end}


class Places(NamedTuple):
    """The addresses of an array on all ranks, in the address space of this rank.

    `mark` identifies slab and offset of this rank's array; 0 means memory without access by other ranks. The kernels
    use the addresses only if the `mark` is the same on all ranks.
    """

    mark: int
    addresses: Sequence[int] = ()


NOWHERE = Places(0)


class Multicast(NamedTuple):
    """Multicast memory of two sections: the address of this rank's own memory, and the address for all ranks at once.
    """

    own: int
    group: int


class PeerHeap:
    """The slabs of all ranks, at addresses valid on `rank`, and the arguments of the kernels on `rank`.

    `patience` is the deadline of a wait in seconds. If a rank misses the deadline, the kernel sets `nan_bytes` bytes
    of the result to NaN: all bytes of a floating-point or complex result, otherwise none.
    """

    def __init__(self, room: Room, rank: int, slabs: Sequence[int], control: int, patience: float) -> None:
        self.room, self.rank = room, rank
        offsets = {name: room.offsets[name] for name in ("lines", "books", "packets", "ll128", "slots", "staging")}
        values = {"slabs": _filled(slabs), "control": control, "patience": int(min(patience, 1e9) * 1e9), "rank": rank,
                  "ranks": room.ranks, "depth": room.depth, **offsets, "packet_room": room.packet_room,
                  "ll128_room": room.ll128_room, "slot_bytes": room.slot, "staging_bytes": room.staging}
        self._staging = slabs[rank] + offsets["staging"]
        self._heap = numpy.zeros((), HEAP)
        for name, value in values.items():
            self._heap[name] = value

    def packets(self, src: int, dst: int, count: int, nan_bytes: int = 0) -> Arguments:
        """Return the arguments of an all-reduce of at most `Room.packets` bytes by `packets`, `Room.ll128` by `ll128`.
        """
        return self._arguments(PACKETS, src=src, dst=dst, count=count, nan_bytes=nan_bytes)

    def shots(self, src: int, dst: int, count: int, sources: Places = NOWHERE, results: Places = NOWHERE,
              nan_bytes: int = 0, multicast: Multicast | None = None) -> Arguments:
        """Return the arguments of an all-reduce by `fold_all`, `fold_share` or, with `multicast`, `multimem_share`.

        With `multicast` also of an all-gather by `multimem_gather`; `count` is then the number of units of a block.

        `sources` are the addresses of the ranks' inputs. `results`, not for `fold_all`, are the addresses of the
        ranks' results. The kernel uses the addresses if all ranks have the same nonzero `mark`. Otherwise the data go
        through the slabs.
        """
        return self._arguments(SHOTS, src=src, dst=dst, count=count, nan_bytes=nan_bytes, source_mark=sources.mark,
                               result_mark=results.mark, sources=_filled(sources.addresses),
                               results=_filled(results.addresses),
                               staged=multicast.own if multicast is not None else self._staging,
                               multicast=multicast.group if multicast is not None else 0)

    def steps(self, buffers: Sequence[int], region: int, program: dict[str, int], rounds: int, movers: int,
              nan_bytes: int = 0) -> Arguments:
        """Return the arguments of `steps` for a schedule of `rounds` rounds with tables at the addresses `program`.

        `buffers` are the addresses of input, output, scratch and staging. Every block has `region` bytes of staging.
        `movers` threads of a block, a power of two, move data; the launch has more threads, one for signalling.
        """
        return self._arguments(STEPS, buffers=buffers, region=region, round_count=rounds, movers=movers,
                               nan_bytes=nan_bytes, **program)

    def _arguments(self, dtype: numpy.dtype, **fields: Any) -> Arguments:
        # Start with zeros, so that padding and unused fields are the same in every call.
        arguments = numpy.zeros(1, dtype)
        arguments["heap"] = self._heap
        for name, value in fields.items():
            arguments[name] = value
        return arguments.view(opaque(dtype))


def _filled(addresses: Sequence[int]) -> list[int]:
    return [*addresses, *(0,) * (MOST_RANKS - len(addresses))]
