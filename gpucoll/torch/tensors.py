"""Tensors as a communicator's arrays, and torch's ops as a communicator's ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch.distributed import ReduceOp

from gpucoll.arrays import Array
from gpucoll.core.dtypes import numpy_dtype
from gpucoll.core.ops import premul_sum
from gpucoll.errors import ArgumentError

TORCH_OPS: dict[Any, str] = {ReduceOp.SUM: "sum", ReduceOp.AVG: "avg", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min",
             ReduceOp.MAX: "max", ReduceOp.BAND: "band", ReduceOp.BOR: "bor", ReduceOp.BXOR: "bxor"}
COMBINED = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
            "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
# torch dtypes without a NumPy equivalent. Those in EXTENDED_DTYPES can be reduced, by the name of gpucoll's dtype.
# CARRIERS gives the integer dtype of equal width, for moving.
EXTENDED_DTYPES = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
CARRIERS = {dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
            for dtype in (*EXTENDED_DTYPES, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)}


def op_of(options: Any) -> Any:
    """Return the op named in a call's options or by a torch op; None means SUM."""
    given = getattr(options, "reduceOp", options)
    if given is None:
        return "sum"
    kind = getattr(given, "op", given)
    if kind == ReduceOp.PREMUL_SUM:
        return premul_sum(float(given.factor))
    return TORCH_OPS[kind]


def combined(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function that combines two tensors of a rank in one call; raise ArgumentError for other ops."""
    both = COMBINED.get(op) if isinstance(op, str) else None
    if both is None:
        raise ArgumentError(f"allreduce: {op} takes one tensor on each rank, not several")
    return both


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor for moving: dtypes unknown to NumPy become integers of equal width."""
    carrier = CARRIERS.get(tensor.dtype)
    tensor = tensor.detach()
    return tensor if carrier is None else tensor.view(carrier)


def moved(tensor: torch.Tensor) -> Any:
    """Return an array on a tensor's memory, for sending and receiving; on a GPU a tensor on the same memory."""
    tensor = carried(tensor)
    return tensor if tensor.is_cuda else _on_host(tensor)


def reduced(tensor: torch.Tensor) -> Any:
    """Return an array on a tensor's memory, for reductions; on a GPU a tensor on the same memory."""
    if tensor.is_cuda or tensor.dtype not in EXTENDED_DTYPES:
        return tensor.detach() if tensor.is_cuda else _on_host(tensor.detach())
    return _on_host(carried(tensor)).view(numpy_dtype(EXTENDED_DTYPES[tensor.dtype]))


def _on_host(tensor: torch.Tensor) -> Array:
    """Return an array on the memory of a tensor on the host.

    `Tensor.numpy` would forbid later resizing of the storage, and FSDP frees parameters by resizing. Tensors without
    memory, and tensors that differ from their memory (conjugates), are left to `Tensor.numpy`.
    """
    if not tensor.data_ptr() or tensor.is_conj() or tensor.is_neg() or tensor.layout != torch.strided:
        return tensor.numpy()
    dtype = _numpy_dtype(tensor.dtype)
    return numpy.asarray(SimpleNamespace(kept=tensor, __array_interface__={  # the array keeps the tensor alive
        "version": 3, "shape": tuple(tensor.shape), "typestr": dtype.str, "data": (tensor.data_ptr(), False),
        "strides": tuple(step * dtype.itemsize for step in tensor.stride())}))


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> numpy.dtype:
    return torch.empty(0, dtype=dtype).numpy().dtype


def row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in one row: a view if possible, else a copy."""
    return tensor.detach().reshape(-1)


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row for a result: the tensor's own memory if contiguous, else new memory."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


def cut(tensor: torch.Tensor, sizes: Sequence[int], size: int) -> Sequence[torch.Tensor]:
    """Return the parts of a tensor, of these `sizes` along the first axis, or `size` equal parts."""
    return tensor.split(list(sizes) or [len(tensor) // size] * size)


def deliver(target: torch.Tensor, result: torch.Tensor) -> None:
    """Copy `result` into `target`, unless both start at one address and the result is already there."""
    if result.data_ptr() != target.data_ptr() and target.numel():
        if target.is_cuda:
            target.detach().copy_(result.detach().reshape(target.shape))
            # The result may be memory of the caller's stream, and is dropped before this stream has read it.
            result.record_stream(torch.cuda.current_stream(result.device))
        else:  # NumPy: in the group's thread torch refuses to write tensors made in inference mode
            numpy.copyto(moved(target), moved(result.reshape(target.shape)))


def fill(targets: Sequence[torch.Tensor], arrays: Sequence[Array]) -> None:
    """Copy array i into tensor i, of equally many elements."""
    for target, array in zip(targets, arrays, strict=True):
        if target.is_cuda:
            deliver(carried(target), torch.from_dlpack(array).reshape(-1))
        else:
            numpy.copyto(moved(target), array.reshape(target.shape))


def apart(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `source`, or a copy if `source` and `target`, both contiguous rows, share memory."""
    first, start = source.data_ptr(), target.data_ptr()
    if first < start + target.nbytes and start < first + source.nbytes:
        return source.clone()
    return source
