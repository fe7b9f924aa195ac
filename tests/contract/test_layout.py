"""Global arrays over meshes of ranks, on every executor: random layout changes against NumPy, products, refusals."""

import math
import random

import numpy
import pytest

import gpucoll as gc
from gpucoll import training
from harness.grids import SEED, often

MESHES = [(1,), (2,), (4,), (2, 2), (3, 2), (2, 4), (2, 2, 2)]


def any_spec(chance, names, axes):
    """Return a random spec: each mesh axis divides an axis of the array, or no axis, in any order."""
    found = [[] for _ in range(axes)]
    for name in chance.sample(names, len(names)):
        axis = chance.randrange(axes + 1)
        if axis < axes:
            found[axis].append(name)
    return tuple(entry[0] if len(entry) == 1 else tuple(entry) or None for entry in found)


def parts(shape, spec, mesh_shape, names):
    """Return the element numbers of each rank, found by dividing axis by axis, unlike the library's method."""
    found = []
    for rank in range(math.prod(mesh_shape)):
        here = dict(zip(names, numpy.unravel_index(rank, mesh_shape), strict=True))
        mine = numpy.arange(math.prod(shape)).reshape(shape)
        for axis, entry in enumerate(spec):
            entry = (entry,) if isinstance(entry, str) else entry or ()
            count = math.prod(mesh_shape[names.index(name)] for name in entry)
            index = 0
            for name in entry:
                index = index * mesh_shape[names.index(name)] + int(here[name])
            each = -(-shape[axis] // count)
            mine = numpy.take(mine, range(min(shape[axis], index * each), min(shape[axis], (index + 1) * each)), axis)
        found.append(mine)
    return found


def count_exchanges(comm):
    """Return a list; every exchange appends the numbers of elements received from each rank."""
    came, exchange = [], comm.all_to_all_v

    def counted(rows):
        found = exchange(rows)
        came.append([len(row) for row in found])
        return found

    comm.all_to_all_v = counted
    return came


def changes(comm, mesh_shape, seed, count):
    came = count_exchanges(comm)
    chance, names = random.Random(seed), ["row", "column", "depth"][:len(mesh_shape)]
    mesh = training.Mesh(comm, mesh_shape, names)
    for number in range(count):
        shape = tuple(chance.choice((1, 2, 3, 4, 8, 12)) for _ in range(chance.randint(1, 3)))
        dtype = chance.choice(["f4", "f8", "i4"])
        content = numpy.random.default_rng([number, 7]).integers(0, 1000, shape).astype(dtype)
        here, there = (any_spec(chance, names, len(shape)) for _ in range(2))
        array = training.shard(content, mesh, here)
        plan = training.plan(array, there)
        came.clear()
        moved = training.redistribute(array, there)
        rows = came[:]
        before, after = (parts(shape, spec, mesh_shape, names) for spec in (here, there))
        note = f"seed {seed}, change {number}: {shape} {here} to {there}"
        assert (array.local == content.reshape(-1)[before[comm.rank]]).all(), note
        assert (moved.local == content.reshape(-1)[after[comm.rank]]).all(), note
        assert (moved.gather() == content).all(), note
        fewest = max(len(numpy.setdiff1d(wanted, had)) for had, wanted in zip(before, after, strict=True))
        assert plan.nbytes == fewest * content.itemsize, note
        assert str(plan).count("\n") == len(plan.steps)
        kinds = {step.kind for step in plan.steps}
        assert kinds <= {"local_slice", "all_gather", "all_to_all", "exchange"}
        if kinds == {"exchange"}:  # each element comes once, own elements from the rank itself
            wanted, had = after[comm.rank], before[comm.rank]
            assert sum(rows[0]) == wanted.size, note
            assert rows[0][comm.rank] == numpy.isin(wanted, had).sum(), note
        assert ("local_slice" in kinds) == (fewest == 0 and array.spec != moved.spec), note


@pytest.mark.parametrize("mesh", often([(mesh,) for mesh in MESHES], ((2,),), ((3, 2),)), ids=str)
@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.nightly)])
def test_changes_of_layout(executor, mesh, count):
    executor.run(math.prod(mesh), changes, mesh, f"{SEED}/{count}/{mesh}", count)


def kinds(comm):
    """Each layout change uses the right collective, with the least possible number of bytes."""
    mesh = training.Mesh(comm, (2, 2), ("data", "model"))
    x = numpy.arange(64.0).reshape(8, 8)
    for here, there, kind, nbytes in (
            ((None, None), ("data", "model"), "local_slice", 0), (("data", None), (None, None), "all_gather", 256),
            (("data", None), (None, "data"), "all_to_all", 128),
            (("data", "model"), ("model", "data"), "exchange", 128),
            (("data", "model"), (None, "model"), "all_gather", 128),
            ((("data", "model"), None), (None, ("data", "model")), "exchange", 96)):
        (step,) = training.plan(training.shard(x, mesh, here), there).steps
        assert (step.kind, step.nbytes) == (kind, nbytes)
    whole = training.shard(x, mesh, (None, None))
    assert not numpy.shares_memory(whole.gather(), whole.local)
    alone = training.Linear(training.shard(x, mesh, (None, "model")))  # a batch of a single row: some ranks have none
    alone.forward(training.shard(x[:1], mesh, ("data", None)))
    assert (alone.backward(training.shard(x[:1], mesh, ("data", "model")))[1].gather() == x[:1].T @ x[:1]).all()
    divided = training.shard(x, mesh, (None, "model"))
    product = training.matmul(divided, training.shard(x, mesh, ("model", None)))
    assert product.partial == ("model",)
    for there, kind, nbytes in (((None, None), "all_reduce", 512), (("model", None), "reduce_scatter", 256)):
        (step,) = training.plan(product, there).steps
        assert (step.kind, step.nbytes) == (kind, nbytes)
        assert (training.redistribute(product, there).gather() == x @ x).all()  # whole numbers are exact
    with pytest.raises(gc.ArgumentError, match="no axis 'modle'; did you mean model"):
        training.redistribute(divided, ("modle", None))
    for wrong, code in (((("data", "data"), None), "GC-SPEC"), ((None,), "GC-SPEC"), ("data", "GC-SPEC"),
                        ((3, None), "GC-SPEC"), ((True, None), "GC-SPEC")):
        with pytest.raises(gc.ArgumentError, match=code + "]"):
            training.shard(x, mesh, wrong)
    for left, right in (((None, "model"), (None, None)), (("data", "model"), ("model", "data"))):
        with pytest.raises(gc.ArgumentError, match="matmul"):
            training.matmul(training.shard(x, mesh, left), training.shard(x, mesh, right))
    with pytest.raises(gc.ArgumentError, match="does not have 4 places"):
        training.Mesh(comm, (3, 2), ("data", "model"))
    for shape, names in ((comm.size, ("data",)), ((float(comm.size),), ("data",)), ((comm.size,), None),
                         ((comm.size,), (3,))):
        with pytest.raises(gc.ArgumentError, match="list of integers"):
            training.Mesh(comm, shape, names)
    for call in (mesh.along, mesh.size):
        with pytest.raises(gc.ArgumentError, match="did you mean model"):
            call("modle")


def parallel(comm):
    """Two layers are exact: the first weight divided by columns, the second by rows, batches along the other axis."""
    mesh = training.Mesh(comm, (comm.size // 2, 2), ("data", "model"))
    chance = numpy.random.default_rng(3)
    x, first, second, gradient = (chance.integers(-3, 4, shape).astype("f8")
                                  for shape in ((4, 3, 6), (6, 8), (8, 10), (4, 3, 10)))
    wide = training.Linear(training.shard(first, mesh, (None, "model")))
    narrow = training.Linear(training.shard(second, mesh, ("model", None)))
    y = narrow.forward(wide.forward(training.shard(x, mesh, ("data", None, None))))
    assert (y.gather() == x @ first @ second).all()
    by_hidden, by_second = narrow.backward(training.shard(gradient, mesh, ("data", None, None)))
    by_x, by_first = wide.backward(by_hidden)
    assert by_first.spec == wide.weight.spec
    rows = gradient.reshape(12, 10)
    assert (by_second.gather() == (x @ first).reshape(12, 8).T @ rows).all()
    assert (by_first.gather() == x.reshape(12, 6).T @ (rows @ second.T)).all()
    assert (by_x.gather() == gradient @ second.T @ first.T).all()


@pytest.mark.parametrize("program", [kinds, parallel], ids=lambda program: program.__name__)
def test_layouts(executor, program):
    executor.run(4, program)


def test_arrays_that_are_not_laid_over_a_mesh():
    array = numpy.zeros((2, 2))
    for call in (lambda: training.redistribute(array, (None, None)), lambda: training.matmul(array, array),
                 lambda: training.plan(array, (None, None)), lambda: training.Linear(array)):
        with pytest.raises(gc.ArgumentError, match=r"GC-SPEC.*is ndarray, not a ShardedArray"):
            call()
