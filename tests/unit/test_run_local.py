"""`run_local`: results in the order of ranks, the first error, and nobody who waits for who has failed."""

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
