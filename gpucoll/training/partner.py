"""Copies of ZeRO's shards on other ranks, so that training continues after the loss of ranks without a checkpoint.

Each rank holds its own shards and a copy of the shards of another rank. A step has two phases. First each rank sends
its shards of the mean gradients to the rank with its copy. Then an all-reduce of one byte ends only if all ranks have
finished the first phase, and each rank takes the step for its own shards and for the copy. At a failure, either no rank
has taken the step, or the gradients of all shards exist on two ranks, and the survivors complete the step.

Source: the scheme PARTNER of Moody et al., "Design, Modeling, and Evaluation of a Scalable Multi-level Checkpointing
System", SC 2010. Here gradients keep the copy up to date: these are smaller than the state.
"""

from __future__ import annotations

import copy
import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll import Communicator, internal
from gpucoll.errors import ArgumentError, BackendError, UsageError
from gpucoll.internal import Array, Metadata, check_alike, module_of, on_gpu
from gpucoll.training.compression import Compression, Memory, Policy, remembered, restore
from gpucoll.training.optimizers import Optimizer
from gpucoll.training.parameters import Like, Parameters
from gpucoll.training.shards import owned

ALIGNMENT = 16  # bytes; arrays inside a message begin at multiples, as GPUs read aligned words only


class Portion(NamedTuple):
    """A rank's shards of the parameters, and of the optimizer's state by parameter."""

    parameters: Parameters
    state: dict[str, Parameters]

    @classmethod
    def blank(cls, like: Mapping[str, Like], rank: int, size: int, optimizer: Optimizer) -> Portion:
        """Return zeros in the shape of the shards of rank `rank` of `size`."""
        zeros = {name: one.new(len(range(one.size)[owned(one.size, rank, size)])) for name, one in like.items()}
        of_rank = _with_state(optimizer, {}, 0)
        return cls(zeros, {name: of_rank.state_of(name, shard) for name, shard in zeros.items()})

    @property
    def rows(self) -> list[Array]:
        return [*self.parameters.values(), *(row for rows in self.state.values() for row in rows.values())]


class TrainingKind(NamedTuple):
    """Common properties of a training's ranks: a fingerprint of the parameters, and the kind of the optimizer."""

    parameters: int
    optimizer: list[str]

    @classmethod
    def of(cls, like: Mapping[str, Like], optimizer: Optimizer) -> TrainingKind:
        """Return the description of a training of these parameters."""
        rows = [[name, one.shape, one.dtype.name] for name, one in like.items()]
        return cls(zlib.crc32(json.dumps(rows).encode()), optimizer.kind)


class Division:
    """The state of a training after `steps` steps, divided over `size` ranks: the portions of two ranks.

    The rank's own portion comes first. A later division of the same training has a higher `number`. A division is
    `complete` once it exists on all ranks. `neighbours` are the rank with its copy here and the rank with this rank's
    copy. `residuals` are the compression's after these steps.
    """

    def __init__(self, number: int, comm: Communicator, kind: TrainingKind, portions: dict[int, Portion],
                 optimizer: Optimizer, residuals: Memory) -> None:
        self.number: int = number
        self.size: int = comm.size
        self.kind: TrainingKind = kind
        self.portions: dict[int, Portion] = portions
        self.neighbours: tuple[int, int] = _neighbours(comm)
        self.steps: int = optimizer.steps
        self.residuals: Memory = residuals
        self.complete: bool = False
        # The step under way: the mean gradients, by rank, and the optimizer with its numbers at the time.
        self.gradients: dict[int, Parameters] = {}
        self.optimizer: Optimizer = optimizer

    @property
    def metadata(self) -> list[Any]:
        """The description for other ranks: see `Source.of`."""
        return [self.number, self.size, self.steps, self.complete, *self.kind, [*self.portions]]

    def exchange(self, gradients: Parameters, comm: Communicator, optimizer: Optimizer) -> None:
        """Send this rank's mean gradients to the rank with the copy; keep those of both portions. A collective call."""
        other, _ = self.neighbours
        wanted = self.portions[other].parameters
        mine = [gradients[name] for name in wanted]
        came = _exchanged(mine, [*wanted.values()], comm, self.neighbours)
        # From here on the step can be completed, so the gradients must have left and reached the GPU.
        _wait(mine)
        self.gradients = {other: dict(zip(wanted, came, strict=True)), comm.rank: dict(gradients)}
        self.optimizer = copy.copy(optimizer)

    def step(self) -> None:
        """Take the step under way for both portions."""
        for rank, portion in self.portions.items():
            _with_state(self.optimizer, portion.state, self.steps).step(portion.parameters, self.gradients[rank])
        self.steps += 1
        self.gradients = {}
        self.residuals = [(one, one.remember()) for one, _ in self.residuals]

    def go_to(self, steps: int) -> None:
        """Complete the step under way if it leads to `steps`; otherwise undo the changes of its reduction."""
        if self.steps < steps:
            self.step()
            return
        self.gradients = {}
        restore(self.residuals)


class Source(NamedTuple):
    """A division that survives. `roots` has, for each of its ranks, a present rank with this rank's portion."""

    number: int
    size: int
    steps: int
    complete: bool
    kind: TrainingKind
    roots: dict[int, int]

    @classmethod
    def of(cls, everyone: Sequence[Metadata]) -> list[Source]:
        """Return all divisions on the ranks, the newest first."""
        found: dict[int, Source] = {}
        for present, metadata in enumerate(everyone):
            for number, size, steps, complete, *kind, (own, *others) in metadata["divisions"]:
                before = found.get(number, cls(number, size, steps, complete, TrainingKind(*kind), {}))
                # A program may have changed arrays that are a rank's own portion; no program has the copies.
                roots = {own: present} | before.roots | dict.fromkeys(others, present)
                # If any rank has taken the step under way, all ranks have its gradients.
                found[number] = before._replace(steps=max(steps, before.steps), complete=complete or before.complete,
                                                roots=roots)
        return [found[number] for number in sorted(found, reverse=True)]


class PartnerCopy:
    """A copy of another rank's shards in a rank's memory, for `ZeRO`.

    A program makes one object for a training, and passes the object to each `ZeRO` of this training. After the loss of
    ranks `ZeRO` continues from the copies, on any number of ranks, as long as no rank is lost together with the rank
    that has its copy. The copies are on other nodes if no node has more than half of the ranks. Only `ZeRO.step` may
    change parameters and optimizer state. Numbers of the optimizer changed by the program (the learning rate) must
    depend on `optimizer.steps` alone.

    See Also
    --------
    ZeRO : Takes the object.

    References
    ----------
    Moody et al., SC 2010, the scheme PARTNER.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import PartnerCopy, SGD, ZeRO
    >>> def program(comm):
    ...     partner = PartnerCopy()
    ...     ZeRO({"w": numpy.zeros(4)}, comm, SGD(lr=1.0), partner=partner)
    ...     return partner.nbytes  # the other rank's half of four elements
    >>> gc.run_local(program, 2)
    [16, 16]
    """

    def __init__(self) -> None:
        # The division in use is the last. Others are kept until all ranks have the new one.
        self._divisions: list[Division] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the copy: parameters and optimizer state of the other rank's shards."""
        portions = [*self._divisions[-1].portions.values()][1:] if self._divisions else []
        return sum(row.nbytes for portion in portions for row in portion.rows)

    def _resume(self, arrays: Parameters, comm: Communicator, optimizer: Optimizer,
                compression: Compression | Policy, *, copies: bool) -> Division:
        """Divide the state over the ranks of `comm`; the parameters are views of `arrays`, or `copies`.

        The state comes from the newest division with all portions on the ranks, and is written into `arrays` and
        `optimizer`. At the start of a training the parameters come from rank 0. A collective call.
        """
        like = {name: Like.of(array) for name, array in arrays.items()}
        kind = TrainingKind.of(like, optimizer)
        everyone = internal.all_gather_metadata(
            comm, {"divisions": [one.metadata for one in self._divisions], "optimizer": kind.optimizer,
                   "steps": optimizer.steps}, "ZeRO")
        check_alike("ZeRO", everyone, "optimizer", "GC-OPTIMIZER")
        source = _newest(everyone, kind)
        portions = {rank: Portion.blank(like, rank, comm.size, optimizer) for rank in (comm.rank, _neighbours(comm)[0])}
        with internal.current_stream(comm, arrays.values()):
            if source is None:
                for array in arrays.values():
                    comm.broadcast(array, root=0)
            else:
                self._collect(source, arrays, portions, comm, optimizer)
            for rank, portion in portions.items():
                for name, array in arrays.items():
                    shard = array.reshape(-1)[owned(array.size, rank, comm.size)]
                    portion.parameters[name] = shard.copy() if copies or rank != comm.rank else shard
            _wait(arrays.values())
        number = 1 + max((one[0] for metadata in everyone for one in metadata["divisions"]), default=0)
        kept = _with_state(optimizer, portions[comm.rank].state, 0 if source is None else source.steps)
        return self._complete(Division(number, comm, kind, portions, kept, remembered(compression)), comm, optimizer)

    def _collect(self, source: Source, arrays: Parameters, portions: Mapping[int, Portion], comm: Communicator,
                 optimizer: Optimizer) -> None:
        """Receive all portions of `source`: parameters into `arrays`, optimizer state into the new `portions`."""
        held = next((one for one in self._divisions if one.number == source.number), None)
        if held is not None:
            held.go_to(source.steps)
        like = {name: Like.of(array) for name, array in arrays.items()}
        for rank, root in sorted(source.roots.items()):
            portion = held.portions[rank] if held is not None and root == comm.rank else \
                Portion.blank(like, rank, source.size, optimizer)
            message = _packed(portion.rows)
            comm.broadcast(message, root)
            received = iter(_unpacked(message, portion.rows))
            for array in arrays.values():
                array.reshape(-1)[owned(array.size, rank, source.size)] = next(received)
            for name, one in like.items():
                here = owned(one.size, rank, source.size)
                for kind in portion.state[name]:
                    row = next(received)
                    for other, new in portions.items():
                        _copy_common(row, here, new.state[name][kind], owned(one.size, other, comm.size))

    def _begin(self, own: Portion, like: Mapping[str, Like], comm: Communicator, optimizer: Optimizer, steps: int,
               residuals: Memory) -> Division:
        """Keep a loaded training, in place of all state before; `own` is this rank's portion. A collective call."""
        neighbours = other, _ = _neighbours(comm)
        portions = {comm.rank: own}
        with internal.current_stream(comm, own.rows):
            if other != comm.rank:
                portions[other] = Portion.blank(like, other, comm.size, optimizer)
                rows = portions[other].rows
                for row, came in zip(rows, _exchanged(own.rows, rows, comm, neighbours), strict=True):
                    row[...] = came
            _wait(own.rows)
        everyone = internal.all_gather_metadata(comm, {"numbers": [one.number for one in self._divisions]}, "load")
        number = 1 + max((one for metadata in everyone for one in metadata["numbers"]), default=0)
        kind = TrainingKind.of(like, optimizer)
        loaded = _with_state(optimizer, own.state, steps)
        return self._complete(Division(number, comm, kind, portions, loaded, residuals), comm, optimizer)

    def _complete(self, division: Division, comm: Communicator, optimizer: Optimizer) -> Division:
        """Take a new division into use on all ranks. A collective call."""
        self._divisions.append(division)
        # The barrier ends only if all ranks have the new division: the older divisions are useless then.
        comm.barrier()
        division.complete = True
        del self._divisions[:-1]
        optimizer.state, optimizer.steps = division.portions[comm.rank].state, division.steps
        return division

    def _check(self, division: Division) -> None:
        """Raise UsageError if `division` is no longer the latest."""
        if self._divisions[-1] is not division:
            raise UsageError("step: a later ZeRO uses the state of this PartnerCopy; make a new "
                             "PartnerCopy for each training", code="GC-PARTNER")

    def _step(self, optimizer: Optimizer) -> None:
        """Take the step under way, for this rank's shards and for the copy, after all ranks have made the exchange."""
        self._divisions[-1].step()
        optimizer.steps = self._divisions[-1].steps


def _with_state(optimizer: Optimizer, state: dict[str, Parameters], steps: int) -> Optimizer:
    """Return an optimizer with the present numbers of `optimizer` (the rate may change), for another state."""
    found = copy.copy(optimizer)
    found.state, found.steps = state, steps
    return found


def _newest(everyone: Sequence[Metadata], kind: TrainingKind) -> Source | None:
    """Return the newest division with all portions on the ranks; None at the start of a training.

    Raises BackendError if portions are lost, and ArgumentError for another training; each on every rank.
    """
    found = Source.of(everyone)
    for source in found:
        if source.kind.parameters != kind.parameters:
            raise ArgumentError("ZeRO: the PartnerCopy has a training with other names, shapes or dtypes of parameters",
                                code="GC-PARTNER")
        if source.kind.optimizer != kind.optimizer:
            kinds = [" ".join(one.optimizer) for one in (source.kind, kind)]
            raise ArgumentError(f"ZeRO: the PartnerCopy has a training with {kinds[0]}, this is {kinds[1]}",
                                code="GC-OPTIMIZER")
        if len(source.roots) == source.size:
            return source
    # Without a division on all ranks no step can have been taken: the training starts again.
    last = next((source for source in found if source.complete), None)
    if last is not None:
        lost = ", ".join(str(rank) for rank in range(last.size) if rank not in last.roots)
        raise BackendError(f"ZeRO: the shards of ranks {lost} of {last.size} are lost, and so are their copies; load a "
                           "checkpoint by ZeRO.load", code="GC-PARTNER")
    steps = [metadata["steps"] for metadata in everyone]
    if any(steps):
        raise BackendError(f"ZeRO: the optimizers have made {steps} steps, but no rank has a copy of the state; load "
                           "a checkpoint by ZeRO.load, or begin with a new optimizer", code="GC-PARTNER")
    return None


def _neighbours(comm: Communicator) -> tuple[int, int]:
    """Return the rank with its copy on this rank, and the rank with this rank's copy.

    In the order of nodes the copy is as many ranks further as the largest node has: beyond the rank's own node.
    """
    nodes = internal.link_of(comm).place.nodes
    ring = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    shift = max(Counter(nodes).values()) % len(nodes) or 1
    at = ring.index(comm.rank)
    return ring[(at - shift) % len(ring)], ring[(at + shift) % len(ring)]


def _exchanged(mine: Sequence[Array], theirs: Sequence[Array], comm: Communicator,
               neighbours: tuple[int, int]) -> list[Array]:
    """Send `mine` to the rank with this rank's copy; return the arrays received, in the shapes of `theirs`."""
    source, target = neighbours
    if source == comm.rank:
        return [row.copy() for row in mine]
    received = _packed(theirs)
    comm.sendrecv(_packed(mine), received, target, source)
    return _unpacked(received, theirs)


def _starts(rows: Sequence[Array]) -> list[int]:
    """Return the first byte of each row in a message of several rows, and the length of the message at the end."""
    starts = [ALIGNMENT]  # the message of no elements is not empty: an empty message would not show a missing sender
    for row in rows:
        starts.append(starts[-1] + -(-row.nbytes // ALIGNMENT) * ALIGNMENT)
    return starts


def _packed(rows: Sequence[Array]) -> Array:
    """Return the bytes of arrays of any dtype in one message."""
    message = module_of(rows[0]).zeros(_starts(rows)[-1], "u1")
    for row, place in zip(rows, _unpacked(message, rows), strict=True):
        place[...] = row
    return message


def _unpacked(message: Array, rows: Sequence[Array]) -> list[Array]:
    """Return the arrays in a message as views, with the dtypes and lengths of `rows`."""
    return [message[start:start + row.nbytes].view(row.dtype) for start, row in zip(_starts(rows), rows, strict=False)]


def _copy_common(row: Array, here: slice, out: Array, there: slice) -> None:
    """Copy the common elements of `row`, `here` in the whole array, and `out`, `there` in the whole array."""
    start, stop = max(here.start, there.start), min(here.stop, there.stop)
    if start < stop:
        out[start - there.start:stop - there.start] = row[start - here.start:stop - here.start]


def _wait(arrays: Iterable[Any]) -> None:
    """Wait for the work on arrays in the GPU's current stream; on the host return at once."""
    if any(map(on_gpu, arrays)):
        sys.modules["cupy"].cuda.get_current_stream().synchronize()
