"""gpucoll.training on every executor, compared with the same training written for a single rank."""

import functools
import math

import numpy
import pytest

import gpucoll as gc
from gpucoll import training
from harness.grids import often
from harness.pace import seconds
from harness.thread_ranks import on_threads
from oracles import learning

CLOSE = 1e-13
STEPS = 5


def whole(zero):
    """Return all parameters in full, gathered if distributed."""
    with zero.layer(learning.SHAPES) as weights:
        return {name: array.copy() for name, array in weights.items()}


def give(trainer, weights, step, rank):
    """Give the trainer a rank's gradients, in a random order of the rank."""
    _, found = learning.gradients(weights, *learning.samples(step, rank))
    for name in numpy.random.default_rng([step, rank]).permutation(list(found)):
        trainer.ready(str(name), found[str(name)])


def data_parallel(comm, make, oracle, bucket_bytes):
    weights = learning.parameters(comm.rank)  # rank 0's values are used on all ranks
    trainer, optimizer = training.DataParallel(weights, comm, bucket_bytes), make()
    for step in range(STEPS):
        give(trainer, weights, step, comm.rank)
        trainer.finish()
        optimizer.step(weights, trainer.gradients)
    assert learning.apart(weights, oracle(learning.parameters(0), STEPS, comm.size)) < CLOSE


OPTIMIZERS = {
    "sgd": (lambda: training.SGD(0.1), functools.partial(learning.sgd, lr=0.1)),
    "momentum": (lambda: training.SGD(0.1, 0.9), functools.partial(learning.sgd, lr=0.1, momentum=0.9)),
    "adam": (lambda: training.Adam(0.01), functools.partial(learning.adamw, lr=0.01)),
    "adamw": (lambda: training.AdamW(0.02, (0.8, 0.95), 1e-3, 0.1),
              functools.partial(learning.adamw, lr=0.02, betas=(0.8, 0.95), eps=1e-3, decay=0.1)),
}


@pytest.mark.parametrize(("size", "name", "bucket_bytes"),
                         [(1, "adam", 1 << 20), (2, "sgd", 1), (3, "momentum", 900), (4, "adamw", 2000)])
def test_data_parallel_is_training_on_one_rank(executor, size, name, bucket_bytes):
    executor.run(size, data_parallel, *OPTIMIZERS[name], bucket_bytes)


def trainer_of_two(comm):
    return training.DataParallel({"w": numpy.zeros((3, 5)), "b": numpy.zeros(7, "f4")}, comm, bucket_bytes=64)


def accumulated(comm):
    """Gradients inside no_sync add up, together with the next gradients; whole numbers make every bit exact."""
    trainer = trainer_of_two(comm)
    for turn in range(3):
        with trainer.no_sync():
            for _ in range(turn):
                trainer.ready("w", numpy.full((3, 5), comm.rank + 1.0))
        trainer.ready("b", numpy.full(7, 4.0 * comm.rank * comm.size, "f4"))
        trainer.ready("w", numpy.full((5, 3), 2.0).T)
        trainer.finish()
        assert (trainer.gradients["w"] == 2 + turn * (comm.size + 1) / 2).all()
        assert (trainer.gradients["b"] == 2 * comm.size * (comm.size - 1)).all()


def in_place(comm):
    """Gradients computed in the trainer's buffer are sent unchanged; inside no_sync, the buffer is the sum already."""
    trainer = trainer_of_two(comm)
    for turn in range(3):
        with trainer.no_sync():
            trainer.gradients["w"][...] = comm.rank
            trainer.ready("w", trainer.gradients["w"])
        trainer.gradients["w"] += turn
        trainer.ready("w", trainer.gradients["w"])
        trainer.gradients["b"][...] = 2 * comm.rank
        trainer.ready("b", trainer.gradients["b"])
        trainer.finish()
        assert (trainer.gradients["w"] == turn + (comm.size - 1) / 2).all()
        assert (trainer.gradients["b"] == comm.size - 1).all()


def refused(comm):
    """A mistake on a rank is an error on all ranks, naming the parameter; the other ranks also learn the rank."""
    weights = {"w": numpy.zeros((3, 5)), "b": numpy.zeros(7)}
    other = weights if comm.rank != 1 else {"w": numpy.zeros((3, 5)), "b": numpy.zeros(8)}
    with pytest.raises(gc.MismatchError, match=r"parameter 1 is b \(7,\) float64 on rank 0 and b \(8,\)") as found:
        training.DataParallel(other, comm)
    assert found.value.ranks == (1,)
    with pytest.raises(gc.MismatchError, match=r"parameter 1 is b .* and missing on rank 2"):
        training.DataParallel(weights if comm.rank != 2 else {"w": weights["w"]}, comm)
    sealed = numpy.zeros((3, 5))
    sealed.flags.writeable = comm.rank != 2
    with pytest.raises(gc.ArgumentError if comm.rank == 2 else gc.PeerError, match="w is read-only"):
        training.ZeRO({"w": sealed}, comm, training.SGD(1))
    for wrong in ({"parameters": [weights["w"]]}, {"compression": "int8"}, {"optimizer": "sgd"}, {"stage": 4}):
        given = {"parameters": weights, "optimizer": training.SGD(1)} | (wrong if comm.rank == 2 else {})
        with pytest.raises(gc.ArgumentError if comm.rank == 2 else gc.PeerError, match="ZeRO: "):
            training.ZeRO(comm=comm, **given)
    for wrong in ({"servers": comm.size}, {"staleness": -1}, {"optimizer": None}):
        given = {"optimizer": training.SGD(1)} | (wrong if comm.rank == 2 else {})
        with pytest.raises(gc.ArgumentError if comm.rank == 2 else gc.PeerError, match="ParameterServer: "):
            training.ParameterServer(weights, comm, **given)
    for trainer in (training.DataParallel(weights, comm), training.ZeRO(weights, comm, training.SGD(1), stage=2)):
        for wrong, gradient in (("v", numpy.zeros(7)), ("b", numpy.zeros(8)), ("b", numpy.zeros(7, "f4"))):
            with pytest.raises((gc.ArgumentError, gc.DtypeError), match="ready"):
                trainer.ready(wrong, gradient)
        trainer.ready("b", numpy.ones(7))
        with pytest.raises(gc.ArgumentError, match="already passed"):
            trainer.ready("b", numpy.ones(7))
        if comm.rank != 2:
            trainer.ready("w", numpy.ones((3, 5)))
        with pytest.raises(gc.ArgumentError if comm.rank == 2 else gc.PeerError, match="gradients of w are missing"):
            trainer.finish() if isinstance(trainer, training.DataParallel) else trainer.step()
        assert not weights["w"].any()
        assert not weights["b"].any()
    assert (comm.all_reduce(numpy.ones(3)) == comm.size).all()  # no message is left behind


@pytest.mark.parametrize("program", [accumulated, in_place, refused], ids=lambda program: program.__name__)
def test_gradients(executor, program):
    executor.run(3, program)


def zero(comm, stage, folder):
    """Train, save after three steps, train on; a run loaded on another number of ranks must reach the same weights."""
    weights = learning.parameters(comm.rank)
    trainer = training.ZeRO(weights, comm, training.AdamW(0.01, weight_decay=0.1), stage)
    elements = sum(array.size for array in weights.values())
    most = elements // comm.size + len(weights)  # each parameter's shard is rounded up
    for step in range(STEPS):
        if step == 3:
            saving = trainer.save(folder, async_op=True)
        now = whole(trainer)
        give(trainer, now, step, comm.rank)
        if step == 3:
            saving.wait()
        trainer.step()
    bytes_of = trainer.memory()
    assert bytes_of["optimizer"] <= 2 * 8 * most
    assert bytes_of["parameters"] == 8 * elements if stage < 3 else bytes_of["parameters"] <= 8 * most
    assert 8 * elements <= bytes_of["gradients"] <= 8 * comm.size * most if stage == 1 else not bytes_of["gradients"]
    wanted = learning.adamw(learning.parameters(0), STEPS, comm.size, decay=0.1)
    assert learning.apart(whole(trainer), wanted) < CLOSE
    if stage < 3:
        assert learning.apart(weights, wanted) < CLOSE


def resumed(comm, stage, folder, size):
    trainer = training.ZeRO.load(folder, comm, training.AdamW(0.01, weight_decay=0.1), stage)
    for step in range(3, STEPS):
        for name, gradient in learning.mean_gradients(whole(trainer), step, size).items():
            trainer.ready(name, gradient)
        trainer.step()
    assert learning.apart(whole(trainer), learning.adamw(learning.parameters(0), STEPS, size, decay=0.1)) < CLOSE
    with pytest.raises(gc.ArgumentError, match="saved with AdamW mean square, this is SGD"):
        training.ZeRO.load(folder, comm, training.SGD(1))


@pytest.mark.parametrize(("kind", "numbers", "named"), [
    (training.SGD, {"lr": "fast"}, "SGD: lr 'fast'"), (training.SGD, {"lr": -0.1}, "SGD: lr -0.1"),
    (training.SGD, {"lr": float("nan")}, "SGD: lr nan"), (training.SGD, {"lr": 1, "momentum": None}, "momentum None"),
    (training.Adam, {"lr": float("inf")}, "Adam: lr inf"), (training.Adam, {"betas": 0.9}, "betas 0.9 are not two"),
    (training.Adam, {"betas": (0.9, 1.0)}, "beta 1.0"), (training.Adam, {"eps": -1e-8}, "eps -1e-08"),
    (training.AdamW, {"weight_decay": "0.1"}, "AdamW: weight_decay '0.1'")])
def test_numbers_that_would_fail_at_the_first_step(kind, numbers, named):
    with pytest.raises(gc.ArgumentError, match=named) as found:
        kind(**numbers)
    assert found.value.code == "GC-OPTIMIZER"


@pytest.mark.parametrize(("size", "stage", "later"), [(1, 1, 2), (3, 1, 4), (4, 2, 1), (2, 3, 3)])
def test_zero_is_training_on_one_rank(executor, size, stage, later, tmp_path):
    executor.run(size, zero, stage, tmp_path)
    executor.run(later, resumed, 4 - stage, tmp_path, size)


def layers(comm):
    """In stage 3, only the layer in use and the next layer exist in full, besides a rank's shards."""
    weights = learning.parameters()
    trainer = training.ZeRO(weights, comm, training.Adam(), stage=3)
    sizes = [8 * sum(weights[name].size for name in names) for names in learning.LAYERS]
    shards = trainer.memory()["parameters"]
    for turn in range(3):
        for names, nbytes in zip(learning.LAYERS, sizes, strict=True):
            with trainer.layer(names) as found:
                coming = sizes[1] if turn and names is learning.LAYERS[0] else 0  # prefetched after the first step
                assert trainer.memory()["parameters"] == shards + nbytes + coming
                assert all((found[name] == weights[name]).all() for name in names)
        assert trainer.memory()["parameters"] == shards
        for name in weights:
            trainer.ready(name, numpy.zeros(weights[name].shape))
        trainer.step()
    with trainer.layer(learning.LAYERS[0]):
        pass  # the prefetched next layer is out of date after a step
    for name, array in weights.items():
        trainer.ready(name, numpy.ones(array.shape))
    trainer.step()
    with trainer.layer(learning.LAYERS[1]) as found:
        assert all((found[name] != weights[name]).all() for name in found)
    with pytest.raises(gc.ArgumentError, match=r"GC-NAME.*no parameter 'scal'; did you mean scale"):
        trainer.layer(["scal"]).__enter__()


def test_layers_are_there_while_they_are_used(executor):
    executor.run(3, layers)


def served(comm, servers, staleness):
    weights = {name: array for name, array in learning.parameters(comm.rank).items()}
    place = training.ParameterServer(weights, comm, servers=servers, optimizer=training.Adam(0.01), staleness=staleness)
    workers, nbytes = comm.size - servers, sum(array.nbytes for array in weights.values())
    if place.is_server:
        place.serve()
        part = math.ceil(nbytes / 8 / servers) * 8
        assert place.traffic["in"] <= workers * STEPS * part
        assert place.traffic["out"] <= workers * (STEPS + 1) * part
        return None
    for step in range(STEPS):
        place.pull()
        place.push(learning.gradients(weights, *learning.samples(step, comm.rank))[1])
    place.pull()
    place.done()
    assert place.traffic == {"in": (STEPS + 1) * nbytes, "out": STEPS * nbytes}
    if staleness == 0:
        assert learning.apart(weights, learning.adamw(learning.parameters(0), STEPS, workers)) < CLOSE
    assert all(numpy.isfinite(array).all() for array in weights.values())
    return place.traffic


@pytest.mark.parametrize(("size", "servers", "staleness"), often(
    [(2, 1, 0), (4, 1, 0), (4, 3, 0), (3, 1, 1), (4, 2, None)], (4, 3, 0), (3, 1, 1), (4, 2, None)))
def test_parameter_servers(executor, size, servers, staleness):
    executor.run(size, served, servers, staleness)


def lost(comm):
    """If lost workers are allowed, a worker leaving without notice does not stop the others."""
    weights = {"w": numpy.zeros(100)}
    place = training.ParameterServer(weights, comm, 1, training.SGD(1.0), may_lose_workers=True)
    if place.is_server:
        place.serve()
        return
    for step in range(4):
        place.pull()
        assert (weights["w"] == -step).all()
        if comm.rank == 1 and step == 2:
            for pair in place._pairs:
                pair._core.waits.failure = gc.UsageError("this worker has died")
                pair.close()
            return
        place.push({"w": numpy.ones(100)})
    place.done()


def test_a_worker_may_be_lost():
    on_threads(4, lost, timeout=seconds(5))


def done_early(comm, order):
    """The last push of a worker counts, and no push before the pushes of other workers is lost."""
    weights = {"w": numpy.zeros(9)}
    place = training.ParameterServer(weights, comm, 2, training.SGD(1.0))
    if place.is_server:
        return [float(row[0]) for row in place.serve().values()]
    place.pull()
    for turn in range(2):
        if comm.rank == order:  # pushes after the other worker, as far as messages can order pushes
            comm.recv(numpy.zeros(1), 1 - order, tag=turn)
        else:
            comm.send(numpy.zeros(1), order, tag=turn)
        place.push({"w": numpy.full(9, 10.0 if comm.rank else 2.0)})
    place.done()
    return None


@pytest.mark.parametrize("order", [0, 1])
def test_a_worker_that_is_done_first_has_pushed(executor, order):
    assert executor.run(4, done_early, order)[2:] == [[-12.0]] * 2
