"""Messages between processes of a node by the engine: in any order, of any length, more than a mailbox holds."""

import gc as collector
import threading
import time
import weakref

import numpy
import pytest

import gpucoll as gc
from harness.node_ranks import on_shared
from harness.pace import seconds

SHORT, LETTERS = 1 << 13, 8  # most bytes of an eager message, and slots of a mailbox, as in kernels/engine/mail.h
LENGTHS = (0, 1, 7, SHORT // 8, SHORT // 8 + 1, 100_000)


def content(count, *key):
    return numpy.arange(count) * 7 + sum(1000 ** place * one for place, one in enumerate(key))


@on_shared
def around(comm):
    """Each rank sends to the next, with new content in each turn; sent arrays may change once the call has returned."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in LENGTHS:
        for memory in (numpy.zeros, comm.zeros):
            x, out = memory(count, "i8"), memory(count, "i8")
            for turn in range(3 * LETTERS):
                x[:] = content(count, comm.rank, turn)
                assert comm.sendrecv(x, out, right, left, tag=turn % 3) is out
                x[:] = -1
                assert (out == content(count, left, turn)).all(), (count, turn)
    assert type(comm._points.carrier).__name__ == "MessagePort"


@on_shared
def backwards(comm):
    """Many messages are under way, and received in the opposite order of the sends."""
    many = 4 * LETTERS
    for count in (3, 5000):
        if comm.rank == 0:
            works = [comm.send(content(count, tag, peer), peer, tag, async_op=True)
                     for tag in range(many) for peer in range(1, comm.size)]
            for work in works:
                work.wait()
        else:
            for tag in reversed(range(many)):
                assert (comm.recv(numpy.zeros(count, "i8"), 0, tag) == content(count, tag, comm.rank)).all(), tag
        comm.barrier()


@on_shared
def not_taken(comm):
    """Messages beyond the slots of a mailbox do not overwrite the first messages while the receiver is away."""
    many = 4 * LETTERS
    if comm.rank == 0:
        works = [comm.send(content(3, tag), 1, tag, async_op=True) for tag in range(many)]
        comm.mpi.Barrier()  # before this barrier rank 1 is in no call of gpucoll
        for work in works:
            work.wait()
    elif comm.rank == 1:
        comm.mpi.Barrier()
        assert comm.iprobe(0, 0) is not None
        for tag in range(many):
            assert (comm.recv(numpy.zeros(3, "i8"), 0, tag) == content(3, tag)).all(), tag


@on_shared
def same_tag(comm):
    """Messages with one tag arrive in the order of the sends, with receives posted before or after the sends."""
    if comm.rank == 0:
        for turn in range(3 * LETTERS):
            comm.send(content(4, turn), 1)
        comm.send(numpy.zeros(1), 1, tag=9)
        comm.recv(numpy.zeros(1), 1, tag=9)
        for turn in range(3 * LETTERS):
            comm.send(content(4, turn), 1)
    elif comm.rank == 1:
        comm.recv(numpy.zeros(1), 0, tag=9)  # afterwards all messages with tag 0 have arrived
        for turn in range(3 * LETTERS):
            assert (comm.recv(numpy.zeros(4, "i8"), 0) == content(4, turn)).all(), turn
        outs = [numpy.zeros(4, "i8") for _ in range(3 * LETTERS)]
        works = [comm.recv(out, 0, async_op=True) for out in outs]
        comm.send(numpy.zeros(1), 0, tag=9)
        for turn, work in enumerate(works):
            assert (work.wait() == content(4, turn)).all(), turn


@on_shared
def to_oneself(comm):
    for count in LENGTHS:
        x, out = content(count, comm.rank), numpy.zeros(count, "i8")
        comm.sendrecv(x, out, comm.rank, comm.rank)
        assert (out == x).all()


@on_shared
def lengths(comm):
    """A message of another length than its destination raises and writes nothing; the next message is right."""
    for sent, room in ((3, 4), (4, 3), (2000, 3), (3, 2000), (2000, 3000)):
        out = numpy.full(room, -1)
        if comm.rank == 0:
            comm.send(content(sent), 1)
        elif comm.rank == 1:
            with pytest.raises(gc.MismatchError) as differ:
                comm.recv(out, 0)
            assert differ.value.ranks == (0,)
            assert f"{8 * sent} bytes" in str(differ.value)
            assert (out == -1).all()
    around.__wrapped__(comm)


def nobody_sends(mpi):
    """A receive without a message ends at the deadline, and a later message is not written to the receive's array."""
    with gc.Communicator.from_mpi(mpi, executor="shared", timeout=seconds(2)) as comm:
        out = numpy.zeros(4)
        if comm.rank == 1:
            with pytest.raises(gc.CollectiveTimeout):
                comm.recv(out, 0)
        mpi.Barrier()
        if comm.rank == 0:
            comm.send(numpy.ones(4), 1)
        mpi.Barrier()
        if comm.rank == 1:
            with pytest.raises(gc.RevokedError):
                comm.recv(out, 0)
            assert (out == 0).all()
        comm._core.waits.failure = comm._core.waits.failure or gc.UsageError("on purpose")


@on_shared
def wrong_requests(comm):
    for wrong in ((True, numpy.zeros((4, 4))[:, 1], 0, 0), (True, numpy.zeros(4), comm.size, 0)):
        with pytest.raises(ValueError, match="no message"):
            comm._core.host._shared.engine.message(*wrong)
    with pytest.raises(TypeError):
        comm._core.host._shared.engine.message(True, [0], 0, 0)


@on_shared
def collected(comm):
    """The collector frees a request and an array referring to each other; the message goes to the next receive."""
    if comm.rank == 0:
        row = numpy.zeros(4, "i8").view(type("Row", (numpy.ndarray,), {}))
        row.request = comm._core.host._shared.engine.message(False, row, 1, 7)
        gone = weakref.ref(row)
        del row
        collector.collect()
        assert gone() is None
    comm.barrier()
    if comm.rank == 0:
        assert (comm.recv(numpy.zeros(4, "i8"), 1, 7) == content(4, 7)).all()
    elif comm.rank == 1:
        comm.send(content(4, 7), 0, 7)


@on_shared
def dropped(comm):
    """A thread drops a request while another thread waits for a message: repeat until both happen at once."""
    hit = numpy.zeros(1)
    for turn in range(1000):
        if comm.rank == 0:
            dropped_beside(comm, hit)
        elif comm.rank == 1:
            until = time.monotonic() + 1e-3
            while time.monotonic() < until:  # let rank 0 poll for the message for a while
                pass
            comm.send(content(4, turn), 0, 3)
        comm.barrier()  # afterwards the request is dropped
        if comm.rank == 1:
            comm.send(content(4, turn + 1), 0, 7)
        else:
            assert (comm.recv(numpy.zeros(4, "i8"), 1, 7) == content(4, turn + 1)).all()
        if comm.broadcast(hit)[0]:
            return
    raise AssertionError("no request was dropped beside a message")


def dropped_beside(comm, hit):
    """Receive a message while another thread drops the request of a second message; set `hit` if both coincided."""
    engine, row = comm._core.host._shared.engine, numpy.zeros(4, "i8")
    requests, gone, ended = [engine.message(False, row, 1, 7)], weakref.ref(row), threading.Event()
    del row

    def drop():
        while not ended.is_set():
            if engine.is_busy():
                requests.clear()
                hit[0] = engine.is_busy()
                return

    thread = threading.Thread(target=drop)
    thread.start()
    comm.recv(numpy.zeros(4, "i8"), 1, 3)
    ended.set()
    thread.join()
    requests.clear()
    assert gone() is None


CASES = ((around, (2, 3)), (backwards, (3,)), (not_taken, (2,)), (same_tag, (2,)), (to_oneself, (1, 2)),
         (lengths, (2,)), (nobody_sends, (2,)), (wrong_requests, (1,)),
         (collected, (2,)), (dropped, (2,)))


@pytest.mark.parametrize(("body", "size"), [(body, size) for body, sizes in CASES for size in sizes])
def test_mail(ranks, body, size):
    ranks(body, size)
