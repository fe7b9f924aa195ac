"""Calls of torch.distributed by the backend "gpucoll" on GPU tensors, each compared with what every rank passed.

    torchrun --standalone --nproc-per-node=2 -m gpu.torch_job    # GPUCOLL_SHARE_GPU=1 with a single GPU
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gpucoll.torch  # noqa: F401

COUNT = 1000
DTYPES = (torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def data(rank, dtype=torch.float32, count=COUNT):
    """Return values of a rank: small whole numbers, so that sums are exact in every dtype."""
    return (torch.arange(count, device=DEVICE) % 7 + rank % 5).to(dtype)


def everyone(dtype=torch.float32, count=COUNT):
    return [data(rank, dtype, count) for rank in range(SIZE)]


def same(found, expected):
    assert torch.equal(found, expected), (found, expected)


def collectives():
    for dtype in DTYPES:
        x = data(RANK, dtype)
        dist.all_reduce(x)
        same(x, sum(everyone(dtype)))
    x = data(RANK)
    work = dist.all_reduce(x, op=dist.ReduceOp.AVG, async_op=True)
    work.wait()
    same(x, sum(everyone()) / SIZE)
    x = data(RANK)
    dist.broadcast(x, SIZE - 1)
    same(x, data(SIZE - 1))
    x = data(RANK, count=SIZE * COUNT)
    out = torch.empty(SIZE * SIZE * COUNT, device=DEVICE)
    dist.all_gather_into_tensor(out, x)
    same(out, torch.cat(everyone(count=SIZE * COUNT)))
    out = torch.empty(COUNT, device=DEVICE)
    dist.reduce_scatter_tensor(out, x)
    same(out, sum(everyone(count=SIZE * COUNT)).chunk(SIZE)[RANK])
    out = torch.empty(SIZE * COUNT, device=DEVICE)
    dist.all_to_all_single(out, x)
    same(out, torch.cat([one.chunk(SIZE)[RANK] for one in everyone(count=SIZE * COUNT)]))
    rows = [torch.empty(COUNT, device=DEVICE) for _ in range(SIZE)]
    dist.all_gather(rows, data(RANK))
    same(torch.stack(rows), torch.stack(everyone()))
    objects = [None] * SIZE
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": rank} for rank in range(SIZE)]
    dist.barrier()


def coalesced():
    rows = [data(RANK, count=1 << 20) + number for number in range(4)]
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as together:
        for row in rows:
            dist.all_reduce(row)
    together.wait()
    for number, row in enumerate(rows):
        same(row, sum(one + number for one in everyone(count=1 << 20)))


def messages():
    """Every rank sends before receiving, in a batch; then messages in one direction at a time."""
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for count in (5, 1 << 20):
        out = torch.empty(count, device=DEVICE)
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, data(RANK, count=count), right),
                                            dist.P2POp(dist.irecv, out, left)]):
            work.wait()
        same(out, data(left, count=count))
    out = data(RANK)
    for rank in range(SIZE - 1):
        if rank == RANK:
            dist.send(out, RANK + 1)
        elif rank == RANK - 1:
            dist.recv(out, rank)
    same(out, data(0))


def network():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(DEVICE)


def training():
    """Train by DistributedDataParallel, and compare with a training of one process on the data of all ranks."""
    torch.manual_seed(5)
    x, labels = torch.randn(20 * SIZE, 64).to(DEVICE), torch.randint(0, 10, (20 * SIZE,)).to(DEVICE)
    parts = ((DistributedDataParallel(network(), device_ids=[DEVICE.index]), x.chunk(SIZE)[RANK],
              labels.chunk(SIZE)[RANK]), (network(), x, labels))
    for model, given, wanted in parts:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(given), wanted).backward()
            optimizer.step()
    pairs = zip(parts[0][0].parameters(), parts[1][0].parameters(), strict=True)
    assert max(float((one - other).abs().max()) for one, other in pairs) < 1e-5


if __name__ == "__main__":
    DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("gpucoll", device_id=DEVICE)
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    for part in (collectives, coalesced, messages, training):
        part()
    dist.destroy_process_group()
    print(f"rank {RANK}: all right", flush=True)
