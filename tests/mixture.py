"""Calls of all kinds one after the other on one communicator, held against the oracle; ranks differ where they may."""

import random

import numpy

import oracle
import programs
from gpucoll.collectives import COLLECTIVES
from grids import generator, naming
from programs import MOVED, MOVEMENTS, REDUCTIONS

PAIRS = [(op, name) for op in oracle.OPS for name in oracle.DTYPES if oracle.legal(op, name)]


def called(comm, calls):
    """Each of `calls`: collective, algorithm, op, dtype, length, and a number that chooses the root, or in place."""
    for call in calls:
        with naming((*call, f"{comm.size} ranks")):
            collective, algorithm, op, name, count, chance = call
            if collective in REDUCTIONS:
                programs.reduction(comm, collective, algorithm, op, name, count, in_place=chance < 0.5)
            else:
                root = int(chance * comm.size) if COLLECTIVES[collective].rooted else 0
                MOVED[collective](comm, algorithm, name, count, root)


class Varied:
    """A communicator whose calls are made in any way that is a rank's own affair: from strided arrays, asynchronously,
    on memory that all ranks map. What `chances` draws is the rank's own too."""

    def __init__(self, comm, chances):
        self._comm, self._chances = comm, chances
        self.rank, self.size = comm.rank, comm.size

    def __getattr__(self, name):
        call = getattr(self._comm, name)

        def varied(x=None, *arguments, **options):
            in_place = name == "broadcast" or options.get("out") is x or (arguments and arguments[0] is x)
            if isinstance(x, numpy.ndarray) and not in_place and self._chances.random() < 0.5:
                x = spread(x, self._chances.choice((2, -1)))
            if self._chances.random() < 0.3:
                return call(x, *arguments, async_op=True, **options).wait()
            return call(x, *arguments, **options)

        return varied


def spread(x, step):
    """The same values with gaps between them, or backwards in memory."""
    room = numpy.zeros((*x.shape[:-1], x.shape[-1] * abs(step)), x.dtype)[..., ::step]
    room[...] = x
    return room


def draw(key, size, pairs=PAIRS, calls=40):
    """Arguments of `run`, alike for all ranks: they are drawn before the ranks begin."""
    chances, drawn = generator(key), []
    for _ in range(calls):
        collective = chances.choice((*REDUCTIONS, *MOVEMENTS))
        algorithms = [name for name in programs.algorithms(collective) if name != "native"]
        drawn.append((collective, chances.choice(algorithms), *chances.choice(pairs),
                      chances.choice((0, 1, size, 37, 3000)), chances.random()))
    return drawn, chances.random()


def run(comm, drawn):
    """The calls without a barrier between them: nothing of one call is seen by another."""
    calls, seed = drawn
    called(Varied(comm, random.Random(f"{seed}/{comm.rank}")), calls)
