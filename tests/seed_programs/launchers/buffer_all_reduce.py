"""allreduce.py of mpi4py of "集合通信" with mpiexec and torchrun.

Mended: comm.Allreduce is all_reduce, which works in place.
"""

import numpy as np

import gpucoll.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
# 每个进程生成一个数据
result = np.array([rank + 1])  # 每个进程的数据为其 rank + 1
# 执行 AllReduce 操作
dist.all_reduce(result, op=dist.ReduceOp.SUM)
print(f"Rank {rank} has result after AllReduce: {result[0]}")
