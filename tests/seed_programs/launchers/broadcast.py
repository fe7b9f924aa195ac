"""torch_broadcast.py of "集合通信" with mpiexec and torchrun.

Mended: arrays in place of tensors; rank and world size are asked of gpucoll.distributed: mpiexec alone sets no RANK.
"""

import numpy

import gpucoll.distributed as dist


def run_broadcast(rank, size):
    # create a group with all processors
    group = dist.new_group(list(range(size)))
    tensor = numpy.array([rank], dtype=numpy.float32) if rank == 0 else numpy.empty(1, numpy.float32)
    # sending all tensors to the others
    dist.broadcast(tensor, src=0, group=group)
    # all ranks will have tensor([0.]) from rank 0
    print(f"[{rank}] data = {tensor}")


def init_process(backend='gloo'):
    dist.init_process_group(backend, init_method="file:///tmp/sharedfile")
    run_broadcast(dist.get_rank(), dist.get_world_size())


init_process()
