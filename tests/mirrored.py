"""A communicator that takes NumPy arrays and works on mirrors of them in GPU memory, so that a program for the host
tests a GPU as well.

A mirror holds the whole memory that an array is a view of, at the same distances, so that strides, gaps, arrays in
place and arrays that overlap stay what they are. CuPy has no float8: unsigned integers carry
it, and a reduction is told by its `dtype=`.
"""

import ctypes

import cupy
import numpy

from gpucoll.core.dtypes import EXTENDED, row_of

NATIVE = {"bfloat16"}
REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "reduce_scatter_v"}


def carrier(dtype):
    """What CuPy has in the place of a dtype."""
    return numpy.dtype(f"u{dtype.itemsize}") if dtype.name in set(EXTENDED) - NATIVE else dtype


def owner(array):
    """The array that has the memory."""
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


class Mirrors:
    """The mirrors of one call's arrays."""

    def __init__(self):
        self._memory, self._made = {}, []

    def of(self, array):
        """The mirror of a NumPy array; anything else as it is, lists element by element."""
        if isinstance(array, list):
            return [self.of(one) for one in array]
        if not isinstance(array, numpy.ndarray):
            return array
        plain = array.view(numpy.ndarray)
        if not plain.size:
            found = cupy.empty(plain.shape, carrier(plain.dtype))
        else:
            start, memory = self._copied(plain)
            pointer = memory.data + (plain.ctypes.data - start)
            found = cupy.ndarray(plain.shape, carrier(plain.dtype), pointer, strides=plain.strides)
        self._made.append((array, found))
        return found

    def _copied(self, array):
        whole = owner(array)
        low, high = numpy.lib.array_utils.byte_bounds(whole)
        if low not in self._memory:
            content = bytes_at(low, high)
            self._memory[low] = whole, content, cupy.asarray(content)
        return low, self._memory[low][2]

    def original(self, found, kind):
        """The NumPy array of a result: the one whose mirror it is, or a new one of `kind` with the same strides."""
        if isinstance(found, list):
            return [self.original(one, kind) for one in found]
        if not isinstance(found, cupy.ndarray):
            return found
        for array, mirror in self._made:
            if mirror is found:
                return array
        host = found.get()
        assert (found.strides == host.strides) or not found.size
        return host.view(kind) if kind is not None and host.dtype == carrier(kind) else host

    def give_back(self):
        """What a GPU has written stands in the NumPy arrays."""
        for whole, content, memory in self._memory.values():
            now = memory.get()
            if (now != content).any():
                assert whole.flags.writeable, "a read-only array was written"
                content[:] = now


def bytes_at(low, high):
    """The bytes between two addresses, those of a read-only array as well."""
    return numpy.ndarray(high - low, numpy.uint8, (ctypes.c_uint8 * (high - low)).from_address(low))


class Mirrored:
    """The calls of `comm` on mirrors; everything else is its own."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        found = getattr(self._comm, name)
        return self._on_mirrors(name, found) if callable(found) and name not in ("close", "split", "barrier") else found

    def _on_mirrors(self, name, call):
        def called(*arguments, **options):
            mirrors = Mirrors()
            array = next((one for one in flattened(arguments) if isinstance(one, numpy.ndarray)), None)
            kind = None if array is None else array.dtype
            if kind is not None and carrier(kind) != kind and name in REDUCTIONS:
                options.setdefault("dtype", row_of(kind).name)
            given = [mirrors.of(one) for one in arguments]
            found = call(*given, **{key: mirrors.of(value) for key, value in options.items()})
            result = mirrors.original(found, kind)
            mirrors.give_back()
            return result

        return called


def flattened(arguments):
    for one in arguments:
        yield from one if isinstance(one, list) else [one]
