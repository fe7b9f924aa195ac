"""The engine's messages by MPI and between threads: in pieces, longer than their room, sent before they are awaited."""

import contextlib
import threading
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.executors.engine import between_nodes
from gpucoll.transport.mailbox import Mailbox
from gpucoll.transport.tags import ENGINE_TAGS
from harness.extension import by_python
from harness.thread_ranks import on_threads


def add_up(comm):
    x = numpy.arange(70001)
    assert (comm.all_reduce(x + comm.rank, algorithm="ring") == x * comm.size + sum(range(comm.size))).all()


def in_pieces(mpi, check, matches):
    with mock.patch.multiple(between_nodes, MAX_MESSAGE=1 << 14, overruns=lambda: matches), \
            gc.Communicator.from_mpi(mpi, executor="mpi", check=check) as comm:
        add_up(comm)


def test_pieces_of_messages_of_python():
    with by_python():
        on_threads(3, add_up, executor="mpi")


class Rung(BaseException):
    """The exception of a signal's handler."""


@pytest.mark.parametrize("method", ["Isend", "Test"])
def test_an_exception_in_messages_of_python_is_raised_as_it_is(method):
    def post(self, mine):
        if mine.sends and mine.key[0] == 1 and mine.key[2] >= ENGINE_TAGS:
            if method == "Isend":
                raise Rung
            mine.Test = mock.Mock(side_effect=[False, Rung, False])
        return posted(self, mine)

    def run(comm):
        with pytest.raises(Rung) if comm.rank == 1 else contextlib.suppress(gc.RankFailedError):
            comm.all_reduce(numpy.ones(5))

    posted = Mailbox.post
    with mock.patch.object(Mailbox, "post", post), by_python():
        on_threads(3, run, executor="mpi")


@pytest.mark.parametrize(("check", "matches"), [(None, False), ("off", True), ("deferred", True)])
def test_messages_in_pieces(ranks, check, matches):
    ranks(in_pieces, 3, check, matches)


@pytest.mark.parametrize(("count", "length"), [(500, 500), (5000, 500)])
def test_a_send_that_has_ended_is_copied_and_none_writes_behind_its_room(count, length):
    memory, sent = numpy.stack([numpy.ones(count), numpy.zeros(count)]), threading.Event()

    def run(comm):
        if comm.rank == 0:
            comm.broadcast(memory[0], algorithm="linear")
            memory[0] = 9
            return sent.set()
        assert count > length or sent.wait(60)
        return comm.broadcast(memory[1][:length], algorithm="linear")

    wrong = pytest.raises(gc.BackendError, match=r"message with rank 0: .*long")
    with wrong if count > length else contextlib.nullcontext():
        on_threads(2, run, executor="mpi", check="off")
    assert (memory[1] == (numpy.arange(count) < length)).all()
