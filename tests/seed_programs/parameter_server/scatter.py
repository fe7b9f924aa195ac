"""Scatter of "Parameter Server and All-Reduce".

Mended: arrays on the host in place of tensors on a GPU.
"""

import numpy

import gpucoll.distributed as dist

# NCCL을 scatter operation을 지원하지 않음
dist.init_process_group("gloo")
rank = dist.get_rank()
world_size = 4

tensor = numpy.empty(1, numpy.float32)
# 랭크 0번의 tensor를 world size 만큼 나눠서 각각의 rank에 전송
if rank == 0:
    tensor_list = [numpy.array([i + 1], dtype=numpy.float32) for i in range(world_size)]
    # tensor_list = [tensor(1), tensor(2), tensor(3), tensor(4)]
    dist.scatter(tensor, scatter_list=tensor_list, src=0)
else:
    dist.scatter(tensor, scatter_list=[], src=0)
print(f"[{rank}] data = {tensor[0]}")
