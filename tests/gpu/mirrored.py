"""A communicator for NumPy arrays, working on mirrors of the arrays in GPU memory: programs for the host test a GPU.

A mirror copies the whole memory around an array, at the same distances. So strides, gaps, arrays in place and
overlapping arrays are preserved. CuPy has no float8: unsigned integers carry float8, and reductions get `dtype=`.
"""

import ctypes

import cupy
import numpy

from gpucoll.core.dtypes import EXTENDED, row_of

NATIVE = {"bfloat16"}
REDUCTIONS = {"all_reduce", "reduce", "reduce_scatter", "scan", "exscan", "reduce_scatter_v"}


def carrier(dtype):
    """Return CuPy's dtype for carrying a dtype."""
    return numpy.dtype(f"u{dtype.itemsize}") if dtype.name in set(EXTENDED) - NATIVE else dtype


def owner(array):
    """Return the array owning the memory."""
    while isinstance(array.base, numpy.ndarray):
        array = array.base
    return array


class Mirrors:
    """The mirrors of one call's arrays."""

    def __init__(self):
        self._memory, self._made = {}, []

    def of(self, array):
        """Return the mirror of a NumPy array, lists element by element; other objects are returned unchanged."""
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
        """Return the NumPy array of a result: the mirrored array, or a new array of `kind` with the same strides."""
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
        """Copy everything written by the GPU into the NumPy arrays."""
        for whole, content, memory in self._memory.values():
            now = memory.get()
            if (now != content).any():
                assert whole.flags.writeable, "a read-only array was written"
                content[:] = now


def bytes_at(low, high):
    """Return the bytes between two addresses, also of a read-only array."""
    return numpy.ndarray(high - low, numpy.uint8, (ctypes.c_uint8 * (high - low)).from_address(low))


class Mirrored:
    """The calls of `comm` on mirrors; all other attributes are those of `comm`."""

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
