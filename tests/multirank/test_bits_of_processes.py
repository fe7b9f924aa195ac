"""The contract of bits between processes: a node's memory, messages, and two pretended nodes."""

import itertools

import numpy
import pytest

import gpucoll as gc
from gpucoll import training
from harness.grids import generator, often
from harness.node_ranks import on_two_nodes
from harness.pace import seconds
from oracles import bits, global_batch

ORACLES = {True: bits.in_order, "exact": bits.exact}
DRAWS = 6  # for a number of ranks


def made(mpi, how, deterministic):
    if how == "hybrid":
        return on_two_nodes(mpi, None, deterministic=deterministic)
    return gc.Communicator.from_mpi(mpi, executor=how, deterministic=deterministic, timeout=seconds(60))


def drawn_cases(mpi, how, draws):
    for deterministic, oracle in ORACLES.items():
        random = generator(f"processes/{how}/{mpi.size}/{deterministic}")
        exact = deterministic == "exact"
        names = [name for name in bits.FLOATS if not exact or name in bits.FORMATS or "complex" in name]
        with made(mpi, how, deterministic) as comm:
            for _ in range(draws):
                name = random.choice(names)
                op = random.choice(bits.ROUNDED if exact or "complex" in name else bits.ORDERED)
                bits.check(comm, bits.case(random, name, op, comm.size), oracle, random)


@pytest.mark.parametrize("how", ["shared", "hybrid", pytest.param("mpi", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("size", "draws"), [(4, DRAWS), *(pytest.param(size, 60 * DRAWS, marks=pytest.mark.nightly)
                                               for size in (2, 3, 4, 8))])
def test_drawn_cases(ranks, how, size, draws):
    ranks(drawn_cases, size, how, draws, timeout=seconds(200 if draws == DRAWS else 2000))


def native_is_refused(mpi):
    for deterministic in ORACLES:
        with made(mpi, "native", deterministic) as comm:
            for algorithm in ("auto", "native"):
                with pytest.raises(gc.ArgumentError, match="GC-DETERMINISTIC"):
                    comm.all_reduce(numpy.ones(5, "f4"), algorithm=algorithm)
            assert (comm.all_reduce(numpy.ones(5, "i4")) == comm.size).all()


def test_mpis_own_sums_are_refused(ranks):
    ranks(native_is_refused, 2)


def trained(mpi, strategy):
    weights = {"w": numpy.zeros(global_batch.FEATURES, "f4")}
    with gc.Communicator.from_mpi(mpi, deterministic="exact", timeout=seconds(60)) as comm:
        optimizer = training.SGD(global_batch.RATE)
        model = training.DataParallel(weights, comm) if strategy == "data parallel" else \
            training.ZeRO(weights, comm, optimizer, stage=2)
        for _ in range(global_batch.STEPS):
            model.ready("w", global_batch.gradient(weights["w"], comm.rank, comm.size))
            if strategy == "data parallel":
                model.finish()
                optimizer.step(weights, model.gradients)
            else:
                model.step()
        return weights["w"].tobytes()


@pytest.mark.parametrize(("strategy", "size"), often(
    [*itertools.product(("data parallel", "ZeRO"), (2, 4, 8))], ("data parallel", 4), ("ZeRO", 2)))
def test_training_has_the_same_bits_on_any_number_of_ranks(ranks, strategy, size):
    assert {*ranks(trained, size, strategy)} == {global_batch.trained().tobytes()}


def test_the_batch_needs_exact_sums():
    """Sums in rank order give other bits, on 4 and on 8 ranks."""
    exact, *in_order = (global_batch.trained(size).tobytes() for size in (1, 4, 8))
    assert len({exact, *in_order}) == 3
