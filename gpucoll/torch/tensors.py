"""Tensors as the arrays that a communicator takes, and torch's ops as its ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from torch.distributed import ReduceOp

from gpucoll.arrays import Array
from gpucoll.core.dtypes import numpy_dtype
from gpucoll.core.ops import premul_sum
from gpucoll.errors import ArgumentError

OPS = {ReduceOp.SUM: "sum", ReduceOp.AVG: "avg", ReduceOp.PRODUCT: "prod", ReduceOp.MIN: "min", ReduceOp.MAX: "max",
       ReduceOp.BAND: "band", ReduceOp.BOR: "bor", ReduceOp.BXOR: "bxor"}
COMBINED = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
            "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
OWN = {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}
CARRIERS = {dtype: torch.int16 if dtype.itemsize == 2 else torch.uint8
            for dtype in (*OWN, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)}


def op_of(options: Any) -> Any:
    """Return the op of a call's options, or of an op of torch's; None is SUM."""
    given = getattr(options, "reduceOp", options)
    if given is None:
        return "sum"
    kind = getattr(given, "op", given)
    if kind == ReduceOp.PREMUL_SUM:
        return premul_sum(float(given.factor))
    return OPS[kind]


def combined(op: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return what makes one tensor of two that a rank gives to one call."""
    both = COMBINED.get(op) if isinstance(op, str) else None
    if both is None:
        raise ArgumentError(f"allreduce: {op} takes one tensor on each rank, not several")
    return both


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as it may be moved: torch's own dtypes, which arrays lack, as integers of their width."""
    carrier = CARRIERS.get(tensor.dtype)
    tensor = tensor.detach()
    return tensor if carrier is None else tensor.view(carrier)


def moved(tensor: torch.Tensor) -> Any:
    """Return the array on a tensor's memory that is sent or received; on a GPU the tensor itself."""
    tensor = carried(tensor)
    return tensor if tensor.is_cuda else tensor.numpy()


def reduced(tensor: torch.Tensor) -> Any:
    """Return the array on a tensor's memory that is reduced; on a GPU the tensor itself."""
    if tensor.is_cuda or tensor.dtype not in OWN:
        return tensor.detach() if tensor.is_cuda else tensor.detach().numpy()
    return carried(tensor).numpy().view(numpy_dtype(OWN[tensor.dtype]))


def row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in one row, which is a copy where they do not lie so."""
    return tensor.detach().reshape(-1)


def room(tensor: torch.Tensor) -> torch.Tensor:
    """Return a row for a result: the memory of the tensor itself, or other memory where its elements lie apart."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device=tensor.device)


def deliver(target: torch.Tensor, result: torch.Tensor) -> None:
    """Write a result into its tensor, unless it is there."""
    if result.data_ptr() != target.data_ptr() and target.numel():
        if target.is_cuda:
            target.detach().copy_(result.detach().reshape(target.shape))
        else:  # in a thread of the group's, where torch would refuse to write what belongs to an inference
            numpy.copyto(moved(target), moved(result.reshape(target.shape)))


def fill(targets: Sequence[torch.Tensor], arrays: Sequence[Array]) -> None:
    """Write arrays into tensors of as many elements."""
    for target, array in zip(targets, arrays, strict=True):
        if target.is_cuda:
            deliver(carried(target), torch.from_dlpack(array).reshape(-1))
        else:
            numpy.copyto(moved(target), array.reshape(target.shape))


def apart(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return `source`, or a copy of it where it shares memory with `target`. Both are rows."""
    first, start = source.data_ptr(), target.data_ptr()
    if first < start + target.nbytes and start < first + source.nbytes:
        return source.clone()
    return source
