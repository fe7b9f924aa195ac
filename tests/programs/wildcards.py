"""Messages from any source and with any tag, and probes before the receive: programs for ranks of any kind."""

import numpy
import pytest

import gpucoll as gc
from programs.collectives import program

SHORT, LONG = 3, 5000  # elements of an eager and of a rendezvous message


def content(rank, tag, count):
    return numpy.arange(count) * 7 + 1000 * rank + tag


@program
def from_anybody(comm):
    """Rank 0 receives one message of each other rank, in any order, and learns the source from the status."""
    for count in (0, SHORT, LONG):
        for any_tag in (False, True):
            if comm.rank:
                comm.send(content(comm.rank, comm.rank, count), 0, tag=comm.rank if any_tag else 5)
                continue
            left = {*range(1, comm.size)}
            while left:
                out, status = numpy.full(count, -1), gc.Status()
                assert comm.recv(out, gc.ANY_SOURCE, gc.ANY_TAG if any_tag else 5, status) is out
                left.remove(status.source)
                assert status.tag == (status.source if any_tag else 5)
                assert status.count == out.nbytes
                assert (out == content(status.source, status.source, count)).all()
        comm.barrier()


@program
def in_order(comm):
    """Receives with ANY_TAG take a rank's messages in the order of the sends, receives with a tag the first match."""
    tags = [5, 6, 5, 7, 5, 6] * 3
    if comm.rank:
        works = [comm.send(content(comm.rank, place, SHORT if place % 2 else LONG), 0, tag=tag, async_op=True)
                 for place, tag in enumerate(tags)]
        comm.barrier()
        for work in works:
            work.wait()
        return
    comm.barrier()
    for rank in range(1, comm.size):
        left, status = list(enumerate(tags)), gc.Status()
        for turn in range(len(tags)):
            wanted = (gc.ANY_TAG, 5, 6)[turn % 3]
            if wanted not in [tag for _, tag in left]:
                wanted = gc.ANY_TAG
            place, tag = next(pair for pair in left if wanted in (gc.ANY_TAG, pair[1]))
            left.remove((place, tag))
            out = numpy.empty(SHORT if place % 2 else LONG, int)
            comm.recv(out, rank, wanted, status)
            assert (status.source, status.tag, status.count) == (rank, tag, out.nbytes)
            assert (out == content(rank, place, len(out))).all(), (turn, place)


@program
def probed(comm):
    """A probe gives the count, to allocate the receive buffer; the message stays receivable. PROC_NULL is empty."""
    last = comm.size - 1
    mine = content(comm.rank, 9, 10 * comm.rank)
    works = [comm.send(mine, 0, tag=40 + comm.rank, async_op=True)] if comm.rank else []
    comm.barrier()
    if comm.rank == 0:
        assert comm.iprobe(tag=3) is None
        assert comm.iprobe(0) is None
        for source in (last, gc.ANY_SOURCE) if last else ():
            while (found := comm.iprobe(source)) is None:
                pass
            again, status = comm.probe(found.source, found.tag), gc.Status()
            assert comm.probe(source, status=status) is status
            assert (again.source, again.tag, again.count) == (found.source, 40 + found.source, 80 * found.source)
            assert source != last or found.source == last == status.source
        for _ in range(1, comm.size):
            found = comm.probe()
            out = numpy.empty(found.count // 8, int)
            comm.recv(out, found.source, found.tag)
            assert (out == content(found.source, 9, 10 * found.source)).all()
        assert comm.iprobe() is None
    for work in works:
        work.wait()
    status = gc.Status(7, 7, 7)
    out = numpy.full(2, 3)
    for found in (comm.probe(gc.PROC_NULL), comm.iprobe(gc.PROC_NULL), comm.recv(out, gc.PROC_NULL, 0, status) is out
                  and status):
        assert (found.source, found.tag, found.count) == (gc.PROC_NULL, gc.ANY_TAG, 0)
    assert (out == 3).all()


@program
def later(comm):
    """Wildcard receives behind a `Work` and in a group may be posted before any message arrives."""
    others = range(1, comm.size)
    for grouped in (False, True):
        outs, statuses, works = numpy.zeros((comm.size, 4), int), [gc.Status() for _ in range(comm.size)], []
        if comm.rank == 0 and grouped:
            with comm.group():
                for out, status in zip(outs[1:], statuses[1:], strict=True):
                    comm.recv(out, gc.ANY_SOURCE, gc.ANY_TAG, status)
        elif comm.rank == 0:
            works = [comm.recv(outs[other], tag=gc.ANY_TAG, status=statuses[other], async_op=True) for other in others]
        comm.barrier() if not grouped else None
        if comm.rank:
            comm.send(content(comm.rank, 1, 4), 0, tag=comm.rank)
        for work in works:
            work.wait()
        if comm.rank == 0:
            assert {status.source for status in statuses[1:]} == {*others}
            for out, status in zip(outs[1:], statuses[1:], strict=True):
                assert (out == content(status.source, 1, 4)).all()
                assert status.tag == status.source
        comm.barrier()
    named = gc.Status()
    x, out = content(comm.rank, 2, 3), numpy.zeros(3, int)
    work = comm.send(x, comm.rank, tag=4, async_op=True)
    comm.recv(out, comm.rank, 4, named)
    work.wait()
    assert (named.source, named.tag, named.count) == (comm.rank, 4, 24)


@program
def wrong(comm):
    """Wrong wildcard calls are refused; a message of another length is an error, and is consumed."""
    x = numpy.full(3, -1)
    for call in (lambda: comm.send(x, gc.ANY_SOURCE), lambda: comm.send(x, 0, gc.ANY_TAG), lambda: comm.recv(x, -7),
                 lambda: comm.sendrecv(x, x.copy(), 0, gc.ANY_SOURCE), lambda: comm.probe(comm.size),
                 lambda: comm.iprobe(0, 1 << 15), lambda: comm.recv([1], gc.ANY_SOURCE)):
        with pytest.raises(gc.ArgumentError):
            call()
    if comm.rank == 1:
        comm.send(numpy.ones(2, int), 0)
    if comm.rank == 0 and comm.size > 1:
        with pytest.raises(gc.MismatchError, match="sent 16 bytes, out has 24") as error:
            comm.recv(x)
        assert error.value.ranks == (1,)
        assert comm.iprobe() is None
    comm.barrier()

PROGRAMS = (from_anybody, in_order, probed, later, wrong)
