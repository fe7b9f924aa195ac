"""Repeated calls: on new arrays of the same layout or another layout, with and without `out`."""

import numpy
import pytest

from oracles import oracle
from programs.collectives import program

CALLS = 5  # from the fourth call on, a GPU's schedule is a graph


def given(rank, turn, shape, name="int64"):
    return (numpy.arange(numpy.prod(shape)).reshape(shape) * 7 + 1000 * rank + turn).astype(oracle.kind(name))


def misplaced(x):
    """Return the same elements at an odd address."""
    memory = numpy.zeros(x.nbytes + x.itemsize, numpy.uint8)
    row = memory[1:1 + x.nbytes].view(x.dtype).reshape(x.shape)
    row[...] = x
    return row


LOOKS = {"plain": lambda x: x, "strided": lambda x: numpy.repeat(x, 2, -1)[..., ::2],
         "misplaced": misplaced, "read-only": lambda x: [x, x.setflags(write=False)][0]}


OPS = {"all_reduce": "sum", "reduce": "max", "all_gather": None, "gather": None, "reduce_scatter": "sum",
       "all_to_all": None, "scan": "sum", "exscan": "sum"}


def call_of(comm, name, op, root):
    """Return the collective as a function of x and `out`."""
    options = ({} if op is None else {"op": op}) | ({"root": root} if name in ("reduce", "gather") else {})
    return lambda x, out=None: getattr(comm, name)(x, out, **options)


@program
def repeated(comm, name):
    op, root = OPS[name], comm.size - 1
    shape = (comm.size, 3) if name in ("reduce_scatter", "all_to_all") else (2, 3)
    call, kept = call_of(comm, name, op, root), []
    for turn in range(CALLS):
        for look in LOOKS.values():
            inputs = [given(rank, turn, shape) for rank in range(comm.size)]
            wanted = oracle.outcome(name, inputs, comm.rank, root, op)
            x = look(inputs[comm.rank].copy())
            found = call(x)
            assert (x == inputs[comm.rank]).all()
            assert found is None if wanted is None else (found == wanted).all(), (turn, look)
            kept += [] if found is None else [(found, wanted)]
            out = None if wanted is None else numpy.full_like(wanted, -1)
            assert call(x, out) is out
            assert out is None or (out == wanted).all()
    assert len({id(found) for found, _ in kept}) == len(kept)
    assert all((found == wanted).all() for found, wanted in kept)  # no later call wrote into an earlier result


@pytest.mark.parametrize("name", OPS)
def test_calls_that_come_again(executor, name):
    for size in (1, 3):
        executor.run(size, repeated, name)
