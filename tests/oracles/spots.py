"""Arrays for calls with all memory around them watched: in any layout, at any place, with a guard on either side."""

import numpy

import gpucoll as gc

GUARD = 64  # bytes


def listed(x):
    return x if isinstance(x, list) else [] if x is None else [x]


class Spot:
    """The array `x` within known memory: with gaps, backwards, transposed, at an odd byte, read-only."""

    def __init__(self, own, x, memory, plain, written, fixed):
        self._x, self._written, self._step = x, written, 1 if plain else own.choice((1, 1, 1, 2, -1, -3))
        self._turned = x.ndim == 2 and not plain and own.random() < 0.3
        self._first = GUARD + (0 if plain else own.choice((0, 0, 8, 1)))
        self._memory = memory(self._first + x.nbytes * abs(self._step) + GUARD)
        self._array, self.given = self._in(self._memory), self._in(self._memory)
        self.given.flags.writeable = not fixed

    def _in(self, memory):
        shape, wide = self._x.shape, abs(self._step)
        row = memory[self._first:self._first + self._x.nbytes * wide].view(self._x.dtype)
        if self._turned:
            return row.reshape(shape[1] * wide, shape[0])[::self._step].T
        return row.reshape(*shape[:-1], shape[-1] * wide)[..., ::self._step]

    def fill(self, turn):
        """Fill the array, backwards in every second turn: all calls work element by element, so the result is known."""
        self._memory[:] = 0x5A
        self._array[...] = self._x[..., ::1 - turn % 2 * 2]
        self._before = self._memory.copy()

    def check(self, *, ended=True):
        if self._written and ended:
            self._in(self._before)[...] = self._array
        assert (self._before == self._memory).all(), "bytes have changed that nobody may write"


class Call:
    """The arrays of a call, each in its own spot: those of `x`, and an array like `out` unless `in_place`."""

    def __init__(self, spot, name, x, out, in_place):
        given = [spot(one, written=in_place) for one in listed(x)]
        self._out = given[0] if in_place else None if out is None else spot(numpy.zeros_like(out), written=True)
        self.spots = {*given, self._out} - {None}
        self.x = [one.given for one in given] if isinstance(x, list) else given[0].given if given else None
        self.out = {} if self._out is None or name == "broadcast" else {"out": self._out.given}

    def fill(self, turn):
        for spot in self.spots:
            spot.fill(turn)

    def ended(self, found, turn):
        """Return the result, in the order of the first data; check that nothing else was written."""
        found = found.wait() if isinstance(found, gc.Work) else found
        assert self._out is None or found is self._out.given
        for spot in self.spots:
            spot.check()
        results = [one[..., ::1 - turn % 2 * 2].copy() for one in listed(found)]
        return results if isinstance(found, list) else results[0] if results else None
