"""Gather of "Parameter Server and All-Reduce".

Mended: arrays on the host in place of tensors on a GPU.
"""

import numpy

import gpucoll.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
world_size = 4

tensor = numpy.array([rank], dtype=numpy.float32)
# 모든 랭크의 tensor를 랭크 0번으로 보내고 하나의 리스트에 저장
if rank == 0:
    tensor_list = [numpy.empty(1, numpy.float32) for i in range(world_size)]
    dist.gather(tensor, gather_list=tensor_list, dst=0)
else:
    dist.gather(tensor, gather_list=[], dst=0)
# [tensor([0.]), tensor([1.]), tensor([2.]), tensor([3.])]
if rank == 0:
    print(f"[{rank}] data = {tensor_list}")
