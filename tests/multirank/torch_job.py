"""Every method of the backend "gpucoll", compared with Gloo in the same job or with torch's arithmetic.

Data are small whole numbers that differ by rank and index: every result is exact, and compared bit for bit.
"""

import datetime
import functools
import itertools
import re
import sys

import pytest
import torch
import torch.distributed as dist

import gpucoll.torch

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool,
          torch.complex64)
SHAPES = ((300,), (3, 5), (), (0,))


def data(shape, dtype, rank, salt=0):
    """Return a rank's tensor of small whole numbers."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    row = (torch.arange(count) * (rank + 1 + salt) + rank) % 5 + 1
    return (row % 2 if dtype == torch.bool else row).to(dtype).reshape(shape)


def same(mine, expected, what):
    assert mine.dtype == expected.dtype, what
    assert mine.shape == expected.shape, what
    raw = [torch.cat([x.reshape(-1)]).view(torch.uint8) for x in (mine, expected)]
    assert torch.equal(*raw), f"{what}: {mine} is not {expected}"


def gaps(tensor):
    """Return a strided tensor of the same elements, with gaps between the elements."""
    wide = torch.full((2 * tensor.numel(),), 99).to(tensor.dtype)
    wide[::2] = tensor.reshape(-1)
    return wide[::2].view(tensor.shape) if tensor.dim() == 1 else wide.view(*tensor.shape, 2)[..., 0]


def everyone(shape, dtype):
    return [data(shape, dtype, rank) for rank in range(SIZE)]


def reductions(shape, dtype):
    ops = {dist.ReduceOp.SUM: torch.add, dist.ReduceOp.PRODUCT: torch.mul, dist.ReduceOp.MAX: torch.maximum,
           dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.BAND: torch.bitwise_and, dist.ReduceOp.BOR: torch.bitwise_or,
           dist.ReduceOp.BXOR: torch.bitwise_xor}
    some = list(ops) if not (dtype.is_floating_point or dtype.is_complex) else list(ops)[:4]
    some = some[:1] if dtype.is_complex else some
    for op in some:
        total = functools.reduce(ops[op], everyone(shape, dtype))
        yield op, torch.as_tensor(total, dtype=dtype)
    if dtype.is_floating_point:
        total = functools.reduce(torch.add, everyone(shape, dtype))
        yield dist._make_nccl_premul_sum(2.0), 2 * total
        yield dist.ReduceOp.AVG, (total.double() / SIZE).to(dtype)


def one_tensor(shape, dtype):
    what, mine = (shape, dtype), functools.partial(data, shape, dtype, RANK)
    for op, expected in reductions(shape, dtype):
        for looks, async_op in itertools.product((torch.clone, gaps), (False, True)):
            x = looks(mine())
            work = dist.all_reduce(x, op, async_op=async_op)
            if async_op:
                (result,) = work.get_future().wait()
                assert work.is_completed()
                assert work.is_success()
                same(torch.view_as_complex(result) if dtype.is_complex else result, expected, ("future", op, *what))
            same(x, expected, ("all_reduce", op, *what))
        x = mine()
        dist.reduce(x, SIZE - 1, op)
        same(x, expected if RANK == SIZE - 1 else mine(), ("reduce", op, *what))
    for x in (mine(), gaps(mine())):
        dist.broadcast(x, SIZE - 1)
        same(x, data(shape, dtype, SIZE - 1), ("broadcast", *what))
    for make in (torch.empty_like, gaps):
        outs = [make(mine()) for _ in range(SIZE)]
        dist.all_gather(outs, mine())
        for out, expected in zip(outs, everyone(shape, dtype), strict=True):
            same(out, expected, ("all_gather", *what))
    blocks = [torch.empty_like(mine()) for _ in range(SIZE)] if RANK == 0 else None
    dist.gather(gaps(mine()), blocks, 0)
    for out, expected in zip(blocks or (), everyone(shape, dtype), strict=False):
        same(out, expected, ("gather", *what))
    out = gaps(torch.zeros_like(mine()))
    dist.scatter(out, [data(shape, dtype, rank) for rank in range(SIZE)] if RANK == 0 else None, 0)
    same(out, mine(), ("scatter", *what))


def one_row(shape, dtype):
    """Check the collectives that cut tensors along the first axis."""
    what, mine = (shape, dtype), data(shape, dtype, RANK)
    for out in (torch.empty(SIZE * shape[0], *shape[1:], dtype=dtype), torch.empty(SIZE, *shape, dtype=dtype)):
        dist.all_gather_into_tensor(out, gaps(mine))
        same(out, torch.stack(everyone(shape, dtype)).view(out.shape), ("all_gather_into_tensor", *what))
    out.zero_()
    out[RANK] = mine
    dist.all_gather_into_tensor(out, out[RANK])
    same(out, torch.stack(everyone(shape, dtype)), ("all_gather_into_tensor in place", *what))
    blocks = [data(shape, dtype, RANK, salt=rank) for rank in range(SIZE)]
    theirs = [data(shape, dtype, rank, salt=RANK) for rank in range(SIZE)]
    out = torch.empty_like(mine)
    total = functools.reduce(torch.add, theirs).to(dtype)
    dist.reduce_scatter_tensor(out, torch.cat(blocks))
    same(out, total, ("reduce_scatter_tensor", *what))
    whole = torch.stack(blocks)
    dist.reduce_scatter_tensor(whole[RANK], whole)
    same(whole[RANK], total, ("reduce_scatter_tensor in place", *what))
    out = gaps(out)
    dist.reduce_scatter(out, blocks)
    same(out, total, ("reduce_scatter", *what))
    out = torch.empty(SIZE * shape[0], *shape[1:], dtype=dtype)
    dist.all_to_all_single(out, torch.cat(blocks))
    same(out, torch.cat(theirs), ("all_to_all_single", *what))
    outs = [torch.empty_like(mine) for _ in range(SIZE)]
    dist.all_to_all(outs, blocks)
    same(torch.cat(outs), torch.cat(theirs), ("all_to_all", *what))


def uneven(dtype):
    """Check collectives with lengths that differ by rank."""
    def part(rank, other):
        return data((rank + 2 * other, 3), dtype, rank, salt=other)

    given, taken = [part(RANK, rank) for rank in range(SIZE)], [part(rank, RANK) for rank in range(SIZE)]
    out = torch.empty_like(torch.cat(taken))
    dist.all_to_all_single(out, torch.cat(given), [len(x) for x in taken], [len(x) for x in given])
    same(out, torch.cat(taken), ("uneven all_to_all_single", dtype))
    outs = [torch.empty_like(x) for x in taken]
    dist.all_to_all(outs, given)
    same(torch.cat(outs), out, ("uneven all_to_all", dtype))
    outs = [torch.empty_like(part(rank, 1)) for rank in range(SIZE)]
    dist.all_gather(outs, part(RANK, 1))
    same(torch.cat(outs), torch.cat([part(rank, 1) for rank in range(SIZE)]), ("uneven all_gather", dtype))
    out = torch.empty_like(part(0, RANK))
    dist.reduce_scatter(out, [part(0, rank) for rank in range(SIZE)])
    same(out, (part(0, RANK) * SIZE).to(dtype), ("uneven reduce_scatter", dtype))


def collectives():
    for dtype, shape in (*itertools.product(DTYPES, SHAPES), (torch.float32, (1 << 19,))):
        one_tensor(shape, dtype)
        if shape and not dtype.is_complex and dtype != torch.bool:
            one_row(shape, dtype)
    uneven(torch.float32)
    fp8 = data((7,), torch.float32, RANK).to(torch.float8_e5m2)
    dist.broadcast(fp8, 0)
    same(fp8, data((7,), torch.float32, 0).to(torch.float8_e5m2), "broadcast of float8")
    several = [data((n,), torch.float32, RANK) for n in (3, 700, 0)]
    with dist._coalescing_manager(async_ops=True) as together:
        for x in several:
            dist.all_reduce(x)
    together.wait()
    for x in several:
        same(x, sum(everyone(tuple(x.shape), torch.float32)), "coalesced")
    with dist._coalescing_manager(device=torch.device("cpu")):
        dist.broadcast(several[0], 0)
    outs = [torch.empty(SIZE * n) for n in (3, 5)]
    with dist._coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, data((len(out) // SIZE,), torch.float32, RANK))
    for out in outs:
        same(out, torch.cat(everyone((len(out) // SIZE,), torch.float32)), "coalesced all_gather")


def several():
    """Pass several tensors of a rank in one call, as with Gloo, and one tensor twice in a call."""
    group, what = dist.group.WORLD, [data((7,), torch.float32, RANK, salt) for salt in (0, 1)]
    both = [sum(everyone((7,), torch.float32)), sum(data((7,), torch.float32, rank, 1) for rank in range(SIZE))]
    xs = [x.clone() for x in what]
    (first, second) = group.allreduce(xs).get_future().wait()
    same(first, sum(both), "two tensors all-reduced")
    same(second, first, "the second of two tensors")
    twice = what[0].clone()
    group.allreduce_coalesced([twice, twice]).wait()
    same(twice, both[0], "a tensor given twice")
    told = dist.BroadcastOptions()
    told.rootRank, told.rootTensor = SIZE - 1, 1
    xs = [x.clone() for x in what]
    group.broadcast(xs, told).wait()
    for x in xs:
        same(x, data((7,), torch.float32, SIZE - 1, 1), "two tensors broadcast")
    outs = [[torch.empty(7) for _ in range(2 * SIZE)] for _ in range(2)]
    group.allgather(outs, what).wait()
    for out in outs:
        same(torch.stack(out), torch.stack([data((7,), torch.float32, rank, salt) for rank in range(SIZE)
                                            for salt in (0, 1)]), "two tensors gathered")
    with torch.inference_mode():
        out = torch.empty(2 * SIZE * 7)[::2]
        dist.all_gather_into_tensor(out, what[0], async_op=True).wait()
    same(out.clone(), torch.cat(everyone((7,), torch.float32)), "into a tensor of inference mode")


def checks():
    """Wrong calls are refused before data move, in the words expected by PyTorch's own tests."""
    group, x, longer, double = dist.group.WORLD, torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.float64)

    def at(options, root, tensor=0):
        options.rootRank, options.rootTensor = root, tensor
        return options

    def to(options, root):
        options.rootRank = root
        return options

    cast, least, outer, inner = dist.BroadcastOptions, dist.ReduceOptions, dist.ScatterOptions, dist.GatherOptions
    full, other = [x] * SIZE, (RANK + 1) % SIZE
    for words, call in (
            ("invalid root rank -1", lambda: group.broadcast([x], at(cast(), -1))),
            ("invalid root tensor 1 of 1", lambda: group.broadcast([x], at(cast(), 0, 1))),
            ("invalid tensor size at index 1", lambda: group.broadcast([x, longer], at(cast(), 0))),
            ("requires non-empty tensor list", lambda: group.allreduce([])),
            ("all have the same type", lambda: group.allreduce_coalesced([x, double])),
            ("unsupported layout", lambda: dist.all_reduce(x.to_sparse())),
            ("requires a single-element tensor list", lambda: group.reduce([x, x], at(least(), 0))),
            ("single-element output tensor list", lambda: group.scatter([], [], to(outer(), 0))),
            (f"Incorrect input list size {SIZE - 1}", lambda: group.scatter([x], [full[1:]], to(outer(), RANK))),
            ("requires empty input on non-root", lambda: group.scatter([x], [full], to(outer(), other))),
            ("invalid tensor type", lambda: group.gather([[double] * SIZE], [x], to(inner(), RANK))),
            ("single-element output list", lambda: group.gather([], [x], to(inner(), RANK))),
            ("same length", lambda: group.allgather([full, full], [x])),
            ("invalid output tensor list", lambda: group.allgather([full[1:]], [x])),
            ("equal to world size", lambda: group.allgather_coalesced([[x]] * (SIZE + 1), [x])),
            ("size of output tensor at index 0", lambda: group.allgather_coalesced([[longer]] * SIZE, [x]))):
        with pytest.raises(RuntimeError, match=words):
            call()
    assert group.options._timeout == datetime.timedelta(minutes=30)
    dist.barrier()


def functional():
    import torch.distributed._functional_collectives as funcol

    x, group = data((4, SIZE), torch.float32, RANK), list(range(SIZE))
    same(funcol.all_reduce(x, "sum", group).wait(), sum(everyone((4, SIZE), torch.float32)), "functional all_reduce")
    gathered = funcol.all_gather_tensor(x, 0, group).wait()
    same(gathered, torch.cat(everyone((4, SIZE), torch.float32)), "functional all_gather")
    part = funcol.reduce_scatter_tensor(gathered, "sum", 0, group).wait()
    same(part, SIZE * x, "functional reduce_scatter")
    same(funcol.broadcast(x, 0, group).wait(), data((4, SIZE), torch.float32, 0), "functional broadcast")
    sizes = [len(gathered) // SIZE] * SIZE
    same(funcol.all_to_all_single(gathered, sizes, sizes, group).wait(),
         torch.cat([data((4, SIZE), torch.float32, RANK)] * SIZE), "functional all_to_all")
    for one in funcol.all_reduce_coalesced([x, x], "sum", group):
        same(one.wait(), sum(everyone((4, SIZE), torch.float32)), "functional coalesced all_reduce")


def no_mpi():
    assert "mpi4py.MPI" not in sys.modules


def objects():
    everything = [None] * SIZE
    dist.all_gather_object(everything, {"rank": RANK, "words": "x" * 100 * RANK})
    assert everything == [{"rank": rank, "words": "x" * 100 * rank} for rank in range(SIZE)]
    told = [("a", 1), None] if RANK == 0 else [None, None]
    dist.broadcast_object_list(told, 0)
    assert told == [("a", 1), None]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(SIZE)] if RANK == 0 else None, 0)
    assert mine == [f"for {RANK}"]
    gathered = [None] * SIZE if RANK == 0 else None
    dist.gather_object(RANK, gathered, 0)
    assert RANK or gathered == list(range(SIZE))


def callbacks():
    """Calls of futures' callbacks stand where `then` stood, also on a rank whose future was complete before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = sum(range(1, size + 1))
    for turn in range(60):
        rows = [torch.full((100,), float(scale * (rank + 1))) for scale in (1, 2, 3, 4, 5)]

        def nested(_, rows=rows):
            work = dist.all_reduce(rows[1], async_op=True)
            dist.all_reduce(rows[2], async_op=True).get_future().wait()
            return work

        first = dist.all_reduce(rows[0], async_op=True)
        if (rank + turn) % 2:
            first.wait()
        future = first.get_future().then(nested) if turn % 3 else None
        second = dist.all_reduce(rows[3], async_op=True)
        future = future or first.get_future().then(nested)
        last = future.then(lambda done, rows=rows: (done.value(), dist.all_reduce(rows[4], async_op=True)))
        for work in (second, *last.wait()):
            work.wait()
        assert [row.tolist() for row in rows] == [[scale * total] * 100 for scale in (1, 2, 3, 4, 5)], turn
    failed = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        failed.wait()


def messages():
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), ((3,), (1 << 18,), (0,))):
        out = torch.empty(shape, dtype=dtype)
        ops = [dist.P2POp(dist.isend, data(shape, dtype, RANK), right), dist.P2POp(dist.irecv, out, left)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        same(out, data(shape, dtype, left), ("batch_isend_irecv", dtype, shape))
    out = torch.zeros(5)
    if RANK:
        dist.send(data((5,), torch.float32, RANK), 0, tag=7)
    else:
        sources = []
        for _ in range(SIZE - 1):
            sources.append(dist.recv(out, tag=7))
            same(out, data((5,), torch.float32, sources[-1]), "from any source")
        assert sorted(sources) == list(range(1, SIZE))
    # A message must pass while an asynchronous collective waits for the receiving rank.
    x = data((100,), torch.float32, RANK)
    if RANK == 0:
        work = dist.all_reduce(x, async_op=True)
        dist.send(out, 1)
    elif RANK == 1:
        dist.recv(out, 0)
    if RANK:
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    same(x, sum(everyone((100,), torch.float32)), "beside a message")


def groups():
    parts = [dist.new_group(ranks) for ranks in ([0, 1], list(range(SIZE))[::-1], [SIZE - 1])]
    for part, ranks in zip(parts, ([0, 1], range(SIZE), [SIZE - 1]), strict=True):
        if RANK in ranks:
            x = data((9,), torch.float32, RANK)
            dist.all_reduce(x, group=part)
            same(x, sum(data((9,), torch.float32, rank) for rank in ranks), ("group", ranks))
    # Every rank makes such a group: from PyTorch 2.15 on, group numbers also count these groups.
    dist.barrier(dist.new_group([RANK], use_local_synchronization=True))
    for part, ranks in zip(parts, ([0, 1], range(SIZE), [SIZE - 1]), strict=True):
        if RANK in ranks:
            dist.destroy_process_group(part)
    dist.barrier()
    dist.barrier(async_op=True).wait()
    assert dist.get_backend() == "gpucoll"


def disagreement():
    """A mismatch shows on all ranks the call sites of both calls in the user's program."""
    with pytest.raises(dist.DistBackendError, match="GC-SHAPE") as told:
        dist.all_reduce(torch.zeros(3)) if RANK else dist.all_reduce(torch.zeros(4))
    assert re.findall(r"\((\S+):\d+\)", str(told.value)) == 2 * [__file__], told.value


def timeouts():
    part = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if RANK == 0:
        for call in (lambda: dist.all_reduce(torch.zeros(3), group=part),
                     lambda: dist.all_reduce(torch.zeros(3), group=part, async_op=True).wait()):
            with pytest.raises(dist.DistBackendError, match=r"waited 1 s|failed earlier"):
                call()
    dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gpucoll")
    RANK, SIZE = dist.get_rank(), dist.get_world_size()
    assert isinstance(dist.group.WORLD, gpucoll.torch.TorchProcessGroup)
    for name in sys.argv[1:]:
        globals()[name]()
        print(f"rank {RANK}: {name} ok", flush=True)
    dist.destroy_process_group()
