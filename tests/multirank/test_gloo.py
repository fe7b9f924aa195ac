"""Side by side with PyTorch: each function of gpucoll.distributed and of torch.distributed, on the same tensors.

A scenario is run twice by the same ranks, once with either module. What calls return, what tensors hold afterwards
and whether there was an error must be alike. Where Gloo cannot do what PyTorch documents, or does it wrongly,
`DOCUMENTED` says what the call must do, and only gpucoll is held to it.
"""

import contextlib
import datetime
import importlib.util
import warnings

import pytest

import gpucoll as gc
import gpucoll.distributed
from gpucoll.distributed import groups, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None,
                                reason="PyTorch is not installed: pip install torch")
SIZE = 3


class Log:
    """What calls did: label, outcome and tensors, in the order of the calls."""

    def __init__(self, dist):
        self.dist = dist
        self.entries = {}

    def __call__(self, label, function, *tensors):
        """Note what `function()` returns, or that it raises, and what the tensors hold then."""
        places = [tensor.data_ptr() for tensor in tensors]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            outcome = self.outcome(function)
        warned = any("does not belong to the given group" in str(one.message) for one in caught)
        held = [(str(tensor.dtype), tuple(tensor.shape), tensor.clone().resolve_conj().tolist()) for tensor in tensors]
        assert [tensor.data_ptr() for tensor in tensors] == places
        assert label not in self.entries
        self.entries[label] = (outcome, warned, held if outcome != "error" else None)

    def outcome(self, function):
        try:
            return plain(function())
        except Exception:
            return "error"


def plain(result):
    """A call's result as something to compare: handles are waited for."""
    if hasattr(result, "is_completed"):
        return "work", result.wait(), result.is_success()
    if isinstance(result, list):
        return [plain(one) for one in result]
    return result


@contextlib.contextmanager
def gpucoll_group(mpi, file):
    start._init_from(gc.Communicator.from_mpi(mpi, timeout=20))
    try:
        yield gpucoll.distributed
        if gpucoll.distributed.is_initialized():
            gpucoll.distributed.destroy_process_group()
    finally:
        groups.state.groups.clear()
        start._clear_variables()


@contextlib.contextmanager
def torch_group(mpi, file):
    import torch.distributed

    torch.distributed.init_process_group("gloo", f"file://{file}", datetime.timedelta(seconds=20), mpi.size, mpi.rank)
    try:
        yield torch.distributed
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def both(mpi, name, file):
    """Run scenario `name` with both modules; the labels at which they differ, and how."""
    found = []
    for group in (gpucoll_group, torch_group):
        with group(mpi, file) as dist:
            log = Log(dist)
            SCENARIOS[name](log, dist, mpi.rank, mpi.size)
            found.append(log.entries)
        mpi.Barrier()
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    documented = DOCUMENTED.get(name, {})
    for label, outcome in documented.items():
        assert shortened(ours[label]) == outcome(mpi.rank, mpi.size), (label, ours[label])
    return {label: (entry, theirs[label]) for label, entry in ours.items()
            if entry != theirs[label] and label not in documented}


def shortened(entry):
    """An entry as `DOCUMENTED` has it: "error", or what the call returned and its tensors' values."""
    outcome, _, held = entry
    return "error" if outcome == "error" else (outcome, *(values for _, _, values in held))


# ---------------------------------------------------------------- scenarios


def tensor(rank, *shape, dtype="float32"):
    import torch

    count = 1
    for length in shape:
        count *= length
    return (torch.arange(count).reshape(shape) % 5 + 10 * rank + 1).to(getattr(torch, dtype))


def zeros(*shape, dtype="float32"):
    import torch

    return torch.zeros(shape, dtype=getattr(torch, dtype))


DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64", "complex64", "bool")
OPS = ("SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR")


def ops_for(dtype):
    if dtype == "complex64":
        return ("SUM",)
    return OPS[:5] if "float" in dtype else tuple(op for op in OPS if op != "AVG")


def all_reduce(log, dist, rank, size):
    for dtype in DTYPES:
        for op in ops_for(dtype):
            x = tensor(rank, 2, 3, dtype=dtype) if dtype != "bool" else tensor(rank, 2, 3) % 2 > 0
            if op in ("PRODUCT", "AVG") and dtype != "bool":  # exact in every dtype
                x = x % 2 + 1
            log(f"{dtype} {op}", lambda x=x, op=op: dist.all_reduce(x, getattr(dist.ReduceOp, op)), x)
    x = tensor(rank, 4)
    log("async", lambda: dist.all_reduce(x, async_op=True), x)
    for label, x in (("0-d", tensor(rank)), ("empty", zeros(0)), ("transposed", tensor(rank, 2, 3).t())):
        log(label, lambda x=x: dist.all_reduce(x), x)
    x = tensor(rank, 8)[::2]
    log("strided", lambda: dist.all_reduce(x), x)
    x = tensor(rank, 2).to(dtype=tensor(0, dtype="complex64").dtype)
    log("complex MAX", lambda: dist.all_reduce(x, dist.ReduceOp.MAX))
    log("complex PRODUCT", lambda: dist.all_reduce(x, dist.ReduceOp.PRODUCT), x)
    y = tensor(rank, 2, dtype="int16")
    log("int16", lambda: dist.all_reduce(y), y)
    log("list", lambda: dist.all_reduce([1.0]))
    log("number", lambda: dist.all_reduce(1.0))


def reduce(log, dist, rank, size):
    for dtype in DTYPES[:8]:
        for op in ("SUM", "MAX"):
            x = tensor(rank, 2, 3, dtype=dtype)
            log(f"{dtype} {op}", lambda x=x, op=op: dist.reduce(x, 1, getattr(dist.ReduceOp, op)),
                *([x] if rank == 1 else []))  # Gloo writes into the other ranks' tensors
    x = tensor(rank, 4)
    log("async", lambda: dist.reduce(x, dst=2, async_op=True), *([x] if rank == 2 else []))
    y = tensor(rank, 2)
    log("group_dst", lambda: dist.reduce(y, group_dst=1), *([y] if rank == 1 else []))
    log("dst twice", lambda: dist.reduce(y, 1, group_dst=1))
    log("no such dst", lambda: dist.reduce(y, size))


def broadcast(log, dist, rank, size):
    for dtype in DTYPES:
        x = tensor(rank, 2, 3, dtype=dtype)
        log(dtype, lambda x=x: dist.broadcast(x, 1), x)
    x = tensor(rank, 8)
    y = tensor(rank, 8)
    log("strided", lambda: dist.broadcast(y[::2], 2), y)
    log("async", lambda: dist.broadcast(x, src=0, async_op=True), x)
    log("group_src", lambda: dist.broadcast(x, group_src=1), x)
    log("src twice", lambda: dist.broadcast(x, 1, group_src=1))
    log("no such src", lambda: dist.broadcast(x, size))
    log("negative src", lambda: dist.broadcast(x, -1))


def all_gather(log, dist, rank, size):
    for dtype in DTYPES:
        outs, x = [zeros(2, 3, dtype=dtype) for _ in range(size)], tensor(rank, 2, 3, dtype=dtype)
        log(dtype, lambda outs=outs, x=x: dist.all_gather(outs, x), x, *outs)
    outs = [zeros(4) for _ in range(size)]
    log("async", lambda: dist.all_gather(outs, tensor(rank, 4), async_op=True), *outs)
    log("strided input", lambda: dist.all_gather(outs, tensor(rank, 8)[::2]), *outs)
    room = [zeros(4, 2) for _ in range(size)]
    log("strided outputs", lambda: dist.all_gather([one[:, 0] for one in room], tensor(rank, 4)), *room)
    numbers = [zeros() for _ in range(size)]
    log("0-d", lambda: dist.all_gather(numbers, tensor(rank)), *numbers)
    log("short list", lambda: dist.all_gather(outs[1:], tensor(rank, 4)))
    log("other shape", lambda: dist.all_gather(outs, tensor(rank, 5)))
    log("other form", lambda: dist.all_gather(outs, tensor(rank, 2, 2)))
    log("other dtype", lambda: dist.all_gather(outs, tensor(rank, 4, dtype="int64")))
    log("no list", lambda: dist.all_gather(zeros(size, 4), tensor(rank, 4)))
    uneven = [zeros(1 + peer) for peer in range(size)]
    log("uneven", lambda: dist.all_gather(uneven, tensor(rank, 1 + rank)), *uneven)
    log("aliased", lambda: dist.all_gather([outs[0]] * size, tensor(rank, 4)))


def all_gather_into_tensor(log, dist, rank, size):
    for dtype in DTYPES:
        out, x = zeros(2 * size, 3, dtype=dtype), tensor(rank, 2, 3, dtype=dtype)
        log(dtype, lambda out=out, x=x: dist.all_gather_into_tensor(out, x), x, out)
    out = zeros(2 * size)
    log("async", lambda: dist.all_gather_into_tensor(out, tensor(rank, 2), async_op=True), out)
    whole = tensor(rank, 2 * size)
    log("slot", lambda: dist.all_gather_into_tensor(whole, whole[2 * rank:2 * rank + 2]), whole)
    log("names", lambda: dist.all_gather_into_tensor(output_tensor=out, input_tensor=tensor(rank, 2)), out)
    log("wrong size", lambda: dist.all_gather_into_tensor(zeros(2 * size + 1), tensor(rank, 2)))
    log("other dtype", lambda: dist.all_gather_into_tensor(out, tensor(rank, 2, dtype="int64")))
    stacked = zeros(size, 2)
    log("stacked", lambda: dist.all_gather_into_tensor(stacked, tensor(rank, 2)), stacked)


def gather(log, dist, rank, size):
    for dtype in DTYPES[:8]:
        outs = [zeros(2, 3, dtype=dtype) for _ in range(size)] if rank == 1 else None
        log(dtype, lambda outs=outs, dtype=dtype: dist.gather(tensor(rank, 2, 3, dtype=dtype), outs, 1), *(outs or []))
    outs = [zeros(2) for _ in range(size)] if rank == 0 else []
    log("empty list", lambda: dist.gather(tensor(rank, 2), gather_list=outs), *outs)
    log("async", lambda: dist.gather(tensor(rank, 2), outs, async_op=True), *outs)


def scatter(log, dist, rank, size):
    for dtype in DTYPES[:8]:
        x = zeros(2, 3, dtype=dtype)
        given = [tensor(peer, 2, 3, dtype=dtype) for peer in range(size)] if rank == 1 else None
        log(dtype, lambda x=x, given=given: dist.scatter(x, given, 1), x)
    x, given = zeros(2), [tensor(peer, 2) for peer in range(size)] if rank == 0 else []
    log("empty list", lambda: dist.scatter(x, scatter_list=given), x)
    log("async", lambda: dist.scatter(x, given, async_op=True), x)


def reduce_scatter(log, dist, rank, size):
    for dtype in DTYPES[:6]:
        x, given = zeros(2, dtype=dtype), [tensor(rank + peer, 2, dtype=dtype) for peer in range(size)]
        log(dtype, lambda x=x, given=given: dist.reduce_scatter(x, given), x)
    x, given = zeros(2), [tensor(rank + peer, 2) for peer in range(size)]
    log("MAX async", lambda: dist.reduce_scatter(x, given, dist.ReduceOp.MAX, async_op=True), x)
    log("short list", lambda: dist.reduce_scatter(x, given[1:]))
    log("other dtype", lambda: dist.reduce_scatter(x, [one.double() for one in given]))
    uneven = [tensor(rank, 1 + peer) for peer in range(size)]
    out = zeros(1 + rank)
    log("uneven", lambda: dist.reduce_scatter(out, uneven), out)


def reduce_scatter_tensor(log, dist, rank, size):
    for dtype in DTYPES[:6]:
        x, given = zeros(2, 3, dtype=dtype), tensor(rank, 2 * size, 3, dtype=dtype)
        log(dtype, lambda x=x, given=given: dist.reduce_scatter_tensor(x, given), x, given)
    x = zeros(2)
    log("AVG", lambda: dist.reduce_scatter_tensor(x, tensor(rank, 2 * size) * 3, dist.ReduceOp.AVG), x)
    log("async", lambda: dist.reduce_scatter_tensor(x, tensor(rank, 2 * size), async_op=True), x)
    log("strided input", lambda: dist.reduce_scatter_tensor(x, tensor(rank, 4 * size)[::2]), x)
    whole = tensor(rank, 2 * size)
    log("slot", lambda: dist.reduce_scatter_tensor(whole[2 * rank:2 * rank + 2], whole), whole)
    log("wrong size", lambda: dist.reduce_scatter_tensor(x, tensor(rank, 2 * size + 1)))
    log("stacked", lambda: dist.reduce_scatter_tensor(x, tensor(rank, 2 * size).reshape(size, 2)), x)


def all_to_all(log, dist, rank, size):
    for dtype in DTYPES:
        outs = [zeros(2, dtype=dtype) for _ in range(size)]
        given = [tensor(3 * rank + peer, 2, dtype=dtype) for peer in range(size)]
        log(dtype, lambda outs=outs, given=given: dist.all_to_all(outs, given), *outs, *given)
    outs, given = [zeros(2) for _ in range(size)], [tensor(3 * rank + peer, 2) for peer in range(size)]
    log("async", lambda: dist.all_to_all(outs, given, async_op=True), *outs)
    log("names", lambda: dist.all_to_all(output_tensor_list=outs, input_tensor_list=given), *outs)
    log("short list", lambda: dist.all_to_all(outs[1:], given[1:]))
    log("other dtype", lambda: dist.all_to_all(outs, [one.double() for one in given]))
    uneven = [zeros(1 + peer) for peer in range(size)]
    log("uneven", lambda: dist.all_to_all(uneven, [tensor(rank, 1 + rank) for _ in range(size)]), *uneven)


def all_to_all_single(log, dist, rank, size):
    for dtype in DTYPES:
        out, given = zeros(2 * size, 3, dtype=dtype), tensor(rank, 2 * size, 3, dtype=dtype)
        log(dtype, lambda out=out, given=given: dist.all_to_all_single(out, given), out, given)
    out = zeros(2 * size)
    log("async", lambda: dist.all_to_all_single(out, tensor(rank, 2 * size), async_op=True), out)
    log("other form", lambda: dist.all_to_all_single(out, tensor(rank, size, 2)), out)
    given, taken = [rank + peer for peer in range(size)], [rank + peer for peer in range(size)]
    out, x = zeros(sum(taken), 2), tensor(rank, sum(given), 2)
    log("splits", lambda: dist.all_to_all_single(out, x, taken, given), out)
    log("splits async", lambda: dist.all_to_all_single(out, x, taken, given, async_op=True), out)
    log("wrong sum", lambda: dist.all_to_all_single(out, x, taken, [one + 1 for one in given]))
    log("wrong number", lambda: dist.all_to_all_single(out, x, taken[1:], given))
    log("other dtype", lambda: dist.all_to_all_single(out.double(), x, taken, given))
    odd = zeros(2 * size + 1)
    log("does not divide", lambda: dist.all_to_all_single(odd, odd.clone()))


def barriers(log, dist, rank, size):
    log("barrier", lambda: dist.barrier())
    log("async", lambda: dist.barrier(async_op=True))
    log("monitored", lambda: dist.monitored_barrier())
    log("timeout", lambda: dist.monitored_barrier(timeout=datetime.timedelta(seconds=10), wait_all_ranks=True))


def messages(log, dist, rank, size):
    for dtype in DTYPES:
        x = tensor(rank, 2, 3, dtype=dtype)
        if rank == 0:
            log(dtype, lambda x=x: dist.send(x, 1), x)
        elif rank == 1:
            log(dtype, lambda x=x: dist.recv(x, 0), x)
    x, right, left = tensor(rank, 4), (rank + 1) % size, (rank - 1) % size
    came = zeros(4)
    log("isend irecv", lambda: [dist.isend(x, right, tag=3), dist.irecv(came, left, tag=3)], came)
    log("batch", lambda: dist.batch_isend_irecv([
        dist.P2POp(dist.isend, x + 1, right), dist.P2POp(dist.irecv, came, left)]), came)
    if rank == 2:
        log("any source", lambda: dist.recv(came), came)
    elif rank == 0:
        log("any source", lambda: dist.send(x, 2))
    log("to myself", lambda: dist.send(x, rank))
    log("no dst", lambda: dist.isend(x))
    log("other op", lambda: dist.P2POp(dist.all_reduce, x, 0))
    log("no list", lambda: dist.batch_isend_irecv(dist.P2POp(dist.isend, x, right)))
    log("peer", lambda: (lambda op: (op.peer, op.group_peer, op.tag))(dist.P2POp(dist.irecv, x, right, tag=7)))


def objects(log, dist, rank, size):
    def filled(call, *lists):
        return [call(), *lists]

    found = [None] * size
    log("all_gather_object", lambda: filled(lambda: dist.all_gather_object(found, {"rank": rank}), found))
    longer = [None] * (size + 1)
    log("longer", lambda: filled(lambda: dist.all_gather_object(longer, rank), longer))
    gathered = [None] * size if rank == 1 else None
    log("gather_object", lambda: filled(lambda: dist.gather_object((rank,), gathered, 1), gathered))
    told = ["a", {1: 2}] if rank == 2 else [None, None]
    log("broadcast_object_list", lambda: filled(lambda: dist.broadcast_object_list(told, 2), told))
    given = ["x", 5, [6]] if rank == 0 else None
    mine = [None, "stays"]
    log("scatter_object_list", lambda: filled(lambda: dist.scatter_object_list(mine, given), mine))


def in_groups(log, dist, rank, size):
    for label, wrong in (("twice", [0, 0]), ("out of range", [0, size]), ("negative", [-1])):
        log(label, lambda wrong=wrong: dist.new_group(wrong))
    group = dist.new_group({0, 2})
    log("ranks", lambda: [dist.get_rank(group), dist.get_world_size(group), dist.get_rank(), dist.get_world_size(),
                          group == dist.GroupMember.NON_GROUP_MEMBER])
    x, outs = tensor(rank, 2), [zeros(2), zeros(2)]
    log("all_reduce", lambda: dist.all_reduce(x, group=group), x)
    log("broadcast", lambda: dist.broadcast(x, 2, group=group), x)
    log("group_src", lambda: dist.broadcast(x, group=group, group_src=0), x)
    log("gather", lambda: dist.gather(x, outs if rank == 2 else None, 2, group=group), *outs)
    log("scatter", lambda: dist.scatter(x, outs if rank == 2 else None, 2, group=group), x)
    log("all_gather", lambda: dist.all_gather(outs, x, group=group), *outs)
    log("all_to_all", lambda: dist.all_to_all(outs, [x, x + 1], group=group), *outs)
    log("async", lambda: dist.all_reduce(x, group=group, async_op=True), x)
    log("reduce", lambda: dist.reduce(x, 0, group=group), *([x] if rank == 0 else []))
    log("barrier", lambda: dist.barrier(group))
    log("monitored", lambda: dist.monitored_barrier(group))
    log("all_gather_object", lambda: dist.all_gather_object([None, None], rank, group=group))
    log("isend", lambda: dist.isend(x, 2 - rank, group=group) if rank == 0 else dist.irecv(x, 0, group=group), x)
    if rank != 1:
        log("src outside", lambda: dist.broadcast(x, 1, group=group))
        log("dst outside", lambda: dist.reduce(x, 1, group=group))
        log("members", lambda: [dist.get_process_group_ranks(group), dist.get_group_rank(group, 2),
                                dist.get_global_rank(group, 1)])
    else:
        log("backend", lambda: dist.get_backend(group))
    turned = dist.new_group((2, 1, 0))
    log("sorted", lambda: dist.get_rank(turned))
    log("destroyed", lambda: dist.destroy_process_group(turned))
    log("world", lambda: [dist.get_rank(dist.group.WORLD), dist.is_initialized()])


def start_and_end(log, dist, rank, size):
    log("again", lambda: dist.init_process_group("gloo"))
    dist.destroy_process_group()
    log("is_initialized", lambda: dist.is_initialized())
    for name in ("get_rank", "get_world_size", "barrier", "monitored_barrier", "get_backend", "new_group",
                 "destroy_process_group"):
        log(name, getattr(dist, name))
    log("all_reduce", lambda: dist.all_reduce(tensor(rank, 2)))
    log("backend", lambda: dist.init_process_group("ncll"))
    log("method", lambda: dist.init_process_group("gloo", "shared"))


SCENARIOS = {function.__name__: function for function in (
    all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter, reduce_scatter,
    reduce_scatter_tensor, all_to_all, all_to_all_single, barriers, messages, objects, in_groups, start_and_end)}


def values(rank, count):
    """What `tensor(rank, count)` holds."""
    return [float(index % 5 + 10 * rank + 1) for index in range(count)]


def total(size, count):
    return [sum(column) for column in zip(*(values(rank, count) for rank in range(size)), strict=True)]


DOCUMENTED = {
    "all_reduce": {
        # Gloo adds up neighbours in memory in place of the tensor's elements.
        "strided": lambda rank, size: (None, total(size, 8)[::2]),
        # Not to be had from PyTorch at all.
        "complex PRODUCT": lambda rank, size: (None, [1 * 11 * 21 + 0j, 2 * 12 * 22 + 0j]),
        "int16": lambda rank, size: (None, total(size, 2)),
    },
    "broadcast": {
        # Gloo overwrites what lies between the elements.
        "strided": lambda rank, size: (None, [values(rank if index % 2 else 2, 8)[index] for index in range(8)]),
    },
    "all_gather": {
        # "Complex and uneven sized tensors are supported."
        "uneven": lambda rank, size: (None, *(values(peer, 1 + peer) for peer in range(size))),
        # PyTorch overwrites one result with the other.
        "aliased": lambda rank, size: "error",
    },
    "all_gather_into_tensor": {
        # "(ii) a stack of all the input tensors along the primary dimension"
        "stacked": lambda rank, size: (None, [values(peer, 2) for peer in range(size)]),
    },
    "reduce_scatter_tensor": {
        # "(ii) a stack of the output tensors along the primary dimension"
        "stacked": lambda rank, size: (None, total(size, 2 * size)[2 * rank:2 * rank + 2]),
    },
    "all_to_all": {
        # PyTorch's own example has parts of different lengths.
        "uneven": lambda rank, size: (None, *(values(peer, 1 + peer) for peer in range(size))),
    },
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_torch_does(ranks, tmp_path, name):
    differences = ranks(both, SIZE, name, str(tmp_path / "store"), timeout=120, env={"GLOO_SOCKET_IFNAME": "lo"})
    assert differences == [{}] * SIZE
