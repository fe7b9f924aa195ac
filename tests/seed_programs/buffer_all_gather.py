"""allgather.py of mpi4py of "集合通信" with mpiexec and torchrun.

Mended: comm.Allgather is all_gather_into_tensor.
"""

import numpy as np

import gpucoll.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
size = dist.get_world_size()
# 每个进程生成一个数据
data = np.array(rank + 1)  # 每个进程的数据为其 rank + 1
gathered_data = np.zeros(size, dtype=int)
# 执行 AllGather 操作
dist.all_gather_into_tensor(gathered_data, data)
print(f"Rank {rank} gathered data: {gathered_data}")
