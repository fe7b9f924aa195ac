"""gather.py of mpi4py of "集合通信" with mpiexec and torchrun.

Mended: the document repeats scatter.py here; this gathers what that one scatters.
"""

import gpucoll.distributed as dist

dist.init_process_group()
size = dist.get_world_size()
rank = dist.get_rank()
data = [None] * size if rank == 0 else None
dist.gather_object(list(range(rank + 2)), data, dst=0)
print(f"rank {rank} data is {data}")
