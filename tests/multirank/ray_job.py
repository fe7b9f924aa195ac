"""Programs of Ray's actors: ``ray_job.py PROGRAM SECONDS``; run by test_dask_and_ray.py."""

import importlib.util
import os
import signal
import sys

import numpy
import pytest
import ray
from ray.experimental import internal_kv
from ray.util import collective
from ray.util.collective.types import ReduceOp

import gpucoll as gc
import gpucoll.ray
from gpucoll.transport.rendezvous import becomes

SIZE, TIMEOUT = 3, float(sys.argv[2]) if len(sys.argv) > 2 else 60.0


@ray.remote(num_cpus=1, max_restarts=0)
class Actor:
    def __init__(self, timeout):
        for _ in range(2):  # idempotent
            gpucoll.ray.register(timeout=timeout)

    def join(self, size, rank, name="default"):
        collective.init_collective_group(size, rank, "gpucoll", name)

    def leave(self, name="default"):
        collective.destroy_collective_group(name)

    def call(self, program, *arguments):
        return program(*arguments)


def actors(size, timeout=TIMEOUT):
    return [Actor.remote(timeout) for _ in range(size)]


def on(members, program, *arguments):
    return ray.get([actor.call.remote(program, *arguments) for actor in members])


def join(members, name="default"):
    ray.get([actor.join.remote(len(members), rank, name) for rank, actor in enumerate(members)])


def same(a, b):
    assert a.dtype == b.dtype
    assert a.tolist() == b.tolist()


def every_function(name, arrays):
    """Ray's functions, on exact data that differ by rank."""
    rank, size = collective.get_rank(name), collective.get_collective_group_size(name)
    of = [numpy.arange(count := 1000, dtype="f4") * (other + 1) + other for other in range(size)]
    for op, combine in ((ReduceOp.SUM, numpy.add), (ReduceOp.MAX, numpy.maximum), (ReduceOp.MIN, numpy.minimum)):
        x = arrays(of[rank])
        collective.allreduce(x, name, op)
        same(numpy.asarray(x), combine.reduce(of))
    for root in range(size):
        x = arrays(of[rank])
        collective.reduce(x, root, name, ReduceOp.PRODUCT)
        same(numpy.asarray(x), numpy.multiply.reduce(of) if rank == root else of[rank])
        x = arrays(of[rank])
        collective.broadcast(x, root, name)
        same(numpy.asarray(x), of[root])
    targets = [arrays(numpy.zeros(count, "f4")) for _ in range(size)]
    collective.allgather(targets, arrays(of[rank]), name)
    for target, row in zip(targets, of, strict=True):
        same(numpy.asarray(target), row)
    target = arrays(numpy.zeros(count, "f4"))
    collective.reducescatter(target, [arrays(of[rank] + number) for number in range(size)], name)
    same(numpy.asarray(target), numpy.add.reduce(of) + size * rank)
    x = arrays(of[rank])
    if rank:
        collective.recv(x, rank - 1, name)
        same(numpy.asarray(x), of[rank - 1])
    if rank < size - 1:
        collective.send(arrays(of[rank]), rank + 1, name)
    collective.barrier(name)


def what_ray_lacks():
    comm = gpucoll.ray.communicator()
    x = numpy.arange(comm.size) + 10 * comm.rank
    assert comm.all_to_all(x).tolist() == [10 * other + comm.rank for other in range(comm.size)]
    rows = comm.gather(x, root=1)
    assert (rows is None) == (comm.rank != 1)
    assert comm.scatter(rows, root=1).tolist() == x.tolist()
    return comm.rank


def as_numpy(x):
    return x.copy()


def as_torch(x):
    import torch

    return torch.from_numpy(x.copy())


def results():
    members = actors(SIZE)
    join(members)
    on(members, every_function, "default", as_numpy)
    assert on(members, what_ray_lacks) == [*range(SIZE)]
    if importlib.util.find_spec("torch"):
        on(members, every_function, "default", as_torch)
    # An argument is a read-only view.
    found = ray.get([actor.call.remote(reduced, numpy.arange(4) + rank) for rank, actor in enumerate(members)])
    for x in found:
        same(x, SIZE * numpy.arange(4) + sum(range(SIZE)))


def reduced(x):
    assert not x.flags.writeable
    collective.allreduce(x)
    return x


def groups():
    """Several groups in one process, on some of the actors and in another order; a name used again."""
    members = actors(SIZE)
    join(members[:2], "first two")
    join(members[::-1], "backwards")
    join(members[1:], "last two")
    for some, name in ((members, "backwards"), (members[1:], "last two"), (members[:2], "first two")):
        on(some, every_function, name, as_numpy)
    assert ray.get([actor.call.remote(collective.get_rank, "backwards") for actor in members]) == [2, 1, 0]
    ray.get(members[0].leave.remote("first two"))  # alone: waits for no other actor
    ray.get(members[1].leave.remote("first two"))
    join(members[1::-1], "first two")
    on(members[:2], every_function, "first two", as_numpy)
    # Groups declared by the driver: each actor joins in its first call.
    collective.create_collective_group(members, SIZE, [1, 2, 0], "gpucoll", "declared")
    assert ray.get([actor.call.remote(totals, "declared") for actor in members]) == [6] * SIZE
    assert ray.get([actor.call.remote(collective.get_rank, "declared") for actor in members]) == [1, 2, 0]


def totals(name):
    x = numpy.full(2, gpucoll.ray.communicator(name).rank + 1)
    collective.allreduce(x, name)
    return int(x[0])


def wrong_shapes():
    comm, targets = gpucoll.ray.communicator(), [numpy.zeros(4) for _ in range(SIZE)]
    if comm.rank == 1:
        targets[0] = numpy.zeros(3)
    with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError):
        collective.allgather(targets, numpy.ones(4))
    assert not any(target.any() for target in targets)
    collective.barrier()


def dying():
    if collective.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collective.allreduce(numpy.ones(3))
    except gc.RankFailedError as error:
        collective.destroy_collective_group()
        return error.ranks
    return None


def errors():
    with pytest.raises(gc.ArgumentError):
        gpucoll.ray.register(executor="sharde")
    members = actors(SIZE)
    join(members)
    on(members, wrong_shapes)
    references = [actor.call.remote(dying) for actor in members]
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(references.pop(1))
    assert ray.get(references) == [(1,), (1,)]
    left = [members[0], members[2]]
    join(left)  # the same name
    on(left, every_function, "default", as_numpy)


def late():
    """A rank 0 killed while actors meet leaves its place in the table: the next group of the name finds its own."""
    lonely, = actors(1)
    reference = lonely.join.remote(2, 0)
    key = " ".join(("gpucoll", ray.get_runtime_context().get_job_id(), "default"))
    assert becomes(lambda: internal_kv._internal_kv_get(key) is not None, TIMEOUT)
    ray.kill(lonely)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(reference)
    members = actors(2)
    second = members[1].join.remote(2, 1)  # finds the old place first
    ray.get([members[0].join.remote(2, 0), second])
    on(members, every_function, "default", as_numpy)
    lonely, = actors(1, timeout=1)
    with pytest.raises(gc.CollectiveTimeout):
        ray.get(lonely.join.remote(2, 1, "nobody's"))


if __name__ == "__main__":
    gpucoll.ray.register()
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    globals()[sys.argv[1]]()
