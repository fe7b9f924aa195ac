"""Programs on the workers of a Dask cluster of four processes: ``dask_job.py PROGRAM SECONDS``.

Run by test_dask_and_ray.py.
"""

import logging
import os
import signal
import sys

import numpy
import pytest
from distributed import Client, LocalCluster

import gpucoll as gc
from gpucoll.dask import Workers

SIZE, TIMEOUT = 4, float(sys.argv[2]) if len(sys.argv) > 2 else 60.0


def totals(comm, count):
    x = numpy.arange(count) * (comm.rank + 1)
    return comm.rank, comm.all_reduce(x).tolist(), comm.all_gather(numpy.full(2, comm.rank)).tolist(), os.getpid()


def failing(comm):
    if comm.rank == 1:
        raise ValueError("of rank 1")
    return comm.all_reduce(numpy.ones(3))


def dying(comm):
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return comm.all_reduce(numpy.ones(3))


def results(client):
    with Workers(client, timeout=TIMEOUT) as ranks:
        for count in (3, 100_000):
            found = ranks.run(totals, count)
            assert [one[:3] for one in found] == [
                (rank, [10 * i for i in range(count)], [[other] * 2 for other in range(SIZE)]) for rank in range(SIZE)]
            assert len({one[3] for one in found}) == SIZE == ranks.size
    with Workers(client, [*client.nthreads()][:2], timeout=TIMEOUT) as ranks:
        assert [one[0] for one in ranks.run(totals, 3)] == [0, 1]


def errors(client):
    for f, kind in ((failing, ValueError), (dying, gc.RankFailedError)):
        with pytest.raises(kind) as caught, Workers(client, timeout=TIMEOUT) as ranks:
            ranks.run(f)
        assert kind is ValueError or caught.value.ranks == (1,)


def nested(client):
    with Workers(client, timeout=TIMEOUT) as ranks:
        with pytest.raises(gc.BackendError, match="GC-DASK"):
            Workers(client, timeout=TIMEOUT).__enter__()
        assert len(ranks.run(totals, 3)) == SIZE


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)  # Dask writes every failed task to standard error
    with LocalCluster(n_workers=SIZE, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as made:
        globals()[sys.argv[1]](made)
