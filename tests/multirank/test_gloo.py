"""Side by side with PyTorch: a table of calls, made by the same ranks with gpucoll.distributed and torch.distributed.

What a call returns, what its arguments hold then, and whether there was an error must be alike. What Gloo cannot do, or
does wrongly, stands in test_distributed.py, as do refusals: gaps, stacks, blocks of different lengths.
"""

import datetime
import warnings
from functools import partial as call

import pytest

import gpucoll.distributed
from distributed_world import world
from pace import seconds

SIZE = 3


def table(dist, rank, torch):
    """The calls, in order. Of a `call` the arguments are looked at, of a function its result only."""
    def tensor(*shape, dtype=torch.float32, start=10 * rank + 1):
        return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + start).to(dtype)

    def reduced(dst):
        x = tensor(4)
        return dist.reduce(x, dst), x if rank == dst else None  # Gloo writes into the others' tensors

    outs = [tensor(4) for _ in range(SIZE)]
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.complex64, torch.bool):
        x, whole, many = tensor(2, dtype=dtype), tensor(6, dtype=dtype), [tensor(2, dtype=dtype) for _ in range(SIZE)]
        yield from [call(dist.broadcast, x.clone(), 1), call(dist.all_reduce, x.clone()),
                    call(dist.all_gather, many, x), call(dist.all_gather_into_tensor, whole, x),
                    call(dist.all_to_all, [one + one for one in many], many),
                    call(dist.all_to_all_single, whole.clone(), whole)]
        if dtype.is_floating_point:
            yield call(dist.all_reduce, tensor(2, dtype=dtype, start=1), dist.ReduceOp.AVG)
        if dtype not in (torch.bool, torch.complex64):
            blocks = many if rank == 1 else None
            yield from [call(dist.all_reduce, tensor(2, dtype=dtype), dist.ReduceOp.MAX),
                        call(dist.reduce_scatter, x, many), call(dist.reduce_scatter_tensor, x, whole),
                        call(dist.gather, x, blocks, 1), call(dist.scatter, x, blocks, 1)]
        yield call(dist.send, x, 1) if rank == 0 else call(dist.recv, x, 0) if rank == 1 else call(dist.get_rank)
    x, given, splits = tensor(4), [tensor(4) + peer for peer in range(SIZE)], [rank, rank + 1, rank + 2]
    rows, out, right, left = tensor(sum(splits), 2), tensor(sum(splits), 2), (rank + 1) % SIZE, (rank - 1) % SIZE
    for async_op in (False, True):
        yield from [call(function, *arguments, async_op=async_op) for function, *arguments in [
            (dist.broadcast, tensor(4)), (dist.all_reduce, tensor(4)), (dist.gather, x, outs if rank == 0 else []),
            (dist.scatter, tensor(4), given if rank == 0 else []), (dist.all_gather, outs, x), (dist.barrier,),
            (dist.all_to_all, outs, given), (dist.reduce_scatter, tensor(4), given),
            (dist.all_to_all_single, out, rows, splits, splits)]]
    yield call(reduced, 2)
    yield from [  # objects and messages
        call(dist.all_gather_object, [None] * (SIZE + 1), {"rank": rank}),
        call(dist.gather_object, (rank,), [None] * SIZE if rank == 1 else None, 1),
        call(dist.broadcast_object_list, ["a", {1: 2}] if rank == 2 else [None, None], 2),
        call(dist.scatter_object_list, [None, "stays"], ["x", 5, [6]] if rank == 0 else None),
        lambda: [dist.isend(x, right, tag=3), dist.irecv(outs[0], left, tag=3)], lambda: outs,
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, outs[1], left)]),
        lambda: outs, call(dist.monitored_barrier, timeout=datetime.timedelta(seconds=seconds(60)))]
    group, two = dist.new_group({0, 2}), outs[:2]
    yield from [call(function, *arguments, group=group) for function, *arguments in [  # rank 1 is not in it
        (dist.get_rank,), (dist.get_world_size,), (dist.all_reduce, tensor(4)), (dist.broadcast, tensor(4), 2),
        (dist.gather, x, two if rank == 2 else None, 2), (dist.scatter, tensor(4), two if rank == 2 else None, 2),
        (dist.all_gather, two, x), (dist.all_to_all, two, [x, x + 1]), (dist.all_gather_object, [None, None], rank)]]
    yield from [call(dist.get_backend, group)] if rank == 1 else [
        call(dist.broadcast, x, 1, group=group), call(dist.reduce, x, 1, group=group),
        call(dist.get_process_group_ranks, group), call(dist.get_group_rank, group, 2)]


def plain(found):
    """What can be compared: handles are waited for; of tensors all that counts, nothing of what is a module's own."""
    if hasattr(found, "is_completed"):
        return "work", found.wait(), found.is_success()
    if hasattr(found, "data_ptr"):
        return str(found.dtype), tuple(found.shape), found.clone().resolve_conj().tolist()
    if isinstance(found, list | tuple):
        return [plain(one) for one in found]
    return found if isinstance(found, int | str | dict | None) else "an object"


def outcome(row):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            returned = plain(row())
        except Exception:
            return "error"
    warned = any("does not belong to the given group" in str(one.message) for one in caught)
    held = [one for one in getattr(row, "args", []) if isinstance(one, list) or hasattr(one, "data_ptr")]
    return returned, warned, plain(held)


def both(mpi, file):
    import torch

    with world(mpi):
        ours = [outcome(row) for row in table(gpucoll.distributed, mpi.rank, torch)]
    dist = torch.distributed
    dist.init_process_group("gloo", f"file://{file}", datetime.timedelta(seconds=seconds(60)), mpi.size, mpi.rank)
    theirs = [outcome(row) for row in table(dist, mpi.rank, torch)]
    dist.destroy_process_group()
    return [row for row in enumerate(zip(ours, theirs, strict=True)) if row[1][0] != row[1][1]]


def test_as_torch_does(ranks, tmp_path):
    pytest.importorskip("torch.distributed", reason="PyTorch is not installed: pip install torch")
    differences = ranks(both, SIZE, str(tmp_path / "store"), timeout=seconds(120), env={"GLOO_SOCKET_IFNAME": "lo"})
    assert differences == [[]] * SIZE
