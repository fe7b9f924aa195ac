"""Side by side with PyTorch: each function of gpucoll.distributed and of torch.distributed, on the same tensors.

A scenario is run twice by the same ranks, once with either module. What calls return, what their arguments hold
afterwards and whether there was an error must be alike. What Gloo cannot do, or does wrongly, is left out, and stands
in test_distributed.py: gaps between elements, stacks, blocks of different lengths, results that share memory.
"""

import contextlib
import datetime
import importlib.util
import warnings

import pytest

import gpucoll as gc
import gpucoll.distributed
from gpucoll.distributed import groups, start
from pace import seconds

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None,
                                reason="PyTorch is not installed: pip install torch")
SIZE = 3
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "complex64", "bool")


class Log:
    """What calls did: name, outcome and what the arguments hold then, in the order of the calls."""

    def __init__(self):
        self.entries = []

    def __call__(self, function, *arguments, look=True, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                outcome = plain(function(*arguments, **options))
            except Exception:
                outcome = "error"
        warned = any("does not belong to the given group" in str(one.message) for one in caught)
        looked_at = [one for one in (*arguments, *options.values()) if isinstance(one, list) or is_tensor(one)]
        held = "error" if outcome == "error" else frozen(looked_at if look else [])
        self.entries.append((getattr(function, "__name__", ""), outcome, warned, held))


def plain(result):
    """A call's result as something to compare: handles are waited for."""
    if hasattr(result, "is_completed"):
        return "work", result.wait(), result.is_success()
    return [plain(one) for one in result] if isinstance(result, list) else frozen(result)


def is_tensor(argument):
    return hasattr(argument, "data_ptr")


def frozen(argument):
    """What it holds: of tensors all that counts, nothing of what is either module's own."""
    if is_tensor(argument):
        return str(argument.dtype), tuple(argument.shape), argument.clone().resolve_conj().tolist()
    if isinstance(argument, list):
        return [frozen(one) for one in argument]
    return argument if isinstance(argument, int | str | tuple | dict | None) else "an object"


def both(mpi, name, file):
    """Run scenario `name` with both modules; the calls that differ, and how."""
    import torch.distributed as theirs

    ours, deadline = gpucoll.distributed, datetime.timedelta(seconds=seconds(60))
    logs = []
    for dist in (ours, theirs):
        if dist is ours:
            start._init_from(gc.Communicator.from_mpi(mpi, timeout=deadline.total_seconds()))
        else:
            dist.init_process_group("gloo", f"file://{file}", deadline, mpi.size, mpi.rank)
        log = Log()
        try:
            SCENARIOS[name](log, dist, mpi.rank, mpi.size)
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            groups.state.groups.clear()
            start._clear_variables()
        logs.append(log.entries)
        mpi.Barrier()
    assert len(logs[0]) == len(logs[1])
    return [pair for pair in enumerate(zip(*logs, strict=True)) if pair[1][0] != pair[1][1]]


def tensor(rank, *shape, dtype="float32"):
    import torch

    count = torch.Size(shape).numel()
    whole = torch.arange(count).reshape(shape) % 5 + 10 * rank + 1
    return whole % 2 > 0 if dtype == "bool" else whole.to(getattr(torch, dtype))


def zeros(*shape, dtype="float32", times=None):
    import torch

    if times is not None:
        return [zeros(*shape, dtype=dtype) for _ in range(times)]
    return torch.zeros(shape, dtype=getattr(torch, dtype))


# ---------------------------------------------------------------- scenarios


def reductions(log, dist, rank, size):
    op = dist.ReduceOp
    for dtype in DTYPES:
        names = ["SUM"] if dtype == "complex64" else ["SUM", "MIN", "MAX", "PRODUCT"]
        names += ["AVG"] if "float" in dtype else ["BAND", "BOR", "BXOR"] if "complex" not in dtype else []
        for name in names:  # on numbers that are exact in every dtype
            x = tensor(rank, 2, 3, dtype=dtype)
            log(dist.all_reduce, x % 2 + 1 if name in ("PRODUCT", "AVG") and dtype != "bool" else x, getattr(op, name))
        x, given = zeros(2, dtype=dtype), [tensor(rank + peer, 2, dtype=dtype) for peer in range(size)]
        if dtype not in ("bool", "complex64"):
            log(dist.reduce, tensor(rank, 2, 3, dtype=dtype), 1, look=rank == 1)  # Gloo writes into the others' tensors
            log(dist.reduce_scatter, x, given)
            log(dist.reduce_scatter_tensor, x, tensor(rank, 2 * size, dtype=dtype))
    for x in (tensor(rank), zeros(0), tensor(rank, 2, 3).t()):
        log(dist.all_reduce, x)
    log(dist.all_reduce, tensor(rank, 4), async_op=True)
    log(dist.all_reduce, tensor(rank, 2, dtype="complex64"), op.MAX)
    log(dist.reduce, tensor(rank, 4), dst=2, async_op=True, look=rank == 2)
    log(dist.reduce, tensor(rank, 2), group_dst=1, look=rank == 1)
    log(dist.reduce, tensor(rank, 2), 1, group_dst=1)
    log(dist.reduce, tensor(rank, 2), size)
    for wrong in ([1.0], 1.0):
        log(dist.all_reduce, wrong)
    x, given = zeros(2), [tensor(rank + peer, 2) for peer in range(size)]
    log(dist.reduce_scatter, x, given, op.MAX, async_op=True)
    log(dist.reduce_scatter, x, given[1:])
    log(dist.reduce_scatter, x, [one.double() for one in given])
    log(dist.reduce_scatter, zeros(1 + rank), [tensor(rank, 1 + peer) for peer in range(size)])
    whole = tensor(rank, 2 * size)
    log(dist.reduce_scatter_tensor, x, tensor(rank, 2 * size) * 3, op.AVG)
    log(dist.reduce_scatter_tensor, x, tensor(rank, 4 * size)[::2], async_op=True)
    log(dist.reduce_scatter_tensor, whole[2 * rank:2 * rank + 2], whole)
    log(dist.reduce_scatter_tensor, x, tensor(rank, 2 * size + 1))


def movements(log, dist, rank, size):
    for dtype in DTYPES:
        x, many = tensor(rank, 2, 3, dtype=dtype), [tensor(3 * rank + peer, 2, 3, dtype=dtype) for peer in range(size)]
        outs, whole = zeros(2, 3, dtype=dtype, times=size), zeros(2 * size, 3, dtype=dtype)
        log(dist.broadcast, x.clone(), 1)
        log(dist.all_gather, outs, x)
        log(dist.all_gather_into_tensor, whole, x)
        log(dist.all_to_all, outs, many)
        log(dist.all_to_all_single, zeros(2 * size, 3, dtype=dtype), whole)
        if dtype not in ("bool", "complex64"):
            log(dist.gather, x, outs if rank == 1 else None, 1)
            log(dist.scatter, x, many if rank == 1 else None, 1)
    x, outs, given = tensor(rank, 4), zeros(4, times=size), [tensor(3 * rank + peer, 4) for peer in range(size)]
    log(dist.broadcast, x, src=0, async_op=True)
    log(dist.broadcast, x, group_src=1)
    for wrong in ((x, size), (x, -1)):
        log(dist.broadcast, *wrong)
    log(dist.broadcast, x, 1, group_src=1)
    log(dist.gather, x, gather_list=outs if rank == 0 else [], async_op=True)
    log(dist.scatter, x, scatter_list=given if rank == 0 else [], async_op=True)
    log(dist.all_gather, outs, x, async_op=True)
    log(dist.all_gather, outs, tensor(rank, 8)[::2])
    log(dist.all_gather, [one[:, 0] for one in zeros(4, 2, times=size)], x)
    log(dist.all_gather, zeros(times=size), tensor(rank))
    for wrong in ((outs[1:], x), (outs, tensor(rank, 5)), (outs, tensor(rank, 2, 2)), (outs, x.long()),
                  (zeros(size, 4), x)):
        log(dist.all_gather, *wrong)
    whole = tensor(rank, 2 * size)
    log(dist.all_gather_into_tensor, whole, whole[2 * rank:2 * rank + 2])
    log(dist.all_gather_into_tensor, output_tensor=zeros(2 * size), input_tensor=tensor(rank, 2), async_op=True)
    for wrong in ((zeros(2 * size + 1), tensor(rank, 2)), (zeros(2 * size), tensor(rank, 2).long())):
        log(dist.all_gather_into_tensor, *wrong)
    log(dist.all_to_all, output_tensor_list=outs, input_tensor_list=given, async_op=True)
    for wrong in ((outs[1:], given[1:]), (outs, [one.double() for one in given])):
        log(dist.all_to_all, *wrong)
    log(dist.all_to_all_single, zeros(2 * size), tensor(rank, size, 2), async_op=True)
    splits, odd = [rank + peer for peer in range(size)], zeros(2 * size + 1)
    out, rows = zeros(sum(splits), 2), tensor(rank, sum(splits), 2)
    for async_op in (False, True):
        log(dist.all_to_all_single, out, rows, splits, splits, async_op=async_op)
    for wrong in ((out, rows, splits, [one + 1 for one in splits]), (out, rows, splits[1:], splits),
                  (out.double(), rows, splits, splits), (odd, odd.clone())):
        log(dist.all_to_all_single, *wrong)


def messages(log, dist, rank, size):
    for dtype in DTYPES:
        if rank == 0:
            log(dist.send, tensor(rank, 2, 3, dtype=dtype), 1)
        elif rank == 1:
            log(dist.recv, zeros(2, 3, dtype=dtype), 0)
    x, came, right, left = tensor(rank, 4), zeros(4), (rank + 1) % size, (rank - 1) % size
    log(lambda came: [dist.isend(x, right, tag=3), dist.irecv(came, left, tag=3)], came)
    log(lambda came: dist.batch_isend_irecv([dist.P2POp(dist.isend, x + 1, right),
                                             dist.P2POp(dist.irecv, came, left)]), came)
    if rank != 1:
        log(*((dist.recv, came) if rank == 2 else (dist.send, x, 2)))
    log(dist.send, x, rank)
    log(dist.isend, x)
    log(dist.P2POp, dist.all_reduce, x, 0)
    log(lambda: dist.batch_isend_irecv(dist.P2POp(dist.isend, x, right)))
    log(lambda: (lambda op: (op.peer, op.group_peer, op.tag))(dist.P2POp(dist.irecv, x, right, tag=7)))
    log(dist.barrier)
    log(dist.barrier, async_op=True)
    log(dist.monitored_barrier, timeout=datetime.timedelta(seconds=seconds(60)), wait_all_ranks=True)
    for length in (size, size + 1):
        log(dist.all_gather_object, [None] * length, {"rank": rank})
    log(dist.gather_object, (rank,), [None] * size if rank == 1 else None, 1)
    log(dist.broadcast_object_list, ["a", {1: 2}] if rank == 2 else [None, None], 2)
    log(dist.scatter_object_list, [None, "stays"], ["x", 5, [6]] if rank == 0 else None)


def in_groups(log, dist, rank, size):
    for wrong in ([0, 0], [0, size], [-1]):
        log(dist.new_group, wrong)
    group = dist.new_group({0, 2})
    for call in (dist.get_rank, dist.get_world_size, dist.barrier, dist.monitored_barrier):
        log(call, group)
    log(lambda: group == dist.GroupMember.NON_GROUP_MEMBER)
    x, outs = tensor(rank, 2), zeros(2, times=2)
    log(dist.all_reduce, x, group=group)
    log(dist.broadcast, x, 2, group=group)
    log(dist.broadcast, x, group=group, group_src=0)
    log(dist.gather, x, outs if rank == 2 else None, 2, group=group)
    log(dist.scatter, x, outs if rank == 2 else None, 2, group=group)
    log(dist.all_gather, outs, x, group=group)
    log(dist.all_to_all, outs, [x, x + 1], group=group)
    log(dist.all_reduce, x, group=group, async_op=True)
    log(dist.reduce, x, 0, group=group, look=rank == 0)
    log(dist.all_gather_object, [None, None], rank, group=group)
    log(*((dist.isend, x, 2 - rank) if rank == 0 else (dist.irecv, x, 0)), group=group)
    if rank == 1:
        log(dist.get_backend, group)
    else:
        log(dist.broadcast, x, 1, group=group)
        log(dist.reduce, x, 1, group=group)
        log(dist.get_process_group_ranks, group)
        log(dist.get_group_rank, group, 2)
        log(dist.get_global_rank, group, 1)
    turned = dist.new_group((2, 1, 0))
    log(dist.get_rank, turned)
    log(dist.destroy_process_group, turned)
    log(dist.get_rank, dist.group.WORLD)
    log(dist.init_process_group, "gloo")
    dist.destroy_process_group()
    for call in (dist.is_initialized, dist.get_rank, dist.get_world_size, dist.barrier, dist.monitored_barrier,
                 dist.get_backend, dist.new_group, dist.destroy_process_group):
        log(call)
    log(dist.all_reduce, tensor(rank, 2))
    log(dist.init_process_group, "ncll")
    log(dist.init_process_group, "gloo", "shared")


SCENARIOS = {function.__name__: function for function in (reductions, movements, messages, in_groups)}


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_torch_does(ranks, tmp_path, name):
    differences = ranks(both, SIZE, name, str(tmp_path / "store"), timeout=seconds(120),
                        env={"GLOO_SOCKET_IFNAME": "lo"})
    assert differences == [[]] * SIZE
