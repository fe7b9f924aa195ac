"""`run_local`: results in rank order, the first error, no wait for failed ranks; objects."""

import time

import numpy
import pytest

import gpucoll as gc


def test_results_are_in_the_order_of_ranks():
    found = gc.run_local(lambda comm: (comm.rank, comm.all_reduce(numpy.full(2, comm.rank + 1.0)).tolist()), 3)
    assert found == [(rank, [6.0, 6.0]) for rank in range(3)]


@pytest.mark.parametrize("executor", ["shared", "mpi"])
def test_the_first_error_is_raised_and_ends_the_others_waits(executor):
    def one_fails(comm):
        if comm.rank == 1:
            raise KeyError("planted")
        comm.all_reduce(numpy.ones(3))

    began = time.monotonic()
    with pytest.raises(KeyError, match="planted") as error:
        gc.run_local(one_fails, 3, timeout=600.0, executor=executor)
    assert error.value.__notes__ == ["on rank 1 of 3"]
    assert time.monotonic() - began < 300


def test_what_is_no_number_of_ranks_is_refused():
    with pytest.raises(gc.ArgumentError):
        gc.run_local(lambda comm: None, 0)
    assert gc.run_local(lambda comm: comm.size, numpy.int64(2)) == [2, 2]


class Stubborn:
    def __reduce__(self):
        raise OSError("planted")


def objects(comm):
    """Each rank's objects arrive unchanged; a rank unable to give an object raises, and the next call works."""
    root, mine = comm.size - 1, {"rank": comm.rank, "data": "x" * comm.rank}
    everyone = [{"rank": rank, "data": "x" * rank} for rank in range(comm.size)]
    assert comm.all_gather_object(mine) == everyone
    assert comm.gather_object(mine, root) == (everyone if comm.rank == root else None)
    assert comm.broadcast_object(mine if comm.rank == root else None, root) == everyone[root]
    assert comm.scatter_object(everyone if comm.rank == root else None, root) == mine
    with comm.group():
        for call in (comm.all_gather_object, comm.gather_object, comm.broadcast_object, comm.scatter_object):
            with pytest.raises(gc.UsageError, match="outside the group"):
                call(everyone)
    if comm.size == 1:
        return
    wrong = Stubborn() if comm.rank == 1 else 1
    for call in (lambda: comm.all_gather_object(wrong), lambda: comm.gather_object(wrong),
                 lambda: comm.broadcast_object(wrong, 1), lambda: comm.scatter_object([wrong] * comm.size, 1),
                 lambda: comm.scatter_object([1], 1)):
        with pytest.raises(gc.ArgumentError if comm.rank == 1 else gc.PeerError):
            call()
    assert comm.all_gather_object(comm.rank) == [*range(comm.size)]


@pytest.mark.parametrize("size", [1, 3])
def test_objects(size):
    gc.run_local(objects, size, timeout=60.0)
