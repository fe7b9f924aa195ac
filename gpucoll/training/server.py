"""Parameter servers: some ranks keep the parameters and take the optimizer's steps, the others compute gradients.

With N servers, M workers and parameters of b bytes, a step moves b bytes from and to each worker, and M b / N from and
to each server. The servers are the bottleneck if N is less than M. A ring all-reduce over P ranks moves 2 (P - 1) / P b
from each rank. Source: Li et al., OSDI 2014; for staleness Ho et al., NIPS 2013.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from gpucoll import Communicator, Work, internal
from gpucoll.errors import ArgumentError, GpucollError, UsageError
from gpucoll.internal import Array, is_whole
from gpucoll.training.buckets import Bucket
from gpucoll.training.optimizers import Optimizer, check_optimizer, gradient_of
from gpucoll.training.parameters import Like, Parameters, on_host, opened, to_array
from gpucoll.training.shards import owned

# The protocol: a worker sends each server a header of two numbers, the request (PULL, PUSH or FINISH) and the worker's
# number of pushes so far. Gradients follow the header of a push. A server answers a pull by its part of the parameters.
PULL, PUSH, FINISH = 0, 1, 2
HEADER_TAG, DATA_TAG = 0, 1  # tags of messages


class ParameterServer:
    """Training of `parameters` on the last `servers` ranks of `comm`, by gradients from all other ranks, the workers.

    Each server keeps an equal part of the bytes, in host memory, and the optimizer's state of this part. The
    constructor is a collective call.

    Parameters
    ----------
    parameters : mapping of str to array
        The parameters by name, the same on all ranks; rank 0's values are broadcast.
    comm : Communicator
        The ranks of the training.
    servers : int, optional
        The number of servers.
    optimizer : Optimizer
        `SGD`, `Adam` or `AdamW`.
    staleness : int or None, optional
        The pushes that a worker can be ahead of the slowest worker. With 0 a step uses the mean of one push from every
        worker. Otherwise every push is a step of its own; with None no worker waits.
    may_lose_workers : bool, optional
        The servers drop a worker that fails, or is silent for half the communicator's timeout; until then the other
        workers may wait. False: the server raises the error.

    Attributes
    ----------
    is_server : bool
        Whether this rank is a server.
    traffic : dict of str to int
        Bytes of parameters and gradients, "in" and "out".

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
    DataParallel : Without servers.

    References
    ----------
    Li et al., OSDI 2014; for staleness Ho et al., NIPS 2013.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> from gpucoll.training import SGD, ParameterServer
    >>> def program(comm):
    ...     training = ParameterServer({"w": numpy.zeros(1)}, comm, servers=1, optimizer=SGD(lr=1.0))
    ...     if training.is_server:
    ...         return training.serve()
    ...     training.push({"w": numpy.array([comm.rank + 1.0])})
    ...     found = training.pull()["w"]
    ...     training.done()
    ...     return found
    >>> gc.run_local(program, 3)
    [array([-1.5]), array([-1.5]), {'0': array([-1.5])}]
    """

    def __init__(self, parameters: Mapping[str, Any], comm: Communicator, servers: int = 1, optimizer: Any = None,
                 staleness: int | None = 0, *, may_lose_workers: bool = False) -> None:
        def check() -> None:
            if not is_whole(servers) or not 0 < servers < comm.size:
                raise ArgumentError(f"ParameterServer: {servers!r} servers of {comm.size} ranks; at least one must be "
                                    "a server, and one a worker")
            if staleness is not None and not (is_whole(staleness) and staleness >= 0):
                raise ArgumentError(f"ParameterServer: staleness {staleness!r} is neither None nor a whole number of "
                                    "at least 0")
            check_optimizer("ParameterServer", optimizer)

        self.parameters: Parameters = opened("ParameterServer", parameters, comm, check)
        for array in self.parameters.values():
            comm.broadcast(array, root=0)
        workers = comm.size - servers
        self.is_server: bool = comm.rank >= workers
        self.traffic: dict[str, int] = {"in": 0, "out": 0}  # bytes of parameters and gradients
        like = {name: Like.of(array)._replace(gpu=False) for name, array in self.parameters.items()}
        kinds = list(dict.fromkeys(one.dtype for one in like.values()))
        self._whole = [_flat({name: one for name, one in like.items() if one.dtype == kind}) for kind in kinds]
        self._pairs = _pairs(comm, workers)
        self._pushes = 0
        if self.is_server:
            place = comm.rank - workers
            # Half, so a server drops a silent worker before the workers waiting for the server time out.
            for pair in self._pairs if may_lose_workers else ():
                internal.waits_of(pair).timeout = comm.timeout / 2
            self._fill(self.parameters)
            self._part = {str(number): bucket.row[owned(bucket.row.size, place, servers)].copy()
                          for number, bucket in enumerate(self._whole)}
            self._whole = []
            self.parameters = {}
            self._shard = _Shard(self._part, optimizer, self._pairs, staleness, self.traffic, may_lose_workers)

    def _fill(self, arrays: Mapping[str, Any]) -> None:
        for bucket in self._whole:
            for name, place in bucket.gradients.items():
                place[...] = on_host(arrays[name])

    def _parts(self, server: int) -> list[Array]:
        return [bucket.row[owned(bucket.row.size, server, len(self._pairs))] for bucket in self._whole]

    def pull(self) -> Parameters:
        """Overwrite this worker's parameters by the servers', and return them.

        Returns
        -------
        dict of str to array
            The parameters.

        Raises
        ------
        UsageError
            This rank is a server (GC-USAGE).

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ParameterServer
        >>> def program(comm):
        ...     training = ParameterServer({"w": numpy.zeros(1)}, comm, servers=1, optimizer=SGD(lr=1.0))
        ...     if training.is_server:
        ...         return training.serve()
        ...     training.push({"w": numpy.array([comm.rank + 1.0])})
        ...     found = training.pull()["w"]
        ...     training.done()
        ...     return found
        >>> gc.run_local(program, 3)
        [array([-1.5]), array([-1.5]), {'0': array([-1.5])}]
        """
        self._only_workers("pull")
        # Ask all servers before the first answer: the servers prepare their answers at the same time.
        for pair in self._pairs:
            self._request(pair, PULL)
        for server, pair in enumerate(self._pairs):
            for part in self._parts(server):
                pair.recv(part, src=1, tag=DATA_TAG)
                self.traffic["in"] += part.nbytes
        for bucket in self._whole:
            for name, content in bucket.gradients.items():
                to_array(self.parameters[name], content)
        return self.parameters

    def push(self, gradients: Mapping[str, Any]) -> None:
        """Send this worker's gradients to the servers.

        Parameters
        ----------
        gradients : mapping of str to array
            The gradients by name.

        Raises
        ------
        UsageError
            This rank is a server (GC-USAGE).
        ArgumentError
            A gradient is missing (GC-NAME) or has a wrong shape (GC-SHAPE).

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ParameterServer
        >>> def program(comm):
        ...     training = ParameterServer({"w": numpy.zeros(1)}, comm, servers=1, optimizer=SGD(lr=1.0))
        ...     if training.is_server:
        ...         return training.serve()
        ...     training.push({"w": numpy.array([comm.rank + 1.0])})
        ...     found = training.pull()["w"]
        ...     training.done()
        ...     return found
        >>> gc.run_local(program, 3)
        [array([-1.5]), array([-1.5]), {'0': array([-1.5])}]
        """
        self._only_workers("push")
        for name in self.parameters:
            if name not in gradients:
                raise ArgumentError(f"push: {name} has no gradient", code="GC-NAME")
        self._fill({name: gradient_of("push", name, gradients[name], parameter.shape)
                    for name, parameter in self.parameters.items()})
        self._pushes += 1
        # Each header directly before its data: a server that has received the header blocks until the data arrives.
        for server, pair in enumerate(self._pairs):
            self._request(pair, PUSH)
            for part in self._parts(server):
                pair.send(part, dst=1, tag=DATA_TAG)
                self.traffic["out"] += part.nbytes

    def done(self) -> None:
        """Tell the servers that this worker makes no more calls.

        Raises
        ------
        UsageError
            This rank is a server (GC-USAGE).

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ParameterServer
        >>> def program(comm):
        ...     training = ParameterServer({"w": numpy.zeros(1)}, comm, servers=1, optimizer=SGD(lr=1.0))
        ...     if training.is_server:
        ...         return training.serve()
        ...     training.push({"w": numpy.array([comm.rank + 1.0])})
        ...     found = training.pull()["w"]
        ...     training.done()
        ...     return found
        >>> gc.run_local(program, 3)
        [array([-1.5]), array([-1.5]), {'0': array([-1.5])}]
        """
        self._only_workers("done")
        for pair in self._pairs:
            self._request(pair, FINISH)

    def _request(self, pair: Communicator, what: int) -> None:
        pair.send(numpy.array([what, self._pushes]), dst=1, tag=HEADER_TAG)

    def _only_workers(self, call: str) -> None:
        if self.is_server:
            raise UsageError(f"{call}: this rank is a server and calls serve() only")

    def serve(self) -> Parameters:
        """Serve until every worker is done or lost; return this server's part.

        Returns
        -------
        dict of str to array
            This server's part of the parameters, flat: an array for each dtype.

        Raises
        ------
        UsageError
            This rank is a worker (GC-USAGE).

        Examples
        --------
        >>> import numpy
        >>> import gpucoll as gc
        >>> from gpucoll.training import SGD, ParameterServer
        >>> def program(comm):
        ...     training = ParameterServer({"w": numpy.zeros(1)}, comm, servers=1, optimizer=SGD(lr=1.0))
        ...     if training.is_server:
        ...         return training.serve()
        ...     training.push({"w": numpy.array([comm.rank + 1.0])})
        ...     found = training.pull()["w"]
        ...     training.done()
        ...     return found
        >>> gc.run_local(program, 3)
        [array([-1.5]), array([-1.5]), {'0': array([-1.5])}]
        """
        if not self.is_server:
            raise UsageError("serve: this rank is a worker and calls pull(), push() and done() only")
        self._shard.serve()
        return self._part


class _Shard:
    """A server's part of the parameters, and the requests of the workers."""

    def __init__(self, part: Parameters, optimizer: Optimizer, pairs: list[Communicator], staleness: int | None,
                 traffic: dict[str, int], may_lose_workers: bool) -> None:
        self._part, self._optimizer, self._staleness, self._traffic = part, optimizer, staleness, traffic
        self._may_lose = may_lose_workers
        self._live = dict(enumerate(pairs))
        self._clocks = dict.fromkeys(self._live, 0)  # the number of pushes of each worker
        self._asked: dict[int, tuple[Array, Work[Any]]] = {}  # the posted receive of each worker's next header
        self._waiting: dict[int, int] = {}  # workers waiting for the answer to a pull, and their numbers of pushes
        self._pushed: dict[int, Parameters] = {}  # with staleness 0: the gradients for the next step, by worker

    def serve(self) -> None:
        for worker in list(self._live):
            self._listen(worker)
        while self._live:
            # No deadline here: each posted receive has its own deadline, and then counts as completed.
            waits = internal.waits_of(next(iter(self._live.values())))
            waits.until(self._has_news, "serve", float("inf"))
            for worker in list(self._live):
                if worker in self._asked and self._asked[worker][1].is_completed():
                    self._with(worker, self._serve)
            self._go_on()

    def _has_news(self) -> bool:
        # A list, not a generator: `is_completed` also drives progress, so every receive must be polled.
        return any([work.is_completed() for _, work in self._asked.values()])

    def _with(self, worker: int, action: Any) -> None:
        """Run `action` on a worker; if this fails and workers may be lost, drop the worker."""
        try:
            action(worker)
        except GpucollError:
            if not self._may_lose:
                raise
            every: list[dict[int, Any]] = [self._live, self._clocks, self._asked, self._waiting, self._pushed]
            for kept in every:
                kept.pop(worker, None)

    # Each worker has at most one posted receive, for the next header. After a pull, and with staleness 0 after a push,
    # the receive is posted only when the request has been answered, so a worker ahead of the others waits.
    def _listen(self, worker: int) -> None:
        room = numpy.zeros(2, numpy.int64)
        self._asked[worker] = room, self._live[worker].recv(room, src=0, tag=HEADER_TAG, async_op=True)

    def _serve(self, worker: int) -> None:
        room, work = self._asked.pop(worker)
        work.wait()
        what, pushes = room.tolist()
        if what == FINISH:  # the worker's last push stays in `_pushed`, and is part of the next step
            del self._live[worker], self._clocks[worker]
            return
        if what == PULL:
            self._waiting[worker] = pushes
            return
        gradients = {name: numpy.empty_like(row) for name, row in self._part.items()}
        for row in gradients.values():
            self._live[worker].recv(row, src=0, tag=DATA_TAG)
            self._traffic["in"] += row.nbytes
        self._clocks[worker] = pushes
        if self._staleness == 0:
            self._pushed[worker] = gradients  # `_go_on` posts the next receive after the step
        else:
            self._optimizer.step(self._part, gradients)
            self._listen(worker)

    def _go_on(self) -> None:
        """Take a step if all live workers have pushed; answer the pulls of workers not too far ahead."""
        if self._pushed and self._live.keys() <= self._pushed.keys():
            # Add in rank order: the result must not depend on the order of arrival.
            pushes = [self._pushed[worker] for worker in sorted(self._pushed)]
            self._optimizer.step(self._part, {name: sum(push[name] for push in pushes) / len(pushes)
                                              for name in self._part})
            heard, self._pushed = [worker for worker in self._pushed if worker in self._live], {}
            for worker in heard:
                self._listen(worker)
        slowest = min(self._clocks.values(), default=0)
        for worker, clock in list(self._waiting.items()):
            if self._staleness is None or clock - slowest <= self._staleness:
                self._with(worker, self._answer)

    def _answer(self, worker: int) -> None:
        """Send the parameters to a worker, and post the next receive."""
        del self._waiting[worker]
        # Asynchronous sends: the server must not block on a worker that is itself waiting for another server. Send
        # a copy: the next step may change the parameters before a send has ended.
        for row in self._part.values():
            self._live[worker].send(row.copy(), dst=0, tag=DATA_TAG, async_op=True)
            self._traffic["out"] += row.nbytes
        self._listen(worker)


def _flat(like: Mapping[str, Like]) -> Bucket:
    return Bucket(like, next(iter(like.values())).new(sum(one.size for one in like.values())))


def _pairs(comm: Communicator, workers: int) -> list[Communicator]:
    """Return on a worker a communicator with each server, on a server a communicator with each worker."""
    # A failure breaks a whole communicator. With a communicator for each pair of ranks, other pairs go on.
    found = []
    for server in range(workers, comm.size):
        for worker in range(workers):
            pair = comm.split(0 if comm.rank in (server, worker) else None, key=comm.rank)
            if pair is not None:
                found.append(pair)
    return found
