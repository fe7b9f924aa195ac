"""Reduce of "Parameter Server and All-Reduce".

Mended: arrays on the host in place of tensors on a GPU.
"""

import numpy

import gpucoll.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()

tensor = numpy.ones(1, numpy.float32)
# rank 0번에 각 rank의 tensor 를 보내 합친 결과를 rank 0에 저장
dist.reduce(tensor, op=dist.ReduceOp.SUM, dst=0)

print(f"[{rank}] data = {tensor[0]}")
