"""Messages between two ranks, groups of calls, splits: programs for ranks of any kind."""

import itertools
import os
import threading

import numpy
import pytest

import gpucoll as gc
from gpucoll.core.dtypes import DTYPES, numpy_dtype


def has_tags(comm):
    """Return whether messages carry tags and lengths: NCCL's, between processes on GPUs, do not."""
    return not comm.options.emulated or comm.mpi is None


def messages(comm):
    """Send and receive strided and empty arrays; receive tags in another order than the sends."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    gaps = numpy.zeros((4, 6), numpy.int32)
    across = numpy.asfortranarray(numpy.full((4, 3), comm.rank, numpy.int32))
    comm.sendrecv(across, gaps[:, ::2], right, left, tag=7)
    assert (gaps[:, ::2] == left).all()
    assert not gaps[:, 1::2].any()
    assert comm.sendrecv(numpy.empty(0), numpy.empty(0), right, left).size == 0
    if comm.size > 1 and comm.rank == 0 and has_tags(comm):
        first = comm.send(numpy.array([1]), comm.size - 1, tag=5, async_op=True)
        comm.send(numpy.array([2]), comm.size - 1, tag=6)
        first.wait()
    if comm.size > 1 and comm.rank == comm.size - 1 and has_tags(comm):
        assert comm.recv(numpy.empty(1, int), 0, tag=6)[0] == 2
        assert comm.recv(numpy.empty(1, int), 0, tag=5)[0] == 1


def groups(comm):
    """Calls in a group start together; without the group, this ring of blocking sends would deadlock."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out, last, big = numpy.zeros(3), numpy.zeros(2), numpy.zeros(300_000)
    with comm.group():
        comm.send(numpy.full(3, comm.rank + 0.5), right)
        assert comm.recv(out, left) is out
        total = comm.all_reduce(numpy.array([comm.rank]))
        comm.send(numpy.full(300_000, float(comm.rank)), left, tag=1)
        comm.recv(big, right, tag=1)
        later = comm.recv(last, left, async_op=True)  # messages between two ranks meet in the order of the calls
        comm.send(numpy.full(2, comm.rank / 4), right, async_op=True)
        work = comm.all_gather(numpy.array([comm.rank]), async_op=True)
        blocks = comm.all_gather_v(numpy.full(comm.rank, comm.rank))
    assert later.is_completed()  # the group completes its calls
    assert (later.wait() == left / 4).all()
    assert (out == left + 0.5).all()
    assert (big == right).all()
    assert total[0] == sum(range(comm.size))
    assert (work.wait()[:, 0] == numpy.arange(comm.size)).all()
    assert all((block == rank).all() and len(block) == rank for rank, block in enumerate(blocks))
    with pytest.raises(gc.UsageError, match="nest"), comm.group(), comm.group():
        pass
    with pytest.raises(KeyError), comm.group():
        raise KeyError("the block failed: nothing is sent")
    assert comm.all_reduce(numpy.array([1]))[0] == comm.size


def splits(comm):
    """Split by color and key, split a part again; a rank in no part gets None."""
    half = comm.split(comm.rank % 2, key=-comm.rank)
    members = sorted((rank for rank in range(comm.size) if rank % 2 == comm.rank % 2), reverse=True)
    assert (half.rank, half.size) == (members.index(comm.rank), len(members))
    assert half.options == comm.options
    assert (half.all_gather(numpy.array([comm.rank]))[:, 0] == members).all()
    nobody = comm.split(None if comm.rank else 3)
    assert (nobody is None) == bool(comm.rank)
    quarter = half.split(half.rank // 2)
    assert quarter.size == min(2, half.size - half.rank // 2 * 2)
    for one in (quarter, half, nobody):
        if one is not None:
            one.close()
    assert comm.all_reduce(numpy.array([1]))[0] == comm.size


def wrong_lengths(comm):
    """A message of the wrong length is an error on the receiver, and the receiver can go on."""
    x = numpy.zeros(4)
    if not has_tags(comm):
        return
    if comm.size > 1 and comm.rank == 0:
        comm.send(numpy.arange(3.0), 1)
        comm.send(numpy.arange(3.0), 1)
    elif comm.rank == 1:
        with pytest.raises(gc.MismatchError, match="sent 24 bytes, out has 32") as mismatch:
            comm.recv(x, 0)
        assert mismatch.value.ranks == (0,)
        with pytest.raises(gc.MismatchError, match="out has 16"):
            comm.recv(x[:2], 0)
    comm.barrier()


def wrong_dtypes(comm):
    """A message of the wrong dtype is an error on the receiver; the array is unchanged, the next message received."""
    names = [] if comm.options.emulated or comm.size == 1 else list(DTYPES)
    receives = (lambda out: comm.recv(out, 0), lambda out: comm.recv(out, 0, async_op=True).wait(),
                lambda out: comm.plan("recv", out=out, src=0)(), lambda out: comm.recv(out, gc.ANY_SOURCE))
    for nbytes, (sent, wanted) in itertools.product((16, 1 << 16), itertools.pairwise([*names, *names[:1]])):
        content = (numpy.arange(nbytes) % 2).astype(numpy.uint8)  # 0 and 1 are valid in every dtype
        x = content.view(numpy_dtype(sent))
        if comm.rank == 0:
            for _ in receives:
                comm.send(x, 1)
            comm.send(x, 1, async_op=True).wait()
        elif comm.rank == 1:
            for receive in receives:
                out = (1 - content).view(numpy_dtype(wanted))
                with pytest.raises(gc.MismatchError, match=f"sent {sent}, out is {wanted}") as mismatch:
                    receive(out)
                assert (mismatch.value.code, mismatch.value.ranks) == ("GC-DTYPE", (0,))
                assert (out.view(numpy.uint8) == 1 - content).all()
            out = (1 - content).view(x.dtype)
            assert (comm.recv(out, 0).view(numpy.uint8) == content).all()
        comm.barrier()  # over MPI a later message of the right dtype would be taken first


def in_order(comm):
    """A blocking send does not overtake an earlier send that waits for the stepping lock, held by another thread."""
    if comm.rank == 0 and comm.size > 1:
        waits, sent = comm._core.waits, threading.Event()
        with waits._stepping:
            first = comm.send(numpy.array([1]), 1, async_op=True)

            def then_begin():
                while len(waits._alone) < 2 and not sent.is_set():
                    os.sched_yield()
                waits._stepping.release()

            thread = threading.Thread(target=then_begin)
            thread.start()
            comm.send(numpy.array([2]), 1)
            sent.set()
            thread.join()
            waits._stepping.acquire()
        first.wait()
    if comm.rank == 1:
        assert [comm.recv(numpy.empty(1, int), 0)[0] for _ in range(2)] == [1, 2]
    comm.barrier()


def refused(comm):
    """Messages with invalid arguments, or on a closed communicator, raise typed errors."""
    x, other = numpy.zeros(3), comm.split(comm.rank)
    for call in (lambda: comm.send(x, comm.size), lambda: comm.recv(x, -7), lambda: comm.send(x, 0, tag=-1),
                 lambda: comm.send(None, 0), lambda: comm.recv(None, 0), lambda: comm.sendrecv(None, x, 0, 0),
                 lambda: comm.sendrecv(x, None, 0, 0), lambda: comm.sendrecv(x, x, 0, 0),
                 lambda: comm.sendrecv(x[:2], x[1:], 0, 0)):
        with pytest.raises(gc.ArgumentError):
            call()
    with pytest.raises(gc.DtypeError, match="byte order"):
        comm.send(x.astype(">f4"), 0)
    x.flags.writeable = False
    with pytest.raises(gc.ArgumentError):
        comm.recv(x, 0)
    other.close()
    with pytest.raises(gc.ClosedError):
        other.send(x, 0)


class Stop(BaseException):
    """The exception raised by the signal handler."""


class Stopping:
    """A link whose method `call` raises an error, after the real call or instead of the call."""

    def __init__(self, points, call, error, *, after):
        self._points, self._call, self._error, self._after = points, call, error, after

    def __getattr__(self, name):
        call = getattr(self._points, name)

        def stops(*arguments):
            if self._after:
                call(*arguments)
            raise self._error

        return stops if name == self._call else call


def broken_off(comm):
    """A message broken off by a signal or by an error of MPI revokes the communicator."""
    if comm.options.emulated:  # they do not come by a carrier
        return
    errors = [(Stop(), Stop, True)]
    if comm.mpi is not None:  # threads do not use MPI
        from mpi4py import MPI

        errors.append((MPI.Exception(MPI.ERR_OTHER), gc.BackendError, False))
    x, out = numpy.ones(3), numpy.zeros(3)
    for call in ("Irecv", "Isend"):
        for error, kind, after in errors:
            other = comm.split(comm.rank)
            carrier = Stopping(other._points.carrier, call, error, after=after)
            other._core.link.points = other._points.carrier = carrier  # the engine leaves its own way, too
            with pytest.raises(kind):
                other.sendrecv(x, out, 0, 0)
            with pytest.raises(gc.RevokedError):
                other.send(x, 0)
            other.close()


def all_programs(comm):
    for program in (messages, groups, splits, wrong_lengths, wrong_dtypes, in_order, refused, broken_off):
        program(comm)
