"""torch.multiprocessing.spawn of "Parameter Server and All-Reduce".

Mended: mpiexec starts the processes; rank and world size are asked of it.
"""

import gpucoll.distributed as dist


# subprocess에서 실행될 함수 정의
def worker(rank, world_size):
    print(f" {world_size} rank: {rank}")


# main process 정의
if __name__ == '__main__':
    dist.init_process_group()
    worker(dist.get_rank(), dist.get_world_size())
