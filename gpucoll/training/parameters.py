"""Parameters and gradients: mappings from names to arrays, with the same names, shapes and dtypes on all ranks."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy

from gpucoll import Communicator, internal
from gpucoll.errors import ArgumentError, DtypeError, GpucollError, MismatchError, minority, nearest, with_noun
from gpucoll.internal import Array, as_array, check_writable, on_gpu, row_of
from gpucoll.training.optimizers import gradient_of

NAME_LIMIT = 300  # characters of a name in an exchange of metadata, of limited length
Parameters = dict[str, Array]


def opened(name: str, parameters: Mapping[str, Any], comm: Communicator, check: Callable[[], None] = lambda: None, *,
           contiguous: bool = False) -> Parameters:
    """Return the parameters as NumPy or CuPy arrays, without copies, after checking that all ranks agree.

    A collective call. `check` validates other arguments of the caller; its error is reported to the other ranks too.
    Raises ArgumentError and DtypeError (PeerError on other ranks). Raises MismatchError, on every rank, naming the
    first parameter with different names, shapes, dtypes or memories (host, GPU).
    """
    error: GpucollError | None = None
    found: Parameters = {}
    try:
        check()
        if not isinstance(parameters, Mapping):
            raise ArgumentError(f"{name}: {type(parameters).__name__} does not map names to arrays; pass a dict",
                                code="GC-ARRAY")
        with internal.current_stream(comm, parameters.values()):
            for key, value in parameters.items():
                found[key] = as_array(name, key, value)
                check_writable(name, key, found[key])
                if contiguous and not found[key].flags.c_contiguous:
                    raise ArgumentError(f"{name}: {key} is not contiguous in C order, and cannot be divided; pass "
                                        "numpy.ascontiguousarray(...)", code="GC-ARRAY")
                row_of(found[key].dtype)
        if not found:
            raise ArgumentError(f"{name}: no parameters were given", code="GC-NAME")
        if len({on_gpu(array) for array in found.values()}) > 1:
            raise ArgumentError(f"{name}: some parameters are on a GPU, others on the host", code="GC-DEVICE")
    except (ArgumentError, DtypeError) as refused:
        error = refused
    rows = [[key, list(array.shape), row_of(array.dtype).name, on_gpu(array)] for key, array in found.items()] \
        if error is None else []
    # Exchange a fingerprint, the number of parameters and a CRC-32: the full list may exceed a message of metadata.
    sign = [len(rows), zlib.crc32(json.dumps(rows).encode())]
    everyone = internal.all_gather_metadata(comm, {"sign": sign}, name, error)
    if differ := minority([one["sign"] for one in everyone]):
        _refuse_first_difference(name, rows, comm, differ)
    return found


def _refuse_first_difference(name: str, rows: Sequence[Any], comm: Communicator, signs: tuple[int, ...]) -> None:
    """Raise the MismatchError, the same on all ranks, by comparing one parameter after another."""
    for index in range(1 + len(rows)):
        mine = [rows[index][0][:NAME_LIMIT], *rows[index][1:]] if index < len(rows) else None
        everyone = [one["row"] for one in internal.all_gather_metadata(comm, {"row": mine}, name)]
        differ = tuple(rank for rank, row in enumerate(everyone) if row != everyone[0])
        if differ:
            raise MismatchError(f"{name}: parameter {index} is {_described(everyone[0])} on rank 0 and "
                                f"{_described(everyone[differ[0]])} on {with_noun(differ)}; all ranks "
                                "need the same parameters in the same order", code="GC-NAME", ranks=differ)
    raise MismatchError(f"{name}: parameter names differ between ranks, beyond {NAME_LIMIT} characters", code="GC-NAME",
                        ranks=signs)


def _described(row: Any) -> str:
    return "missing" if row is None else f"{row[0]} {tuple(row[1])} {row[2]}{' on a GPU' if row[3] else ''}"


class Like(NamedTuple):
    """The shape, dtype and memory (GPU or host) of an array."""

    shape: tuple[int, ...]
    dtype: numpy.dtype
    gpu: bool

    @classmethod
    def of(cls, array: Array) -> Like:
        return cls(array.shape, array.dtype, on_gpu(array))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def new(self, shape: int | tuple[int, ...]) -> Array:
        """Return zeros of another `shape`, with the same dtype and memory."""
        return (sys.modules["cupy"] if self.gpu else numpy).zeros(shape, self.dtype)


def like_parameter(name: str, gradient: Any, parameters: Mapping[str, Like], comm: Communicator) -> Array:
    """Return a gradient as an array; raise ArgumentError or DtypeError unless shape, dtype and memory are right."""
    if name not in parameters:
        raise ArgumentError(f"ready: there is no parameter {name!r}{nearest(name, parameters)}", code="GC-NAME")
    like = parameters[name]
    if type(gradient) is numpy.ndarray and gradient.dtype == like.dtype and gradient.shape == like.shape \
            and not like.gpu:
        return gradient
    with internal.current_stream(comm, [gradient]):
        array = gradient_of("ready", name, gradient, like.shape)
    if array.dtype != like.dtype:
        raise DtypeError(f"ready: the gradient of {name} is {array.dtype}, the parameter {like.dtype}")
    if on_gpu(array) != like.gpu:
        raise ArgumentError(f"ready: the gradient of {name} is not on the device of the parameter", code="GC-DEVICE")
    return array


def on_host(array: Array) -> Array:
    """Return `array` itself, or a copy on the host if `array` is on a GPU."""
    return array.get() if on_gpu(array) else array  # type: ignore[attr-defined]


def to_array(array: Array, content: Array) -> None:
    """Copy the NumPy array `content` into `array`, of the same shape and dtype, on the host or on a GPU."""
    if on_gpu(array):
        array.set(content)  # type: ignore[attr-defined]
    else:
        array[...] = content
