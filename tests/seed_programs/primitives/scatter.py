"""2. scatter of "集合通信".

Mended: arrays in place of tensors; mpiexec starts the processes.
"""

import numpy

import gpucoll.distributed as dist


def run(rank_id, size):
    tensor = numpy.arange(2, dtype=numpy.int64) + 1 + 2 * rank_id
    print('before scatter', ' Rank ', rank_id, ' has data ', tensor)
    if rank_id == 0:
        scatter_list = [numpy.array([0, 0]), numpy.array([1, 1]), numpy.array([2, 2]), numpy.array([3, 3])]
        print('scater list:', scatter_list)
        dist.scatter(tensor, src=0, scatter_list=scatter_list)
    else:
        dist.scatter(tensor, src=0)
    print('after scatter', ' Rank ', rank_id, ' has data ', tensor)


def init_process(fn, backend='gloo'):
    """ Initialize the distributed environment. """
    dist.init_process_group(backend)
    fn(dist.get_rank(), dist.get_world_size())


if __name__ == "__main__":
    init_process(run)
