"""1. broadcast of "集合通信".

Mended: arrays in place of tensors; mpiexec starts the processes.
"""

import numpy

import gpucoll.distributed as dist


def run(rank_id, size):
    tensor = numpy.arange(2, dtype=numpy.int64) + 1 + 2 * rank_id
    print('before broadcast', ' Rank ', rank_id, ' has data ', tensor)
    dist.broadcast(tensor, src=0)
    print('after broadcast', ' Rank ', rank_id, ' has data ', tensor)


def init_process(fn, backend='gloo'):
    """ Initialize the distributed environment. """
    dist.init_process_group(backend)
    fn(dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    init_process(run)
