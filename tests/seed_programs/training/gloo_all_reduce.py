"""gloo_allreduce of "Distributed Training Collective Communication".

Mended: mpiexec in place of Ray, which starts the processes there; a copy, since all_reduce works in place.
"""

import numpy as np

import gpucoll.distributed as dist


def gloo_allreduce(rank, world_size):
    Sendbuf = np.array([[1, 2, 3], [1, 2, 3]], dtype=np.float32)
    recvbuf = Sendbuf.copy()

    # 标明发送者和接收者并直接调用AllReduce算法
    dist.all_reduce(recvbuf, op=dist.ReduceOp.SUM)
    print(f"[{rank}] {recvbuf}")


dist.init_process_group("gloo")
gloo_allreduce(dist.get_rank(), dist.get_world_size())
