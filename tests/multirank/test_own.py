"""A user's algorithm on processes: all ranks must register the same algorithm under one name."""


import numpy
import pytest

import gpucoll as gc
from gpucoll import Copy, RecvReduce, Send, Slice
from harness import leftovers
from harness.pace import seconds


@leftovers.without_algorithms()
def unlike(mpi, name, executor, check):
    """If rank 1 registers another order of additions, all ranks raise, no data move, and the next call is right."""
    def make(rank, size):
        out, others = Slice("output", 0), [peer for peer in range(size) if peer != rank]
        order = others[::-1] if mpi.rank == 1 else others
        yield (*(Send(Slice("input", 0), peer) for peer in others), Copy(Slice("input", 0), out),
               *(RecvReduce(out, peer) for peer in order))

    gc.algorithm("all_reduce", name, chunks=1)(make)
    with gc.Communicator.from_mpi(mpi, executor=executor, check=check, timeout=seconds(20)) as comm:
        x = numpy.arange(5, dtype=numpy.float32)
        with pytest.raises(gc.MismatchError) as caught:
            comm.all_reduce(x, out=x, algorithm=name)
        assert (caught.value.code, caught.value.ranks) == ("GC-ALGO", (1,))
        assert f"by {name} #" in str(caught.value)
        assert (x == numpy.arange(5)).all()
        assert (comm.all_reduce(x, algorithm="ring") == comm.size * x).all()


@leftovers.without_algorithms()
def wrong(mpi, name, executor):
    """A rank with a wrong algorithm raises GC-PROOF, a rank without the algorithm GC-ALGO, and the next call works."""
    def make(rank, size):
        yield (Copy(Slice("input", 0), Slice("output", 0)),) if mpi.rank == 2 else ()

    if mpi.rank:
        gc.algorithm("all_reduce", name, chunks=1)(make)
    with gc.Communicator.from_mpi(mpi, executor=executor, check="full", timeout=seconds(20)) as comm:
        with pytest.raises(gc.ArgumentError) as caught:
            comm.all_reduce(numpy.ones(3), algorithm=name)
        assert caught.value.code == ("GC-PROOF" if comm.rank else "GC-ALGO")
        assert (comm.all_reduce(numpy.ones(3)) == comm.size).all()


@pytest.mark.parametrize("executor", ["shared", "mpi", None])
def test_ranks_with_unlike_generators_are_told(ranks, executor):
    ranks(unlike, 3, f"unlike_{executor}", executor, "full", timeout=seconds(60))


@pytest.mark.emulated
@pytest.mark.parametrize("executor", ["nccl", "peer"])
def test_so_are_those_with_devices(emulated_kernels, rank_pool, executor):
    rank_pool.run(unlike, 3, f"unlike_{executor}", executor, "full", timeout=seconds(120),
                  env={"GPUCOLL_DEVICE": "emulated"})


@pytest.mark.parametrize("executor", ["shared", "mpi"])
def test_a_rank_whose_own_is_wrong_refuses(ranks, executor):
    ranks(wrong, 3, f"wrong_{executor}", executor, timeout=seconds(60))
