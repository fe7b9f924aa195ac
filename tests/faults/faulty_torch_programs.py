"""Programs of torch.distributed with a fault, as in `faulty_programs`; each is a function run by all virtual ranks.

    python tests/faults/faulty_torch_programs.py

Prints for each program its name, the kind and the ranks expected, and the findings, as a line of JSON.
"""

import functools
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.rpc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import gpucoll as gc
import gpucoll.torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the rooms of the tests

from faults import faulty_programs

TORCH_PROGRAMS = []
fault = functools.partial(faulty_programs.fault, among=TORCH_PROGRAMS)  # starts with the default group


def started(function):
    """Return `function(rank, size)` as a program run with a default group."""
    def program(_):
        dist.init_process_group("gpucoll")
        function(dist.get_rank(), dist.get_world_size())

    return program


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


@fault(4, "ended", 3)
def fewer_batches(rank, size):
    """A rank has a batch less than the others: the most common hang of data-parallel training."""
    parallel = nn.parallel.DistributedDataParallel(model())
    for _ in range(3 if rank < 3 else 2):
        parallel(torch.ones(5, 4)).sum().backward()  # fault


@fault(3, "ended", 1)
def a_batch_without_backward(rank, size):
    """A rank skips a batch, for its loss is no number."""
    parallel = nn.parallel.DistributedDataParallel(model())
    for step in range(3):
        loss = parallel(torch.ones(5, 4)).sum()
        if (rank, step) != (1, 1):
            loss.backward()  # fault


@fault(4, "shape", 2)
def shapes_that_differ(rank, size):
    """The last batch of a rank is shorter."""
    dist.all_reduce(torch.ones(8 if rank != 2 else 7))  # fault


@fault(3, "dtype", 0)
def dtypes_that_differ(rank, size):
    """A rank counts in whole numbers."""
    dist.all_reduce(torch.ones(2, dtype=torch.int64 if rank == 0 else torch.float32), async_op=True).wait()  # fault


@fault(4, "root", 3)
def roots_that_differ(rank, size):
    """A rank takes itself for the source."""
    dist.broadcast(torch.ones(2), src=3 if rank == 3 else 0)  # fault


@fault(2, "deadlock", 0, 1)
def groups_in_two_orders(rank, size):
    """Two groups of the same ranks, used in different orders (pytorch#137006)."""
    data, model = dist.new_group([0, 1]), dist.new_group([0, 1])
    for group in (data, model) if rank == 0 else (model, data):
        dist.all_reduce(torch.ones(4), group=group)  # fault


@fault(2, "deadlock", 0, 1)
def handles_in_two_orders(rank, size):
    """The same with handles: each rank waits for its first call before the second call."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()  # fault


@fault(3, "unmatched send", 1)
def a_message_too_many(rank, size):
    """No rank receives a message."""
    if rank == 1:
        dist.send(torch.ones(3), 2)  # fault


@fault(3, "unmatched receive", 0)
def a_receive_from_any_rank_too_many(rank, size):
    """The first rank waits for a message more than there are."""
    for _ in range(size if rank == 0 else 0):
        dist.recv(torch.ones(3))  # fault
    if rank:
        dist.send(torch.ones(3), 0)


@fault(4, "deadlock", 0, 1, 2, 3)
def a_ring_of_blocking_sends(rank, size):
    """Every rank sends before it receives."""
    dist.send(torch.ones(3), (rank + 1) % size)  # fault
    dist.recv(torch.ones(3), (rank - 1) % size)


@fault(3, "raised", 1)
def an_exception_on_one_rank(rank, size):
    """A rank finds no data; the others wait in the first step."""
    if rank == 1:
        raise FileNotFoundError("shard-00001")  # fault
    dist.all_gather_object([None] * size, rank)  # fault


@fault(4, "group", 0, 1)
def a_group_made_by_its_first_member_only(rank, size):
    """A rank goes on to the next call without the group that the other member makes."""
    if rank == 0:
        dist.new_group([0, 1])  # fault
    dist.barrier()  # fault


@fault(4, "group", 1)
def a_group_without_a_member(rank, size):
    """The other member ends without the group."""
    if rank == 0:
        dist.new_group([0, 1])  # fault


@fault(4, "ended", 0)
def saved_by_the_first_rank(rank, size):
    """The first rank alone gathers the parameters to save them, a collective call for each."""
    sharded = model()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (size,)))
    sharded(torch.ones(5, 4)).sum().backward()
    if rank == 0:
        [one.full_tensor() for one in sharded.parameters()]  # fault


@fault(2, "shape", 1)
def rows_that_differ(rank, size):
    """A rank makes a DTensor of another shape."""
    mesh = init_device_mesh("cpu", (size,))
    distribute_tensor(torch.ones(4, 2 + rank), mesh, [Shard(0)], src_data_rank=None).full_tensor()  # fault


@fault(3, "collective", 2)
def evaluation_on_one_rank(rank, size):
    """A rank evaluates with a reduction of its own."""
    if rank == 2:
        dist.all_reduce(torch.ones(1))  # fault
    dist.barrier()  # fault


@fault(2, "unsupported", 0, 1)
def refused_processes(rank, size):
    """The ranks would start further ranks."""
    torch.multiprocessing.spawn(print, nprocs=2)  # fault


@fault(2, "unsupported", 0, 1)
def refused_remote_calls(rank, size):
    """Remote calls are no calls of all ranks."""
    torch.distributed.rpc.init_rpc("a", rank=rank, world_size=size)  # fault


@fault(2, "unsupported", 1)
def refused_ranks_in_another_order(rank, size):
    """Both processes take themselves for rank 0."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=2)  # fault


if __name__ == "__main__":
    for program in TORCH_PROGRAMS:
        found = gc.precheck(started(program.function), program.size)
        print(json.dumps([program.function.__name__, program.kind, [*program.ranks], sorted(program.lines()), found]))
