"""PyTorch programs run twice in one job, over Gloo and over gpucoll, unchanged but for the name: equal losses."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gpucoll.torch  # noqa: F401 - registers the backend

STEPS = 3
kept = []  # groups that live as long as the process


def mlp(width=16):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def batches(rank, steps=STEPS):
    made = torch.Generator().manual_seed(rank)
    return [torch.randn(6, 8, generator=made) for _ in range(steps)]


def train(model, optimizer, losses=None):
    losses = [] if losses is None else losses
    for x in batches(dist.get_rank()):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp():
    model = nn.parallel.DistributedDataParallel(mlp())
    return train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


class Branches(nn.Module):
    """A model with three layers, of which every rank leaves out another."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number != dist.get_rank() % 3:
                x = layer(x)
        return x


def ddp_unused():
    model = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def ddp_accumulated():
    model = nn.parallel.DistributedDataParallel(mlp(), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for x in batches(dist.get_rank()):
        optimizer.zero_grad()
        with model.no_sync():
            model(x[:3]).square().mean().backward()
        loss = model(x[3:]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp_powersgd():
    """The callbacks of the hook's futures make calls, and wait for the calls."""
    # A callback may end last, and Gloo's thread would then free Gloo's group, and wait for itself.
    kept.append(dist.group.WORLD)
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    model = nn.parallel.DistributedDataParallel(mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, torch.optim.SGD(model.parameters(), 0.01))


def zero_redundancy():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(mlp())
    return train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


def fsdp():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    losses = []
    for dtype in (None, torch.bfloat16):
        model = mlp()
        for layer in (*model[::2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
                        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
        losses += train(model, torch.optim.Adam(model.parameters(), 0.01))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [*losses, norm.full_tensor().item()]


def fsdp1():
    """The older FSDP frees its parameters by resizing their storage."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"))
    return train(model, torch.optim.SGD(model.parameters(), 0.1))


def pipeline():
    """Stages of a model on the ranks, by two schedules; the last stage has the losses."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    rank, size, losses = dist.get_rank(), dist.get_world_size(), []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(7 + rank)
        layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        steps = schedule(PipelineStage(layer, rank, size, torch.device("cpu")), 2 * size,
                         loss_fn=lambda out, wanted: (out - wanted).square().mean())
        for x in batches(0):
            optimizer.zero_grad()
            x, found = x[:1].repeat(2 * size, 1) + torch.arange(2 * size)[:, None], []
            steps.step(*([x] if rank == 0 else []), target=x.flip(0), losses=found)
            optimizer.step()
            losses += [loss.item() for loss in found] + [sum(one.sum() for one in layer.parameters()).item()]
    return losses


def dtensor():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(60.0).reshape(6, 10)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    assert torch.equal(y.to_local(), whole)
    assert torch.equal((x @ x.T).full_tensor(), whole @ whole.T)
    return [x.sum().full_tensor().item()]


def tensor_parallel():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = parallelize_module(mlp(12), init_device_mesh("cpu", (dist.get_world_size(),)),
                               {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return train_on_drawn(model, 3)


def train_on_drawn(model, seed):
    """Train on random data, equal on ranks with the same seed; return the losses."""
    torch.manual_seed(seed)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mesh_2d():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "model"))
    model = parallelize_module(mlp(), mesh["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    return train_on_drawn(model, 4 + mesh["data"].get_local_rank())


def checkpoint():
    import torch.distributed.checkpoint as saved
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    mesh, models = init_device_mesh("cpu", (dist.get_world_size(),)), [mlp(), mlp()]
    for model in models:
        fully_shard(model, mesh=mesh)
    losses = train(models[0], torch.optim.SGD(models[0].parameters(), 0.1))
    saved.save(get_model_state_dict(models[0]), checkpoint_id=folder[0])
    state = get_model_state_dict(models[1])
    saved.load(state, checkpoint_id=folder[0])
    models[1].load_state_dict(state)
    assert all(torch.equal(mine.full_tensor(), other.full_tensor())
               for mine, other in zip(*(model.parameters() for model in models), strict=True))
    return losses


def begin(backend):
    """Make a group in a part of its own of one store: torch's Gloo waits for ever at addresses of the group before."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not hasattr(dist, "store_of_the_job"):  # kept where the next run of this file finds it
        dist.store_of_the_job = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False,
            is_master=rank == 0 and "TORCHELASTIC_USE_AGENT_STORE" not in os.environ)
    number = os.environ["GROUPS_MADE"] = str(int(os.environ.get("GROUPS_MADE", 0)) + 1)
    dist.init_process_group(backend, store=dist.PrefixStore(number, dist.store_of_the_job), rank=rank, world_size=size)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[1:]:
        results = []
        for backend in ("gloo", "gpucoll"):
            begin(backend)
            results.append(globals()[name]())
            rank = dist.get_rank()
            dist.destroy_process_group()
        torch.testing.assert_close(*map(torch.tensor, results), rtol=1e-6, atol=0)
        print(f"rank {rank}: {name} ok", flush=True)
