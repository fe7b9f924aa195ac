"""Indices of `cupy.ndarray`: arrays of the GPU, and what CuPy makes arrays of: lists, arrays of NumPy, truth values."""

import numpy

from . import _operands


def indices(index):
    """Return an index as a tuple, with lists, arrays of NumPy and truth values as arrays of the GPU."""
    parts = [_operands.like(part) for part in (index if isinstance(index, tuple) else (index,))]
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
