"""The collectives, of arrays and of objects. Arrays and lists are checked before data is sent.

Objects are pickled; see `gpucoll.communicator.objects`. In shapes below, `size` is the number of ranks of the group.
"""

from __future__ import annotations

import functools
import itertools
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
    """Overwrite every rank's `tensor` with the reduction of all ranks' tensors.

    Parameters
    ----------
    tensor : array of shape s
        NumPy's array, PyTorch's tensor, or another with DLPack.
    op : str or ReduceOp, optional
        The reduction, as in `Communicator.all_reduce`.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-DTYPE).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.all_reduce : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> x = numpy.array([1.0, 2.0])
    >>> dist.all_reduce(x)
    >>> x
    array([1., 2.])
    >>> dist.destroy_process_group()
    """
    if (pg := member("all_reduce", group, tensor)) is None:
        return None
    done = pg.communicator.all_reduce(tensor, tensor, op, async_op=async_op)
    return conclude(done, [tensor], async_op)


def all_reduce_coalesced(tensors: Any, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
    """Overwrite every rank's `tensors`, of one dtype, with the reductions of all ranks' tensors, by one call.

    Parameters
    ----------
    tensors : array or list of arrays
        Arrays of one dtype, of any shapes.
    op : str or ReduceOp, optional
        The reduction, as in `Communicator.all_reduce`.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> import numpy
    >>> x, y = numpy.ones(2), numpy.ones(3)
    >>> dist.all_reduce_coalesced([x, y])
    >>> dist.destroy_process_group()
    """
    given = tensors if isinstance(tensors, list | tuple) else [tensors]
    if (pg := member(name := "all_reduce_coalesced", group, *given)) is None:
        return None
    xs = shapes.inputs(name, "tensors", given, max(len(given), 1))
    outs, xp = shapes.outputs(name, "tensors", given, len(xs), xs[0].dtype), module_of(xs[0])
    row, ends = xp.concatenate([x.reshape(-1) for x in xs]), itertools.accumulate(x.size for x in xs[:-1])
    done = pg.communicator.all_reduce(row, row, op, async_op=async_op)
    parts = xp.split(row, [*ends])
    return conclude(done, given, async_op, lambda came: shapes.fill(name, "tensors", outs, parts))


def reduce(tensor: Any, dst: int | None = 0, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False,
           group_dst: int | None = None) -> Any:
    """Overwrite `tensor` of rank `dst` with the reduction of all ranks' tensors; other ranks keep theirs.

    Parameters
    ----------
    tensor : array of shape s
        NumPy's array, PyTorch's tensor, or another with DLPack.
    dst : int or None, optional
        The receiving rank, by its number in the world.
    op : str or ReduceOp, optional
        The reduction, as in `Communicator.all_reduce`.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.
    group_dst : int or None, optional
        The receiving rank, by its number in the group, in place of `dst`.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-DTYPE).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.reduce : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> x = numpy.array([3])
    >>> dist.reduce(x, dst=0, op=dist.ReduceOp.MAX)
    >>> x
    array([3])
    >>> dist.destroy_process_group()
    """
    if (pg := member("reduce", group, tensor)) is None:
        return None
    root = pg.number_of("reduce", "dst", dst, group_dst)
    out = tensor if pg.rank() == root else None
    return conclude(pg.communicator.reduce(tensor, out, op, root, async_op=async_op), [tensor], async_op)


def broadcast(tensor: Any, src: int | None = 0, group: Any = None, async_op: bool = False,
              group_src: int | None = None) -> Any:
    """Overwrite every rank's `tensor` with the tensor of rank `src`.

    Parameters
    ----------
    tensor : array of shape s
        NumPy's array, PyTorch's tensor, or another with DLPack.
    src : int or None, optional
        The sending rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.
    group_src : int or None, optional
        The sending rank, by its number in the group, in place of `src`.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-DTYPE).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.broadcast : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> x = numpy.array([3])
    >>> dist.broadcast(x, src=0)
    >>> x
    array([3])
    >>> dist.destroy_process_group()
    """
    if (pg := member("broadcast", group, tensor)) is None:
        return None
    root = pg.number_of("broadcast", "src", src, group_src)
    return conclude(pg.communicator.broadcast(tensor, root, async_op=async_op), [tensor], async_op)


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None, timeout: Any = None) -> Any:
    """Wait until every rank of `group` has entered the barrier.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.
    device_ids : object, optional
        Has no effect.
    timeout : timedelta or None, optional
        At this deadline CollectiveTimeout is raised, and the barrier goes on.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    monitored_barrier : Names the missing ranks.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.barrier()
    >>> dist.destroy_process_group()
    """
    if (pg := member("barrier", group)) is None:
        return None
    has_work = async_op or timeout is not None
    work = conclude(pg.communicator.barrier(async_op=has_work), [], has_work)
    if timeout is not None and not async_op:
        work.wait(timeout)
    return work if async_op else None


def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    """Write `tensor` of rank i into ``tensor_list[i]`` of every rank; shapes may differ from rank to rank.

    Parameters
    ----------
    tensor_list : list of arrays of shape s_i
        The places of the arrays of all ranks.
    tensor : array of shape s_i
        The contribution of this rank.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError
        Entries of `tensor_list` share memory (GC-OVERLAP).
    MismatchError
        An entry and the tensor received for this entry differ in length; no entry is written (GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    all_gather_into_tensor : Into one array.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> parts = [numpy.zeros(2)]
    >>> dist.all_gather(parts, numpy.array([1.0, 2.0]))
    >>> parts
    [array([1., 2.])]
    >>> dist.destroy_process_group()
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
    """Write all ranks' `input` into every rank's `output`.

    `input` may be its own slot of `output`.

    Parameters
    ----------
    output : array of shape (size * n, \\*s) or (size, n, \\*s)
        The place of the arrays of all ranks, concatenated or stacked.
    input : array of shape (n, \\*s)
        The contribution of this rank.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-DTYPE).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.all_gather : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = numpy.zeros(2)
    >>> dist.all_gather_into_tensor(out, numpy.array([1.0, 2.0]))
    >>> out
    array([1., 2.])
    >>> dist.destroy_process_group()
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
    """Write `tensor` of rank i into ``gather_list[i]`` of rank `dst`.

    Parameters
    ----------
    tensor : array of shape s
        NumPy's array, PyTorch's tensor, or another with DLPack.
    gather_list : list of arrays of shape s, or None, optional
        The places of the arrays on rank `dst`; None or empty on the other ranks.
    dst : int or None, optional
        The receiving rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.
    group_dst : int or None, optional
        The receiving rank, by its number in the group, in place of `dst`.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError
        Other ranks pass a non-empty `gather_list` (GC-ROOT), or entries share memory (GC-OVERLAP).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.gather : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> parts = [numpy.zeros(1)]
    >>> dist.gather(numpy.array([5.0]), parts)
    >>> parts
    [array([5.])]
    >>> dist.destroy_process_group()
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
    """Write ``scatter_list[i]`` of rank `src` into `tensor` of rank i.

    Parameters
    ----------
    tensor : array of shape s
        The place of this rank's array.
    scatter_list : list of arrays of shape s, or None, optional
        An array for each rank on rank `src`; None or empty on the other ranks.
    src : int or None, optional
        The sending rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.
    group_src : int or None, optional
        The sending rank, by its number in the group, in place of `src`.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError
        Other ranks pass a non-empty `scatter_list` (GC-ROOT).
    PeerError
        Rank `src` refuses its arguments (GC-PEER).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.scatter : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> x = numpy.zeros(1)
    >>> dist.scatter(x, [numpy.array([5.0])])
    >>> x
    array([5.])
    >>> dist.destroy_process_group()
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
    """Write the reduction of all ranks' ``input_list[i]`` into `output` of rank i.

    Parameters
    ----------
    output : array of shape s_i
        The place of this rank's sum.
    input_list : list of arrays of shape s_i
        An array for each rank.
    op : str or ReduceOp, optional
        The reduction, as in `Communicator.all_reduce`.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-DTYPE).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    reduce_scatter_tensor : From one array.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = numpy.zeros(1)
    >>> dist.reduce_scatter(out, [numpy.array([5.0])])
    >>> out
    array([5.])
    >>> dist.destroy_process_group()
    """
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
    """Write block i of the reduction of all ranks' `input` into `output` of rank i.

    `output` may be its own slot of `input`.

    Parameters
    ----------
    output : array of shape (n, \\*s)
        The place of this rank's block.
    input : array of shape (size * n, \\*s) or (size, n, \\*s)
        The blocks for all ranks, concatenated or stacked.
    op : str or ReduceOp, optional
        The reduction, as in `Communicator.all_reduce`.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-DTYPE).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.reduce_scatter : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = numpy.zeros(2)
    >>> dist.reduce_scatter_tensor(out, numpy.array([1.0, 2.0]))
    >>> out
    array([1., 2.])
    >>> dist.destroy_process_group()
    """
    if (pg := member(name := "reduce_scatter_tensor", group, output)) is None:
        return None
    x = check_input(name, input, "input")
    out = check_output(name, output, (), x.dtype, None, "output")
    shapes.check_blocks(name, "input", x, "an output", out, pg.size())
    blocks = _blocks(shapes.apart(x, out), pg.size(), out)
    return conclude(pg.communicator.reduce_scatter(blocks, out, op, async_op=async_op), [output], async_op)


all_gather_single, reduce_scatter_single = all_gather_into_tensor, reduce_scatter_tensor  # torch's newer names


@_also_named(output_tensor_list="output_list", input_tensor_list="input_list")
def all_to_all(output_list: Any, input_list: Any, group: Any = None, async_op: bool = False) -> Any:
    """Write ``input_list[j]`` of rank i into ``output_list[i]`` of rank j; all shapes may differ.

    Parameters
    ----------
    output_list : list of arrays
        The places of the arrays from all ranks.
    input_list : list of arrays
        An array for each rank.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError
        Entries of `output_list` share memory (GC-OVERLAP).
    MismatchError
        An entry and the block received for this entry differ in length; no entry is written (GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    all_to_all_single : Parts of one array.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = [numpy.zeros(1)]
    >>> dist.all_to_all(out, [numpy.array([5.0])])
    >>> out
    [array([5.])]
    >>> dist.destroy_process_group()
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

    Either all ranks pass split sizes or none does.

    Parameters
    ----------
    output : array
        The place of the result.
    input : array
        The contribution of this rank.
    output_split_sizes : list of int or None, optional
        The lengths of the parts of `output`, one for each rank; None: equal parts.
    input_split_sizes : list of int or None, optional
        The lengths of the parts of `input`, one for each rank; None: equal parts.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    async_op : bool, optional
        True returns a `Work` at once.

    Returns
    -------
    None or Work
        The handle with ``async_op=True``, else None; None outside the group, with a warning.

    Raises
    ------
    ArgumentError or DtypeError
        A wrong argument of this rank, before data is sent (GC-SHAPE, GC-ROOT, GC-OP, GC-DTYPE).
    MismatchError
        The calls of the ranks differ (GC-MISMATCH, GC-SHAPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.all_to_all_v : The call underneath.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = numpy.zeros(2)
    >>> dist.all_to_all_single(out, numpy.array([1.0, 2.0]))
    >>> out
    array([1., 2.])
    >>> dist.destroy_process_group()
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
    """Write `obj` of rank i into ``object_list[i]`` of every rank.

    Parameters
    ----------
    object_list : list
        The place of the objects; it may be longer than there are ranks.
    obj : object
        Any object that can be pickled.
    group : ProcessGroup or None, optional
        The group; None is the default group.

    Raises
    ------
    ArgumentError
        A list is too short, or no list (GC-COUNTS).
    Exception
        An object cannot be pickled; PeerError on the other ranks (GC-PEER).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.all_gather_object : The call underneath.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> found = [None]
    >>> dist.all_gather_object(found, {"loss": 0.5})
    >>> found
    [{'loss': 0.5}]
    >>> dist.destroy_process_group()
    """
    if (pg := member(name := "all_gather_object", group)) is None:
        return
    with internal.refusing(pg.communicator):
        shapes.check_list(name, "object_list", object_list, pg.size())
    object_list[:pg.size()] = pg.communicator.all_gather_object(obj)


def gather_object(obj: Any, object_gather_list: list[Any] | None = None, dst: int | None = 0, group: Any = None,
                  group_dst: int | None = None) -> None:
    """Write `obj` of rank i into ``object_gather_list[i]`` of rank `dst`.

    Parameters
    ----------
    obj : object
        Any object that can be pickled.
    object_gather_list : list or None, optional
        The place of the objects on rank `dst`; None or empty on the other ranks.
    dst : int or None, optional
        The receiving rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    group_dst : int or None, optional
        The receiving rank, by its number in the group, in place of `dst`.

    Raises
    ------
    ArgumentError
        A list is too short, or no list (GC-COUNTS).
    Exception
        An object cannot be pickled; PeerError on the other ranks (GC-PEER).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.gather_object : The call underneath.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> found = [None]
    >>> dist.gather_object("a", found)
    >>> found
    ['a']
    >>> dist.destroy_process_group()
    """
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
    """Overwrite the objects of every rank's list with the objects of rank `src`.

    Parameters
    ----------
    object_list : list
        The objects, equally many on all ranks.
    src : int or None, optional
        The sending rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    device : object, optional
        Has no effect.
    group_src : int or None, optional
        The sending rank, by its number in the group, in place of `src`.

    Raises
    ------
    ArgumentError
        A list and the list of rank `src` differ in length; the list is unchanged (GC-COUNTS).
    Exception
        An object cannot be pickled; PeerError on the other ranks (GC-PEER).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.broadcast_object : The call underneath.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> found = ["a", 1]
    >>> dist.broadcast_object_list(found)
    >>> found
    ['a', 1]
    >>> dist.destroy_process_group()
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

    Parameters
    ----------
    scatter_object_output_list : list
        The place of this rank's object.
    scatter_object_input_list : list or None, optional
        An object for each rank on rank `src`; ignored on the other ranks.
    src : int or None, optional
        The sending rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    group_src : int or None, optional
        The sending rank, by its number in the group, in place of `src`.

    Raises
    ------
    ArgumentError
        A list is too short, or no list (GC-COUNTS).
    Exception
        An object cannot be pickled; PeerError on the other ranks (GC-PEER).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.scatter_object : The call underneath.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> found = [None]
    >>> dist.scatter_object_list(found, ["a"])
    >>> found
    ['a']
    >>> dist.destroy_process_group()
    """
    if (pg := member(name := "scatter_object_list", group)) is None:
        return
    root = pg.number_of(name, "src", src, group_src)
    came = pg.communicator.scatter_object(scatter_object_input_list, root)
    # Check the output list only after the scatter: a rank refusing earlier would leave the other ranks waiting.
    shapes.check_list(name, "scatter_object_output_list", scatter_object_output_list, 1)
    scatter_object_output_list[0] = came
