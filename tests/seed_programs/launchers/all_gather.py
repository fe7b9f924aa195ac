"""torch_all_gather.py of "集合通信" with mpiexec and torchrun.

Mended: arrays in place of tensors; rank and world size are asked of gpucoll.distributed: mpiexec alone sets no RANK.
"""

import numpy

import gpucoll.distributed as dist


def run_all_gather(rank, size):
    # create a group with all processors
    group = dist.new_group(list(range(size)))
    tensor = numpy.array([rank], dtype=numpy.float32)
    # create an empty list we will use to hold the gathered values
    tensor_list = [numpy.empty(1, numpy.float32) for i in range(size)]
    # sending all tensors to the others
    dist.all_gather(tensor_list, tensor, group=group)
    # all ranks will have [tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]
    print(f"[{rank}] data = {tensor_list}")


def init_process(backend='gloo'):
    dist.init_process_group(backend, init_method="file:///tmp/sharedfile")
    run_all_gather(dist.get_rank(), dist.get_world_size())


init_process()
