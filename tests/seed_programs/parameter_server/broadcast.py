"""Broadcast of "Parameter Server and All-Reduce".

Mended: arrays on the host in place of tensors on a GPU.
"""

import numpy

import gpucoll.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()

tensor = numpy.array([rank], dtype=numpy.float32) if rank == 0 else numpy.empty(1, numpy.float32)
# rank 0번의 tensor ([0.])을 다른 모든 rank에 전송
dist.broadcast(tensor, src=0)
print(f"[{rank}] data = {tensor}")
