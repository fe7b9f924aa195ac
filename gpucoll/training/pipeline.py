"""Pipeline parallel training: each rank has a stage of the model, and works on one microbatch after another.

A schedule is data, a list of `PipelineStep` for each rank. Two schedules are known, for P stages and M microbatches:

    gpipe   all M forward passes, then all M backward passes; a stage keeps the activations of M microbatches
    1f1b    after P - rank - 1 forward passes, one forward and one backward pass in turn; stage `rank` keeps the
            activations of at most P - rank microbatches

    gpipe, P = 3, M = 4                      1f1b: the same time, fewer activations (F forward, B backward, . idle)
    0   F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3       F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    1   .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .        .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    2   .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .        .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

In both a rank is idle for P - 1 passes forward and P - 1 backward, a share of (P - 1) / (M + P - 1) of the time: the
bubble. Sources: Huang et al., "GPipe", arXiv 1811.06965; Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters", arXiv 2104.04473.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast

import numpy

from gpucoll import Communicator, internal
from gpucoll.errors import ArgumentError, nearest
from gpucoll.internal import Array, as_array, check_alike, numpy_dtype, row_of
from gpucoll.training.parameters import Like

PIPELINE_SCHEDULES = ("1f1b", "gpipe")
HEADER_BYTES = 256  # of the message with the shape and dtype of an activation


class PipelineStep(NamedTuple):
    """A step of a rank: a pass of a microbatch through the rank's stage, or a message about a microbatch.

    Activations go to the rank after, gradients to the rank before.

    Parameters
    ----------
    action : str
        "forward" and "backward" are passes, "send" and "recv" messages.
    microbatch : int
        The number of the microbatch.
    peer : int or None, optional
        The other rank of a message; None for a pass.

    Examples
    --------
    >>> PipelineStep("send", microbatch=3, peer=1)
    PipelineStep(action='send', microbatch=3, peer=1)
    """

    action: Literal["forward", "backward", "send", "recv"]
    microbatch: int
    peer: int | None = None


def _passes(schedule: str, rank: int, stages: int, microbatches: int) -> Iterator[PipelineStep]:
    first = microbatches if schedule == "gpipe" else min(stages - rank - 1, microbatches)
    yield from (PipelineStep("forward", number) for number in range(first))
    for number in range(microbatches):
        if first + number < microbatches:
            yield PipelineStep("forward", first + number)
        yield PipelineStep("backward", number)


def pipeline_schedule(schedule: str, rank: int, stages: int, microbatches: int) -> list[PipelineStep]:
    """Return the steps of a rank, in order.

    Messages between two passes run together, so that two ranks may send to each other.

    Parameters
    ----------
    schedule : str
        "1f1b" or "gpipe".
    rank : int
        The rank, which has stage number `rank`.
    stages : int
        Number of stages, and of ranks.
    microbatches : int
        Number of microbatches in a step of training.

    Returns
    -------
    list of PipelineStep
        Passes and messages.

    Raises
    ------
    ArgumentError
        For another schedule, or numbers below 1.

    See Also
    --------
    pipeline_bubble : The idle time of a schedule.

    Examples
    --------
    >>> for step in pipeline_schedule("1f1b", rank=1, stages=2, microbatches=1):
    ...     print(*step)
    recv 0 0
    forward 0 None
    backward 0 None
    send 0 0
    """
    if schedule not in PIPELINE_SCHEDULES:
        raise ArgumentError(f"no schedule of a pipeline is named {schedule!r}{nearest(schedule, PIPELINE_SCHEDULES)}")
    if microbatches < 1 or not 0 <= rank < stages:
        raise ArgumentError(f"a pipeline of {stages} stages and {microbatches} microbatches has no rank {rank}")
    steps = list[PipelineStep]()
    for action, number, _ in _passes(schedule, rank, stages, microbatches):
        before, after = (rank - 1, rank + 1) if action == "forward" else (rank + 1, rank - 1)
        steps += [PipelineStep("recv", number, before)] if 0 <= before < stages else []
        steps.append(PipelineStep(action, number))
        steps += [PipelineStep("send", number, after)] if 0 <= after < stages else []
    return steps


def pipeline_bubble(schedule: str, stages: int, microbatches: int, forward: float = 1.0,
                    backward: float = 2.0) -> float:
    """Return the idle share of the ranks' time, counted in a replay of the schedule.

    Parameters
    ----------
    schedule : str
        "1f1b" or "gpipe".
    stages : int
        Number of stages, and of ranks.
    microbatches : int
        Number of microbatches in a step of training.
    forward, backward : float
        Times of a pass through a stage, equal on all stages. Messages take no time, and a send waits for its receive.

    Returns
    -------
    float
        A share between 0 and 1: (P - 1) / (M + P - 1) for P stages and M microbatches.

    Raises
    ------
    ArgumentError
        For another schedule, or numbers below 1.

    See Also
    --------
    pipeline_schedule : The steps that are replayed.

    Examples
    --------
    >>> round(pipeline_bubble("gpipe", stages=4, microbatches=12), 9), (4 - 1) / (12 + 4 - 1)
    (0.2, 0.2)
    """
    turns = [_turns(pipeline_schedule(schedule, rank, stages, microbatches)) for rank in range(stages)]
    seconds, clocks, places = {"forward": forward, "backward": backward}, [0.0] * stages, [0] * stages
    ready: dict[tuple[int, int, str, int], float] = {}  # from rank, peer, action and microbatch to a moment
    for rank in [*range(stages)] * sum(map(len, turns)):  # each time round, a rank at least ends a turn
        for messages, work in turns[rank][places[rank]:]:
            ready |= {(rank, one.peer or 0, one.action, one.microbatch): clocks[rank] for one in messages}
            others = [ready.get((one.peer or 0, rank, "recv" if one.action == "send" else "send", one.microbatch))
                      for one in messages]
            met = [moment for moment in others if moment is not None]
            if len(met) < len(others):
                break
            clocks[rank] = max([clocks[rank], *met]) + (seconds[work.action] if work else 0.0)
            places[rank] += 1
    return 1 - microbatches * (forward + backward) / max(clocks)


def _turns(steps: Sequence[PipelineStep]) -> list[tuple[list[PipelineStep], PipelineStep | None]]:
    """Return each pass with the messages before, which run together; last, the messages after the last pass."""
    turns, messages = list[tuple[list[PipelineStep], PipelineStep | None]](), list[PipelineStep]()
    for step in steps:
        if step.peer is None:
            turns.append((messages, step))
            messages = []
        else:
            messages.append(step)
    return [*turns, (messages, None)]


class PipelineStage(Protocol):
    """What `Pipeline` needs of a stage: two methods. A stage adds up the gradients of its own parameters."""

    def forward(self, x: Any) -> tuple[Any, Any]:
        """Return the output for an input, and what `backward` needs."""

    def backward(self, kept: Any, gradient: Any) -> Any:
        """Return the gradient of the input, from what `forward` kept and the gradient of the output."""


_Pass: TypeAlias = tuple[str, int]
Loss: TypeAlias = Callable[[Any, int], tuple[Any, Any]]


class Pipeline:
    """Training of a model in stages, a stage on each rank, by microbatches.

    The gradients have the bits of a training in one process that takes the same microbatches one after another.

    Parameters
    ----------
    stages : sequence of objects
        The stages in order, one for each rank. Only this rank's stage is used: the others may be None. A stage has two
        methods: ``forward(x)`` returns the output for an input, and what `backward` needs; ``backward(kept, gradient)``
        returns the gradient of the input, and adds up the gradients of the stage's own parameters.
    comm : Communicator
        The ranks. The constructor is a collective call.
    microbatches : int
        Number of parts of a batch, along the first axis, in sizes that differ by one sample at most.
    schedule : str
        "1f1b" or "gpipe", see `pipeline_schedule`.

    Raises
    ------
    ArgumentError
        For another number of stages than of ranks, another schedule, or no microbatch; PeerError on the other ranks.
    MismatchError
        If microbatches or schedule differ between ranks.

    See Also
    --------
    pipeline_schedule : The steps of a rank.
    pipeline_bubble : The idle share of the time.

    References
    ----------
    Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", arXiv 1811.06965.
    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", arXiv 2104.04473.

    Examples
    --------
    One stage on one rank, which multiplies by w = 2; the loss is the square of the output:

    >>> import numpy
    >>> import gpucoll as gc
    >>> class Times:
    ...     w, gradient = 2.0, 0.0
    ...     def forward(self, x):
    ...         return self.w * x, x
    ...     def backward(self, kept, gradient):
    ...         self.gradient += float((kept * gradient).sum())
    ...         return self.w * gradient
    >>> with gc.init() as comm:
    ...     stage = Times()
    ...     pipeline = Pipeline([stage], comm, microbatches=2)
    ...     losses = pipeline.step(numpy.array([1.0, 3.0]), lambda y, number: (float((y ** 2).sum()), 2 * y))
    >>> losses, stage.gradient
    ([4.0, 36.0], 40.0)
    """

    def __init__(self, stages: Sequence[PipelineStage | None], comm: Communicator, microbatches: int,
                 schedule: str = "1f1b") -> None:
        error = None
        try:
            if len(stages) != comm.size or stages[comm.rank] is None:
                raise ArgumentError(f"Pipeline: {len(stages)} stages for {comm.size} ranks: every rank needs one")
            #: The steps of this rank, as `pipeline_schedule` returns them.
            self.steps: list[PipelineStep] = pipeline_schedule(schedule, comm.rank, comm.size, microbatches)
        except ArgumentError as refused:
            error = refused
        everyone = internal.all_gather_metadata(
            comm, {"microbatches": microbatches, "schedule": schedule} if error is None else {}, "Pipeline", error)
        for name in ("microbatches", "schedule"):
            check_alike("Pipeline", everyone, name, "GC-MISMATCH")
        self._comm, self._microbatches, self._stage = comm, microbatches, cast("PipelineStage", stages[comm.rank])
        self._turns = _turns(self.steps)

    def step(self, x: Any = None, loss: Loss | None = None) -> list[Any]:
        """Take a batch forward and backward through all stages; the stages have added up their gradients at the end.

        A collective call.

        Parameters
        ----------
        x : array, on the first rank
            The batch, of NumPy or CuPy; samples along the first axis.
        loss : function, on the last rank
            Called as ``loss(output, microbatch)`` with the output of the last stage. Returns the value of the loss of
            this microbatch, and the gradient of the output.

        Returns
        -------
        list
            The values of `loss` on the last rank, by microbatch; on the other ranks an empty list.

        Raises
        ------
        ArgumentError
            On the first rank without `x`, or on the last without `loss`.

        Examples
        --------
        A program of two ranks, here threads; the first stage multiplies by 2, the second by 3:

        >>> import numpy
        >>> import gpucoll as gc
        >>> class Times:
        ...     def __init__(self, factor):
        ...         self.factor = factor
        ...     def forward(self, x):
        ...         return self.factor * x, None
        ...     def backward(self, kept, gradient):
        ...         return self.factor * gradient
        >>> def program(comm):
        ...     pipeline = Pipeline([Times(2.0), Times(3.0)], comm, microbatches=2)
        ...     x = numpy.array([1.0, 5.0]) if comm.rank == 0 else None
        ...     return pipeline.step(x, lambda y, microbatch: (float(y.sum()), numpy.ones_like(y)))
        >>> gc.run_local(program, 2)
        [[], [6.0, 30.0]]
        """
        rank, last = self._comm.rank, self._comm.size - 1
        with internal.refusing(self._comm):
            if (rank == 0 and x is None) or (rank == last and loss is None):
                raise ArgumentError("step: the first rank of a pipeline needs x, the last loss")
        # By direction and microbatch: what a pass of this stage needs, and what the neighbour's pass needs of it.
        came = {("forward", number): part for number, part in enumerate(self._parts(x))} if rank == 0 else {}
        made, kept, likes, values = dict[_Pass, Any](), dict[int, Any](), dict[int, Like](), list[Any]()
        for messages, work in self._turns:
            self._exchange(messages, came, made, likes)
            if work is not None and work.action == "forward":
                number = work.microbatch
                output, kept[number] = self._stage.forward(came.pop(("forward", number)))
                if rank < last:
                    made["forward", number], likes[number] = output, Like.of(as_array("step", "an output", output))
                elif loss is not None:
                    value, came["backward", number] = loss(output, number)
                    values.append(value)
            elif work is not None:
                number = work.microbatch
                found = self._stage.backward(kept.pop(number), came.pop(("backward", number)))
                if rank > 0:
                    made["backward", number] = found
        return values

    def _parts(self, x: Any) -> Iterator[Any]:
        each, more = divmod(len(x), self._microbatches)
        for number in range(self._microbatches):
            first = number * each + min(number, more)
            yield x[first:first + each + (number < more)]

    def _exchange(self, messages: Sequence[PipelineStep], came: dict[_Pass, Any], made: dict[_Pass, Any],
                  likes: dict[int, Like]) -> None:
        """Send what the neighbours wait for out of `made`, and receive into `came`, together.

        Before an activation goes a message of its own, with shape and dtype: the ranks know those of their own outputs,
        and a gradient has them too.
        """
        comm, calls = self._comm, list[tuple[Callable[[Any, int], Any], Any, int]]()
        for action, number, peer in messages:
            assert peer is not None
            direction = "forward" if (action == "send") == (peer > comm.rank) else "backward"
            if action == "send":
                array = made.pop((direction, number))
                if direction == "forward":
                    comm.send(_header(likes[number]), peer)
                calls.append((comm.send, array, peer))
            else:
                like = likes[number] if direction == "backward" else _like(comm.recv(_header(None), peer))
                came[direction, number] = like.new(like.shape)
                calls.append((comm.recv, came[direction, number], peer))
        with comm.group():
            for call, array, peer in calls:
                call(array, peer)


def _header(like: Like | None) -> Array:
    """Return the message with shape, dtype and memory of an activation; None: an empty one, to be received."""
    text = "" if like is None else json.dumps([like.shape, row_of(like.dtype).name, like.gpu])
    return numpy.frombuffer(bytearray(text.ljust(HEADER_BYTES).encode()), "u1")


def _like(header: Array) -> Like:
    shape, dtype, gpu = json.loads(header.tobytes())
    return Like(tuple(shape), numpy_dtype(dtype), gpu)
