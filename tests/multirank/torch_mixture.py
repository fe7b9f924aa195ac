"""Random valid programs of torch.distributed, checked by `gpucoll.precheck`; the results are compared with arithmetic.

    python tests/multirank/torch_mixture.py 50 [FIRST]

Prints the number of programs, of steps and of programs with a finding, and each finding.
"""

import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import gpucoll as gc
import gpucoll.torch

DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bfloat16)


class Ranks:
    """The ranks of a group, as seen by one of them; a step checks the result of a call."""

    def __init__(self, members, own):
        self.members, self.group = members, dist.new_group(members) if members is not None else None
        everyone = range(dist.get_world_size()) if members is None else members
        self.all, self.rank, self.own = [*everyone], dist.get_rank(), own

    def tensor(self, step, rank, count=None):
        """Return a rank's tensor for a step: small whole numbers."""
        row = (torch.arange(count or step["count"]) * (step["salt"] + 1) + rank) % 3
        return row.to(step["dtype"])

    def finish(self, step, work, check):
        """Check at once, or return what is to be checked after the wait."""
        if work is None:
            check()
            return []
        if step["future"]:
            work.get_future().then(lambda _: None)
        return [(work, check)]

    def all_reduce(self, step):
        x = self.tensor(step, self.rank)
        wanted = sum(self.tensor(step, rank) for rank in self.all)
        work = dist.all_reduce(x, group=self.group, async_op=step["async"])
        return self.finish(step, work, lambda: check(x, wanted))

    def broadcast(self, step):
        root = self.all[step["salt"] % len(self.all)]
        x = self.tensor(step, self.rank)
        work = dist.broadcast(x, root, group=self.group, async_op=step["async"])
        return self.finish(step, work, lambda: check(x, self.tensor(step, root)))

    def all_gather(self, step):
        out = torch.empty(len(self.all) * step["count"], dtype=step["dtype"])
        work = dist.all_gather_into_tensor(out, self.tensor(step, self.rank), group=self.group, async_op=step["async"])
        return self.finish(step, work, lambda: check(out, torch.cat([self.tensor(step, rank) for rank in self.all])))

    def reduce_scatter(self, step):
        out, count = torch.empty(step["count"], dtype=step["dtype"]), len(self.all) * step["count"]
        work = dist.reduce_scatter_tensor(out, self.tensor(step, self.rank, count), group=self.group,
                                          async_op=step["async"])
        total, mine = sum(self.tensor(step, rank, count) for rank in self.all), self.all.index(self.rank)
        return self.finish(step, work, lambda: check(out, total.reshape(len(self.all), -1)[mine]))

    def all_to_all(self, step):
        mine, parts = self.all.index(self.rank), [self.tensor(step, self.rank + 1, to + 1) for to in self.all]
        outs = [torch.empty(self.rank + 1, dtype=step["dtype"]) for _ in self.all]
        work = dist.all_to_all(outs, parts, group=self.group, async_op=step["async"])
        wanted = [self.tensor(step, rank + 1, self.all[mine] + 1) for rank in self.all]
        return self.finish(step, work, lambda: [check(*pair) for pair in zip(outs, wanted, strict=True)])

    def objects(self, step):
        found = [None] * len(self.all)
        dist.all_gather_object(found, "x" * self.rank, group=self.group)
        assert found == ["x" * rank for rank in self.all]
        return []

    def barrier(self, step):
        return self.finish(step, dist.barrier(group=self.group, async_op=step["async"]), lambda: None)

    def ring(self, step):
        size, mine = len(self.all), self.all.index(self.rank)
        x, out = self.tensor(step, self.rank), torch.empty(step["count"], dtype=step["dtype"])
        after, before = self.all[(mine + 1) % size], self.all[(mine - 1) % size]
        ops = [dist.P2POp(dist.isend, x, after, self.group), dist.P2POp(dist.irecv, out, before, self.group)]
        for work in dist.batch_isend_irecv(self.own.sample(ops, 2)) if size > 1 else ():
            work.wait()
        check(out if size > 1 else x, self.tensor(step, before))
        return []

    def pairs(self, step):
        """Let the first rank receive from all others, from a named rank or from any."""
        first, out = self.all[0], torch.empty(step["count"], dtype=step["dtype"])
        if self.rank != first:
            dist.send(self.tensor(step, self.rank), first, group=self.group, tag=step["salt"])
        else:
            named = self.own.sample(self.all[1:], len(self.all) - 1) if step["future"] else [None] * (len(self.all) - 1)
            for source in named:
                sender = dist.recv(out, source, group=self.group, tag=step["salt"])
                check(out, self.tensor(step, sender if source is None else source))
        return []


COLLECTIVES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "objects", "barrier", "ring",
               "pairs")
TRAININGS = ("data_parallel", "sharded", "distributed_tensor")


def check(found, wanted):
    assert torch.equal(found.double(), wanted.double()), (found, wanted)


def data_parallel(step):
    torch.manual_seed(step["salt"])
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)),
                                                bucket_cap_mb=1e-4 if step["future"] else 25)
    if step["async"]:
        with model.no_sync():
            model(torch.ones(2, 4)).sum().backward()
    model(torch.full((2, 4), dist.get_rank() + 1.0)).sum().backward()
    alike(model)


def sharded(step):
    torch.manual_seed(step["salt"])
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=step["async"])
    model(torch.full((2, 5), dist.get_rank() + 1.0)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, norm)
    assert {*found} == {norm}


def distributed_tensor(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = (torch.arange(step["count"] * 4.0) % 5).reshape(-1, 4)
    one = distribute_tensor(x, mesh, [Shard(0)])
    check(one.redistribute(mesh, [Shard(1) if step["async"] else Replicate()]).full_tensor(), x)
    check((one @ one.t()).full_tensor(), x @ x.t())
    if dist.get_world_size() % 2 == 0:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
        # The parts of a row of this length differ between the ranks of both axes.
        row = torch.arange(dist.get_world_size() * 4.0 - 1)
        check(distribute_tensor(row, mesh, [Shard(0), Shard(0)]).full_tensor(), row)


def alike(model):
    """Compare the gradients of all ranks."""
    mine = torch.cat([one.grad.reshape(-1) for one in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(others, mine)
    assert all(torch.equal(mine, other) for other in others)


def draw(chances, size):
    """Return the steps of a program of `size` ranks: equal on all ranks."""
    steps = []
    for _ in range(chances.randint(3, 9)):
        kind = chances.choice(COLLECTIVES if chances.random() < 0.9 else TRAININGS)
        members = chances.choice((None, sorted(chances.sample(range(size), chances.randint(1, size)))))
        steps.append({"kind": kind, "members": members, "count": chances.randint(1, 40), "salt": chances.randint(0, 5),
                      "dtype": chances.choice(DTYPES), "async": chances.random() < 0.5,
                      "future": chances.random() < 0.3, "closes": chances.random() < 0.1})
    return steps


def run(steps, number):
    """Run a program on a rank."""
    dist.init_process_group("gpucoll")
    own, pending = random.Random(number * 64 + dist.get_rank()), []
    for step in steps:
        if step["kind"] in TRAININGS:
            globals()[step["kind"]](step)
            continue
        ranks = Ranks(step["members"], own)
        if ranks.rank in ranks.all:
            pending += getattr(ranks, step["kind"])(step)
        if own.random() < 0.5 or step["closes"]:
            finished(pending, own)
        if step["closes"]:
            dist.destroy_process_group()
            dist.init_process_group("gpucoll")
    finished(pending, own)


def finished(pending, own):
    """Wait for calls in an order of the rank's own, and check the results."""
    for work, checked in own.sample(pending, len(pending)):
        work.wait()
        checked()
    pending.clear()


def main(count, first=0):
    steps = faulty = 0
    for number in range(first, first + count):
        chances = random.Random(number)
        size = chances.choice((1, 2, 3, 4, 8))
        program = draw(chances, size)
        found = gc.precheck(lambda _, program=program, number=number: run(program, number), size)
        steps, faulty = steps + len(program), faulty + bool(found)
        for one in found:
            print(f"program {number} of {size} ranks: {one['kind']}: {one['message']}; {program}")
    print(f"{count} programs, {steps} steps, {faulty} with a finding")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
