"""Changes of layout: the collectives from one layout of a global array to another, and the bytes moved.

A rank receives each missing element exactly once, the minimum possible. Forming a sum along a mesh axis of p ranks
costs in addition (p - 1) / p of the elements for a part of the sum, and twice as much for the whole sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpucoll.internal import Array, CollectiveName, module_of
from gpucoll.training.mesh import Box, Mesh, Spec


class Move(NamedTuple):
    """One step of a change of layout: a collective along a mesh axis, or between all ranks if `axis` is empty."""

    kind: str  # local_slice, all_gather, all_to_all, reduce_scatter, all_reduce, or exchange (between any two ranks)
    axis: str
    source: int  # the axis of the array divided before the step; -1 for none
    target: int  # the axis of the array divided after the step; -1 for none
    spec: Spec  # the layout after the step
    nbytes: int  # the most bytes received by a rank
    seconds: float  # predicted by `explain`

    def __str__(self) -> str:
        where = f"along {self.axis}" if self.axis else "between all ranks"
        return f"{self.kind:14} {where:20} {self.nbytes:14,} bytes {self.seconds * 1e6:10.1f} us"


class Redistribution(NamedTuple):
    """The steps of a change of layout; printed as a table."""

    steps: tuple[Move, ...]

    @property
    def nbytes(self) -> int:
        """The most bytes received by a rank: the sum over the steps."""
        return sum(step.nbytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """The time predicted by the model of `explain`: the sum over the steps."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.steps), f"{'total':35} {self.nbytes:14,} bytes {self.seconds * 1e6:10.1f} us"])


# ---------------------------------------------------------------- the choice of steps


def planned(mesh: Mesh, shape: Sequence[int], itemsize: int, here: Spec, partial: Sequence[str], target: Spec,
            device: str | None) -> Redistribution:
    """Return the steps from layout `here`, partial along the mesh axes `partial`, to layout `target`."""
    change = _Change(mesh, shape, itemsize, device)
    steps: list[Move] = []
    for name in partial:
        steps.append(change.summing(here, target, name))
        here = steps[-1].spec
    if here != target:
        steps.append(change.moving(here, target))
    return Redistribution(tuple(steps))


class _Change(NamedTuple):
    """The array and the ranks of a change of layout."""

    mesh: Mesh
    shape: Sequence[int]
    itemsize: int
    device: str | None

    def summing(self, here: Spec, target: Spec, name: str) -> Move:
        """Return the step forming the sum along mesh axis `name`.

        A reduce-scatter if the target divides a whole axis of the array evenly by `name` alone; else an all-reduce.
        """
        p, nbytes = self.mesh.size(name), self.most(here)
        for axis, (before, after) in enumerate(zip(here, target, strict=True)):
            if not before and after == (name,) and self.shape[axis] % p == 0:
                spec = (*here[:axis], after, *here[axis + 1:])
                return Move("reduce_scatter", name, -1, axis, spec, nbytes * (p - 1) // p,
                            self.seconds(name, "reduce_scatter", nbytes))
        return Move("all_reduce", name, -1, -1, here, 2 * nbytes * (p - 1) // p,
                    self.seconds(name, "all_reduce", nbytes))

    def moving(self, here: Spec, target: Spec) -> Move:
        """Return the single step from layout `here` to layout `target`.

        A change along a single mesh axis with blocks of equal lengths is an all-gather or an all-to-all; any other
        change that moves data is an exchange.
        """
        changed = [axis for axis in range(len(self.shape)) if here[axis] != target[axis]]
        nbytes = self.received(here, target)
        if nbytes == 0:
            return Move("local_slice", "", -1, -1, target, 0, 0.0)
        names = {name for axis in changed for name in (*here[axis], *target[axis])}
        if len(names) == 1 and all(len(spec[axis]) <= 1 for spec in (here, target) for axis in changed):
            (name,) = names
            p = self.mesh.size(name)
            source = next(axis for axis in changed if here[axis])
            goal = next((axis for axis in changed if target[axis]), -1)
            if all(self.shape[axis] % p == 0 for axis in changed):
                kind: CollectiveName = "all_gather" if goal < 0 else "all_to_all"
                return Move(kind, name, source, goal, target, nbytes, self.seconds(name, kind, nbytes * p // (p - 1)))
        return Move("exchange", "", -1, -1, target, nbytes, self.seconds("", "all_to_all", nbytes))

    def seconds(self, name: str, collective: CollectiveName, nbytes: int) -> float:
        """Return the seconds predicted by `explain` for the ranks along mesh axis `name`, or for all ranks."""
        comm = self.mesh.along(name) if name else self.mesh.comm
        found = comm.explain(collective, nbytes, device=self.device)
        return float(found["candidates"][0]["seconds"] or 0.0)

    def most(self, spec: Spec) -> int:
        """Return the bytes of the largest part of the array on any rank."""
        boxes = (self.mesh.box(spec, self.shape, rank) for rank in range(self.mesh.comm.size))
        return max(map(_elements, boxes)) * self.itemsize

    def received(self, here: Spec, target: Spec) -> int:
        """Return the most bytes missing on any rank."""
        most = 0
        for rank in range(self.mesh.comm.size):
            needed, had = (self.mesh.box(spec, self.shape, rank) for spec in (target, here))
            most = max(most, _elements(needed) - _elements(_common(needed, had)))
        return most * self.itemsize


def _elements(box: Box) -> int:
    return math.prod(max(0, side.stop - side.start) for side in box)


def _common(a: Box, b: Box) -> Box:
    return tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))


# ---------------------------------------------------------------- the steps


def _within(box: Box, outer: Box) -> Box:
    """Return `box` relative to the box `outer`, which contains `box`."""
    return tuple(slice(side.start - all_.start, side.stop - all_.start) for side, all_ in zip(box, outer, strict=True))


def apply(local: Array, here: Spec, step: Move, shape: Sequence[int], mesh: Mesh) -> Array:
    """Return this rank's part of the array after a step, from the part `local` in layout `here`."""
    if step.kind == "exchange":
        return _exchange(local, here, step, shape, mesh)
    if step.kind == "local_slice":
        mine, wanted = (mesh.box(spec, shape, mesh.comm.rank) for spec in (here, step.spec))
        return local[_within(wanted, mine)].copy()
    comm: Any = mesh.along(step.axis)
    if step.kind == "all_gather":
        return _joined(comm.all_gather(local), step.source)
    if step.kind == "all_reduce":
        return comm.all_reduce(local)
    blocks = _cut(local, step.target, comm.size)
    return comm.reduce_scatter(blocks) if step.kind == "reduce_scatter" else \
        _joined(comm.all_to_all(blocks), step.source)


def _cut(local: Array, axis: int, parts: int) -> Array:
    """Return the blocks of `local` along an axis as one contiguous array of shape (parts, *block)."""
    xp = module_of(local)
    return xp.ascontiguousarray(xp.stack(xp.split(local, parts, axis=axis)))


def _joined(blocks: Array, axis: int) -> Array:
    return module_of(blocks).concatenate(list(blocks), axis=axis)


def _exchange(local: Array, here: Spec, step: Move, shape: Sequence[int], mesh: Mesh) -> Array:
    """Send every rank its missing elements by all_to_all_v, each from the nearest rank holding a copy.

    The nearest holder differs from the receiver only along mesh axes dividing the array.
    """
    comm, rank = mesh.comm, mesh.comm.rank
    pieces = _pieces(here, step.spec, shape, mesh)
    mine, wanted = mesh.box(here, shape, rank), mesh.box(step.spec, shape, rank)
    empty_row = local[:0].reshape(-1) if local.ndim else local.reshape(-1)[:0]
    sends = [local[_within(pieces[rank, other], mine)].reshape(-1) if (rank, other) in pieces else empty_row
             for other in range(comm.size)]
    found: Array = module_of(local).empty(tuple(side.stop - side.start for side in wanted), local.dtype)
    for source, row in enumerate(comm.all_to_all_v(sends)):
        if (source, rank) in pieces:
            place = _within(pieces[source, rank], wanted)
            found[place] = row.reshape(found[place].shape)
    return found


def _pieces(here: Spec, target: Spec, shape: Sequence[int], mesh: Mesh) -> dict[tuple[int, int], Box]:
    """Return the part of the global array sent by each (sender, receiver), including sender = receiver."""
    dividing = {name for entry in here for name in entry}
    found = {}
    for receiver in range(mesh.comm.size):
        wanted, place = mesh.box(target, shape, receiver), mesh.of(receiver)
        for sender in range(mesh.comm.size):
            there = mesh.of(sender)
            if any(there[name] != place[name] for name in mesh.names if name not in dividing):
                continue  # a nearer rank has the same copy
            piece = _common(wanted, mesh.box(here, shape, sender))
            if _elements(piece):
                found[sender, receiver] = piece
    return found
