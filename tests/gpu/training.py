"""gpucoll.training on CuPy arrays, compared with the same training on one rank: programs for gpu/programs.py."""

import cupy
import numpy

from gpucoll import training
from gpucoll.block_scaled import FORMATS, BlockScaledCollectives, conversion
from gpucoll.device.launch import Quantised
from gpucoll.training.compression import COMPRESSIONS, shorten
from oracles import learning

STEPS = 3
CLOSE = 1e-12


def on_device(arrays):
    return {name: cupy.asarray(array) for name, array in arrays.items()}


def on_host(arrays):
    return {name: array.get() for name, array in arrays.items()}


def given(comm, trainer, weights, step):
    """Pass a rank's gradients, in reverse order; each array is overwritten immediately."""
    for name, gradient in reversed(learning.gradients(weights, *learning.samples(step, comm.rank))[1].items()):
        array = cupy.asarray(gradient)
        trainer.ready(name, array)
        array.fill(numpy.nan)


def data_parallel(comm):
    weights, rule = on_device(learning.parameters(comm.rank)), training.Adam(0.01)
    trainer = training.DataParallel(weights, comm, bucket_bytes=600)
    for step in range(STEPS):
        given(comm, trainer, on_host(weights), step)
        trainer.finish()
        rule.step(weights, trainer.gradients)
    return on_host(weights)


def zero(comm, stage):
    """Half way all ranks begin anew, and every second rank has lost its shards."""
    copy, rule = training.PartnerCopy(), training.Adam(0.01)
    trainer = training.ZeRO(on_device(learning.parameters(comm.rank)), comm, rule, stage, partner=copy)
    for step in range(STEPS + 1):
        if step == 2:
            if comm.rank % 2:
                copy, rule = training.PartnerCopy(), training.Adam(0.01)
            trainer = training.ZeRO(on_device(learning.parameters(7)), comm, rule, stage, partner=copy)
            assert rule.steps == step
        with trainer.layer(learning.SHAPES) as found:
            weights = on_host(found)
        if step < STEPS:
            given(comm, trainer, weights, step)
            trainer.step()
    return weights


def trained(comm, strategy):
    """The parameters equal those of one rank after the same number of steps."""
    found = data_parallel(comm) if strategy == "data_parallel" else zero(comm, int(strategy[-1]))
    assert learning.apart(found, learning.adamw(learning.parameters(0), STEPS, comm.size)) < CLOSE


def compressed(comm):
    """With every compression, the gradients passed on plus the remaining error equal all inputs."""
    for name, make in COMPRESSIONS.items():
        compression = make()
        trainer = training.DataParallel({"w": cupy.zeros((40, 60), "f4")}, comm, compression=compression)
        came, total = numpy.zeros((40, 60)), numpy.zeros((40, 60))
        for step in range(3):
            mine = [numpy.random.default_rng([step, rank]).standard_normal((40, 60)).astype("f4")
                    for rank in range(comm.size)]
            trainer.ready("w", cupy.asarray(mine[comm.rank]))
            trainer.finish()
            total += trainer.gradients["w"].get()
            came += sum(mine) / comm.size
        if "w" in compression.lost:
            lost = cupy.asarray(compression.lost["w"].astype("f8"))
            total += comm.all_reduce(lost).get() / comm.size
        assert abs(total - came).max() < (0.05 if "float" in name else 1e-4), name


def packed(comm):
    """The kernels' bits equal the host's."""
    chance = numpy.random.default_rng(comm.rank)
    x, before = chance.standard_normal((2, 5003)).astype("f4")
    found = []
    for xp in (numpy, cupy):
        row, lost = xp.asarray(x), xp.asarray(before)
        after, short = xp.zeros_like(row), xp.zeros(x.size, "f2")
        shorten(row, lost, after, short)
        outs = [after.copy(), short]
        for name in FORMATS:
            form = Quantised(3, 1792, FORMATS[name])
            rows, mean = xp.zeros(3 * form.stride, "u1"), xp.zeros(form.share, "f4")
            conversion.quantise(form, row, lost, after, rows)
            conversion.dequantise(form, rows, mean, 3, 3)
            outs += [after.copy(), rows, mean]
        found.append(outs)
    for host, there in zip(*found, strict=True):
        assert (there.get() == host).all()


def block_scaled(comm):
    """Collectives in block-scaled formats give the bits and the bounds that they give on the host."""
    x = numpy.random.default_rng(comm.rank).standard_normal((comm.size, 1000)).astype("f4")
    for name in FORMATS:
        collectives = BlockScaledCollectives(comm, name)
        for call in (collectives.all_reduce, collectives.reduce_scatter, collectives.all_gather):
            host, there = call(x), call(cupy.asarray(x))
            assert (there.result.get() == host.result).all()
            assert abs(float(there.bound) - host.bound) <= 1e-12 * host.bound


def laid_out(comm):
    """Every change of layout of a matrix, and a product with a divided inner axis."""
    mesh = training.Mesh(comm, (comm.size,), ("all",))
    x = numpy.arange(16.0 * comm.size**2).reshape(4 * comm.size, 4 * comm.size)
    specs = ((None, None), ("all", None), (None, "all"))
    for here in specs:
        for there in specs:
            moved = training.redistribute(training.shard(cupy.asarray(x), mesh, here), there)
            assert (moved.local.get() == x[mesh.box(moved.spec, x.shape, comm.rank)]).all()
    product = training.matmul(training.shard(cupy.asarray(x), mesh, (None, "all")),
                              training.shard(cupy.asarray(x), mesh, ("all", None)))
    for there in specs:
        assert (training.redistribute(product, there).gather().get() == x @ x).all()
