"""Data parallel training: every rank has all parameters and its own samples; gradients are averaged over ranks.

In a step each of P ranks sends 2 (P - 1) / P bytes for each byte of gradients, less than 2 for any P. Source: Li et
al., PyTorch Distributed, arXiv 2006.15704. After ranks were lost or have joined, `resume` continues a training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpucoll import Communicator, internal
from gpucoll.internal import address, check_alike, same_memory
from gpucoll.training.averaging import Averaging
from gpucoll.training.buckets import BUCKET_BYTES, Bucket
from gpucoll.training.compression import Compression, Policy, check_kind
from gpucoll.training.optimizers import Optimizer, check_optimizer
from gpucoll.training.parameters import Like, like_parameter, opened


class DataParallel(Averaging):
    """Gradients averaged over all ranks of `comm`, in buckets, while the next gradients are computed.

    `parameters` maps names to arrays, the same on all ranks; rank 0's values are broadcast. An asynchronous
    all-reduce of a bucket starts after the bucket's last gradient and after all earlier buckets. Give gradients in the
    reverse order of `parameters` for the best overlap. Without spare processors on a node (`can_overlap`), `finish`
    makes all the collectives. Buckets are allocated by `comm.empty`. The constructor is a collective call. Raises
    ArgumentError and DtypeError for wrong arguments of this rank, PeerError for wrong arguments of another rank, and
    MismatchError if names, shapes, dtypes or memories (host, GPU) of the parameters differ between ranks.
    """

    def __init__(self, parameters: Mapping[str, Any], comm: Communicator, bucket_bytes: int = BUCKET_BYTES,
                 compression: Compression | Policy | None = None) -> None:
        arrays = opened("DataParallel", parameters, comm, lambda: check_kind("DataParallel", compression))
        like = {name: Like.of(comm.broadcast(array, root=0)) for name, array in arrays.items()}
        super().__init__(like, comm, compression, bucket_bytes)
        self._is_synchronised = True
        self._buckets = [self._bucket(some) for some in self._names]
        self.gradients = {name: row for bucket in self._buckets for name, row in bucket.gradients.items()}
        self._addresses = {name: address(row) for name, row in self.gradients.items()}

    def _bucket(self, names: list[str]) -> Bucket:
        like = {name: self._like[name] for name in names}
        first = like[names[0]]
        row = self._comm.empty(sum(one.size for one in like.values()), first.dtype, "cuda" if first.gpu else None)
        return Bucket(like, row)

    def ready(self, name: str, gradient: Any) -> None:
        """Give the gradient of a parameter: an array of the parameter's shape and dtype, reusable after the call.

        A gradient computed in `gradients[name]` is not copied; inside `no_sync` this array must hold the sum.
        Raises ArgumentError or DtypeError for other arrays, an unknown name, and a gradient given before.
        """
        array = like_parameter(name, gradient, self._like, self._comm)
        self._arrivals.check(name)
        with internal.current_stream(self._comm, [gradient]):
            place = self.gradients[name]
            if address(array) == self._addresses[name] and same_memory(array, place):
                pass  # computed in the bucket: no copy
            elif name in self._arrivals.held:
                place += array
            else:
                place[...] = array
            self._arrivals.held.add(name)
            if self._is_synchronised:
                self._arrivals.came(name)
                if self._overlaps:
                    self._start(self._arrivals.startable())

    def _start(self, numbers: Iterable[int]) -> None:
        for bucket in (self._buckets[number] for number in numbers):
            compression = self._compression.of(next(iter(bucket.gradients)))
            self._pipeline.start(compression.reduce(bucket.gradients, bucket.row, self._comm), compression.collectives)

    def finish(self) -> None:
        """Return once `gradients` are the means over all ranks; on a GPU the means are ready in stream order.

        A collective call. Raises ArgumentError if gradients of this rank are missing, PeerError on the other ranks.
        """
        self._reduce_all("finish", self.gradients.values())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank inside the context, without sending; the next gradients are added."""
        before, self._is_synchronised = self._is_synchronised, False
        try:
            yield
        finally:
            self._is_synchronised = before


def resume(parameters: Mapping[str, Any], optimizer: Optimizer, comm: Communicator) -> int:
    """Give all ranks the newest parameters and optimizer state, in place; return the number of steps made so far.

    A collective call, for a communicator of `Communicator.replace`, `grow`, `shrink` or `gpucoll.join`, before a new
    `DataParallel` is made. `parameters` and the whole `optimizer` are the same on all ranks, as in data-parallel
    training. A failure in the middle of a step may leave some ranks a step ahead: the lowest rank with the most steps
    sends its state. At the start of a training only the parameters are sent, from rank 0.

    Raises ArgumentError and DtypeError for wrong arguments of this rank, PeerError for another rank's, and
    MismatchError if the parameters or the kinds of optimizers differ between ranks.
    """
    arrays = opened("resume", parameters, comm, lambda: check_optimizer("resume", optimizer))
    everyone = internal.all_gather_metadata(comm, {"steps": optimizer.steps, "optimizer": optimizer.kind}, "resume")
    check_alike("resume", everyone, "optimizer", "GC-OPTIMIZER")
    steps = [one["steps"] for one in everyone]
    newest = max(steps)
    root = steps.index(newest)
    with internal.current_stream(comm, arrays.values()):
        for name, array in arrays.items():
            comm.broadcast(array, root)
            if newest:  # before the first step the state is zeros on every rank
                for state in optimizer.state_of(name, array).values():
                    comm.broadcast(state, root)
    optimizer.steps = newest
    return newest
