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

    An asynchronous all-reduce of a bucket starts after the bucket's last gradient and after all earlier buckets. Give
    gradients in the reverse order of `parameters` for the best overlap. Without spare processors on a node
    (`can_overlap`), `finish` makes all the collectives. Buckets are allocated by `comm.empty`. The constructor is a
    collective call.

    Parameters
    ----------
    parameters : mapping of str to array
        The parameters by name, the same on all ranks; rank 0's values are broadcast.
    comm : Communicator
        The ranks of the training.
    bucket_bytes : int, optional
        Most bytes of a bucket, the unit of messages.
    compression : Compression, Policy or None, optional
        How the means are formed; None is `Exact`.

    Attributes
    ----------
    gradients : dict of str to array
        The places of the gradients, and after `finish` their means.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank (GC-ARRAY, GC-NAME, GC-DEVICE, GC-DTYPE, GC-COMPRESSION, GC-OPTIMIZER).
    PeerError
        A wrong argument of another rank (GC-PEER).
    MismatchError
        Names, shapes, dtypes or memories (host, GPU) of the parameters differ between ranks.

    See Also
    --------
    ZeRO : The state of training, divided over the ranks.

    References
    ----------
    Li et al., PyTorch Distributed, arXiv 2006.15704.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import DataParallel
    >>> def program(comm):
    ...     weights = {"w": numpy.zeros(2)}
    ...     training = DataParallel(weights, comm)
    ...     training.ready("w", numpy.full(2, comm.rank + 1.0))
    ...     training.finish()
    ...     return training.gradients["w"].copy()
    >>> gc.run_local(program, 2)[0]
    array([1.5, 1.5])
    """

    def __init__(self, parameters: Mapping[str, Any], comm: Communicator, bucket_bytes: int = BUCKET_BYTES,
                 compression: Compression | Policy | None = None) -> None:
        arrays = opened("DataParallel", parameters, comm, lambda: check_kind("DataParallel", compression))
        like = {name: Like.of(comm.broadcast(array, root=0)) for name, array in arrays.items()}
        super().__init__(like, comm, compression, bucket_bytes)
        self._is_synchronised = True
        self._buckets = [self._bucket(some) for some in self._names]
        self.gradients: dict[str, Any] = {
            name: row for bucket in self._buckets for name, row in bucket.gradients.items()}
        self._addresses = {name: address(row) for name, row in self.gradients.items()}

    def _bucket(self, names: list[str]) -> Bucket:
        like = {name: self._like[name] for name in names}
        first = like[names[0]]
        row = self._comm.empty(sum(one.size for one in like.values()), first.dtype, "cuda" if first.gpu else None)
        return Bucket(like, row)

    def ready(self, name: str, gradient: Any) -> None:
        """Give the gradient of a parameter.

        A gradient computed in `gradients[name]` is not copied; inside `no_sync` this array must hold the sum.

        Parameters
        ----------
        name : str
            The name of the parameter.
        gradient : array
            The gradient, of the parameter's shape and dtype; reusable after the call.

        Raises
        ------
        ArgumentError or DtypeError
            Another shape or dtype, an unknown name, or a gradient given before (GC-SHAPE, GC-DTYPE, GC-NAME).

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import DataParallel
        >>> def program(comm):
        ...     weights = {"w": numpy.zeros(2)}
        ...     training = DataParallel(weights, comm)
        ...     training.ready("w", numpy.full(2, comm.rank + 1.0))
        ...     training.finish()
        ...     return training.gradients["w"].copy()
        >>> gc.run_local(program, 2)[0]
        array([1.5, 1.5])
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
            self._queue.start(compression.reduce(bucket.gradients, bucket.row, self._comm), compression.collectives)

    def finish(self) -> None:
        """Return once `gradients` are the means over all ranks.

        A collective call. On a GPU the means are ready in stream order.

        Raises
        ------
        ArgumentError
            Gradients of this rank are missing (GC-NAME); PeerError on the other ranks.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import DataParallel
        >>> def program(comm):
        ...     weights = {"w": numpy.zeros(2)}
        ...     training = DataParallel(weights, comm)
        ...     training.ready("w", numpy.full(2, comm.rank + 1.0))
        ...     training.finish()
        ...     return training.gradients["w"].copy()
        >>> gc.run_local(program, 2)[0]
        array([1.5, 1.5])
        """
        self._reduce_all("finish", self.gradients.values())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank inside the context, without sending; the next gradients are added.

        Yields
        ------
        None
            For a ``with`` block.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import DataParallel
        >>> def program(comm):
        ...     weights = {"w": numpy.zeros(2)}
        ...     training = DataParallel(weights, comm)
        ...     with training.no_sync():
        ...         training.ready("w", numpy.ones(2))
        ...     training.ready("w", numpy.full(2, float(comm.rank)))
        ...     training.finish()
        ...     return training.gradients["w"].copy()
        >>> gc.run_local(program, 2)[0]
        array([1.5, 1.5])
        """
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

    Parameters
    ----------
    parameters : mapping of str to array
        The parameters by name, the same on all ranks; rank 0's values are broadcast.
    optimizer : Optimizer
        `SGD`, `Adam` or `AdamW`.
    comm : Communicator
        The ranks of the training.

    Returns
    -------
    int
        The number of steps made so far.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank (GC-ARRAY, GC-NAME, GC-DEVICE, GC-DTYPE, GC-COMPRESSION, GC-OPTIMIZER).
    PeerError
        A wrong argument of another rank (GC-PEER).
    MismatchError
        Names, shapes, dtypes or memories (host, GPU) of the parameters differ between ranks.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import SGD, resume
    >>> def program(comm):
    ...     weights, optimizer = {"w": numpy.zeros(1)}, SGD(lr=1.0)
    ...     if comm.rank == 1:  # this rank has made a step, the other is new
    ...         optimizer.step(weights, {"w": numpy.ones(1)})
    ...     return resume(weights, optimizer, comm), weights["w"]
    >>> gc.run_local(program, 2)[0]
    (1, array([-1.]))
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
