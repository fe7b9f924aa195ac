"""torch_scatter.py of "集合通信" with mpiexec and torchrun.

Mended: arrays in place of tensors; gpucoll.distributed gives rank and world size, since mpiexec alone sets no RANK.
"""

import numpy

import gpucoll.distributed as dist


def run_scatter(rank, size):
    group = dist.new_group(list(range(size)))
    tensor = numpy.empty(1, numpy.float32)
    if rank == 0:
        tensor_list = [numpy.array([i + 1], dtype=numpy.float32) for i in range(size)]
        dist.scatter(tensor, scatter_list=tensor_list, src=0, group=group)
    else:
        dist.scatter(tensor, scatter_list=[], src=0, group=group)
    dist.barrier()
    print(f'\nRank {rank} received data {tensor}')


dist.init_process_group("gloo", init_method="file:///tmp/sharedfile")
run_scatter(dist.get_rank(), dist.get_world_size())
