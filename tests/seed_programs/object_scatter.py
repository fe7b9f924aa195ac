"""scatter.py of mpi4py of "集合通信" with mpiexec and torchrun.

Mended: comm.scatter is scatter_object_list; four ranks, as printed by the document, in place of the two started.
"""

import gpucoll.distributed as dist

dist.init_process_group()
size = dist.get_world_size()
rank = dist.get_rank()
data = [list(range(i + 2)) for i in range(size)] if rank == 0 else None
mine = [None]
dist.scatter_object_list(mine, data, src=0)
print(f"rank {rank} data is {mine[0]}")
