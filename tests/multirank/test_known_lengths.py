"""The v-variants with lengths of blocks from an earlier call, or from the caller: a single call of the engine."""

import contextlib
import os
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.communicator.ragged import VectorVariants
from harness.grids import generator, often
from harness.node_ranks import on_shared, on_two_nodes

ALIKE = 5  # calls in a row after which a short call may go ahead
STEADY = 150  # calls with the same lengths after which these are taken for known again


def block(rank, other, length, turn):
    return numpy.arange(2.0 * length).reshape(length, 2) + 100 * rank + 1000 * other + turn


def call(comm, name, lengths, turn, root=0, op="sum"):
    """Make a call with lengths by sender and receiver, and compare the result with what the ranks have sent."""
    rank, everyone = comm.rank, range(comm.size)
    name, has_counts, _ = name.partition(" by counts")
    more = {"counts": [one for one, *_ in lengths]} if has_counts else {}
    if name == "all_gather_v":
        found = comm.all_gather_v(block(rank, 0, lengths[rank][0], turn), **more)
        expected = [block(one, 0, lengths[one][0], turn) for one in everyone]
    elif name == "gather_v":
        found = comm.gather_v(block(rank, 0, lengths[rank][0], turn), comm.size - 1 - root, **more) or []
        expected = [block(one, 0, lengths[one][0], turn) for one in everyone if rank == comm.size - 1 - root]
    elif name == "all_to_all_v":
        found = comm.all_to_all_v([block(rank, one, lengths[rank][one], turn) for one in everyone])
        expected = [block(one, rank, lengths[one][rank], turn) for one in everyone]
    elif name == "scatter_v":
        given = [block(root, one, lengths[0][one], turn) for one in everyone]  # ignored on other ranks than the root
        found = [comm.scatter_v(given if rank == root or turn % 2 else None, root)]
        expected = [block(root, rank, lengths[0][rank], turn)]
    else:
        counts = lengths[0]
        found, begin = [comm.reduce_scatter_v(block(rank, 0, sum(counts), turn), counts, op)], sum(counts[:rank])
        rows = numpy.stack([block(one, 0, sum(counts), turn) for one in everyone])
        expected = [getattr(rows, op)(0)[begin:begin + counts[rank]]]
    assert [one.tolist() for one in found] == [one.tolist() for one in expected], (name, turn)


NAMES = ("all_gather_v", "all_to_all_v", "gather_v", "reduce_scatter_v", "scatter_v")
BY_COUNTS = ("all_gather_v by counts", "gather_v by counts", "reduce_scatter_v")


@on_shared
def steady_lengths(comm):
    """With the lengths of the call before, a call is one call of the engine; with other lengths it is right, too."""
    lengths, other = ([[1 + (rank + one + shift) % 4 for one in range(comm.size)] for rank in range(comm.size)]
                      for shift in (0, 1))
    for name in (*NAMES, *BY_COUNTS):
        for turn in range(4):
            before = comm._core.calls.host_engine().call_count
            call(comm, name, lengths, turn)
        assert comm._core.calls.host_engine().call_count == before + 1, name
        for turn in range(3):
            call(comm, name, other, turn)
            call(comm, name, lengths, turn)
    before = comm._core.calls.host_engine().call_count
    for turn in range(STEADY):
        for name in NAMES:
            call(comm, name, lengths, turn)
    after = comm._core.calls.host_engine().call_count
    # At most MOST_EXCHANGES for each name, then none.
    assert STEADY * len(NAMES) <= after - before <= (STEADY + 70) * len(NAMES)


@on_shared
def exchanges_in_a_row(comm):
    """Exchanges of lengths that come several times in a row go ahead of no rank: another rank may know the lengths."""
    everyone = range(comm.size)

    def given(length):
        return [block(0, one, length + one, length) for one in everyone] if comm.rank == 0 else None

    def several():
        with comm.group():
            for _ in range(2 * ALIKE):
                comm.scatter_v(given(3))

    def refused():
        for _ in range(2 * ALIKE):
            with pytest.raises(gc.ArgumentError if comm.rank == 0 else gc.PeerError):
                comm.scatter_v([] if comm.rank == 0 else None)

    for exchange in (several, refused):
        exchange()
        for turn in range(STEADY):
            length = 3 + (turn % 50 > 48)
            assert (comm.scatter_v(given(length)) == block(0, comm.rank, length + comm.rank, length)).all()


@on_shared
def rare_attempts(comm):
    """Lengths that change in each call are seldom taken from earlier calls: a call given up costs more."""
    turns, before = 200, comm._core.calls.host_engine().call_count
    for turn in range(turns):
        call(comm, "all_gather_v", [*[[3]] * (comm.size - 1), [turn]], turn)
    # Two calls of the engine in each, and one more where the call was given up.
    assert comm._core.calls.host_engine().call_count - before <= 2 * turns + 12


def into_list(comm, name, lengths, turn, **options):
    """Make a call into the arrays of a list; return the list, the result, and what is to stand there on this rank."""
    rank, everyone = comm.rank, range(comm.size)
    if name == "all_to_all_v":
        out = [numpy.full((lengths[rank], 2), -1.0) for _ in everyone]
        found = comm.all_to_all_v([block(rank, one, lengths[one], turn) for one in everyone], out=out)
        return out, found, [block(one, rank, lengths[rank], turn) for one in everyone]
    is_here = name == "all_gather_v" or rank == 0
    out = [numpy.full((length, 2), -1.0) for length in lengths] if is_here else None
    found = getattr(comm, name)(block(rank, 0, lengths[rank], turn), out=out, **options)
    return out, found, [block(one, 0, lengths[one], turn) for one in everyone if is_here]


@on_shared
def into_lists(comm):
    """A result in separate arrays is one call of the engine, as a result in one array: every length, short rings."""
    for unit in (0, 1, 400, 100_000):
        lengths = [unit * (1 + one % 3) + one % 2 for one in range(comm.size)]
        for name, options in (("all_gather_v", {}), ("gather_v", {}), ("all_to_all_v", {}),
                              ("all_gather_v", {"algorithm": "ring"})):
            for turn in range(4):
                is_python = turn < 3 or (options and unit > 400)
                with contextlib.nullcontext() if is_python else mock.patch.object(
                        VectorVariants, "_run_blocks", side_effect=AssertionError((name, unit))):
                    out, found, expected = into_list(comm, name, lengths, turn, **options)
                assert found is out
                assert all(map(numpy.array_equal, found or (), expected)), (name, unit, turn)


@on_shared
def refused_lists(comm):
    """Lists that Python refuses are refused after a right one, too, and nothing is written."""
    mine, row = numpy.arange(3.0), numpy.full(3 * comm.size + 3, -1.0)
    right = [row[3 * one:3 * one + 3] for one in range(comm.size)]
    frozen = right[0].view()
    frozen.flags.writeable = False
    for _ in range(3):
        assert comm.all_gather_v(mine, out=right) is right
        assert row[:3 * comm.size].tolist() == mine.tolist() * comm.size
        row[:] = -1.0
        for code, outs in (("GC-COUNTS", right[1:]), ("GC-SHAPE", [row[-4:], *right[1:]]),
                           ("GC-DTYPE", [numpy.zeros(3, "f4"), *right[1:]]), ("GC-OVERLAP", [row[2:5], *right[1:]]),
                           ("GC-OVERLAP", [right[0]] * comm.size), ("GC-READONLY", [frozen, *right[1:]])):
            with pytest.raises(gc.GpucollError, match=code):
                comm.all_gather_v(mine, out=outs)
            assert (row == -1).all(), code
        right[comm.rank][:] = mine
        comm.all_gather_v(right[comm.rank], out=right)  # in place
        assert row[:3 * comm.size].tolist() == mine.tolist() * comm.size
        comm.all_gather_v(mine, out=[numpy.zeros(6)[::2] for _ in right])


@on_shared
def outs(comm):
    """Calls with and without `out`, in place and into lists, mixed: each has its own form in the engine."""
    rank, everyone, random = comm.rank, range(comm.size), generator("outs")
    lengths = [1 + one % 3 for one in everyone]
    begin, rows = sum(lengths[:rank]), sum(lengths)
    for turn in range(200):
        mine = block(rank, 0, lengths[rank], turn)
        expected = numpy.concatenate([block(one, 0, lengths[one], turn) for one in everyone])
        out = numpy.zeros((rows, 2))
        # The way of an odd rank may differ from that of an even rank.
        way = random.choice(("new", "array", "place", "list", "odd"))
        if way == "place" or (way == "odd" and rank % 2):
            out[begin:begin + lengths[rank]] = mine
            mine = out[begin:begin + lengths[rank]]
        if way == "list":
            parts = [numpy.zeros((length, 2)) for length in lengths]
            out = numpy.concatenate(comm.all_gather_v(mine, out=parts))
        elif way == "new" or (way == "odd" and not rank % 2):
            out = numpy.concatenate(comm.all_gather_v(mine))
        else:
            assert comm.all_gather_v(mine, out) is out
        assert (out == expected).all(), (way, turn)


@on_shared
def lists(comm):
    """The blocks of a list are joined before the call, so the result may take their memory; an array is no list."""
    rank, everyone = comm.rank, range(comm.size)
    lengths = [1 + one % 3 for one in everyone]
    for turn in range(6):
        base = numpy.concatenate([block(rank, one, 2, turn) for one in everyone])
        given = [base[2 * one:2 * one + 2] for one in everyone]
        expected = numpy.concatenate([block(one, rank, 2, turn) for one in everyone])
        # First with memory of its own: the engine then knows the call.
        out = numpy.zeros_like(base) if turn < 3 else base
        if turn < 3:
            assert (comm.all_to_all_v(given, out) == expected).all()
        else:
            with pytest.raises(gc.ArgumentError, match="GC-OVERLAP"):
                comm.all_to_all_v(given, out)
            assert (numpy.concatenate(comm.all_to_all_v(given)) == expected).all()
    rows = [numpy.arange(2.0 * length) + rank for length in lengths]
    for _ in range(3):
        comm.all_to_all_v(rows, [numpy.zeros(2 * lengths[rank]) for _ in everyone])
    with pytest.raises(gc.ArgumentError):
        comm.all_to_all_v(numpy.concatenate(rows), numpy.zeros(2 * lengths[rank] * comm.size))
    # More counts than the engine's table has sets.
    x, counts = numpy.arange(100.0), [0] * comm.size
    for turn in range(200):
        counts[0], counts[-1] = turn % 100, 100 - turn % 100
        assert len(comm.reduce_scatter_v(x, counts)) == counts[rank], turn


@on_shared
def changing_lengths(comm):
    """Lengths of some ranks change while those of others stay: each call is right."""
    random = generator("known lengths")
    few = [[[random.choice((3, 3, 3, 1, 5)) for _ in range(comm.size)] for _ in range(comm.size)] for _ in range(4)]
    for turn in range(600):
        call(comm, random.choice(NAMES), few[min(3, int(random.expovariate(1.5)))], turn, random.choice((0, 0, 1)),
             random.choice(("sum", "sum", "max")))


@on_shared
def known_tables_mixed(comm):
    """Each rank takes the lengths of another call, in which all ranks had its length."""
    for name in NAMES[:3]:
        for turn, length in enumerate((1, 1, 2, 2, 1, 2)):
            call(comm, name, [[length] * comm.size] * comm.size, turn)
        for turn in range(3):
            call(comm, name, [[1 + (rank > 0)] * comm.size for rank in range(comm.size)], turn)


@on_shared
def counts_of_callers(comm):
    """Lengths given by the callers are never exchanged; the ranks compare them before data move."""
    rank, size = comm.rank, comm.size
    engine = comm._core.calls.host_engine()
    for turn in range(6):
        lengths = [[(one + turn) % 4 + other % 2 for other in range(size)] for one in range(size)]
        for name in BY_COUNTS:
            before = engine.call_count
            call(comm, name, lengths, turn)
            assert engine.call_count == before + 1, (name, turn)
    x, counts, last = numpy.full((2, 3), 1.0 + rank), [2] * size, size - 1
    for turn in range(3):
        with pytest.raises(gc.MismatchError, match=r"GC-COUNTS.*counts 2, 2"):
            comm.all_gather_v(x, counts=[2] * last + [3 if rank == 0 and size > 1 else 2])
        with pytest.raises(gc.MismatchError, match=r"GC-COUNTS.*counts 2, 2"):
            comm.all_gather_v(x, **({} if rank == last else {"counts": counts}))
        with pytest.raises(gc.MismatchError, match="GC-SHAPE"):
            comm.all_gather_v(x[:, 1:] if rank == last else x, counts=counts)
        for refused in (x[1:], numpy.ones((2, 3), object), "no array"):
            with pytest.raises((gc.ArgumentError, gc.DtypeError) if rank == last else gc.PeerError):
                comm.gather_v(refused if rank == last else x, 0, counts=counts)
        for wrong in (counts[1:], [2.0] * size, [3, -1, *counts[2:]], 7):
            with pytest.raises(gc.ArgumentError if rank == last else gc.PeerError, match="GC-COUNTS"):
                comm.all_gather_v(x, counts=wrong if rank == last else counts)
        out = numpy.full((2 * size, 3), numpy.nan)
        assert comm.all_gather_v(x, out, counts) is out
        assert out[::2, 0].tolist() == [1.0 + one for one in range(size)]
        assert not numpy.isnan(comm.all_gather_v(x, counts=tuple(counts), async_op=True).wait()[last]).any(), turn


@on_shared
def wrong_roots(comm):
    """Every rank refuses a wrong root itself, also a rank with a block of known length."""
    for turn in range(4):
        call(comm, "gather_v", [[1]] * comm.size, turn)
    for turn in range(2):
        with pytest.raises(gc.ArgumentError, match="GC-ROOT"):
            comm.gather_v(block(comm.rank, 0, 1 + comm.rank, turn), -1)
    call(comm, "gather_v", [[1]] * comm.size, 0)


@on_shared
def disagreements(comm):
    """Another op, another collective or refused arguments on one rank are told as before, and then all goes on."""
    lengths = [[1 + (rank + one) % 3 for one in range(comm.size)] for rank in range(comm.size)]
    counts, odd = lengths[0], comm.rank == 1
    rows = block(comm.rank, 0, sum(counts), 0)

    def steady():
        for turn in range(STEADY):
            for name in NAMES:
                call(comm, name, lengths, turn)
            comm.reduce_scatter_v(rows, counts, "max")

    steady()

    def two_calls():
        """Call twice; in a group the lengths of both calls are exchanged before any data."""
        with comm.group() if odd else contextlib.nullcontext():
            for _ in range(2):
                comm.all_gather_v(rows, algorithm="ring")

    with pytest.raises(gc.MismatchError) as told:
        two_calls()
    assert "all_gather_v by ring" in str(told.value)
    steady()
    with pytest.raises(gc.MismatchError, match=r"GC-OP\]"):
        comm.reduce_scatter_v(rows, counts, "max" if odd else "sum")
    with pytest.raises(gc.MismatchError, match="GC-COLLECTIVE"):
        comm.barrier() if odd else call(comm, "all_gather_v", lengths, 0)
    steady()
    with pytest.raises(gc.MismatchError, match="GC-DTYPE"):
        comm.all_gather_v(rows.astype("f4") if odd else rows)
    with pytest.raises(gc.ArgumentError if odd else gc.PeerError):
        comm.all_gather_v("no array" if odd else rows)
    steady()


CASES = [(steady_lengths, 2, 1, 3), (exchanges_in_a_row, 2, 3), (rare_attempts, 2, 3), (outs, 2, 1, 3),
         (into_lists, 4, 1), (refused_lists, 2, 3),
         (lists, 2, 3), (counts_of_callers, 2, 3), (changing_lengths, 2, 4), (known_tables_mixed, 2, 3),
         (wrong_roots, 2, 3), (disagreements, 3, 2)]  # numbers of ranks, after the first at night


@pytest.mark.parametrize(("body", "size"), [
    pytest.param(body, size, id=f"{body.__name__}-{size}", marks=pytest.mark.nightly if number else ())
    for body, *sizes in CASES for number, size in enumerate(sizes)])
def test_known_lengths(ranks, body, size):
    ranks(body, size)


def on_two_hosts(mpi, body, executor):
    """Messages compare the calls, between two pretended nodes or between all ranks; MPI's own calls are left out."""
    schedules = {"GPUCOLL_ALGO": ";".join(f"{name}:^native" for name in NAMES)}
    with mock.patch.dict(os.environ, schedules), on_two_nodes(mpi, executor) as comm:
        body.__wrapped__(comm)


@pytest.mark.parametrize(("body", "executor"), often(
    [(body, executor) for body in (steady_lengths, changing_lengths, known_tables_mixed, outs,
                                   disagreements) for executor in (None, "mpi")],
    (steady_lengths, None), (changing_lengths, "mpi"), (known_tables_mixed, "mpi"), (disagreements, None)))
def test_between_hosts(ranks, body, executor):
    ranks(on_two_hosts, 3, body, executor)


@pytest.mark.parametrize("body", often(
    [steady_lengths, outs, lists, changing_lengths, counts_of_callers, disagreements], lists, counts_of_callers,
    disagreements))
def test_between_threads(body):
    gc.run_local(body.__wrapped__, 3, executor="shared")
