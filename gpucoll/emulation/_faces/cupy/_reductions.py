"""NCCL's reductions and dtypes on emulated GPUs, on the bytes of all ranks' inputs."""

import ml_dtypes
import numpy

from .hostile import on

KINDS = [numpy.dtype(kind) for kind in ("i1 u1 i4 u4 i8 u8 f2 f4 f8".split())] + [
    numpy.dtype(kind) for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]
PAIRS = (numpy.add, numpy.multiply, numpy.maximum, numpy.minimum, numpy.add)
_AVG = 4


def reduced(kind, op, rooms, root=None):
    """Return the reduction in rank order: short floats in float32, an integer average rounded towards zero."""
    dtype = KINDS[kind]
    if on("rounding") and dtype.kind not in "iu":
        return _by_hops(dtype, op, [room.view(dtype) for room in rooms], root)
    wide = numpy.float32 if dtype.itemsize < 4 and dtype.kind not in "iu" else dtype
    with numpy.errstate(all="ignore"):
        total = rooms[0].view(dtype).astype(wide)
        for room in rooms[1:]:
            total = PAIRS[op](total, room.view(dtype).astype(wide))
        total = total / len(rooms) if op == _AVG else total
        return total.astype(dtype).view(numpy.uint8)


def _by_hops(dtype, op, rooms, root):
    """Return the reduction around the ring, rounded at each rank; a part ends at a rank and begins at the next rank."""
    wide, size = numpy.float32 if dtype.itemsize < 4 else dtype, len(rooms)
    with numpy.errstate(all="ignore"):
        if op == _AVG:  # NCCL divides the inputs
            rooms = [(room.astype(wide) * wide.type(1 / size) if wide is dtype else room.astype(wide) / wide(size)
                      ).astype(dtype) for room in rooms]
        split = [numpy.array_split(room, size) if root is None else [room] for room in rooms]
        for part, last in enumerate(range(size) if root is None else [root]):
            total = split[(last + 1) % size][part]
            for hop in range(2, size + 1):
                total = PAIRS[op](split[(last + hop) % size][part].astype(wide), total.astype(wide)).astype(dtype)
            split[0][part] = total
        return numpy.concatenate(split[0]).view(numpy.uint8)
