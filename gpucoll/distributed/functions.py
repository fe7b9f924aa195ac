"""The collectives, of arrays and of objects. Arrays and lists are checked before data is sent.

Objects are pickled; see `gpucoll.communicator.objects`. In shapes below, `size` is the number of ranks of the group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from gpucoll import internal
from gpucoll.arrays import Array, check_input, check_output, module_of
from gpucoll.core.ops import ReduceOp
from gpucoll.distributed import shapes
from gpucoll.distributed.groups import member
from gpucoll.distributed.work import conclude
from gpucoll.errors import ArgumentError

Function = TypeVar("Function", bound=Callable[..., Any])


def _also_named(**others: str) -> Callable[[Function], Function]:
    """Let callers also pass arguments by other names; `others` maps torch's names to the function's names."""
    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def renamed(*arguments: Any, **named: Any) -> Any:
            return function(*arguments, **{others.get(name, name): value for name, value in named.items()})
        return renamed  # type: ignore[return-value] # a checker sees the signature of `function`
    return decorate


def all_reduce(tensor: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Overwrite every rank's `tensor` (shape s) with the reduction of all ranks' tensors."""
    if (pg := member("all_reduce", group, tensor)) is None:
        return None
    done = pg.communicator.all_reduce(tensor, tensor, op, async_op=async_op)
    return conclude(done, [tensor], async_op)


def reduce(tensor: Any, dst: int | None = 0, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
           group_dst: int | None = None) -> Any:
    """Overwrite `tensor` (shape s) of rank `dst` with the reduction of all ranks' tensors; other ranks keep theirs."""
    if (pg := member("reduce", group, tensor)) is None:
        return None
    root = pg.number_of("reduce", "dst", dst, group_dst)
    out = tensor if pg.rank() == root else None
    return conclude(pg.communicator.reduce(tensor, out, op, root, async_op=async_op), [tensor], async_op)


def broadcast(tensor: Any, src: int | None = 0, group: Any = None, async_op: bool = False,
              group_src: int | None = None) -> Any:
    """Overwrite every rank's `tensor` (shape s) with the tensor of rank `src`."""
    if (pg := member("broadcast", group, tensor)) is None:
        return None
    root = pg.number_of("broadcast", "src", src, group_src)
    return conclude(pg.communicator.broadcast(tensor, root, async_op=async_op), [tensor], async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Wait until every rank of `group` has entered the barrier; `device_ids` has no effect."""
    pg = member("barrier", group)
    return None if pg is None else conclude(pg.communicator.barrier(async_op=async_op), [], async_op)


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    """Write `tensor` (shape s_i) of rank i into ``tensor_list[i]`` of every rank; shapes may differ from rank to rank.

    Raises ArgumentError if entries of `tensor_list` share memory. Raises MismatchError, with no entry written, if an
    entry and the tensor received for this entry differ in length.
    """
    if (pg := member(name := "all_gather", group, tensor)) is None:
        return None
    x = check_input(name, tensor, "tensor")
    outs = shapes.outputs(name, "tensor_list", tensor_list, pg.size(), x.dtype)
    shapes.check_shape(name, f"tensor_list[{pg.rank()}]", outs[pg.rank()], "tensor", x.shape)
    gathering = pg.communicator.all_gather if shapes.alike(outs) else pg.communicator.all_gather_v
    done = gathering(x.reshape(-1), async_op=async_op)
    return conclude(done, tensor_list, async_op, lambda blocks: shapes.fill(name, "tensor_list", outs, blocks))


@_also_named(output_tensor="output", input_tensor="input")
def all_gather_into_tensor(output: Any, input: Any, group: Any = None, async_op: bool = False) -> Any:
    """Write all ranks' `input` (shape (n, \\*s)) into every rank's `output`.

    `output` is concatenated (size * n, \\*s) or stacked (size, n, \\*s). `input` may be its own slot of `output`.
    """
    if (pg := member(name := "all_gather_into_tensor", group, input)) is None:
        return None
    x = check_input(name, input, "input")
    out = check_output(name, output, (), x.dtype, None, "output")
    shapes.check_blocks(name, "output", out, "an input", x, pg.size())
    return conclude(pg.communicator.all_gather(x, _blocks(out, pg.size(), x), async_op=async_op), [output], async_op)


def _blocks(whole: Array, size: int, block: Array) -> Array:
    """Return `whole`, reshaped from one row to stacked blocks (size, \\*shape); other shapes are returned unchanged."""
    return whole.reshape(size, *block.shape) if whole.ndim == 1 else whole


def gather(tensor: Any, gather_list: Any = None, dst: int | None = 0, group: Any = None, async_op: bool = False,
           group_dst: int | None = None) -> Any:
    """Write `tensor` (shape s) of rank i into ``gather_list[i]`` (shape s) of rank `dst`.

    Raises ArgumentError if other ranks pass a non-empty `gather_list`, or if entries share memory.
    """
    if (pg := member(name := "gather", group, tensor)) is None:
        return None
    root = pg.number_of(name, "dst", dst, group_dst)
    x = check_input(name, tensor, "tensor")
    outs: list[Array] = []
    if pg.rank() == root:
        outs = shapes.outputs(name, "gather_list", gather_list, pg.size(), x.dtype)
        for index, out in enumerate(outs):
            shapes.check_shape(name, f"gather_list[{index}]", out, "tensor", x.shape)
    else:
        shapes.check_absent(name, "gather_list", "dst", gather_list)
    done = pg.communicator.gather(x, root=root, async_op=async_op)
    return conclude(done, gather_list or [], async_op,
                    lambda blocks: shapes.fill(name, "gather_list", outs, blocks if outs else []))


def scatter(tensor: Any, scatter_list: Any = None, src: int | None = 0, group: Any = None, async_op: bool = False,
            group_src: int | None = None) -> Any:
    """Write ``scatter_list[i]`` (shape s) of rank `src` into `tensor` (shape s) of rank i.

    Raises ArgumentError if other ranks pass a non-empty `scatter_list`. If rank `src` refuses its arguments, the other
    ranks raise PeerError.
    """
    if (pg := member(name := "scatter", group, tensor)) is None:
        return None
    root = pg.number_of(name, "src", src, group_src)
    x = None
    if pg.rank() == root:
        with internal.refusing(pg.communicator):
            blocks = shapes.inputs(name, "scatter_list", scatter_list, pg.size())
            out = check_output(name, tensor, (), blocks[0].dtype, None, "tensor")
            for index, block in enumerate(blocks):
                shapes.check_shape(name, f"scatter_list[{index}]", block, "tensor", out.shape)
        x = module_of(blocks[0]).stack(blocks)
    else:
        shapes.check_absent(name, "scatter_list", "src", scatter_list)
    return conclude(pg.communicator.scatter(x, tensor, root, async_op=async_op), [tensor], async_op)


def reduce_scatter(output: Any, input_list: Any, op: Any = ReduceOp.SUM, group: Any = None,
                   async_op: bool = False) -> Any:
    """Write the reduction of all ranks' ``input_list[i]`` (shape s_i) into `output` (shape s_i) of rank i."""
    if (pg := member(name := "reduce_scatter", group, output)) is None:
        return None
    blocks = shapes.inputs(name, "input_list", input_list, pg.size())
    out = check_output(name, output, (), blocks[0].dtype, None, "output")
    shapes.check_shape(name, "output", out, f"input_list[{pg.rank()}]", blocks[pg.rank()].shape)
    if shapes.alike(blocks):
        done = pg.communicator.reduce_scatter(module_of(out).stack(blocks), out, op, async_op=async_op)
        return conclude(done, [output], async_op)
    row = module_of(out).concatenate([block.reshape(-1) for block in blocks])
    done = pg.communicator.reduce_scatter_v(row, [block.size for block in blocks], op, async_op=async_op)
    return conclude(done, [output], async_op, lambda came: shapes.fill(name, "output", [out], [came]))


def reduce_scatter_tensor(output: Any, input: Any, op: Any = ReduceOp.SUM, group: Any = None,
                          async_op: bool = False) -> Any:
    """Write block i of the reduction of all ranks' `input` into `output` (shape (n, \\*s)) of rank i.

    `input` is concatenated (size * n, \\*s) or stacked (size, n, \\*s). `output` may be its own slot of `input`.
    """
    if (pg := member(name := "reduce_scatter_tensor", group, output)) is None:
        return None
    x = check_input(name, input, "input")
    out = check_output(name, output, (), x.dtype, None, "output")
    shapes.check_blocks(name, "input", x, "an output", out, pg.size())
    blocks = _blocks(shapes.apart(x, out), pg.size(), out)
    return conclude(pg.communicator.reduce_scatter(blocks, out, op, async_op=async_op), [output], async_op)


@_also_named(output_tensor_list="output_list", input_tensor_list="input_list")
def all_to_all(output_list: Any, input_list: Any, group: Any = None, async_op: bool = False) -> Any:
    """Write ``input_list[j]`` of rank i into ``output_list[i]`` of rank j; all shapes may differ.

    Raises ArgumentError if entries of `output_list` share memory. Raises MismatchError, with no entry written, if an
    entry and the block received for this entry differ in length.
    """
    if (pg := member(name := "all_to_all", group, *(input_list if isinstance(input_list, list) else ()))) is None:
        return None
    blocks = shapes.inputs(name, "input_list", input_list, pg.size())
    outs = shapes.outputs(name, "output_list", output_list, pg.size(), blocks[0].dtype)
    # A rank cannot know whether the blocks of all other ranks have one length, so lengths are always exchanged.
    done = pg.communicator.all_to_all_v([block.reshape(-1) for block in blocks], async_op=async_op)
    return conclude(done, output_list, async_op, lambda came: shapes.fill(name, "output_list", outs, came))


def all_to_all_single(output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None,
                      group: Any = None, async_op: bool = False) -> Any:
    """Write part j of rank i's `input` into part i of rank j's `output`; parts are cut along the first axis.

    Split sizes are the lengths of the parts, one length per rank; None cuts into equal parts. Either all ranks pass
    split sizes or none does.
    """
    if (pg := member(name := "all_to_all_single", group, input)) is None:
        return None
    x = check_input(name, input, "input")
    out = check_output(name, output, (), x.dtype, None, "output")
    given = shapes.splits_of(name, "input_split_sizes", input_split_sizes, x, pg.size())
    taken = shapes.splits_of(name, "output_split_sizes", output_split_sizes, out, pg.size())
    if input_split_sizes is None and output_split_sizes is None:
        if out.size != x.size:
            raise ArgumentError(f"{name}: output has shape {out.shape}, input {x.shape}; without split sizes both must "
                                "have the same length", code="GC-SHAPE")
        shape = pg.size(), x.size // pg.size()
        blocks = out.reshape(shape) if out.flags.c_contiguous else None  # an output with gaps is filled afterwards
        done = pg.communicator.all_to_all(shapes.apart(x, out).reshape(shape), blocks, async_op=async_op)
        if blocks is not None:
            return conclude(done, [output], async_op)
    else:
        done = pg.communicator.all_to_all_v([part.reshape(-1) for part in given], async_op=async_op)
    return conclude(done, [output], async_op, lambda came: shapes.fill(name, "output part ", taken, came))


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Write `obj` of rank i into ``object_list[i]`` of every rank; the list may be longer than there are ranks."""
    if (pg := member(name := "all_gather_object", group)) is None:
        return
    with internal.refusing(pg.communicator):
        shapes.check_list(name, "object_list", object_list, pg.size())
    object_list[:pg.size()] = pg.communicator.all_gather_object(obj)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = 0, group: Any = None,
                  group_dst: int | None = None) -> None:
    """Write `obj` of rank i into ``object_gather_list[i]`` of rank `dst`; other ranks pass None or an empty list."""
    if (pg := member(name := "gather_object", group)) is None:
        return
    root = pg.number_of(name, "dst", dst, group_dst)
    with internal.refusing(pg.communicator):
        if pg.rank() == root:
            shapes.check_list(name, "object_gather_list", object_gather_list, pg.size())
        else:
            shapes.check_absent(name, "object_gather_list", "dst", object_gather_list)
    objects = pg.communicator.gather_object(obj, root)
    if object_gather_list:
        object_gather_list[:pg.size()] = objects


def broadcast_object_list(object_list: list[Any], src: int | None = 0, group: Any = None, device: Any = None,
                          group_src: int | None = None) -> None:
    """Overwrite the objects of every rank's list with the objects of rank `src`; `device` has no effect.

    Raises ArgumentError, with the list unchanged, if a list and the list of rank `src` differ in length.
    """
    if (pg := member(name := "broadcast_object_list", group)) is None:
        return
    root = pg.number_of(name, "src", src, group_src)
    given = None
    if pg.rank() == root:
        with internal.refusing(pg.communicator):
            given = list(shapes.check_list(name, "object_list", object_list, 0))
    came = pg.communicator.broadcast_object(given, root)
    if pg.rank() != root:
        if len(shapes.check_list(name, "object_list", object_list, len(came))) != len(came):
            raise ArgumentError(f"{name}: object_list has {len(object_list)} objects, but the list of rank {src} has "
                                f"{len(came)}", code="GC-COUNTS")
        object_list[:] = came


def scatter_object_list(scatter_object_output_list: list[Any], scatter_object_input_list: list[Any] | None = None,
                        src: int | None = 0, group: Any = None, group_src: int | None = None) -> None:
    """Write ``scatter_object_input_list[i]`` of rank `src` into ``scatter_object_output_list[0]`` of rank i.

    Other ranks' input lists are ignored. Raises ArgumentError if the output list is empty or no list.
    """
    if (pg := member(name := "scatter_object_list", group)) is None:
        return
    root = pg.number_of(name, "src", src, group_src)
    came = pg.communicator.scatter_object(scatter_object_input_list, root)
    # Check the output list only after the scatter: a rank refusing earlier would leave the other ranks waiting.
    shapes.check_list(name, "scatter_object_output_list", scatter_object_output_list, 1)
    scatter_object_output_list[0] = came
