"""torch_scatter.py of "集合通信" with mpiexec and torchrun.

Mended: arrays in place of tensors; rank and world size are asked of gpucoll.distributed: mpiexec alone sets no RANK.
"""

import numpy

import gpucoll.distributed as dist


def run_scatter(rank, size):
    # create a group with all processors
    group = dist.new_group(list(range(size)))
    # sending all tensors from rank 0 to the others
    tensor = numpy.empty(1, numpy.float32)
    if rank == 0:
        tensor_list = [numpy.array([i + 1], dtype=numpy.float32) for i in range(size)]
        # tensor_list = [tensor(1), tensor(2), tensor(3), tensor(4)]
        dist.scatter(tensor, scatter_list=tensor_list, src=0, group=group)
    else:
        dist.scatter(tensor, scatter_list=[], src=0, group=group)
    # each rank will have a tensor with their rank number
    dist.barrier()
    print(f'\nRank {rank} received data {tensor}')


def init_process(backend='gloo'):
    dist.init_process_group(backend, init_method="file:///tmp/sharedfile")
    run_scatter(dist.get_rank(), dist.get_world_size())


init_process()
