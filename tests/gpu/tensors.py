"""Programs on tensors like PyTorch's, of torch_like.py."""

import cupy
import numpy

from gpu.helpers import held, same
from harness.leftovers import modules_in_place
from oracles import oracle


def tensors(comm, what):
    """The most common calls of data-parallel training on tensors."""
    from gpu import torch_like

    with modules_in_place(torch=torch_like):
        globals()[f"_{what}"](comm, torch_like)


def _weights(comm, torch):
    memory = cupy.full(9, float(comm.rank), numpy.float32)
    weight = torch.Tensor(memory, requires_grad=True)
    same(comm.all_reduce(weight, algorithm="ring"), numpy.full(9, sum(range(comm.size)), numpy.float32))
    assert comm.broadcast(weight, comm.size - 1) is weight
    same(memory, numpy.full(9, comm.size - 1, numpy.float32))


def _float8(comm, torch):
    host = oracle.values("sum", "float8_e5m2", comm.rank, 11)
    memory = cupy.asarray(host.view(numpy.uint8))
    x = torch.Tensor(memory, torch.float8_e5m2)
    comm.all_reduce(x)
    assert comm.broadcast(x, 0) is x
    same(memory, oracle.values("sum", "float8_e5m2", 0, 11).view(numpy.uint8))


def _streams(comm, torch):
    """Calls on tensors follow PyTorch's current stream and are followed by it, not by CuPy's current stream."""
    side, rank, size = cupy.cuda.Stream(non_blocking=True), comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    comm.all_reduce(cupy.ones(3, numpy.float32))  # loading and allocating come before
    mine = numpy.arange(900, dtype=numpy.float32) + rank
    total, others = sum(mine - rank + one for one in range(size)), [mine - rank + one for one in range(size)]
    blocks, length = numpy.stack([mine + 10 * one for one in range(size)]), rank + 1

    def tensor(values):
        """Return a tensor with values available once `side` has reached this point."""
        array = cupy.zeros(values.shape, values.dtype)
        cupy.cuda.get_current_stream().synchronize()
        with side:
            array += cupy.asarray(values)
        return torch.Tensor(array)

    def room(shape):
        return tensor(numpy.full(shape, -1, numpy.float32))

    calls = [
        (total, lambda x, out: comm.all_reduce(x, out, algorithm="ring", async_op=True), mine),
        (others[left], lambda x, out: comm.sendrecv(x, out, right, left, async_op=True), mine),
        (others[0] + 10 * rank, lambda x, out: comm.scatter(x if rank == 0 else None, out=out,
                                                                      async_op=True), blocks),
        (numpy.concatenate([one[:number + 1] for number, one in enumerate(others)]),
         lambda x, out: comm.all_gather_v(x, out, async_op=True), mine[:length]),
        ((total[rank:rank + 1]),
         lambda x, out: comm.reduce_scatter_v(x, [1] * size, out=out, async_op=True), mine[:size])]
    for expected, call, given in calls:
        x, out = tensor(given), room(expected.shape)
        with torch.cuda.stream(side), held(side):
            call(x, out).wait()
            with side:
                twice = out._array * numpy.float32(2)
        side.synchronize()
        with side:
            same(twice, 2 * expected)
