"""What nearby libraries get wrong without a word: one test for each hazard.

Streams (a rival orders on stream 0, not on the current one) need a GPU; lists that alias one buffer are in
test_distributed.py; the type of NCCL's id is in test_bootstrap.py.
"""

import numpy
import pytest

import gpucoll as gc


def strided_views_keep_what_lies_between(comm):
    room = numpy.full((6, 8), -1.0)
    room[::2, ::2] = comm.rank
    assert (comm.all_reduce(room[::2, ::2]) == sum(range(comm.size))).all()
    comm.all_reduce(room[::2, ::2], out=room[::2, ::2])
    comm.all_gather(room[0, ::2], out=numpy.empty((comm.size, 8))[:, ::2])
    assert (room[1::2] == -1).all()
    assert (room[:, 1::2] == -1).all()


def a_remainder_is_refused_not_dropped(comm):
    for call in (comm.reduce_scatter, comm.all_to_all):
        with pytest.raises(gc.ArgumentError, match="first axis must be"):
            call(numpy.zeros(comm.size * 3 + 1))


def bool_sum_is_or_not_a_sum_of_bytes(comm):
    found = comm.all_reduce(numpy.array([True, False]))
    assert found.dtype == bool
    assert found.tobytes() == b"\x01\x00"


def fortran_order_is_not_sent_as_it_lies(comm):
    plain = numpy.arange(comm.size * 6).reshape(comm.size, 2, 3) * (comm.rank + 1)
    expected = numpy.stack([numpy.arange(comm.size * 6).reshape(comm.size, 2, 3)[comm.rank] * (rank + 1)
                            for rank in range(comm.size)])
    for x in (plain, numpy.asfortranarray(plain)):
        for out in (numpy.empty_like(plain), numpy.asfortranarray(numpy.empty_like(plain))):
            assert (comm.all_to_all(x, out) == expected).all()
            assert (comm.all_reduce(x, out) == comm.all_reduce(plain)).all()


def both_arrays_are_checked(comm):
    good, narrow, short = numpy.zeros((comm.size, 2)), numpy.zeros((comm.size, 2), "f4"), numpy.zeros((comm.size, 1))
    for x, out, error in ((good, narrow, gc.DtypeError), (narrow, good, gc.DtypeError), (good, short, gc.ArgumentError),
                          (short, good, gc.ArgumentError)):
        with pytest.raises(error):
            comm.all_to_all(x, out)


def ranks_are_those_of_the_subgroup(comm):
    turned = comm.split(0, key=-comm.rank)
    assert turned.rank == comm.size - 1 - comm.rank
    assert turned.all_gather(numpy.array([comm.rank])).ravel().tolist() == list(range(comm.size))[::-1]
    assert (turned.broadcast(numpy.array([comm.rank]), root=0) == comm.size - 1).all()
    turned.close()


def odd_counts_are_whole(comm):
    for count in (1, 3, 17, 1023, 4097):
        for algorithm in gc.algorithms("all_reduce"):
            found = comm.all_reduce(numpy.ones(count, numpy.uint8), algorithm=algorithm)
            assert found.tobytes() == bytes([comm.size]) * count


def results_do_not_share_memory(comm):
    """Blocks of a list are views of one array, but apart from each other and from the input."""
    x = numpy.ones((2, 3))
    blocks = comm.all_gather_v(x)
    blocks[0][...] = 7
    assert (x == 1).all()
    assert all((block == 1).all() for block in blocks[1:])


HAZARDS = [strided_views_keep_what_lies_between, a_remainder_is_refused_not_dropped, bool_sum_is_or_not_a_sum_of_bytes,
           fortran_order_is_not_sent_as_it_lies, both_arrays_are_checked, ranks_are_those_of_the_subgroup,
           odd_counts_are_whole, results_do_not_share_memory]


def run(mpi, hazard):
    with gc.Communicator.from_mpi(mpi, timeout=30) as comm:
        hazard(comm)
    return True


@pytest.mark.parametrize("hazard", HAZARDS)
def test_hazard(ranks, hazard):
    ranks(run, 3, hazard)
