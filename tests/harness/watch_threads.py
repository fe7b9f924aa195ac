"""Threads watching each other by `gpucoll.health.remote`, as ranks of several hosts do."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

from gpucoll.health.remote import Watch
from gpucoll.transport import rendezvous
from harness.pace import seconds


class Ranks:
    """The part of MPI needed by `Watch`, for threads."""

    def __init__(self, size, patience=20):
        self.size, self._rows, self._barrier = size, [None] * size, threading.Barrier(size)
        self._patience = seconds(patience)

    def of(self, rank):
        ranks = type(self).__new__(type(self))
        vars(ranks).update(vars(self), rank=rank)
        return ranks

    def allgather(self, value):
        self._rows[self.rank] = value
        self._barrier.wait(self._patience)
        rows = list(self._rows)
        self._barrier.wait(self._patience)
        return rows

    def bcast(self, value):
        return self.allgather(value)[0]


@contextlib.contextmanager
def made(ranks, nodes=(0, 0, 1, 1)):
    """Yield the watches of all ranks; close rank 0's last."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        watches = list(pool.map(lambda rank: Watch(ranks.of(rank), nodes), range(len(nodes))))
    yield watches
    for watch in reversed(watches):
        watch.close()


def becomes(done):
    """Return whether `done()` becomes true within some seconds."""
    return rendezvous.becomes(done, seconds(20))
