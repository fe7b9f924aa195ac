"""Checks of a call's tensors before data is sent. Errors use PyTorch's text, because programs search for it.

In all checks `name` is the call's name, for messages; a failed check raises ArgumentError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, TypeAlias

import torch

from gpucoll.errors import ArgumentError

Tensors: TypeAlias = Sequence[torch.Tensor]


def refuse(name: str, text: str) -> NoReturn:
    """Raise ArgumentError with the call's name and `text`."""
    raise ArgumentError(f"{name}: {text}")


def dense(name: str, tensors: Tensors) -> None:
    for index, tensor in enumerate(tensors):
        if tensor.layout != torch.strided:
            refuse(name, f"invalid tensor layout at index {index}: unsupported layout {tensor.layout}; give to_dense()")


def root(name: str, rank: int, size: int, tensor: int = 0, count: int = 1) -> None:
    """Raise unless root `rank` is in 0 .. `size` - 1 and the index `tensor` is in 0 .. `count` - 1."""
    if not 0 <= rank < size:
        refuse(name, f"invalid root rank {rank}; this group has ranks 0 to {size - 1}")
    if not 0 <= tensor < count:
        refuse(name, f"invalid root tensor {tensor} of {count}")


def alike(name: str, tensors: Tensors, model: torch.Tensor | None = None, *, sizes: bool = True) -> None:
    """Raise if the list is empty, or a tensor is sparse or differs from `model` in dtype or size (None: the first)."""
    if not tensors:
        refuse(name, "requires non-empty tensor list")
    dense(name, tensors)
    first = tensors[0] if model is None else model
    for index, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            refuse(name, f"invalid tensor type at index {index}: {tensor.dtype}, expected {first.dtype}; tensors must "
                         "all have the same type")
        if sizes and tensor.numel() != first.numel():
            refuse(name, f"invalid tensor size at index {index}: {tensor.numel()} elements, expected {first.numel()}")


def rooted(name: str, one: str, many: str, tensors: Tensors, lists: Sequence[Tensors], size: int,
           at_root: bool) -> None:
    """Raise unless a scatter or gather has one tensor on each rank and one list of `size` tensors on the root only.

    `one` and `many` name the two sides: "input" and "output" for a gather, the reverse for a scatter.
    """
    if len(tensors) != 1:
        refuse(name, f"requires a single-element {one} tensor list, not {len(tensors)} tensors")
    if not at_root:
        if lists:
            refuse(name, f"requires empty {many} on non-root")
        return
    if len(lists) != 1:
        refuse(name, f"requires a single-element {many} list, not {len(lists)} lists")
    if len(lists[0]) != size:
        refuse(name, f"Incorrect {many} list size {len(lists[0])}. {many.title()} list size should be {size}, "
                     "same as size of the process group")
    alike(name, lists[0], tensors[0])


def gathered(name: str, outputs: Sequence[Tensors], inputs: Tensors, size: int) -> None:
    """Raise unless an all-gather has, for each input, a list of ``size * len(inputs)`` outputs of equal dtype."""
    if not inputs:
        refuse(name, "requires non-empty input tensor list")
    if len(outputs) != len(inputs):
        refuse(name, f"requires input/output tensor lists to have the same length, not {len(inputs)} and "
                     f"{len(outputs)}")
    for index, targets in enumerate(outputs):
        if len(targets) != size * len(inputs):
            refuse(name, f"invalid output tensor list at index {index}: {len(targets)} tensors, expected "
                         f"{size * len(inputs)}")
    several = len(inputs) > 1  # with one input the lengths may differ from rank to rank
    alike(name, inputs)
    for targets in outputs:
        alike(name, targets, inputs[0], sizes=several)


def gathered_together(name: str, outputs: Sequence[Tensors], inputs: Tensors, size: int) -> None:
    """Raise unless a coalesced all-gather has, for each rank, a list of outputs with the inputs' sizes and dtypes."""
    if len(outputs) != size:
        refuse(name, f"output lists should be equal to world size: {len(outputs)} lists, {size} ranks")
    dense(name, inputs)
    for targets in outputs:
        if len(targets) != len(inputs):
            refuse(name, f"invalid output size: {len(targets)} tensors, expected {len(inputs)}")
        for index, (target, x) in enumerate(zip(targets, inputs, strict=True)):
            if target.numel() != x.numel():
                refuse(name, f"invalid size of output tensor at index {index}: {target.numel()} elements, expected "
                             f"{x.numel()}")
            if target.dtype != x.dtype:
                refuse(name, f"invalid tensor type at index {index}: {target.dtype}, expected {x.dtype}")
