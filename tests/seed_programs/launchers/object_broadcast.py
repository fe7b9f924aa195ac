"""broadcast.py of mpi4py of "集合通信" with mpiexec and torchrun.

Mended: comm.bcast is broadcast_object_list.
"""

import gpucoll.distributed as dist

dist.init_process_group()
rank = dist.get_rank()
data = {'key1': [7, 2.72, 2 + 3j], 'key2': ('abc', 'xyz')} if rank == 0 else None
data = [data]
dist.broadcast_object_list(data, src=0)
print(f"rank {rank} data is {data[0]}")
