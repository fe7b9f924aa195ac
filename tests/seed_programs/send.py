"""torch_mpi_send.py of "集合通信" with mpiexec and torchrun.

Mended: arrays in place of tensors; no frontend to choose: gpucoll.distributed knows rank and world size under every
launcher; the indentation.
"""

import argparse
import os

import numpy

import gpucoll.distributed as dist


def init_global_vars():
    global LOCAL_RANK, WORLD_SIZE, WORLD_RANK
    LOCAL_RANK, WORLD_SIZE, WORLD_RANK = (int(os.environ[name]) for name in ("LOCAL_RANK", "WORLD_SIZE", "RANK"))


def run(backend):
    tensor = numpy.zeros((10, 10))
    if WORLD_RANK == 0:
        for rank_recv in range(1, WORLD_SIZE):
            tensor = numpy.ones((10, 10))
            dist.send(tensor=tensor, dst=rank_recv)
            print(f'worker_{0} sent data to Rank {rank_recv}\n')
    else:
        dist.recv(tensor=tensor, src=0)
        print(f'worker_{WORLD_RANK} has received data {tensor} from rank 0\n')


def init_processes(backend):
    dist.init_process_group(backend)
    init_global_vars()
    print(f"local rank {LOCAL_RANK} world size {WORLD_SIZE} world rank {WORLD_RANK}")
    run(backend)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-rank", type=int, help="Local rank.")
    parser.add_argument("--backend", type=str, default="nccl", choices=['nccl', 'gloo'])
    args = parser.parse_args()
    init_processes(backend=args.backend)
