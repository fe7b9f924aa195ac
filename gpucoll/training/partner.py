"""Copies of ZeRO's shards on partner ranks, so that a training goes on after ranks were lost, without a checkpoint.

Each rank holds the shards of another rank, its partner's, besides its own. A step has two phases. First each rank sends
its shards of the mean gradients to the rank with the copy. Then an all-reduce of one byte ends only if all ranks have
finished the first phase, and each rank takes the step for its own shards and for the copy. So either no rank has taken
a step when a failure comes, or the gradients of all shards exist on two ranks, and the survivors complete the step.

Source: the scheme PARTNER of Moody et al., "Design, Modeling, and Evaluation of a Scalable Multi-level Checkpointing
System", SC 2010. The copy is kept up to date by the gradients, which are smaller than the state.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.arrays import Array, module_of, on_gpu
from gpucoll.communicator import Communicator, internal
from gpucoll.communicator.metadata import Metadata, check_alike
from gpucoll.errors import BackendError
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
        """All arrays, in the same order on all ranks."""
        return [*self.parameters.values(), *(row for rows in self.state.values() for row in rows.values())]


class Division:
    """The state of a training after `steps` steps, divided over `size` ranks: the portions of two ranks.

    A later division of the same training has a higher `number`. `residuals` are the compression's after these steps.
    `gradients` are the mean gradients of the step under way, by rank.
    """

    def __init__(self, number: int, size: int, steps: int, portions: dict[int, Portion], residuals: Memory) -> None:
        self.number, self.size, self.steps, self.portions, self.residuals = number, size, steps, portions, residuals
        self.gradients: dict[int, Parameters] = {}

    def step(self, optimizer: Optimizer) -> None:
        """Take the step under way for both portions."""
        for rank, portion in self.portions.items():
            _with_state(optimizer, portion.state, self.steps).step(portion.parameters, self.gradients[rank])
        self.steps += 1
        optimizer.steps = self.steps
        self.gradients = {}

    def go_to(self, steps: int, optimizer: Optimizer) -> None:
        """Complete the step under way if it leads to `steps`; otherwise undo what its reduction has changed."""
        if self.steps < steps:
            self.step(optimizer)
            return
        self.gradients = {}
        restore(self.residuals)


class Source(NamedTuple):
    """A division that survives: for each of its ranks a present rank with this rank's portion, in `roots`."""

    number: int
    size: int
    steps: int
    roots: dict[int, int]


class PartnerCopy:
    """A copy of another rank's shards in a rank's memory, for `ZeRO`. Source: Moody et al., SC 2010 (PARTNER).

    A program makes one object at its start, and passes the object to each `ZeRO` of the training. After the loss of
    ranks `ZeRO` continues from the copies, on any number of ranks, as long as no rank is lost together with the rank
    that has its copy. The copy is on another node if there is one.
    """

    def __init__(self) -> None:
        # The division in use is the last. Others are kept until all ranks have the new one.
        self._divisions: list[Division] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the copy: parameters and optimizer state of the other rank's shards."""
        portions = [*self._divisions[-1].portions.values()][1:] if self._divisions else []
        return sum(row.nbytes for portion in portions for row in portion.rows)

    def _open(self, arrays: Parameters, comm: Communicator, optimizer: Optimizer, compression: Compression | Policy,
              *, copies: bool) -> Parameters:
        """Divide the state over the ranks of `comm`, and return this rank's shards; views of `arrays`, or `copies`.

        The state comes from the newest division with all portions on the ranks, and is written into `arrays` and
        `optimizer`. Without any division, the parameters come from rank 0. A collective call.
        """
        kinds = [type(optimizer).__name__, *optimizer.state_names]
        mine = [[one.number, one.size, one.steps, *one.portions] for one in self._divisions]
        everyone = internal.all_gather_metadata(comm, {"divisions": mine, "optimizer": kinds}, "ZeRO")
        check_alike("ZeRO", everyone, "optimizer", "GC-OPTIMIZER")
        source = _newest(everyone)
        like = {name: Like.of(array) for name, array in arrays.items()}
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
        optimizer.state = portions[comm.rank].state
        number = 1 + max((one[0] for metadata in everyone for one in metadata["divisions"]), default=0)
        self._divisions.append(Division(number, comm.size, optimizer.steps, portions, remembered(compression)))
        # The barrier ends only if all ranks have the new division: the old one is not needed any more.
        comm.barrier()
        del self._divisions[:-1]
        return portions[comm.rank].parameters

    def _collect(self, source: Source, arrays: Parameters, portions: Mapping[int, Portion], comm: Communicator,
                 optimizer: Optimizer) -> None:
        """Receive all portions of `source`: parameters into `arrays`, optimizer state into the new `portions`."""
        held = next((one for one in self._divisions if one.number == source.number), None)
        if held is not None:
            held.go_to(source.steps, optimizer)
        optimizer.steps = source.steps
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

    def _renew(self, comm: Communicator, optimizer: Optimizer, residuals: Memory) -> None:
        """Send this rank's portion to the rank with the copy, after a checkpoint was loaded. A collective call."""
        division = self._divisions[-1]
        other, _ = _neighbours(comm)
        rows = division.portions[other].rows
        with internal.current_stream(comm, rows):
            for row, came in zip(rows, _exchanged(division.portions[comm.rank].rows, rows, comm), strict=True):
                row[...] = came
        division.steps, division.residuals = optimizer.steps, residuals

    def _exchange(self, gradients: Parameters, comm: Communicator) -> None:
        """Send this rank's mean gradients to the rank with the copy. A collective call."""
        division = self._divisions[-1]
        other, _ = _neighbours(comm)
        wanted = division.portions[other].parameters
        mine = [gradients[name] for name in wanted]
        came = _exchanged(mine, [*wanted.values()], comm)
        # From here on the step can be completed, so the gradients must have left and reached the GPU.
        _wait(mine)
        division.gradients = {other: dict(zip(wanted, came, strict=True)), comm.rank: dict(gradients)}

    def _step(self, optimizer: Optimizer, residuals: Memory) -> None:
        """Take the step under way, for this rank's shards and for the copy, after all ranks have made `_exchange`."""
        self._divisions[-1].residuals = residuals
        self._divisions[-1].step(optimizer)

    def _clear(self) -> None:
        """Forget everything: the training begins from a checkpoint."""
        self._divisions.clear()


def _with_state(optimizer: Optimizer, state: dict[str, Parameters], steps: int) -> Optimizer:
    """Return an optimizer with the present numbers of `optimizer` (the rate may change), for another state."""
    found = copy.copy(optimizer)
    found.state, found.steps = state, steps
    return found


def _newest(everyone: Sequence[Metadata]) -> Source | None:
    """Return the newest division with all portions on the ranks, None if no rank has any division.

    Raises BackendError, on every rank, if portions of each division are lost.
    """
    found: dict[int, Source] = {}
    for root, metadata in enumerate(everyone):
        for number, size, steps, *ranks in metadata["divisions"]:
            before = found.get(number, Source(number, size, steps, {}))
            # If any rank has taken the step under way, all ranks have its gradients.
            found[number] = before._replace(steps=max(steps, before.steps),
                                            roots=dict.fromkeys(ranks, root) | before.roots)
    for _, source in sorted(found.items(), reverse=True):
        if len(source.roots) == source.size:
            return source
    if found:
        last = found[max(found)]
        lost = ", ".join(str(rank) for rank in range(last.size) if rank not in last.roots)
        raise BackendError(f"ZeRO: the shards of ranks {lost} of {last.size} are lost, and so are their copies; load a "
                           "checkpoint by ZeRO.load", code="GC-PARTNER")
    return None


def _neighbours(comm: Communicator) -> tuple[int, int]:
    """Return the rank with its copy on this rank, and the rank with this rank's copy.

    The ranks form a ring, ordered by their number on the node first, so that neighbours are on different nodes.
    """
    nodes, seen = internal.link_of(comm).place.nodes, Counter[int]()
    places = []
    for rank, node in enumerate(nodes):
        places.append((seen[node], node, rank))
        seen[node] += 1
    ring = [rank for *_, rank in sorted(places)]
    at = ring.index(comm.rank)
    return ring[at - 1], ring[(at + 1) % len(ring)]


def _exchanged(mine: Sequence[Array], theirs: Sequence[Array], comm: Communicator) -> list[Array]:
    """Send `mine` to the rank with this rank's copy; return arrays in the shapes of `theirs`, received likewise."""
    source, target = _neighbours(comm)
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
    """Copy the elements of `row`, which are `here` in the whole array, into `out` for the elements `there`."""
    start, stop = max(here.start, there.start), min(here.stop, there.stop)
    if start < stop:
        out[start - there.start:stop - there.start] = row[start - here.start:stop - here.start]


def _wait(arrays: Iterable[Any]) -> None:
    """Wait for the work on arrays in the GPU's current stream; on the host return at once."""
    if any(map(on_gpu, arrays)):
        sys.modules["cupy"].cuda.get_current_stream().synchronize()
