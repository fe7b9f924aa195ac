"""ZeRO: the state of training divided over the ranks, in three stages. Source: Rajbhandari et al., arXiv 1910.02054.

    stage 1   a rank has the optimizer's state of its shard of every parameter, and takes the step of that shard
    stage 2   and the gradients of its shard only: a reduce-scatter leaves it nothing else
    stage 3   and the parameters of its shard only: a layer's are gathered while it computes

With parameters and gradients of b bytes each and an optimizer that keeps k bytes, a rank of P has 2 b + k / P,
b + (b + k) / P or (2 b + k) / P bytes, and sends 2 (P - 1) / P b bytes in a step; in stage 3 (P - 1) / P b for the
gradients, and as many each time that the layers are gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucoll.arrays import Array
from gpucoll.communicator import Communicator, internal
from gpucoll.errors import ArgumentError, nearest
from gpucoll.training.buckets import BUCKET_BYTES, Arrivals, Bucket, Phases, Pipeline, cut, has_room_beside
from gpucoll.training.checkpoint import PARAMETER, Checkpoint, Saving
from gpucoll.training.compression import (
    Compression,
    Exact,
    Policy,
    check_dtypes,
    check_kind,
    remembered,
    tell_of_missing,
)
from gpucoll.training.layers import Layers
from gpucoll.training.optimizers import Optimizer, check_optimizer
from gpucoll.training.parameters import Like, Parameters, like_parameter, missing_of, opened
from gpucoll.training.shards import Shards, owned

STAGES = (1, 2, 3)


class _Sharded:
    """A bucket of gradients whose means are formed by a reduce-scatter."""

    collectives = 1

    def __init__(self, shards: Shards, compression: Compression, *, stays: bool) -> None:
        self._shards, self.memory, self._compression, self._stays = shards, shards.empty(), compression, stays

    def put(self, name: str, gradient: Array) -> None:
        self._shards.put(name, gradient, self.memory)

    def reduce(self, comm: Communicator, found: Parameters) -> Phases:
        yield from self._shards.reduce_scatter(self.memory, comm, found, stays=self._stays)
        self._compression._count(self.memory, comm, (self.memory, (comm.size - 1) / comm.size))


class _Compressed:
    """A bucket of gradients whose means a compression forms, on every rank, of which a rank keeps its shards."""

    def __init__(self, shards: Shards, compression: Compression, *, stays: bool) -> None:
        elements = sum(one.size for one in shards.arrays.values())
        self.memory = next(iter(shards.arrays.values())).new(elements)
        self._bucket, self._compression = Bucket(shards.arrays, self.memory), compression
        self.collectives, self._stays = compression.collectives, stays

    def put(self, name: str, gradient: Array) -> None:
        self._bucket.gradients[name][...] = gradient

    def reduce(self, comm: Communicator, found: Parameters) -> Phases:
        yield from self._compression.reduce(self._bucket.gradients, self.memory, comm)
        for name, gradient in self._bucket.gradients.items():
            shard = gradient.reshape(-1)[owned(gradient.size, comm.rank, comm.size)]
            found[name] = shard if self._stays else shard.copy()


class ZeRO:
    """Trains `parameters` by `optimizer`, with the state of stage 1, 2 or 3 divided over the ranks of `comm`.

    `parameters` maps names to contiguous arrays, alike on all ranks; those of rank 0 count. In stages 1 and 2 a step
    changes them in place. Stage 3 keeps none of them: who drops them has their memory back, and `layer` gives their
    values. Making one is a collective call. Raises ArgumentError and what `opened` does.
    """

    def __init__(self, parameters: Mapping[str, Any], comm: Communicator, optimizer: Optimizer, stage: int = 1,
                 compression: Compression | Policy | None = None) -> None:
        def check() -> None:
            if isinstance(stage, bool) or stage not in STAGES:
                raise ArgumentError(f"ZeRO: stage {stage!r} is not 1, 2 or 3", code="GC-STAGE")
            check_optimizer("ZeRO", optimizer)
            check_kind("ZeRO", compression)

        self._comm, self._stage = comm, stage
        self.optimizer = optimizer
        arrays = opened("ZeRO", parameters, comm, check, contiguous=True)
        self._like = {name: Like.of(comm.broadcast(array, root=0)) for name, array in arrays.items()}
        self._own = {name: array.reshape(-1)[owned(array.size, comm.rank, comm.size)] for name, array in arrays.items()}
        if stage == 3:
            self._own = {name: shard.copy() for name, shard in self._own.items()}
        self.parameters: Parameters = {} if stage == 3 else arrays
        # From stage 2 on a bucket is as long as a parameter: what has been sent is let go of.
        most = BUCKET_BYTES if stage == 1 else max(1, *(one.nbytes for one in self._like.values()))
        self._compression = compression or Exact()
        check_dtypes("ZeRO", self._like, self._compression)
        names = cut(self._like, min(BUCKET_BYTES, most), self._compression.of)
        self._arrivals = Arrivals(names)
        self._buckets = [Shards({name: self._like[name] for name in some}, comm.rank, comm.size) for some in names]
        self._bucket_of = {name: number for number, some in enumerate(names) for name in some}
        self._open: dict[int, _Sharded | _Compressed] = {}  # the buckets whose gradients are here
        self._gradients: Parameters = {}
        beside = has_room_beside(comm, self._like.values())
        self._pipeline = Pipeline(beside=beside)
        self._layers = Layers(self._own, self._like, comm, beside=beside)
        self._saving: Saving | None = None
        self._before = remembered(self._compression)

    def ready(self, name: str, gradient: Any) -> None:
        """Give the gradient of a parameter, an array of its shape and dtype; it may be overwritten afterwards.

        Raises ArgumentError and DtypeError for any other, for an unknown name, and for one that has been given before.
        """
        array = like_parameter(name, gradient, self._like, self._comm)
        self._arrivals.check(name)
        number = self._bucket_of[name]
        with internal.current_stream(self._comm, [gradient]):
            self._opened(number).put(name, array)
            self._arrivals.came(name)
            self._send(self._arrivals.startable())

    def _opened(self, number: int) -> _Sharded | _Compressed:
        """Return where the gradients of a bucket are gathered."""
        if number not in self._open:
            shards = self._buckets[number]
            compression = self._compression.of(next(iter(shards.arrays)))
            stays = self._stage == 1  # the bucket, in which a rank's shards then are
            kind = _Sharded if isinstance(compression, Exact) else _Compressed
            self._open[number] = kind(shards, compression, stays=stays)
        return self._open[number]

    def _send(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if self._stage > 1:
                self._pipeline.finish(most=1)  # what is under way holds whole gradients
            self._pipeline.start(self._reduce(number), self._opened(number).collectives)

    def _reduce(self, number: int) -> Phases:
        """Leave this rank the means of its shards of a bucket's gradients."""
        yield from self._opened(number).reduce(self._comm, self._gradients)
        if self._stage > 1:
            del self._open[number]

    def step(self) -> None:
        """Take a step of the optimizer, once every gradient has been given. A collective call.

        Raises ArgumentError where gradients of this rank have not come, PeerError on the others; nothing has changed.
        """
        error = missing_of("step", self._arrivals.missing, self._comm)
        with internal.current_stream(self._comm, self._own.values()):
            self._send(self._arrivals.startable(all_of_them=True))  # the other ranks are in these collectives
            self._pipeline.finish()
        self._arrivals.clear()
        tell_of_missing("step", error, self._comm, self._before)
        self._before = remembered(self._compression)
        with internal.current_stream(self._comm, self._own.values()):
            self.optimizer.step(self._own, self._gradients)
        self._gradients.clear()
        if self._stage < 3:
            self._spread()
        self._layers.restart()

    def _spread(self) -> None:
        """Let every rank have all shards of the parameters."""
        for bucket in self._buckets:
            self._pipeline.start(bucket.all_gather(self._own, self._comm, self.parameters), 1)
            self._pipeline.finish(most=1)
        self._pipeline.finish()

    @contextlib.contextmanager
    def layer(self, names: Iterable[str]) -> Iterator[Parameters]:
        """Inside, the arrays of these parameters, to be read. In stage 3 a collective call, alike on all ranks.

        There they are gathered on entry and gone at the end; the layer that came next in the step before is gathered
        meanwhile. All ranks give gradients and enter layers in one order. Raises ArgumentError for an unknown name.
        """
        some = (names,) if isinstance(names, str) else tuple(names)
        for name in some:
            if name not in self._like:
                raise ArgumentError(f"layer: there is no parameter {name!r}{nearest(name, self._like)}", code="GC-NAME")
        if self._stage < 3:
            yield {name: self.parameters[name] for name in some}
            return
        weights = self._layers.enter(some)
        try:
            yield dict(weights)
        finally:
            self._layers.leave(weights)

    def memory(self) -> dict[str, int]:
        """Return the bytes of "parameters", "gradients" and "optimizer" that this rank has now."""
        whole = self._own if self._stage == 3 else self.parameters
        gradients = [bucket.memory for bucket in self._open.values()]
        gradients += [] if self._stage == 1 else self._gradients.values()
        states = [row for state in self.optimizer.state.values() for row in state.values()]
        return {"parameters": sum(row.nbytes for row in whole.values()) + self._layers.nbytes,
                "gradients": sum(row.nbytes for row in gradients), "optimizer": sum(row.nbytes for row in states)}

    def _states(self) -> dict[str, Parameters]:
        return {name: {PARAMETER: shard, **self.optimizer.state_of(name, shard)} for name, shard in self._own.items()}

    def save(self, folder: str | Path, *, async_op: bool = False) -> Saving:
        """Write a checkpoint into `folder`, in place of the one there: until it is whole, that one counts. Collective.

        Every rank writes its shards. With `async_op` a copy of them is written while training goes on, and the
        checkpoint counts once every rank has come back from `wait` of what is returned, a collective call as well; the
        next `save` makes it if nobody has. Raises ArgumentError for what is no path, BackendError where a rank cannot
        write, PeerError on the others.
        """
        if self._saving is not None:  # which would take the new one's files for those of an interrupted one
            self._saving.wait()
        kept = {name: row for one in self._compression.members for name, row in one.state.items()}
        self._saving = Saving(folder, self._comm, self._like, self._states(), self.optimizer, kept)
        if not async_op:
            self._saving.wait()
        return self._saving

    @classmethod
    def load(cls, folder: str | Path, comm: Communicator, optimizer: Optimizer, stage: int = 1,
             compression: Compression | Policy | None = None, *, parameters: Mapping[str, Any] | None = None) -> ZeRO:
        """Return training as it was when it was saved, on any number of ranks and in any stage. A collective call.

        `parameters` are the arrays to write into; None makes NumPy arrays, which are the result's `parameters`. What a
        `compression` has lost on each of P ranks is divided over all where there are not P ranks. Raises
        BackendError, naming the file, for one that is missing or damaged (PeerError elsewhere), ArgumentError where
        `parameters` or the kind of optimizer are not those that were saved.
        """
        check_optimizer("load", optimizer)
        found = Checkpoint(folder, comm)
        asked = type(optimizer).__name__, *optimizer.state_names
        if found.optimizer != asked:
            raise ArgumentError(f"load: {folder} was saved with {' '.join(found.optimizer)}, this is {' '.join(asked)}",
                                code="GC-CHECKPOINT")
        given = {name: one.new(one.shape) for name, one in found.like.items()} if parameters is None else parameters
        zero = cls(given, comm, optimizer, stage, compression)
        saved, here = ({name: (one.shape, one.dtype) for name, one in like.items()}
                       for like in (found.like, zero._like))
        if saved != here:
            raise ArgumentError(f"load: {folder} was saved with other parameters than these", code="GC-CHECKPOINT")
        found.read(zero._states())
        optimizer.steps = found.steps
        kept = found.read_kept()
        for name, one in zero._like.items():
            zero._compression.of(name).restore(name, one, kept)
        zero._before = remembered(zero._compression)
        if stage < 3:
            zero._spread()
        return zero
