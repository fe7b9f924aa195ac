"""Rounds as MSCCL's XML: a thread block for each peer and direction, and another for a GPU's local steps."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias
from xml.sax.saxutils import quoteattr

from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.schedule import Copy, Recv, RecvReduce, Reduce, Round, Schedule, Send, Slice, Step
from gpucoll.errors import ArgumentError
from gpucoll.msccl.documents import SPELLINGS
from gpucoll.msccl.order import in_order

ThreadBlock: TypeAlias = tuple[int, int]  # the rank sent to, the rank received from; -1 for none
XML_TYPES: dict[type[Any], str] = {Send: "s", Recv: "r", RecvReduce: "rrc", Copy: "cpy", Reduce: "re"}
NOP = Slice("input", -1, 0)


class Line(NamedTuple):
    """A step of a thread block: type, slices, and the step of another block awaited before."""

    type: str
    src: Slice
    dst: Slice
    after: tuple[ThreadBlock, int] | None


def xml(schedules: list[Schedule]) -> str:
    """Return the XML file of the schedules of all ranks, out of place, with one channel.

    Raises ArgumentError for collectives without a name in MSCCL.
    """
    one = schedules[0]
    names = {ours: theirs for theirs, ours in SPELLINGS.items()}
    if one.collective not in names:
        raise ArgumentError(f"MSCCL has no {one.collective}, only {', '.join(names)}", code="GC-XML")
    row = COLLECTIVES[one.collective]
    per_block = one.chunks // one.size if row.blocks else one.chunks
    extents = [one.chunks if side.blocks else per_block for side in (row.input, row.output)]
    lines = [f'<algo name={quoteattr(one.algorithm)} proto="Simple" nchannels="1" nchunksperloop="{one.chunks}" '
             f'ngpus="{one.size}" coll="{names[one.collective]}" inplace="0" outofplace="1" minBytes="0" maxBytes="0">']
    for schedule in schedules:
        gpu = _Gpu()
        for steps in schedule:
            gpu.round(steps)
        there = [side.exists(schedule.rank, 0) * extent
                 for side, extent in zip((row.input, row.output), extents, strict=True)]
        lines.append(f'  <gpu id="{schedule.rank}" i_chunks="{there[0]}" o_chunks="{there[1]}" '
                     f's_chunks="{gpu.scratch}">')
        lines += [f"    {line}" for line in gpu.lines()]
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>\n"])


class _Gpu:
    """The steps of a rank, distributed to thread blocks; blocks wait for each other's steps on the same chunks."""

    def __init__(self) -> None:
        self.scratch = 0
        self._blocks: dict[ThreadBlock, list[Line]] = collections.defaultdict(list)
        self._touched = Touched()
        self._places = list[tuple[ThreadBlock, int]]()  # of the steps, in order of addition
        # Vector clocks: for each step of a block, the last step of every block known to be done before.
        self._clocks = dict[tuple[ThreadBlock, int], dict[ThreadBlock, int]]()

    def round(self, steps: Round) -> None:
        """Add a round, ordering the steps: all reads of a chunk come before the writes."""
        for step in steps:
            for part in step:
                if isinstance(part, Slice) and part.buffer == "scratch":
                    self.scratch = max(self.scratch, part.first + part.count)
        turns = _sorted(steps)
        stuck = {*range(len(steps))} - {*turns}
        # No order exists if, for example, two chunks change places. Only the source of a copy or a reduction can close
        # a cycle, so `copies`, copies of these sources into scratch in a round before, breaks all cycles.
        if stuck:
            copies = list[Step]()
            whole = list(steps)
            for index in sorted(stuck):
                step = whole[index]
                if isinstance(step, Copy | Reduce):
                    copies.append(Copy(step.src, Slice("scratch", self.scratch, step.src.count)))
                    whole[index] = type(step)(copies[-1].dst, step.dst)  # type: ignore[union-attr] # it is a Copy
                    self.scratch += step.src.count
            self.round(tuple(copies))
            steps = tuple(whole)
            turns = _sorted(steps)
        for index in turns:
            self._add(steps[index])

    def _add(self, step: Step) -> None:
        block = (step.peer if isinstance(step, Send) else -1, step.peer if isinstance(step, Recv | RecvReduce) else -1)
        src = step.dst if isinstance(step, Recv | RecvReduce) else step.src
        dst = step.src if isinstance(step, Send) else step.dst
        reads = _chunks(src) if not isinstance(step, Recv) else []
        writes = _chunks(dst) if not isinstance(step, Send) else []
        # Wait only for steps not implied by the block's own order or by another wait: `clock` is the knowledge so far.
        before = {self._places[one] for one in self._touched.follows(len(self._places), reads, writes)}
        clock = dict(self._clocks.get((block, len(self._blocks[block]) - 1), {}))
        waits = list[tuple[ThreadBlock, int]]()
        for other, number in sorted(before, key=lambda one: -one[1]):  # late steps imply most
            if other != block and clock.get(other, -1) < number:
                waits.append((other, number))
                for known, last in {**self._clocks[other, number], other: number}.items():
                    clock[known] = max(clock.get(known, -1), last)
        lines = self._blocks[block]
        # An XML step waits for one step at most: further waits go to empty steps before.
        for wait in waits[1:]:
            self._clocks[block, len(lines)] = clock
            lines.append(Line("nop", NOP, NOP, wait))
        self._places.append((block, len(lines)))
        self._clocks[self._places[-1]] = clock
        lines.append(Line(XML_TYPES[type(step)], src, dst, waits[0] if waits else None))

    def lines(self) -> Iterator[str]:
        blocks = {block: number for number, block in enumerate(sorted(self._blocks))}
        waited = {line.after for lines in self._blocks.values() for line in lines}
        for block, number in blocks.items():
            yield f'<tb id="{number}" send="{block[0]}" recv="{block[1]}" chan="0">'
            for index, line in enumerate(self._blocks[block]):
                after = (-1, -1) if line.after is None else (blocks[line.after[0]], line.after[1])
                yield (f'  <step s="{index}" type="{line.type}" srcbuf="{line.src.buffer[0]}" '
                       f'srcoff="{line.src.first}" dstbuf="{line.dst.buffer[0]}" dstoff="{line.dst.first}" '
                       f'cnt="{line.src.count}" depid="{after[0]}" deps="{after[1]}" '
                       f'hasdep="{int((block, index) in waited)}"/>')
            yield "</tb>"


class Touched:
    """The last writer and the later readers of each chunk, as numbers of steps."""

    def __init__(self) -> None:
        self._writer = dict[Any, int]()
        self._readers: dict[Any, list[int]] = collections.defaultdict(list)

    def follows(self, one: int, reads: Iterable[Any], writes: Iterable[Any]) -> set[int]:
        """Note the chunks read and written by step `one`; return the earlier steps that have to come before."""
        before = {self._writer[chunk] for chunk in (*reads, *writes) if chunk in self._writer}
        before.update(reader for chunk in writes for reader in self._readers.pop(chunk, ()))
        for chunk in reads:
            self._readers[chunk].append(one)
        self._writer.update(dict.fromkeys(writes, one))
        return before - {one}


def _chunks(part: Slice) -> list[tuple[str, int]]:
    return [(part.buffer, part.first + index) for index in range(part.count)]


def _sorted(steps: Round) -> list[int]:
    """Return the indices of the steps in a possible sequential order; steps in or after a cycle are left out.

    Readers of a chunk come before writers. Steps with the same destination, and messages of the same peer and
    direction, keep their order in the round.
    """
    readers: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
    for index, step in enumerate(steps):
        for chunk in _chunks(step.src) if isinstance(step, Send | Copy | Reduce) else ():
            readers[chunk].append(index)
    before: list[set[int]] = [set() for _ in steps]
    last = dict[object, int]()
    for index, step in enumerate(steps):
        written = [] if isinstance(step, Send) else _chunks(step.dst)
        before[index].update(reader for chunk in written for reader in readers[chunk] if reader != index)
        ends = [] if isinstance(step, Copy | Reduce) else [(isinstance(step, Send), step.peer)]
        for key in (*written, *ends):
            before[index].update({last[key]} if key in last else ())
            last[key] = index
    return in_order(before)
