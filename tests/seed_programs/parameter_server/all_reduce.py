"""All-reduce of "Parameter Server and All-Reduce".

Mended: arrays on the host in place of tensors on a GPU.
"""

import numpy

import gpucoll.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()

tensor = numpy.ones(1, numpy.float32)
# 각 rank의 tensor를 모두 합친 결과를 다시 모든 rank에 전송
dist.all_reduce(tensor, op=dist.ReduceOp.SUM)

print(f"[{rank}] data = {tensor[0]}")
