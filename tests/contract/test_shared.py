"""The executor `shared` with each way of access to memory, and calls in close succession."""

import contextlib
from unittest import mock

import numpy
import pytest

from gpucoll.arrays.segments import Copier
from gpucoll.executors.engine import plans
from harness.thread_ranks import on_threads
from programs import blocks, collectives

WAYS = ("small", "copied", "mapped")


@contextlib.contextmanager
def way(name):
    """Force a way of access: `small` by the call's size, `copied` by the system, `mapped` if the system refuses."""
    with contextlib.ExitStack() as stack:
        if name != "small":
            for size in ("TINY", "SMALL"):
                stack.enter_context(mock.patch.object(plans, size, 0))
        if name == "mapped":
            stack.enter_context(mock.patch.object(Copier, "read", side_effect=PermissionError("not permitted")))
        yield


@pytest.mark.parametrize("name", WAYS)
def test_gatherings_in_place(name):
    for number, collective in enumerate(("all_gather", "gather")):
        for algorithm in collectives.algorithms(collective):
            if algorithm != "native":
                with way(name):
                    size, many = (3, 2, 4)[number % 3], f"{collective}_v"
                    on_threads(size, blocks.gathered_in_place, collective, algorithm, executor="shared")
                    if algorithm in collectives.algorithms(many):
                        on_threads(size, blocks.unlike_in_place, many, algorithm, executor="shared")
                number += 1


def exscan_in_place(comm, count):
    """The first rank has nothing to wait for, and fills its result: the others still read the same array as input."""
    for turn in range(3):
        x = numpy.arange(count, dtype=numpy.float64) * (comm.rank + 1) + turn
        wanted = sum((numpy.arange(count) * (rank + 1.0) + turn for rank in range(comm.rank)), numpy.zeros(count))
        comm.exscan(x, out=x, algorithm="linear")
        assert (x == wanted).all(), turn


@pytest.mark.parametrize("count", [7, 1 << 20])
def test_an_exscan_in_place(count):
    on_threads(4, exscan_in_place, count, executor="shared")


def long_copies(comm, count):
    """Results written past the caches are right at every offset in a cache line, ends included."""
    for shift, collective in enumerate(("broadcast", "all_gather", "all_to_all")):
        gives, takes = (count if one == collective else count * comm.size for one in ("all_gather", "broadcast"))
        given = numpy.arange(gives if collective == "all_to_all" else count, dtype=numpy.uint16) * 3 + comm.rank
        taken = numpy.full(takes * 2 + 64, 7, numpy.uint8)
        out = taken[shift:shift + len(taken) - 64].view(numpy.uint16)
        if collective == "broadcast":
            out[:] = given
            comm.broadcast(out, root=1, algorithm="linear")
            wanted = numpy.arange(count, dtype=numpy.uint16) * 3 + 1
        else:
            getattr(comm, collective)(given, out, algorithm="direct")
            block = numpy.arange(count * comm.size, dtype=numpy.uint16).reshape(comm.size, count)[comm.rank]
            rows = [numpy.arange(count, dtype=numpy.uint16) if collective == "all_gather" else block] * comm.size
            wanted = numpy.concatenate([row * 3 + rank for rank, row in enumerate(rows)])
        assert (out == wanted).all()
        assert (taken[:shift] == 7).all()
        assert (taken[shift + out.nbytes:] == 7).all()


def test_long_copies():
    on_threads(3, long_copies, (1 << 21) + 13, executor="shared")
