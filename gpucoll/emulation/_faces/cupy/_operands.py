"""The operands of CuPy's functions: arrays of GPUs in reach, arrays of other libraries, and no arrays of NumPy.

Indices also take what CuPy makes arrays of: lists, arrays of NumPy, truth values.
"""

import warnings

import numpy

from . import _array, _memory
from ._machine import MACHINE
from .cuda import runtime


class PerformanceWarning(RuntimeWarning):
    """Memory of another GPU is used."""


def check_elements(array):
    """Warn of an array on another device than the current one; raise ValueError if there is no access."""
    current, there = MACHINE.device(), array._device
    if there != current:
        words = f"The device where the array resides ({there}) is different from the current device ({current})."
        if not runtime.deviceCanAccessPeer(current, there):
            raise ValueError(f"{words} Peer access is unavailable between these devices.")
        _memory.peers.add((current, there))
        warnings.warn(f"{words} Peer access has been activated automatically.", PerformanceWarning, stacklevel=4)


PLAIN = (numpy.ndarray, numpy.generic, int, float, list, tuple, slice)


def like(value):
    """Return an array for another library's array of a GPU; other values as they are."""
    if type(value) is _array.ndarray or isinstance(value, PLAIN):
        return value
    if hasattr(value, "__cupy_get_ndarray__"):
        return value.__cupy_get_ndarray__()
    if hasattr(value, "__cuda_array_interface__"):
        from ._creation import array
        return array(value)
    return value


def hosts(operands):
    """Return the operands for NumPy; raise TypeError for NumPy arrays, as CuPy does."""
    found = []
    for x in operands:
        if isinstance(x, _array.ndarray):
            check_elements(x)
            x = x._host
        elif isinstance(x, numpy.ndarray) and x.ndim:
            raise TypeError(f"Unsupported type {type(x)}")
        found.append(x)
    return found


def indices(index):
    """Return an index as a tuple, with lists, arrays of NumPy and truth values as arrays of the GPU."""
    parts = [like(part) for part in (index if isinstance(index, tuple) else (index,))]
    kinds = list | tuple | numpy.ndarray | bool | numpy.bool_
    return tuple(_index_array(part) if isinstance(part, kinds) else part for part in parts)


def _index_array(part):
    from ._creation import array
    found = array(part)
    if isinstance(part, list | tuple) and not found.size:
        return found.astype(numpy.intp)
    if found.dtype.kind not in "biu":
        raise IndexError(f"arrays used as indices must be of integer or boolean type (actual: {found.dtype.type})")
    return found


def inside(host, chosen):
    """Return an index with whole numbers wrapped: CuPy's index arrays out of bounds begin again at 0."""
    found, axis = [], 0
    for part in chosen:
        if part is ...:
            return tuple(chosen)  # NumPy's own check of bounds serves
        if isinstance(part, numpy.ndarray) and part.dtype != bool:
            part = part.astype(numpy.intp) % max(1, host.shape[axis])
        found.append(part)
        axis += 0 if part is None else part.ndim if isinstance(part, numpy.ndarray) and part.dtype == bool else 1
    return tuple(found)
