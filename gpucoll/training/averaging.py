"""The part common to `DataParallel` and `ZeRO`: gradients of all parameters, reduced in buckets, and failed steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy

from gpucoll import Communicator, internal
from gpucoll.errors import ArgumentError, DtypeError, GpucollError
from gpucoll.internal import row_of
from gpucoll.training.buckets import Arrivals, PhaseQueue, can_overlap, cut
from gpucoll.training.compression import Compression, Exact, Policy, remembered, restore
from gpucoll.training.parameters import Like


class Averaging:
    """Means of gradients over the ranks of `comm`, in buckets of at most `bucket_bytes`."""

    def __init__(self, like: Mapping[str, Like], comm: Communicator, compression: Compression | Policy | None,
                 bucket_bytes: int) -> None:
        self._comm, self._like = comm, like
        self._compression = compression or Exact()
        for name, one in like.items():
            kind, chosen = row_of(one.dtype).kind, self._compression.of(name)
            if kind != "float" and not (kind == "complex" and isinstance(chosen, Exact)):
                raise DtypeError(f"{type(self).__name__}: {name} is {one.dtype}, and {chosen!r} cannot form its mean; "
                                 "use floating-point numbers, or complex numbers without compression")
        self._names = cut(like, bucket_bytes, self._compression.of)
        self._arrivals = Arrivals(self._names)
        self._overlaps = can_overlap(comm, like.values())
        self._queue = PhaseQueue(overlaps=self._overlaps)
        self._before = remembered(self._compression)

    def _start(self, numbers: Iterable[int]) -> None:
        """Start the reductions of the buckets with these numbers."""
        raise NotImplementedError

    def _reduce_all(self, call: str, arrays: Iterable[Any], then: Callable[[], object] = lambda: None) -> None:
        """End the reductions of a step, and call ``then()``. A collective call.

        If gradients of this rank are missing, raise ArgumentError, and PeerError on the other ranks, after restoring
        the residuals.
        """
        missing = self._arrivals.missing
        with internal.current_stream(self._comm, arrays):
            # Start incomplete buckets too: other ranks are in these collectives and would wait for this rank.
            self._start(self._arrivals.startable(all_of_them=True))
            self._queue.finish()
            then()
        self._arrivals.clear()
        # An all-reduce of one byte is cheaper than an exchange of metadata, and all that a successful step needs.
        if self._comm.all_reduce(numpy.array([bool(missing)], "u1"), op="max")[0]:
            some = ", ".join(missing[:5]) + " and others" * (len(missing) > 5)
            error = ArgumentError(f"{call}: the gradients of {some} are missing on rank {self._comm.rank}",
                                  code="GC-NAME") if missing else None
            try:
                internal.all_gather_metadata(self._comm, {}, call, error)
            except GpucollError:
                restore(self._before)
                raise
        self._before = remembered(self._compression)
