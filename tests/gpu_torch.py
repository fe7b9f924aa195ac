"""Programs on tensors like PyTorch's, by the stand-in's rule `torch`."""

import sys
from unittest.mock import patch

import cupy
import numpy

import oracle
from gpu_helpers import called_before, held, ramp, same


def tensors(comm, what):
    """The commonest calls of data-parallel training on tensors."""
    import torch_like

    with patch.dict(sys.modules, torch=torch_like):
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


def _orders(comm, torch):
    """With `stream=` the producer is asked to order that stream, whichever is current."""
    theirs, ours, total = called_before(comm)
    with held(theirs):
        with theirs:
            x = torch.Tensor(ramp(comm, 900, 3))
        y = comm.all_reduce(x, stream=ours, algorithm="tree")
        assert not ours.done
    with ours:
        same(y, total)
    assert x.asked == [ours.ptr]
