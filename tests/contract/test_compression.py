"""Compression of gradients on every executor: later steps make up for losses, and the sent bytes are counted."""


import numpy
import pytest

import gpucoll as gc
from gpucoll import training
from gpucoll.training.compression import COMPRESSIONS
from harness.thread_ranks import on_threads
from oracles import learning, oracle


def compressed(comm, make):
    """The given means and the remaining losses add up to all gradients; every rank has the same bits."""
    shapes = {"w": (64, 96), "v": (96,), "u": (3, 5, 70)}
    compression = make()
    trainer = training.DataParallel({name: numpy.zeros(shape, "f4") for name, shape in shapes.items()}, comm, 1 << 14,
                                    compression)
    given, came = ({name: numpy.zeros(shape) for name, shape in shapes.items()} for _ in range(2))
    for step in range(6):
        for name in reversed(shapes):
            mine = [numpy.random.default_rng([step, rank, len(shapes[name])]).standard_normal(shapes[name]).astype("f4")
                    for rank in range(comm.size)]
            trainer.ready(name, mine[comm.rank])
            came[name] += sum(mine) / comm.size
        trainer.finish()
        for name, mean in trainer.gradients.items():
            given[name] += mean
            assert (comm.all_gather(mean.view("u4")) == mean.view("u4")).all()
    for name in shapes:
        lost = compression.of(name).lost.get(name)
        lost = 0 if lost is None else comm.all_reduce(numpy.asarray(lost, "f8")) / comm.size
        tolerance = TOLERANCE.get(str(compression), 1e-5) if comm.size > 1 else 1e-5
        assert numpy.abs(given[name] + lost - came[name]).max() < tolerance * 6
    if comm.size > 1 and str(compression) in SAVED:
        assert compression.exact_bytes / compression.wire_bytes >= SAVED[str(compression)]


TOLERANCE = {"Cast()": 0.02, "PowerSGD()": 1e-3}  # the sum of the ranks is rounded as well
SAVED = {"Cast()": 2, "Int8()": 3.5, "PowerSGD()": 4}


@pytest.mark.parametrize("name", [*COMPRESSIONS, "policy"])
def test_compression_loses_nothing_for_good(executor, name):
    make = COMPRESSIONS.get(name, lambda: training.Policy({"v": training.Int8(32), "w": training.PowerSGD(2)}))
    for size in (1, 3):
        executor.run(size, compressed, make)


def test_sixteen_bits_and_eight_are_what_they_say():
    """Cast rounds like NumPy, Int8 is off by at most a step, and TopK keeps exactly the largest values."""
    values = numpy.random.default_rng(1).standard_normal(1000).astype("f4")

    def program(comm, compression):
        trainer = training.DataParallel({"w": numpy.zeros(1000, "f4")}, comm, compression=compression)
        trainer.ready("w", values)
        trainer.finish()
        return trainer.gradients["w"].copy()

    (found,) = on_threads(1, program, training.Cast("float16"))
    assert (found == values.astype("f2").astype("f4")).all()
    (found,) = on_threads(1, program, training.Int8(100))
    step = numpy.abs(values.reshape(10, 100)).max(1, keepdims=True) / 127
    assert (numpy.abs(found - values).reshape(10, 100) <= step * 1.01).all()
    (found,) = on_threads(1, program, training.TopK(0.01))
    largest = numpy.argsort(-numpy.abs(values))[:10]
    assert (numpy.flatnonzero(found) == numpy.sort(largest)).all()
    assert (found[largest] == values[largest]).all()


def test_what_a_mean_of_float16_loses_stays_finite():
    """The mean, 5 * 2^13, is sent as 4 * 2^13; eight times the difference is 2^16, and float16 ends below."""
    def program(comm):
        compression = training.BlockScaled("mxfp4")
        trainer = training.DataParallel({"w": numpy.zeros(256, "f2")}, comm, compression=compression)
        for _ in range(3):
            trainer.ready("w", numpy.full(256, (4, 6)[comm.rank % 2] * 2.0**13, "f2"))
            trainer.finish()
            assert numpy.isfinite(trainer.gradients["w"]).all()
            assert numpy.isfinite(compression.lost["w"]).all()

    on_threads(8, program)


def low_rank(comm):
    """Gradients of the rank kept by PowerSGD are exact from the second step on."""
    chance = numpy.random.default_rng(comm.rank)
    left, right = numpy.random.default_rng(9).standard_normal((40, 2)), chance.standard_normal((2, 30))
    trainer = training.DataParallel({"w": numpy.zeros((40, 30))}, comm, compression=training.PowerSGD(2))
    for _ in range(3):
        trainer.ready("w", left @ right)
        trainer.finish()
    mean = comm.all_reduce(left @ right) / comm.size
    assert learning.apart(trainer.gradients, {"w": mean}) < 1e-12
    assert trainer._compression.exact_bytes / trainer._compression.wire_bytes > 8


def test_power_sgd_is_exact_where_it_can_be(executor):
    executor.run(3, low_rank)


def revived(comm, dtype, scale, first):
    """A gradient of rank 2 passes at any scale, even after a first gradient of zeros, infinities or NaN."""
    chance = numpy.random.default_rng(3)
    matrix = (chance.standard_normal((32, 2)) @ chance.standard_normal((2, 32)) * scale).astype("f4")
    trainer = training.DataParallel({"w": numpy.zeros((32, 32), "f4")}, comm, compression=training.PowerSGD(2, dtype))
    with numpy.errstate(all="ignore"):
        for number in range(6):
            trainer.ready("w", matrix if number or first is None else numpy.full_like(matrix, first))
            trainer.finish()
    assert numpy.abs(trainer.gradients["w"] - matrix).max() < 0.2 * scale


@pytest.mark.parametrize(("dtype", "scale", "first"), [
    ("float16", 1e-6, None), ("float16", 100.0, None), ("float16", 1.0, 0.0), (None, 1.0, 0.0), (None, 1.0, numpy.inf),
    ("float16", 1.0, numpy.inf), ("bfloat16", 1e-6, numpy.nan)])
def test_power_sgd_goes_on_from_what_is_nothing_or_no_number(dtype, scale, first):
    on_threads(2, revived, dtype, scale, first)


def counted(comm, stage):
    """Uncompressed parameters are counted, too; a reduce-scatter sends half of an all-reduce."""
    both = training.Policy({"bias": training.Exact(), "w": (short := training.Cast("float16")), "v": short})
    trainer = training.ZeRO({"w": numpy.zeros((8, 8), "f4"), "v": numpy.zeros(64, "f4"), "bias": numpy.zeros(8, "f4")},
                            comm, training.SGD(1.0), stage, both)
    for name, shape in (("bias", 8), ("v", 64), ("w", (8, 8))):
        trainer.ready(name, numpy.ones(shape, "f4"))
    trainer.step()
    assert (both.exact_bytes, both.wire_bytes) == (2 * 128 * 4 / 2 * 1 + 32, 128 * 2 + 16)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_exact_ones_count_too(stage):
    on_threads(2, counted, stage)


def resumed_with_losses(comm, folder):
    """Losses from before a checkpoint are made up for afterwards, even on another number of ranks."""
    if comm.size == 4:
        trainer = training.ZeRO({"w": numpy.zeros((8, 9))}, comm, training.SGD(1.0), 2, training.TopK(0.3))
        trainer.ready("w", numpy.arange(72.0).reshape(8, 9) + comm.rank)
        trainer.step()
        trainer.save(folder)
        return
    trainer = training.ZeRO.load(folder, comm, training.SGD(1.0), 1, training.TopK(1.0))
    trainer.ready("w", numpy.zeros((8, 9)))
    trainer.step()
    assert numpy.allclose(trainer.parameters["w"], -(numpy.arange(72.0).reshape(8, 9) + 1.5), rtol=1e-15)


def test_a_checkpoint_has_what_was_lost(executor, tmp_path):
    executor.run(4, resumed_with_losses, tmp_path)
    for size in (1, 3):
        executor.run(size, resumed_with_losses, tmp_path)


def resumed_at_once(comm, folder, kind, dtype):
    """On the same number of ranks, a loaded run goes on with the same bits, and the state keeps its dtype."""
    def step(trainer, number):
        for name in ("v", "w"):
            chance = numpy.random.default_rng([number, comm.rank, len(name)])
            trainer.ready(name, chance.standard_normal(SHAPES[name]).astype(kind))
        trainer.step()

    compression = training.PowerSGD(2, dtype)
    trainer = training.ZeRO({name: numpy.zeros(shape, kind) for name, shape in SHAPES.items()}, comm,
                            training.SGD(0.1), 1, compression)
    for number in range(3):
        step(trainer, number)
    trainer.save(folder)
    again = training.PowerSGD(2, dtype)
    other = training.ZeRO.load(folder, comm, training.SGD(0.1), 1, again)
    assert {name: (row.dtype, row.shape) for name, row in again.state.items()} == {
        name: (row.dtype, row.shape) for name, row in compression.state.items()}
    for one in (trainer, other):
        step(one, 3)
    assert all((other.parameters[name] == array).all() for name, array in trainer.parameters.items())


SHAPES = {"w": (12, 9), "v": (5,)}


@pytest.mark.parametrize(("kind", "dtype"), [("f4", None), ("f4", "float16"), ("f2", None), ("f8", "bfloat16")])
def test_power_sgd_goes_on_from_a_checkpoint(executor, tmp_path, kind, dtype):
    executor.run(2, resumed_at_once, tmp_path, kind, dtype)


def given_up(comm, folder, make):
    """A step lacking a gradient, also the first one after a checkpoint, changes no state; the next step goes on."""
    kept, again, values = make(), make(), numpy.random.default_rng(comm.rank).standard_normal((8, 8))
    first = training.ZeRO({"w": numpy.zeros((8, 8))}, comm, training.SGD(1.0), 1, kept)
    first.ready("w", values)
    first.step()
    first.save(folder)
    loaded, mean = training.ZeRO.load(folder, comm, training.SGD(1.0), 1, again), comm.all_reduce(values) / comm.size
    for trainer, compression in ((first, kept), (loaded, again)):
        before = {name: row.copy() for name, row in compression.state.items()}
        assert any(row.any() for row in before.values())
        if comm.rank == 0:
            trainer.ready("w", values)
        with pytest.raises((gc.ArgumentError, gc.PeerError), match="are missing on rank 1"):
            trainer.step()
        assert all((compression.state[name] == row).all() for name, row in before.items())
        trainer.ready("w", values)
        trainer.step()
        lost = comm.all_reduce(numpy.asarray(compression.lost["w"])) / comm.size
        assert numpy.abs(trainer.parameters["w"] - lost + 2 * mean).max() < TOLERANCE.get(str(compression), 1e-6)


@pytest.mark.parametrize("name", ["float16", "int8", "topk", "powersgd"])
def test_a_step_that_is_given_up(executor, tmp_path, name):
    executor.run(2, given_up, tmp_path, COMPRESSIONS[name])


def narrow(comm, dtype, make):
    """Short dtypes are compressed like the others: sums stay finite and near to the exact sums."""
    values = numpy.random.default_rng(3).standard_normal((16, 40)).astype(oracle.kind(dtype))
    trainer = training.DataParallel({"w": numpy.zeros((16, 40), oracle.kind(dtype))}, comm, compression=make())
    total = numpy.zeros((16, 40))
    for _ in range(20):
        trainer.ready("w", values)
        trainer.finish()
        total += trainer.gradients["w"].astype("f8")
    assert numpy.isfinite(total).all()
    assert numpy.abs(total / 20 - values.astype("f8")).max() < 1.2
    assert numpy.median(numpy.abs(total / 20 - values.astype("f8"))) < 0.4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["int8", "topk", "powersgd"])
def test_short_dtypes(dtype, name):
    on_threads(2, narrow, dtype, COMPRESSIONS[name])


@pytest.mark.parametrize(("kind", "wrong"), [
    (training.Cast, "float32"), (training.Cast, "float8_e5m2"), (training.Cast, None), (training.TopK, "x"),
    (training.TopK, True), (training.TopK, 0), (training.Policy, 3), (training.Policy, {"*": "int8"}),
    (training.Policy, {3: training.Int8()}), (training.Int8, 0), (training.PowerSGD, 1.5)])
def test_what_no_compression_is_made_of(kind, wrong):
    with pytest.raises(gc.ArgumentError, match=kind.__name__) as refused:
        kind(wrong)
    assert refused.value.code == "GC-COMPRESSION"


def kinds(comm):
    for dtype, compression in (("i4", None), ("c8", training.Int8()), ("c8", training.PowerSGD(1))):
        with pytest.raises(gc.DtypeError, match="cannot form its mean"):
            training.DataParallel({"w": numpy.zeros(3, dtype)}, comm, compression=compression)
    trainer = training.DataParallel({"w": numpy.zeros(3, "c8"), "none": numpy.zeros((0, 4))}, comm)
    trainer.ready("w", numpy.full(3, 1 + 2j * comm.rank, "c8"))
    trainer.ready("none", numpy.zeros((0, 4)))
    trainer.finish()
    assert (trainer.gradients["w"] == 1 + 1j * (comm.size - 1)).all()


def test_dtypes(executor):
    executor.run(3, kinds)
