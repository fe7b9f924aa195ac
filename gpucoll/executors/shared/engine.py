"""Orders bound for the engine (kernels/engine.h), which walks them without a step in Python.

Buffers are in the ranks' control segments, at the same places on all of them, so that a plan serves calls like the one
it was made for whatever their arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from gpucoll.arrays import Array, address
from gpucoll.arrays.segments import at
from gpucoll.executors import Layouts, Task
from gpucoll.executors.shared import slots
from gpucoll.executors.shared.neighbours import BUFFERS, Neighbours, Spot
from gpucoll.executors.shared.order import Order
from gpucoll.executors.shared.program import TELL, WAIT, Binder, Bindings

AWAIT, SIGNAL, FORM = range(3)  # as kernels/engine.h has them

Instruction = tuple[int, int, int, int, tuple[int, ...]]


def make_walk(near: Neighbours, task: Task, order: Order, layouts: Layouts, signature: int, kinds: tuple[int, int],
              boards: Sequence[tuple[int, ...]], spots: Sequence[Sequence[Spot]], places: Sequence[tuple[int, int]],
              readers: dict[int, int]) -> Any:
    """Return the engine's plan for calls like `task`.

    For each half `boards` has the words of this rank's board, `spots` where the buffers are, and `places` where the
    input goes and the output comes from, or 0. `kinds` are the places of dtype and op in the engine's tables.
    """
    kept: list[Array] = []
    programs = tuple((*ends, board, (*_instructions(near, task, order, layouts, some, kept),))
                     for board, some, ends in zip(boards, spots, places, strict=True))
    kind, op = kinds
    parts = 0
    if slots.OPS[op] == "avg" and task.output is not None:  # there is no mean of a prefix
        parts = near.size
    given, taken = (0 if row is None else row.nbytes for row in (task.input, task.output))
    return slots.library().Walk(near.size, signature, given, taken, kind, 0 if slots.OPS[op] == "avg" else op, parts,
                          task.collective == "broadcast", task.root, order.sources, (*readers.items(),), programs, kept)


def _instructions(near: Neighbours, task: Task, order: Order, layouts: Layouts, spots: Sequence[Spot],
                  kept: list[Array]) -> Iterator[Instruction]:
    def workspace(name: str, nbytes: int) -> Array:
        kept.append(numpy.empty(nbytes, numpy.uint8))
        return kept[-1]

    def theirs(peer: int, buffer: str) -> Array:
        return near.controls[peer].row[spots[BUFFERS.index(buffer)].offset:]

    some = task.output if task.output is not None else task.input
    own = {name: at(spot.address, spot.nbytes) for name, spot in zip(BUFFERS, spots, strict=True)}
    binder = Binder(Bindings(own, theirs, lambda rank: layouts, near.rank,
                             numpy.dtype(numpy.uint8) if some is None else some.dtype, None, True, lambda rank: rank,
                             workspace))
    for do, what, number in binder.steps(order.instructions):
        if do == WAIT:
            yield AWAIT, what, number, 0, ()
        elif do == TELL:
            yield SIGNAL, 0, number, 0, ()
        else:
            operands, copies = number
            yield FORM, address(what), 0, what.nbytes, tuple(map(address, operands))
            for copy in copies:
                yield FORM, address(copy), 0, what.nbytes, (address(what),)
