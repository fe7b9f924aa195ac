"""Parameter servers: some ranks keep the parameters and take the optimizer's steps, the others compute gradients.

With N servers and M workers and parameters of b bytes, a step moves b bytes from and to each worker and M b / N from
and to each server: the servers are the bottleneck where N is less than M. A ring all-reduce over P ranks moves
2 (P - 1) / P b from each. Source: Li et al., OSDI 2014; for staleness Ho et al., NIPS 2013.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from gpucoll.arrays import Array
from gpucoll.communicator import Communicator
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, GpucollError, UsageError
from gpucoll.progress.operations import Work
from gpucoll.training.buckets import Bucket
from gpucoll.training.optimizers import Optimizer, check_optimizer, gradient_of
from gpucoll.training.parameters import Like, Parameters, on_host, opened, to_array
from gpucoll.training.shards import owned

PULL, PUSH, DONE = 0, 1, 2
HEADER, DATA = 0, 1  # tags


class ParameterServer:
    """Trains `parameters` on the last `servers` ranks of `comm`, by gradients from all the others.

    `parameters` maps names to arrays, alike on all ranks; those of rank 0 count. Each server has an equal part of their
    bytes, in host memory, and its part of the optimizer's state. A worker may be `staleness` pushes ahead of the
    slowest: with 0 a step takes the mean of one push of every worker; above, every push is a step of its own at once;
    None lets nobody wait. With `may_lose_workers` a worker that fails, or is silent for half the communicator's
    timeout, counts no longer, and the others, who wait for as long as that, go on; else the server raises its error.
    Making one is a collective call. Raises ArgumentError and what `opened` does.
    """

    def __init__(self, parameters: Mapping[str, Any], comm: Communicator, servers: int = 1, optimizer: Any = None,
                 staleness: int | None = 0, *, may_lose_workers: bool = False) -> None:
        def check() -> None:
            if not is_whole(servers) or not 0 < servers < comm.size:
                raise ArgumentError(f"ParameterServer: {servers!r} servers of {comm.size} ranks; at least one must be "
                                    "a server, and one a worker", code="GC-SERVERS")
            if staleness is not None and not (is_whole(staleness) and staleness >= 0):
                raise ArgumentError(f"ParameterServer: staleness {staleness!r} is neither None nor a whole number from "
                                    "0 on", code="GC-SERVERS")
            check_optimizer("ParameterServer", optimizer)

        self.parameters = opened("ParameterServer", parameters, comm, check)
        for array in self.parameters.values():
            comm.broadcast(array, root=0)
        workers = comm.size - servers
        self.is_server = comm.rank >= workers
        self.traffic = {"in": 0, "out": 0}  # bytes of parameters and gradients
        like = {name: Like.of(array)._replace(gpu=False) for name, array in self.parameters.items()}
        kinds = list(dict.fromkeys(one.dtype for one in like.values()))
        self._whole = [_flat({name: one for name, one in like.items() if one.dtype == kind}) for kind in kinds]
        self._pairs = _pairs(comm, workers)
        self._pushes = 0
        if self.is_server:
            place = comm.rank - workers
            for pair in self._pairs if may_lose_workers else ():
                pair._waits.timeout = comm.timeout / 2
            self._fill(self.parameters)
            self._part = {str(number): bucket.row[owned(bucket.row.size, place, servers)].copy()
                          for number, bucket in enumerate(self._whole)}
            self._whole, self.parameters = [], {}
            self._shard = _Shard(self._part, optimizer, self._pairs, staleness, self.traffic, may_lose_workers)

    def _fill(self, arrays: Mapping[str, Any]) -> None:
        for bucket in self._whole:
            for name, place in bucket.gradients.items():
                place[...] = on_host(arrays[name])

    def _parts(self, server: int) -> list[Array]:
        return [bucket.row[owned(bucket.row.size, server, len(self._pairs))] for bucket in self._whole]

    def pull(self) -> Parameters:
        """Write the servers' parameters into this worker's, and return these. Raises UsageError on a server."""
        self._only_workers("pull")
        for pair in self._pairs:
            self._tell(pair, PULL)
        for server, pair in enumerate(self._pairs):
            for part in self._parts(server):
                pair.recv(part, src=1, tag=DATA)
                self.traffic["in"] += part.nbytes
        for bucket in self._whole:
            for name, content in bucket.gradients.items():
                to_array(self.parameters[name], content)
        return self.parameters

    def push(self, gradients: Mapping[str, Any]) -> None:
        """Send this worker's gradients to the servers; raise ArgumentError where one is missing or of another shape."""
        self._only_workers("push")
        for name in self.parameters:
            if name not in gradients:
                raise ArgumentError(f"push: {name} has no gradient", code="GC-NAME")
        self._fill({name: gradient_of("push", name, gradients[name], parameter.shape)
                    for name, parameter in self.parameters.items()})
        self._pushes += 1
        for server, pair in enumerate(self._pairs):  # each is told when its part comes, and waits for all of that
            self._tell(pair, PUSH)
            for part in self._parts(server):
                pair.send(part, dst=1, tag=DATA)
                self.traffic["out"] += part.nbytes

    def done(self) -> None:
        """Tell the servers that this worker has ended its work."""
        self._only_workers("done")
        for pair in self._pairs:
            self._tell(pair, DONE)

    def _tell(self, pair: Communicator, what: int) -> None:
        pair.send(numpy.array([what, self._pushes]), dst=1, tag=HEADER)

    def _only_workers(self, call: str) -> None:
        if self.is_server:
            raise UsageError(f"{call}: this rank is a server, whose call is serve()")

    def serve(self) -> Parameters:
        """Serve until every worker is done, or lost. Raises UsageError on a worker."""
        if not self.is_server:
            raise UsageError("serve: this rank is a worker, whose calls are pull(), push() and done()")
        self._shard.serve()
        return self._part


class _Shard:
    """A server's part of the parameters, and what its workers ask for."""

    def __init__(self, part: Parameters, optimizer: Optimizer, pairs: list[Communicator], staleness: int | None,
                 traffic: dict[str, int], may_lose_workers: bool) -> None:
        self._part, self._optimizer, self._staleness, self._traffic = part, optimizer, staleness, traffic
        self._may_lose = may_lose_workers
        self._live = dict(enumerate(pairs))
        self._clocks = dict.fromkeys(self._live, 0)  # how often each has pushed
        self._asked: dict[int, tuple[Array, Work]] = {}  # for each worker's next message
        self._waiting: dict[int, int] = {}  # workers that pull, and how often they have pushed
        self._pushed: dict[int, Parameters] = {}  # of this step, by worker

    def serve(self) -> None:
        for worker in list(self._live):
            self._listen(worker)
        while self._live:
            waits = next(iter(self._live.values()))._waits
            waits.until(self._has_news, "serve", float("inf"))
            for worker in list(self._live):
                if worker in self._asked and self._asked[worker][1].is_completed():
                    self._with(worker, self._hear)
            self._go_on()

    def _has_news(self) -> bool:
        return any([work.is_completed() for _, work in self._asked.values()])

    def _with(self, worker: int, action: Any) -> None:
        """Do what may find that a worker is lost."""
        try:
            action(worker)
        except GpucollError:
            if not self._may_lose:
                raise
            self._lose(worker)

    def _lose(self, worker: int) -> None:
        every: list[dict[int, Any]] = [self._live, self._clocks, self._asked, self._waiting, self._pushed]
        for kept in every:
            kept.pop(worker, None)

    def _listen(self, worker: int) -> None:
        room = numpy.zeros(2, numpy.int64)
        self._asked[worker] = room, self._live[worker].recv(room, src=0, tag=HEADER, async_op=True)

    def _hear(self, worker: int) -> None:
        room, work = self._asked.pop(worker)
        work.wait()
        what, pushes = room.tolist()
        if what == DONE:  # what it has pushed last counts
            del self._live[worker], self._clocks[worker]
            return
        if what == PULL:
            self._waiting[worker] = pushes
            return
        gradients = {name: numpy.empty_like(row) for name, row in self._part.items()}
        for row in gradients.values():
            self._live[worker].recv(row, src=0, tag=DATA)
            self._traffic["in"] += row.nbytes
        self._clocks[worker] = pushes
        if self._staleness == 0:
            self._pushed[worker] = gradients  # it is heard again once there has been a step
        else:
            self._optimizer.step(self._part, gradients)
            self._listen(worker)

    def _go_on(self) -> None:
        """Take the step that all have pushed for; answer who need not wait any longer."""
        if self._pushed and self._live.keys() <= self._pushed.keys():
            pushes = [self._pushed[worker] for worker in sorted(self._pushed)]  # added in the order of ranks
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
        """Send a copy of the parameters, while the next messages are heard: nobody waits in a circle."""
        del self._waiting[worker]
        for row in self._part.values():
            self._live[worker].send(row.copy(), dst=0, tag=DATA, async_op=True)
            self._traffic["out"] += row.nbytes
        self._listen(worker)


def _flat(like: Mapping[str, Like]) -> Bucket:
    """Return room for arrays of one dtype, one after the other."""
    return Bucket(like, next(iter(like.values())).new(sum(one.size for one in like.values())))


def _pairs(comm: Communicator, workers: int) -> list[Communicator]:
    """Return a communicator with each server, on a server with each worker: who fails takes nobody else with it."""
    found = []
    for server in range(workers, comm.size):
        for worker in range(workers):
            pair = comm.split(0 if comm.rank in (server, worker) else None, key=comm.rank)
            if pair is not None:
                found.append(pair)
    return found
