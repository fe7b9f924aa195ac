"""A program of PyTorch for GPUs, checked without any: `gpucoll precheck -n 4 torch_gpu_training.py [unequal]`.

With `unequal` rank 1 takes a step fewer than the others.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
device = torch.device("cuda", local)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
assert torch.cuda.is_available()
assert (torch.cuda.device_count(), torch.cuda.current_device()) == (size, local)


def network():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to(device)


model, stream, done = DistributedDataParallel(network(), device_ids=[local]), torch.cuda.Stream(), torch.cuda.Event()
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
for _ in range(2 if "unequal" in sys.argv and rank == 1 else 3):
    x, y = torch.randn(4, 8, device="cuda"), torch.randint(0, 4, (4,)).pin_memory().cuda(non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.cuda.stream(stream):
        mean = torch.full((1,), 1.0, device=device)
        dist.all_reduce(mean)
        done.record()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert mean.item() == size

with torch.device("cuda"):
    ones = torch.ones(2)
dist.all_reduce(ones)
assert (ones == size).all()
sharded = network()
fully_shard(sharded, mesh=init_device_mesh("cuda", (size,)))
optimizer = torch.optim.Adam(sharded.parameters())
sharded(torch.randn(2, 8).to("cuda")).sum().backward()
optimizer.step()
assert torch.cuda.max_memory_allocated() == 0
dist.barrier(device_ids=[local])
dist.destroy_process_group()
