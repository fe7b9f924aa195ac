"""NCCL's own collectives: the `native` choice for GPU arrays.

A call may name NCCL's own algorithm, as "native(ring)" does; otherwise NCCL chooses.

NCCL reduces dtypes known to NCCL, and moves all data as bytes. A complex number is a pair of reals, correct for sum and
avg. A bool is a byte; max of bytes is `or`, min is `and`.
"""

from __future__ import annotations

import functools
from typing import Any

from gpucoll.arrays import address
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import Device, Waiting, nccl
from gpucoll.device.launch import StreamOrder
from gpucoll.device.nccl import Nccl
from gpucoll.executors import Call, CallLauncher, CallRequest, Executor, Refusal
from gpucoll.progress.operations import Operation

NCCL_ON_BOOL = {"sum": "max", "max": "max", "bor": "max", "lor": "max", "prod": "min", "min": "min", "band": "min",
                "land": "min"}
WITH_OP = ("all_reduce", "reduce", "reduce_scatter")
_BY_BLOCKS = ("ring", "collnetdirect", "nvls", "pat")
# NCCL's algorithms by collective, after ncclTopoTuneModel (graph/tuning.cc). NCCL itself refuses what the links lack.
NCCL_ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring", "tree", "collnetdirect", "collnetchain", "nvls", "nvlstree"),
    "all_gather": _BY_BLOCKS, "reduce_scatter": _BY_BLOCKS, "broadcast": ("ring",), "reduce": ("ring",)}


class NcclNative(Executor):
    """An executor of NCCL's collectives on `device`."""

    name = "native"

    def __init__(self, device: Device, transport: Nccl, order: StreamOrder, *, capability: int) -> None:
        self._device, self._transport, self._order = device, transport, order
        self._lacks_float8 = nccl.lacks_float8(capability)  # capability: the lowest of all ranks

    def serves(self, request: CallRequest) -> str | None:
        """Return None for the collectives, ops and dtypes of NCCL with the library's meaning."""
        if request.collective in WITH_OP:
            return _cannot_reduce(request) or (self._lacks_float8 if request.dtype.itemsize == 1 and
                                               request.dtype.kind == "float" else None)
        return nccl.lacks(request.collective)

    def compile(self, request: CallRequest) -> Call | Refusal:
        """Return NCCL's call; refuse an algorithm that NCCL lacks or cannot be told."""
        wrong = _cannot_select(request)
        return Call(self, request) if wrong is None else Refusal(wrong)

    def run(self, call: Call, source: Any, target: Any, stream: Any, *, repeated: bool) -> Operation:
        """Enqueue NCCL's collective."""
        self._order.follow(stream)
        if _needs_copy(call.request, source, target):
            return self._from_copy(call.request, source, target, stream)
        return self._transport.call(self._call(call.request, address(source), address(target)), stream)

    def launcher(self, call: Call, source: Any, target: Any) -> CallLauncher | None:
        """Return a function that enqueues NCCL's collective on these arrays, or None if the input must be copied."""
        if _needs_copy(call.request, source, target):
            return None
        return self._transport.launcher(self._call(call.request, address(source), address(target)))

    def _call(self, request: CallRequest, source: int, target: int) -> nccl.NcclCall:
        """Return NCCL's call; sizes are elements in reductions, elsewhere bytes of one rank's block."""
        call = functools.partial(self._transport.collective, selection=_selection(request))
        name, given, taken = request.collective, request.sizes[0] or 0, request.sizes[1] or 0
        if name in WITH_OP:
            dtype, op, per_element = _spelled(request)
            count = (taken if name == "reduce_scatter" else given) // request.dtype.itemsize * per_element
            root = [request.root] if name == "reduce" else []  # ranks other than the root have no output
            return call(name, source, target or source if root else target, count, dtype, nccl.NCCL_OPS[op], *root)
        if name == "broadcast":
            return call(name, source or target, target, taken, "ncclUint8", request.root)
        if name == "all_gather":
            return call(name, source, target, given, "ncclUint8")
        if name == "all_to_all":
            return call(name, source, target, given // self._transport.size, "ncclUint8")
        return call(name, source, target, given if name == "gather" else taken, "ncclUint8", request.root)

    def _from_copy(self, request: CallRequest, source: Any, target: Any, stream: Any) -> Waiting:
        """Let NCCL read a copy, kept until all is enqueued, or for ever in a capture."""
        staging = self._device.empty(source.size, source.dtype, stream)
        self._order.keep_captured(stream, staging)
        self._device.kernels.copy(address(source), address(staging), source.size, request.dtype.itemsize, stream)
        yield from self._transport.call(self._call(request, address(staging), address(target)), stream)


def _selection(request: CallRequest) -> str:
    """Return the algorithm of NCCL that a call names, "" for NCCL's choice."""
    return request.algorithm.removeprefix("native").removeprefix("(").removesuffix(")").lower()


def _cannot_select(request: CallRequest) -> str | None:
    if request.algorithm == "native":
        return None
    there, name = NCCL_ALGORITHMS.get(request.collective, ()), _selection(request)
    if name not in there or request.algorithm[-1] != ")":
        return f"NCCL has no {request.algorithm} for {request.collective}" + (
            f"; its algorithms are {', '.join(there)}" if there else ", and no choice of its algorithm")
    return nccl.lacks_selection()


def _needs_copy(request: CallRequest, source: Any, target: Any) -> bool:
    """Return whether NCCL needs a copy of the input: in an all_to_all in place."""
    return request.collective == "all_to_all" and address(source) == address(target)


def _cannot_reduce(request: CallRequest) -> str | None:
    assert request.op is not None
    op, dtype = request.op, request.dtype
    if op.expression:
        return "NCCL has no op for an expression"
    if dtype.kind == "bool":
        return None if op.name in NCCL_ON_BOOL else f"NCCL has no {op.name} for bool"
    if dtype.kind == "complex":
        return None if op.name in ("sum", "avg", "premul_sum") else f"NCCL has no {op.name} for complex numbers"
    if dtype.nccl is None or op.nccl is None:
        return f"NCCL has no {op.name} for {dtype.name}"
    if dtype.kind == "float" and op.name in ("min", "max"):
        return f"NCCL's {op.name} need not let NaN win"
    return None


def _spelled(request: CallRequest) -> tuple[Any, Any, int]:
    """Return NCCL's dtype and op, and the number of NCCL's elements in one element."""
    op, dtype = request.op, request.dtype
    assert op is not None
    # As for every executor, a factor has been applied before, and the division of avg comes after.
    name = "sum" if op.factor is not None or op.name == "avg" else op.name
    if dtype.kind == "bool":
        return "ncclUint8", OPS[NCCL_ON_BOOL[name]].nccl, 1
    if dtype.kind == "complex":
        return DTYPES[f"float{4 * dtype.itemsize}"].nccl, OPS[name].nccl, 2
    return dtype.nccl, OPS[name].nccl, 1
