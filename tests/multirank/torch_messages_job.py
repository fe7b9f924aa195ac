"""Messages of the backend "gpucoll", each used as soon as its wait allows; and the calls that order streams."""

import sys

import torch
import torch.distributed as dist

import gpucoll.torch  # noqa: F401 - registers the backend


def first_message():
    """The first message of a group needs no other rank."""
    x = torch.arange(5.0) + RANK
    if RANK == 0:
        dist.send(x, 1)
    elif RANK == 1:
        dist.recv(x, 0)
        assert torch.equal(x, torch.arange(5.0))
    dist.barrier()


def object_messages():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for turn in range(3):
        came = [None, None]
        for ours in (RANK % 2, 1 - RANK % 2) if SIZE % 2 == 0 else (RANK == 0, RANK != 0):
            if ours:
                dist.recv_object_list(came, left)
            else:
                dist.send_object_list([RANK, "x" * 1000 * (RANK + turn)], right)
        assert came == [left, "x" * 1000 * (left + turn)]


def singly():
    """Messages one by one; the receiving rank computes on each as soon as it has waited."""
    for turn in range(10):
        x = torch.full((1 << 12,), float(10 * turn + RANK))
        if RANK == 0:
            works = [dist.isend(x, peer) for peer in range(1, SIZE)]
            for work in works:
                work.wait()
            x.fill_(-1)
            dist.recv(x, SIZE - 1)
            assert torch.equal(x, torch.full((1 << 12,), 10.0 * turn + 1))
        else:
            work = dist.irecv(x, 0)
            work.wait()
            x += 1
            assert RANK < SIZE - 1 or dist.send(x, 0) is None
            assert torch.equal(x, torch.full((1 << 12,), 10.0 * turn + 1))


def ordered():
    """A call follows the work before it, and barriers wait for the GPU of the tensors."""
    for turn in range(10):
        x = torch.full((100, 2), float(RANK + turn))[:, 0]
        work = dist.all_reduce(x, async_op=True)
        dist.barrier(async_op=True).wait()
        work.wait()
        assert torch.equal(x, torch.full((100,), float(sum(range(SIZE)) + turn * SIZE)))
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gpucoll")
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"rank {RANK}: {name} ok", flush=True)
    dist.destroy_process_group()
