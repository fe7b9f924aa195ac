"""reduce.py of mpi4py of "集合通信" with mpiexec and torchrun.

Mended: comm.Reduce is reduce, which works in place.
"""

import numpy as np

import gpucoll.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
# 每个进程生成一个数据
result = np.array([rank + 1])  # 每个进程的数据为其 rank + 1
# 执行 Reduce 操作
dist.reduce(result, dst=0, op=dist.ReduceOp.SUM)
# 只有根进程接收结果
if rank == 0:
    print(f"Result after Reduce: {result[0]}")
