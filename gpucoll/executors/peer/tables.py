"""What the host writes for the peer kernels: the layout of memory shared by the ranks, arguments, and a plan as tables.

Every rank has one slab, with the same layout on all ranks, and can access the slabs of all ranks. Only the kernels
read and write the slabs (``kernels/device/peer.h``); a new slab is all zeros. The control block lies outside the slab,
so that the host can write the block while a kernel runs.

The step kernel runs any plan, by tables of rounds, lanes, parts and writes. Block c of every rank works on share c of
each part, and on nothing else, so that no block waits for another block of its own rank. So a part is a chunk of the
schedule: share c of a chunk on one rank is share c everywhere. With a single block, a part may be any length. Staging
holds other chunks in each round, so that each block has its own region of staging.

The module is pure: code here computes with addresses and spans, and never touches memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy

from gpucoll.device.launch import WORD, Arguments, opaque
from gpucoll.plan import HALVES, Layouts, Message, Plan, PlanStep, Reduction, Span
from gpucoll.verify.symbolic import ScheduleError

# Constants and structs of the kernels: peer.h, peer_packets.cu, peer_ll128.cu, peer_shots.cu, peer_multimem.cu,
# peer_steps.cu.
MOST_RANKS = 16
STEP_BUFFERS = ("input", "output", "scratch", "staging")  # of the step kernel
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
                     ("sources", "u8", MOST_RANKS), ("results", "u8", MOST_RANKS), *((name, "u8") for name in (
                         "staged", "multicast", "source_group", "result_group", "source_place", "result_place"))],
                    align=True)
STEPS = numpy.dtype([("heap", HEAP), ("buffers", "u8", len(STEP_BUFFERS)), ("region", "u8"), *(
    (name, "u8") for name in ("nan_bytes", "rounds", "lanes", "parts", "writes", "round_count", "movers"))], align=True)
PART = numpy.dtype([("start", "u8"), ("count", "u8"), ("buffer", "u4"), ("combine", "u4")])
LANE = numpy.dtype([("peer", "u4"), ("receives", "u4"), ("first", "u4"), ("parts", "u4")])
WRITE = numpy.dtype([("first", "u4"), ("operands", "u4")])
ROUND = numpy.dtype([("first_lane", "u4"), ("lanes", "u4"), ("first_write", "u4"), ("before", "u4"), ("after", "u4")])

WAIT_NAMES = {1: "meeting", 2: "packet", 3: "piece"}  # the object of the failed wait, by the field `where` of CONTROL
StructTable: TypeAlias = "numpy.ndarray[tuple[int], numpy.dtype[numpy.void]]"


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
    use the addresses only if the `mark` is the same on all ranks. At `group` is the memory of all ranks at once, if it
    is multicast memory, with the array at `offset`.
    """

    mark: int
    addresses: Sequence[int] = ()
    group: int = 0
    offset: int = 0


NO_PLACES = Places(0)


class Multicast(NamedTuple):
    """Memory of all ranks: this rank's own address, the address for all ranks at once, or 0, and each rank's address.
    """

    own: int
    group: int
    addresses: Sequence[int] = ()


class PeerHeap:
    """The slabs of all ranks, at addresses valid on `rank`, and the arguments of the kernels on `rank`.

    `patience` is the deadline of a wait in seconds. If a rank misses the deadline, the kernel sets `nan_bytes` bytes
    of the result to NaN: all bytes of a floating-point or complex result, otherwise none.
    """

    def __init__(self, room: Room, rank: int, slabs: Sequence[int], control: int, patience: float) -> None:
        self.room: Room = room
        self.rank: int = rank
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

    def shots(self, src: int, dst: int, count: int, sources: Places = NO_PLACES, results: Places = NO_PLACES,
              nan_bytes: int = 0, multicast: Multicast | None = None) -> Arguments:
        """Return the arguments of an all-reduce by `fold_all`, `fold_share` or, with `multicast`, `multimem_share`.

        With `multicast` also of an all-gather by `multimem_gather`; `count` is then the number of units of a block.

        `sources` are the addresses of the ranks' inputs. `results`, not for `fold_all`, are the addresses of the
        ranks' results. The kernel uses the addresses, or the switch where both have a `group`, if all ranks have the
        same nonzero `mark`. Otherwise the data go through the slabs.
        """
        return self._arguments(SHOTS, src=src, dst=dst, count=count, nan_bytes=nan_bytes, source_mark=sources.mark,
                               result_mark=results.mark, sources=_filled(sources.addresses),
                               results=_filled(results.addresses), source_group=sources.group,
                               result_group=results.group, source_place=sources.offset, result_place=results.offset,
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


class Lane(NamedTuple):
    """The data sent to, or received from, `peer` in a round: spans, each with a flag for combining on arrival."""

    peer: int
    receives: bool
    parts: tuple[tuple[Span, bool], ...]


class LaneStep(NamedTuple):
    """A round: writes, then lanes side by side, then writes. A write is a destination and its operands."""

    before: tuple[tuple[Span, ...], ...]
    lanes: tuple[Lane, ...]
    after: tuple[tuple[Span, ...], ...]


class Program(NamedTuple):
    """The steps of a rank, and the number of elements of staging for each block."""

    steps: tuple[LaneStep, ...]
    region: int


def program(plan: Plan, layouts: Layouts, channels: int, itemsize: int, *, empty: bool = False) -> Program:
    """Return the program of `plan` for `channels` blocks; messages without data are left out unless `empty`.

    The span of a part in staging starts at the offset of the part's share in a block's region.
    """
    steppers = [_Stepper(planned, layouts, channels, itemsize, empty) for planned in plan.rounds]
    steps = tuple(step for step in (stepper.step() for stepper in steppers) if any(step))
    return Program(steps, max((stepper.region for stepper in steppers), default=0))


def tables(steps: tuple[LaneStep, ...]) -> dict[str, StructTable]:
    parts: list[tuple[int, int, int, bool]] = []
    lanes: list[tuple[int, bool, int, int]] = []
    writes, rounds = list[tuple[int, int]](), []
    for step in steps:
        rounds.append((len(lanes), len(step.lanes), len(writes), len(step.before), len(step.after)))
        for write in (*step.before, *step.after):
            writes.append((len(parts), len(write) - 1))
            parts += [_row(span, False) for span in write]
        for lane in step.lanes:
            lanes.append((lane.peer, lane.receives, len(parts), len(lane.parts)))
            parts += [_row(span, combined) for span, combined in lane.parts]
    return {"rounds": numpy.array(rounds, ROUND), "lanes": numpy.array(lanes, LANE), "parts": numpy.array(parts, PART),
            "writes": numpy.array(writes, WRITE)}


def _row(span: Span, combined: bool) -> tuple[int, int, int, bool]:
    return span.start, span.stop - span.start, STEP_BUFFERS.index(span.buffer), combined


class _Stepper:
    """The translation of one planned round to a step; `region` is the number of elements of staging in use."""

    def __init__(self, steps: Sequence[PlanStep], layouts: Layouts, channels: int, itemsize: int, empty: bool) -> None:
        self._layouts, self._channels, self._per_word, self._empty = layouts, channels, WORD // itemsize, empty
        self._messages = [step for step in steps if isinstance(step, Message)]
        self._forms = [step for step in steps if isinstance(step, Reduction)]
        self._places: dict[int, int] = {}
        self.region = 0
        came = {message.span for message in self._messages if not message.sends}
        sent = {message.number for message in self._messages if message.sends}
        # A single received operand may be combined on arrival, without staging, if no other message of the round reads
        # or writes the destination.
        self._fused = {form.sources[1]: form.dst for form in self._forms if len(form.sources) == 2
                       and form.sources[0] == form.dst and form.sources[1] in came and sent.isdisjoint(form.after)
                       and not any(_overlap(form.dst, span) for span in came)}

    def step(self) -> LaneStep:
        met = {message.number for message in self._messages}
        first = [form for form in self._forms if form.dst.buffer in HALVES and form.after.isdisjoint(met)]
        before = [write for form in first for write in self._write(form)]
        after = [write for form in self._forms if form not in first and form.sources[-1] not in self._fused
                 for write in self._write(form)]
        return LaneStep(tuple(before), (*self._lanes(receives=False), *self._lanes(receives=True)), tuple(after))

    def _lanes(self, *, receives: bool) -> Iterator[Lane]:
        there = [message for message in self._messages if message.sends != receives]
        for peer in dict.fromkeys(message.peer for message in there):
            spans = [message.span for message in there if message.peer == peer]
            parts = tuple((part, span in self._fused) for span in spans
                          for part in self._cut(self._fused.get(span, span)))
            if parts:
                yield Lane(peer, receives, parts)

    def _write(self, form: Reduction) -> list[tuple[Span, ...]]:
        cut = [self._cut(span) for span in (form.dst, *form.sources)]
        if len({tuple(part.stop - part.start for part in parts) for parts in cut}) > 1:
            raise ScheduleError(f"{form} is not cut alike: a step names chunks of other lengths")
        return [write for write in zip(*cut, strict=True) if write[0].start < write[0].stop]

    def _cut(self, span: Span) -> list[Span]:
        """Return `span` chunk by chunk; chunks without elements are left out."""
        if span.start == span.stop:
            return [span] if self._empty else []
        first, *starts = self._layouts.starts(span.like)
        # Several blocks share a part chunk by chunk, as all ranks do; a single block takes the whole span.
        inner = starts[:-1] if self._channels > 1 else []
        points = [span.start, *(span.start + start - first for start in inner), span.stop]
        parts = [span._replace(start=start, stop=stop) for start, stop in itertools.pairwise(points) if start < stop]
        return [self._place(part) for part in parts] if span.buffer in HALVES else parts

    def _place(self, part: Span) -> Span:
        """Return the span in staging: room for the longest share of a block, in whole words."""
        count = part.stop - part.start
        if part.start not in self._places:
            self._places[part.start] = self.region
            # Shares begin at words, so that kernels can move whole words.
            words = -(-count // self._per_word)
            self.region += -(-words // self._channels) * self._per_word
        place = self._places[part.start]
        return Span("staging", place, place + count, part.like)


def _overlap(one: Span, other: Span) -> bool:
    return one.buffer == other.buffer and one.start < other.stop and other.start < one.stop
