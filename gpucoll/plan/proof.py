"""Prove plans: each order of steps that a plan allows ends with the result promised by the schedule.

The proof of a schedule (`gpucoll.verify.symbolic`) speaks of chunks and rounds. A `Plan` has steps on elements, and
executors make messages, instructions and tables of these. A step waits only for the steps in its `after`, and for other
ranks. Two conditions together cover all orders of the steps:

1. In one order the plans of all ranks come to their ends, with the promised content of every element.
2. Two steps of a rank that touch a common element, at least one of them to write, are ordered by `after`.

The content of an element is a pair: the number of the input element, and a sum with a digit for each rank, the count of
its contributions. The proof covers neither the order of the operands of a result nor an executor's use of the plan.
"""

from __future__ import annotations

import graphlib
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from gpucoll.core.collectives import COLLECTIVES, Collective
from gpucoll.core.schedule import Schedule, Slice
from gpucoll.plan import HALVES, PEER, Layout, Layouts, Message, Plan, PlanStep, Ragged, Span
from gpucoll.verify.symbolic import DIGIT, ScheduleError

ElementContent: TypeAlias = tuple[int, int] | None  # element of the inputs, contributions; None before any write
ElementRange: TypeAlias = tuple[str, range]  # buffer and elements
Node: TypeAlias = tuple[int, int]  # rank and number of a step


def prove_plans(schedules: Sequence[Schedule], elements: int, *, root: int = 0, in_place: bool = False,
                nodes: Sequence[int] | None = None) -> int:
    """Prove the plans of schedules, one for each rank; return the number of steps, or raise ScheduleError.

    A block, or an array without blocks, has `elements`; v-variants have blocks of 0 to 3 elements. With `nodes`, the
    node of each rank, ranks read the memory of ranks of their node; else all data are messages. A rank without memory
    common to input and output is not `in_place`.
    """
    row, size, chunks = COLLECTIVES[schedules[0].collective], len(schedules), schedules[0].chunks
    per_block, ranks = chunks // size if row.blocks else chunks, list[_PlannedRank]()
    for rank, schedule in enumerate(schedules):
        counts = [(chunks if side.blocks else per_block) if side.exists(rank, root) else 0
                  for side in (row.input, row.output)]
        layouts = Layouts(*(_layout(row, buffer, rank, size, elements, per_block) for buffer in ("input", "output")))
        # The input may be this rank's block of the output, or both may be one array.
        is_common = (row.output.blocks and not row.input.blocks) \
            or (counts[0] == counts[1] and layouts.input == layouts.output)
        same_node = () if nodes is None else [other for other in range(size) if nodes[other] == nodes[rank]]
        plan = Plan(schedule, layouts, in_place=in_place and all(counts) and is_common, schedules=schedules.__getitem__,
                    same_node=same_node, alignment=1)  # without gaps, parts of unlike rounds overlap in most ways
        ranks.append(_PlannedRank(row, rank, plan, counts))
    for one in ranks:
        one.check_order()
    _run(ranks)
    for done in ranks:
        done.check_result(ranks, root, per_block)
    return sum(len(done.steps) for done in ranks)


def _layout(row: Collective, buffer: str, rank: int, size: int, elements: int, per_block: int) -> Layout | Ragged:
    """Return the cut of input or output on a rank; blocks of unlike length have 0 to 3 elements."""
    if row.ragged is None:
        return Layout(elements, per_block)
    source_weight, target_weight = {"source": (3, 0), "target": (0, 3), "pair": (3, 1)}[row.ragged]
    side = row.input if buffer == "input" else row.output

    def length(other: int) -> int:
        source, target = (rank, other) if buffer == "input" else (other, rank)
        return (source_weight * source + target_weight * target) % 4

    return Ragged.of(map(length, range(size) if side.blocks else (rank,)))


class _PlannedRank:
    """The steps of a rank, each with its round, and the symbolic memory; `counts` are chunks of input and output."""

    def __init__(self, row: Collective, rank: int, plan: Plan, counts: Sequence[int]) -> None:
        self.row, self.rank, self.plan, self._count = row, rank, plan, counts[1]
        self.steps: dict[int, tuple[int, PlanStep]] = {step.number: (number, step)
                                                       for number, steps in enumerate(plan.rounds) for step in steps}
        self.memory: dict[str, list[ElementContent]] = {name: [None] * count for name, count in plan.workspace.items()}
        given, taken = (Slice("input", 0, counts[0]), Slice("output", 0, counts[1]))
        self.memory |= {part.buffer: [None] * plan.layouts.span(part)[1] for part in (given, taken)}
        buffer, elements = self.at(given)
        self.given: list[ElementContent] = [(element, 1 << DIGIT * rank) for element in range(len(elements))]
        self.memory[buffer][elements.start:elements.stop] = self.given

    def at(self, part: Slice) -> ElementRange:
        real = self.plan.real(part)
        return real.buffer, range(*self.plan.layouts.span(real))

    def place(self, span: Span) -> ElementRange:
        """Return the place of a span in this rank's memory."""
        # A send to a same-node rank names the buffer as that rank does; the slice is the true place.
        return span.buffer if span.buffer in HALVES else span.like.buffer, range(span.start, span.stop)

    def error(self, step: PlanStep, why: str) -> ScheduleError:
        return ScheduleError(f"{self.row.name}: rank {self.rank}, round {self.steps[step.number][0] + 1} of the plan: "
                             f"{step}: {why}", ranks=(self.rank,))

    def check_order(self) -> None:
        """Raise ScheduleError if two steps touch an element, one of them writes, and neither follows the other."""
        before: dict[int, int] = {}  # for each step a bit for each step ordered before
        writer: dict[tuple[str, int], int] = {}
        readers: dict[tuple[str, int], list[int]] = defaultdict(list)  # since the last write
        for number, (_, step) in sorted(self.steps.items()):
            before[number] = 0
            for one in step.after:
                if one not in before or one == number:
                    raise self.error(step, f"follows step {one}, which is not before")
                before[number] |= before[one] | 1 << one
            reads, writes = self._touched(step)
            for buffer, elements in [*reads, *writes]:
                is_write = (buffer, elements) in writes
                for key in [(buffer, element) for element in elements]:
                    earlier = [writer[key]] if key in writer else []
                    for one in earlier + readers[key] if is_write else earlier:
                        if one != number and not before[number] >> one & 1:
                            raise self.error(step, f"touches {key} without an order after {self.steps[one][1]}")
                    if is_write:
                        writer[key] = number
                        readers.pop(key)
                    else:
                        readers[key].append(number)

    def _touched(self, step: PlanStep) -> tuple[list[ElementRange], list[ElementRange]]:
        """Return the places read and written by a step."""
        if isinstance(step, Message):
            return ([self.place(step.span)], []) if step.sends else ([], [self.place(step.span)])
        return [self.place(one) for one in step.sources if one.buffer != PEER], [self.place(step.dst)]

    def check_result(self, ranks: Sequence[_PlannedRank], root: int, per_block: int) -> None:
        """Raise ScheduleError if an element of the output differs from the promise, or the input was written."""
        if self.at(Slice("input", 0))[0] == "input" and self.memory["input"] != self.given:
            raise ScheduleError(f"{self.row.name}: rank {self.rank}: the plan writes to the input", ranks=(self.rank,))
        for chunk in range(self._count):
            piece = self.row.result(self.rank, len(ranks), root, per_block, chunk)
            if not piece.ranks:  # nothing is promised
                continue
            counts = sum(1 << DIGIT * rank for rank in piece.ranks)
            first = ranks[min(piece.ranks)].plan.layouts.input.start(piece.chunk)
            for number, element in enumerate(range(*self.plan.layouts.span(Slice("output", chunk)))):
                if self.memory["output"][element] != (first + number, counts):
                    raise ScheduleError(f"{self.row.name}: rank {self.rank}: the plan ends with wrong content in "
                                        f"element {element} of the output", ranks=(self.rank,))


def _run(ranks: Sequence[_PlannedRank]) -> None:
    """Carry out all steps in an order that respects `after` and the messages; raise ScheduleError if there is none."""
    partners, follows = _partners(ranks), dict[Node, set[Node]]()
    for one in ranks:
        for number, (_, step) in one.steps.items():
            follows[one.rank, number] = {(one.rank, before) for before in step.after}
    # Data move when both ends have begun: the reading end follows all that the sending end follows. A send then ends.
    for reader, sends in partners.items():
        for send in sends:
            follows[reader] |= follows[send]
    for reader, sends in partners.items():
        for send in sends:
            follows[send].add(reader)
    try:
        order = [*graphlib.TopologicalSorter(follows).static_order()]
    except graphlib.CycleError as error:
        rank, number = error.args[1][0]
        raise ranks[rank].error(ranks[rank].steps[number][1], "waits for ever, in a circle of steps") from None
    for rank, number in order:
        step = ranks[rank].steps[number][1]
        if not isinstance(step, Message):
            _move(ranks, rank, step, [(one.start, ranks[one.start].at(one.like)) if one.buffer == PEER
                                      else (rank, ranks[rank].place(one)) for one in step.sources], step.dst)
        elif not step.sends:
            (sender, sent), = partners[rank, number]
            message = ranks[sender].steps[sent][1]
            assert isinstance(message, Message)
            _move(ranks, rank, step, [(sender, ranks[sender].place(message.span))], step.span)


def _partners(ranks: Sequence[_PlannedRank]) -> dict[Node, list[Node]]:
    """Return the sends read by each receive, and by each reduction of same-node ranks' memory."""
    # The k-th send between two ranks meets the k-th receive. Inside a node the ends agree on both rounds.
    sends, reads = (defaultdict[tuple[int, ...], list[Node]](list) for _ in range(2))
    for one in ranks:
        for number, (turn, step) in sorted(one.steps.items()):
            node = one.rank, number
            if not isinstance(step, Message):
                for span in step.sources:
                    if span.buffer == PEER:
                        reads[span.start, one.rank, span.stop, turn].append(node)
            elif not step.sends:
                reads[step.peer, one.rank].append(node)
            elif step.there is None:
                sends[one.rank, step.peer].append(node)
            else:
                sends[one.rank, step.peer, turn, step.there].append(node)
    partners: dict[Node, list[Node]] = defaultdict(list)
    for pair in sends.keys() | reads.keys():
        if len(sends[pair]) != len(reads[pair]):
            rank, number = [*sends[pair], *reads[pair]][0]
            raise ranks[rank].error(ranks[rank].steps[number][1], f"{len(sends[pair])} sends meet {len(reads[pair])} "
                                                                  "receives")
        for send, read in zip(sends[pair], reads[pair], strict=True):
            partners[read] += [send] if len(pair) == 2 else sends[pair]
    for (rank, number), found in partners.items():
        step, places = ranks[rank].steps[number][1], []
        for sender, sent in found:
            message = ranks[sender].steps[sent][1]
            assert isinstance(message, Message)
            places.append((sender, ranks[sender].place(message.span)))
        for span in () if isinstance(step, Message) else step.sources:
            if span.buffer == PEER and (span.start, ranks[span.start].at(span.like)) not in places:
                raise ranks[rank].error(step, f"reads {span.like} of rank {span.start}, which is not sent")
    return partners


def _move(ranks: Sequence[_PlannedRank], rank: int, step: PlanStep, sources: Sequence[tuple[int, ElementRange]],
          target: Span) -> None:
    """Form the contents of `target` on `rank` from places in the memory of ranks."""
    buffer, elements = ranks[rank].place(target)
    places = [*sources, (rank, (buffer, elements))]
    if any(there.stop > len(ranks[owner].memory[name]) for owner, (name, there) in places):
        raise ranks[rank].error(step, "reads or writes beyond the end of a buffer")
    if len({len(there) for _, (_, there) in places}) != 1:
        raise ranks[rank].error(step, "source and destination differ in length")
    # The first operand may be the destination itself. An executor overwrites any other before reading it.
    later = sources[1:] if sources[0] == places[-1] else sources
    if any(owner == rank and name == buffer and set(there) & set(elements) for owner, (name, there) in later):
        raise ranks[rank].error(step, "overwrites an operand")
    contents = [[ranks[owner].memory[name][element] for element in there] for owner, (name, there) in sources]
    for place, *parts in zip(elements, *contents, strict=True):
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len({element for element, _ in known}) != 1:
            raise ranks[rank].error(step, f"combines {parts} in element {place} of {buffer}")
        ranks[rank].memory[buffer][place] = known[0][0], sum(counts for _, counts in known)
