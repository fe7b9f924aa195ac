"""PyTorch's DDP on a global batch divided among ranks; each rank prints the bits of its parameters."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gpucoll.torch  # noqa: F401 - registers the backend

sys.path.insert(0, str(Path(__file__).parents[1]))
from oracles import global_batch


class Model(nn.Module):
    """A model whose gradient is that of the global batch."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(global_batch.FEATURES))

    def forward(self):
        mine = global_batch.gradient(self.weights.detach().numpy(), dist.get_rank(), dist.get_world_size())
        return (self.weights * torch.from_numpy(mine)).sum()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gpucoll")
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), global_batch.RATE)
    for _ in range(global_batch.STEPS):
        optimizer.zero_grad()
        model().backward()
        optimizer.step()
    print(f"weights {model.module.weights.detach().numpy().tobytes().hex()}", flush=True)
    dist.destroy_process_group()
