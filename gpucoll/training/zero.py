"""ZeRO: the state of training divided over the ranks, in three stages. Source: Rajbhandari et al., arXiv 1910.02054.

    stage 1   a rank keeps the optimizer's state of its shard of every parameter, and takes the step of this shard
    stage 2   in addition, a rank keeps the gradients of its shard only, the result of a reduce-scatter
    stage 3   in addition, a rank keeps the parameters of its shard only; a layer is gathered while in use

With parameters and gradients of b bytes each and an optimizer's state of k bytes, each of P ranks keeps 2 b + k / P,
b + (b + k) / P or (2 b + k) / P bytes. A step sends 2 (P - 1) / P b bytes per rank in stages 1 and 2. In stage 3 the
gradients cost (P - 1) / P b bytes, and each gathering of all layers the same again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucoll import Communicator, internal
from gpucoll.errors import ArgumentError, nearest
from gpucoll.internal import Array
from gpucoll.training.averaging import Averaging
from gpucoll.training.buckets import BUCKET_BYTES, Bucket, Phases
from gpucoll.training.checkpoint import PARAMETER, Checkpoint, Saving
from gpucoll.training.compression import Compression, Exact, Policy, check_kind, remembered
from gpucoll.training.layers import Layers
from gpucoll.training.optimizers import Optimizer, check_optimizer
from gpucoll.training.parameters import Like, Parameters, like_parameter, opened
from gpucoll.training.partner import Division, PartnerCopy, Portion
from gpucoll.training.shards import Shards, owned

STAGES = (1, 2, 3)


class _Sharded:
    """A bucket of gradients averaged by a reduce-scatter; `stays`: the memory is kept after the step (stage 1)."""

    collectives = 1

    def __init__(self, shards: Shards, compression: Compression, *, stays: bool) -> None:
        self._shards, self.memory, self._compression, self._stays = shards, shards.empty(), compression, stays

    def put(self, name: str, gradient: Array) -> None:
        self._shards.put(name, gradient, self.memory)

    def reduce(self, comm: Communicator, found: Parameters) -> Phases:
        yield from self._shards.reduce_scatter(self.memory, comm, found, stays=self._stays)
        self._compression._count(self.memory, comm, (self.memory, (comm.size - 1) / comm.size))


class _Compressed:
    """A bucket of gradients averaged by a compression; `stays` as in `_Sharded`."""

    def __init__(self, shards: Shards, compression: Compression, *, stays: bool) -> None:
        elements = sum(one.size for one in shards.arrays.values())
        self.memory = next(iter(shards.arrays.values())).new(elements)
        self._bucket, self._compression = Bucket(shards.arrays, self.memory), compression
        self.collectives, self._stays = compression.collectives, stays

    def put(self, name: str, gradient: Array) -> None:
        self._bucket.gradients[name][...] = gradient

    def reduce(self, comm: Communicator, found: Parameters) -> Phases:
        yield from self._compression.reduce(self._bucket.gradients, self.memory, comm)
        # A compression leaves the whole means on every rank; keep this rank's shards.
        for name, gradient in self._bucket.gradients.items():
            shard = gradient.reshape(-1)[owned(gradient.size, comm.rank, comm.size)]
            found[name] = shard if self._stays else shard.copy()


class ZeRO(Averaging):
    """Training of `parameters` by `optimizer`, with the state of stage 1, 2 or 3 divided over the ranks of `comm`.

    In stages 1 and 2 a step updates the arrays in place. Stage 3 copies its shards and keeps no reference to the
    arrays, so a program can free the arrays, and read values by `layer`.

    With a `partner`, another rank has a copy of this rank's shards: see `PartnerCopy`. If the `partner` of any rank has
    state of the training, the training continues from this state: parameters and optimizer are overwritten, and
    `optimizer.steps` is the number of steps made before. The constructor is a collective call.

    Parameters
    ----------
    parameters : mapping of str to array
        Contiguous arrays by name, the same on all ranks; rank 0's values are broadcast.
    comm : Communicator
        The ranks of the training.
    optimizer : Optimizer
        `SGD`, `Adam` or `AdamW`.
    stage : int, optional
        1, 2 or 3.
    compression : Compression, Policy or None, optional
        How the means are formed; None is `Exact`.
    partner : PartnerCopy or None, optional
        Keeps a copy of another rank's shards.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank (GC-ARRAY, GC-NAME, GC-DEVICE, GC-DTYPE, GC-COMPRESSION, GC-OPTIMIZER).
    PeerError
        A wrong argument of another rank (GC-PEER).
    MismatchError
        Names, shapes, dtypes or memories (host, GPU) of the parameters differ between ranks.
    BackendError
        A rank was lost together with its copy (GC-PARTNER).

    See Also
    --------
    DataParallel : All of the state on each rank.

    References
    ----------
    Rajbhandari et al., arXiv 1910.02054.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import SGD, ZeRO
    >>> def program(comm):
    ...     weights = {"w": numpy.array([1.0, 2.0])}
    ...     training = ZeRO(weights, comm, SGD(lr=1.0), stage=2)
    ...     training.ready("w", numpy.full(2, comm.rank + 1.0))
    ...     training.step()
    ...     return weights["w"]
    >>> gc.run_local(program, 2)[0]
    array([-0.5,  0.5])
    """

    def __init__(self, parameters: Mapping[str, Any], comm: Communicator, optimizer: Optimizer, stage: int = 1,
                 compression: Compression | Policy | None = None, *, partner: PartnerCopy | None = None) -> None:
        self._open_training(parameters, comm, optimizer, stage, compression, partner, resumes=True)

    def _open_training(self, parameters: Mapping[str, Any], comm: Communicator, optimizer: Optimizer, stage: int,
               compression: Compression | Policy | None, partner: PartnerCopy | None, *, resumes: bool) -> None:
        """Begin a training; without `resumes` the values of the parameters, and the state, are read afterwards."""
        def check() -> None:
            if isinstance(stage, bool) or stage not in STAGES:
                raise ArgumentError(f"ZeRO: stage {stage!r} is not 1, 2 or 3")
            check_optimizer("ZeRO", optimizer)
            check_kind("ZeRO", compression)
            if partner is not None and not isinstance(partner, PartnerCopy):
                raise ArgumentError(f"ZeRO: partner {partner!r} is not a PartnerCopy()", code="GC-PARTNER")

        self._stage = stage
        self.optimizer: Optimizer = optimizer
        self._partner = partner
        arrays = opened("ZeRO", parameters, comm, check, contiguous=True)
        like = {name: Like.of(array) for name, array in arrays.items()}
        # From stage 2 on a bucket is freed once reduced. Buckets no longer than the longest parameter keep the memory
        # of gradients under way small.
        most = BUCKET_BYTES if stage == 1 else max(1, *(one.nbytes for one in like.values()))
        super().__init__(like, comm, compression, min(BUCKET_BYTES, most))
        self._division: Division | None = None
        if partner is not None and resumes:
            self._division = partner._resume(arrays, comm, optimizer, self._compression, copies=stage == 3)
            self._own = self._division.portions[comm.rank].parameters
        else:
            if resumes:
                for array in arrays.values():
                    comm.broadcast(array, root=0)
            shards = {name: array.reshape(-1)[owned(array.size, comm.rank, comm.size)]
                      for name, array in arrays.items()}
            self._own = {name: shard.copy() for name, shard in shards.items()} if stage == 3 else shards
        self.parameters: Parameters = {} if stage == 3 else arrays
        self._buckets = [Shards({name: like[name] for name in some}, comm.rank, comm.size) for some in self._names]
        self._bucket_of = {name: number for number, some in enumerate(self._names) for name in some}
        self._open: dict[int, _Sharded | _Compressed] = {}  # the buckets with memory allocated, by number
        self._gradients: Parameters = {}
        self._layers = Layers(self._own, like, comm, overlaps=self._overlaps)
        self._saving: Saving | None = None

    def ready(self, name: str, gradient: Any) -> None:
        """Give the gradient of a parameter.

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
        >>> from gpucoll.training import SGD, ZeRO
        >>> def program(comm):
        ...     weights = {"w": numpy.array([1.0, 2.0])}
        ...     training = ZeRO(weights, comm, SGD(lr=1.0), stage=2)
        ...     training.ready("w", numpy.full(2, comm.rank + 1.0))
        ...     training.step()
        ...     return weights["w"]
        >>> gc.run_local(program, 2)[0]
        array([-0.5,  0.5])
        """
        array = like_parameter(name, gradient, self._like, self._comm)
        self._arrivals.check(name)
        number = self._bucket_of[name]
        with internal.current_stream(self._comm, [gradient]):
            self._opened(number).put(name, array)
            self._arrivals.came(name)
            self._start(self._arrivals.startable())

    def _opened(self, number: int) -> _Sharded | _Compressed:
        if number not in self._open:
            shards = self._buckets[number]
            compression = self._compression.of(next(iter(shards.arrays)))
            stays = self._stage == 1  # then the rank's shards of the gradients are views of the bucket
            kind = _Sharded if isinstance(compression, Exact) else _Compressed
            self._open[number] = kind(shards, compression, stays=stays)
        return self._open[number]

    def _start(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            # From stage 2 on at most two buckets are under way, since each holds whole gradients.
            if self._stage > 1:
                self._queue.finish(most=1)
            self._queue.start(self._reduce(number), self._opened(number).collectives)

    def _reduce(self, number: int) -> Phases:
        """Reduce a bucket to this rank's shards of the means; from stage 2 on, free the bucket afterwards."""
        yield from self._opened(number).reduce(self._comm, self._gradients)
        if self._stage > 1:
            del self._open[number]

    def step(self) -> None:
        """Make a step of the optimizer, after every gradient has been passed.

        A collective call. After an error the parameters and the optimizer are unchanged.

        Raises
        ------
        ArgumentError
            Gradients of this rank are missing (GC-NAME); PeerError on the other ranks.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ZeRO
        >>> def program(comm):
        ...     weights = {"w": numpy.array([1.0, 2.0])}
        ...     training = ZeRO(weights, comm, SGD(lr=1.0), stage=2)
        ...     training.ready("w", numpy.full(2, comm.rank + 1.0))
        ...     training.step()
        ...     return weights["w"]
        >>> gc.run_local(program, 2)[0]
        array([-0.5,  0.5])
        """
        if self._partner is not None and self._division is not None:
            self._partner._check(self._division)
        self._reduce_all("step", self._own.values(), self._exchange)
        with internal.current_stream(self._comm, self._own.values()):
            if self._partner is not None:
                self._partner._step(self.optimizer)
            else:
                self.optimizer.step(self._own, self._gradients)
        self._gradients.clear()
        if self._stage < 3:
            self._spread()
        self._layers.restart()

    def _exchange(self) -> None:
        if self._division is not None:
            self._division.exchange(self._gradients, self._comm, self.optimizer)

    def _spread(self) -> None:
        """Gather the parameters from all ranks' shards, in place, with at most two buckets under way."""
        for bucket in self._buckets:
            self._queue.start(bucket.all_gather(self._own, self._comm, self.parameters), 1)
            self._queue.finish(most=1)
        self._queue.finish()

    @contextlib.contextmanager
    def layer(self, names: Iterable[str]) -> Iterator[Parameters]:
        """Give the arrays of these parameters inside the context, for reading only.

        A collective call in stage 3: the arrays are gathered on entry and released at the end. Meanwhile the layer next
        in the order of the last step is gathered. All ranks must give gradients and enter layers in the same order.

        Parameters
        ----------
        names : str or iterable of str
            The names of the parameters.

        Yields
        ------
        dict of str to array
            The arrays by name.

        Raises
        ------
        ArgumentError
            An unknown name (GC-NAME).

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ZeRO
        >>> def program(comm):
        ...     weights = {"w": numpy.array([1.0, 2.0])}
        ...     training = ZeRO(weights, comm, SGD(lr=1.0), stage=3)
        ...     with training.layer("w") as layer:
        ...         return layer["w"].copy()
        >>> gc.run_local(program, 2)[0]
        array([1., 2.])
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
        """Return the bytes kept by this rank at present.

        Returns
        -------
        dict of str to int
            Bytes of "parameters", "gradients" and "optimizer".

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ZeRO
        >>> def program(comm):
        ...     weights = {"w": numpy.array([1.0, 2.0])}
        ...     training = ZeRO(weights, comm, SGD(lr=1.0), stage=2)
        ...     return training.memory()
        >>> gc.run_local(program, 2)[0]
        {'parameters': 16, 'gradients': 0, 'optimizer': 0}
        """
        whole = self._own if self._stage == 3 else self.parameters
        gradients = [bucket.memory for bucket in self._open.values()]
        gradients += [] if self._stage == 1 else self._gradients.values()
        states = [row for state in self.optimizer.state.values() for row in state.values()]
        return {"parameters": sum(row.nbytes for row in whole.values()) + self._layers.nbytes,
                "gradients": sum(row.nbytes for row in gradients), "optimizer": sum(row.nbytes for row in states)}

    def save(self, folder: str | Path, *, async_op: bool = False) -> Saving:
        """Write a checkpoint into `folder`, replacing an older checkpoint once complete.

        A collective call: every rank writes its shards.

        Parameters
        ----------
        folder : str or Path
            The folder of the checkpoint.
        async_op : bool, optional
            Write a copy of the shards during further training.

        Returns
        -------
        Saving
            With `async_op` the checkpoint is valid after its `wait`, a collective call too; the next `save` calls
            `wait` if the program has not.

        Raises
        ------
        ArgumentError
            `folder` is not a path (GC-FILE).
        BackendError
            This rank cannot write (GC-FILE); PeerError on the other ranks.

        See Also
        --------
        load : Reads the checkpoint.

        Examples
        --------
        >>> import tempfile
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ZeRO
        >>> def program(comm, folder):
        ...     training = ZeRO({"w": numpy.ones(3)}, comm, SGD(lr=1.0))
        ...     training.save(folder)
        ...     return ZeRO.load(folder, comm, SGD(lr=1.0), stage=2).parameters["w"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = gc.run_local(lambda comm: program(comm, folder), 2)
        >>> found[0]
        array([1., 1., 1.])
        """
        # An unfinished saving would remove the new files as leftovers of an interrupted checkpoint.
        if self._saving is not None:
            self._saving.wait()
        kept = {name: row for one in self._compression.members for name, row in one.state.items()}
        states = {name: {PARAMETER: shard, **self.optimizer.state_of(name, shard)} for name, shard in self._own.items()}
        self._saving = Saving(folder, self._comm, self._like, states, self.optimizer, kept)
        if not async_op:
            self._saving.wait()
        return self._saving

    @classmethod
    def load(cls, folder: str | Path, comm: Communicator, optimizer: Optimizer, stage: int = 1,
             compression: Compression | Policy | None = None, *, parameters: Mapping[str, Any] | None = None,
             partner: PartnerCopy | None = None) -> ZeRO:
        """Return the training saved in `folder`, on any number of ranks and in any stage.

        A collective call. If the number of ranks has changed, each rank gets the mean of the saved residuals of a
        `compression`. The loaded state takes the place of the state in a `partner`.

        Parameters
        ----------
        folder : str or Path
            The folder of the checkpoint.
        comm : Communicator
            The ranks of the training.
        optimizer : Optimizer
            `SGD`, `Adam` or `AdamW`.
        stage : int, optional
            1, 2 or 3.
        compression : Compression, Policy or None, optional
            How the means are formed; None is `Exact`.
        parameters : mapping of str to array, or None, optional
            The arrays to write into; with None, new NumPy arrays become the result's ``parameters``.
        partner : PartnerCopy or None, optional
            Keeps a copy of another rank's shards.

        Returns
        -------
        ZeRO
            The training.

        Raises
        ------
        BackendError
            A file is missing or damaged; the error names it (GC-FILE); PeerError on other ranks.
        ArgumentError
            The names, shapes or dtypes of `parameters`, or the kind of optimizer, differ from the checkpoint (GC-FILE).

        See Also
        --------
        save : Writes the checkpoint.

        Examples
        --------
        >>> import tempfile
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ZeRO
        >>> def program(comm, folder):
        ...     training = ZeRO({"w": numpy.ones(3)}, comm, SGD(lr=1.0))
        ...     training.save(folder)
        ...     return ZeRO.load(folder, comm, SGD(lr=1.0), stage=2).parameters["w"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     found = gc.run_local(lambda comm: program(comm, folder), 2)
        >>> found[0]
        array([1., 1., 1.])
        """
        check_optimizer("load", optimizer)
        found = Checkpoint(folder, comm)
        if found.optimizer != optimizer.kind:
            raise ArgumentError(f"load: {folder} was saved with {' '.join(found.optimizer)}, this is "
                                f"{' '.join(optimizer.kind)}", code="GC-FILE")
        given = {name: one.new(one.shape) for name, one in found.like.items()} if parameters is None else parameters
        zero = cls.__new__(cls)
        zero._open_training(given, comm, optimizer, stage, compression, partner, resumes=False)
        saved, here = ({name: (one.shape, one.dtype) for name, one in like.items()}
                       for like in (found.like, zero._like))
        if saved != here:
            raise ArgumentError(f"load: {folder} was saved with other parameters", code="GC-FILE")
        # The arrays and the optimizer may be in use by a training: overwrite both only after all ranks have read.
        own = Portion.blank(zero._like, comm.rank, comm.size, optimizer)
        found.read({name: {PARAMETER: shard, **own.state[name]} for name, shard in own.parameters.items()})
        kept = found.read_kept()
        for name, one in zero._like.items():
            zero._compression.of(name).restore(name, one, kept)
        zero._before = remembered(zero._compression)
        if partner is not None:
            zero._division = partner._begin(own, zero._like, comm, optimizer, found.steps, zero._before)
        optimizer.state, optimizer.steps = own.state, found.steps
        with internal.current_stream(comm, zero._own.values()):
            for name, shard in zero._own.items():
                shard[...] = own.parameters[name]
        own.parameters.update(zero._own)
        if stage < 3:
            zero._spread()
        return zero
