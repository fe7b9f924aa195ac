"""torch.distributed.launch of "Parameter Server and All-Reduce".

Mended: init_process_group, which sets the variables where mpiexec alone has started the program.
"""

import os

import gpucoll.distributed as dist

dist.init_process_group()

print(f" Worldsize : {os.environ['WORLD_SIZE']} rank: {os.environ['RANK']}")
