"""Threads watching each other by `gpucoll.health.remote`, as ranks of several hosts do."""

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

from gpucoll.health.remote import Watch
from gpucoll.transport import kvstore, rendezvous
from gpucoll.transport.connections import Hub
from harness.pace import seconds
from unit.strangers import connected_to

TOKEN = "0123456789abcdef"


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


@contextlib.contextmanager
def listening(size=3, answer=lambda rank, frame: ({}, b""), listener=None):
    """Yield ranks with their hub, and a function connecting to the hub."""
    ranks = kvstore.StoreServer(size, TOKEN)
    ranks.answer = answer
    hub = ranks.hub = Hub({"": ranks}, listener or socket.create_server(("127.0.0.1", 0)), size)
    hub.serve()
    try:
        yield ranks, connected_to(socket.AF_INET, ("127.0.0.1", hub.port))
    finally:
        ranks.end()
        hub.close()


def becomes(done):
    """Return whether `done()` becomes true within some seconds."""
    return rendezvous.becomes(done, seconds(20))
