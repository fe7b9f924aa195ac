"""`cupy.random` by NumPy's generators; the numbers are not those of a GPU, but repeat by a seed."""

import types

import numpy

from . import _generic


class RandomState:
    def __init__(self, seed=None, method=None):
        self._state = numpy.random.RandomState(None if seed is None else int(seed) % (1 << 32))

    def __getattr__(self, name):
        function = getattr(self._state, "random_sample" if name in ("sample", "ranf") else name)

        def draw(*args, dtype=None, **options):
            if dtype is not None and name not in ("randint",):
                return _generic.at_once(lambda: numpy.asarray(function(*args, **options)).astype(dtype), (), {})
            return _generic.at_once(function, args, options if dtype is None else {**options, "dtype": dtype})

        return draw


XORWOW = MRG32k3a = Philox4x3210 = numpy.random.Philox


class Generator:
    def __init__(self, bit_generator):
        self._generator = numpy.random.Generator(bit_generator)

    def __getattr__(self, name):
        return _generic.generic(getattr(self._generator, name))


def default_rng(seed=None):
    return Generator(XORWOW(seed))


generator = types.SimpleNamespace(RandomState=RandomState)  # its former place
_state = RandomState()


def seed(seed=None):
    global _state
    _state = RandomState(seed)


def get_random_state():
    return _state


def __getattr__(name):
    if name.startswith("_") or not hasattr(numpy.random, name):
        raise AttributeError(f"module 'cupy.random' has no attribute {name!r}")
    return lambda *args, **options: getattr(_state, name)(*args, **options)
