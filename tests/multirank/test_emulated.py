"""The device path on NumPy arrays: the same programs, with kernels that run on the CPU and messages in NCCL's place."""

import functools

import numpy
import pytest

import gpucoll as gc
import oracle
import programs
from grids import in_pairs, sampled
from programs import MOVEMENTS, REDUCTIONS, SHARES, algorithms, grid, program, share_of

pytestmark = pytest.mark.emulated

SIZE = 4
EMULATED = {"GPUCOLL_DEVICE": "emulated"}


@pytest.fixture
def ranks(rank_pool, emulated_kernels):
    """`ranks(program, size, *args)` on the emulated device."""
    return functools.partial(rank_pool.run, env=EMULATED)


def on_four(collectives):
    return [(collective, algorithm) for collective in collectives for algorithm in algorithms(collective)]


@pytest.mark.parametrize(("collective", "algorithm"), on_four(REDUCTIONS))
def test_every_reduction(ranks, collective, algorithm):
    """Of the ops and dtypes one algorithm of a collective has one third, the next one another."""
    share = algorithms(collective).index(algorithm) % SHARES
    ranks(programs.every_op_and_dtype, SIZE, collective, algorithm, share, timeout=120)
    ranks(programs.every_count, SIZE, collective, algorithm, timeout=120)


@pytest.mark.parametrize(("collective", "algorithm"), on_four(MOVEMENTS))
def test_every_movement(ranks, collective, algorithm):
    ranks(programs.copies, SIZE, collective, algorithm, timeout=120)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(REDUCTIONS), 5), keep=7, seed=5))
def test_other_sizes(ranks, collective, algorithm, size):
    ranks(programs.every_op_and_dtype, size, collective, algorithm, share_of(size), timeout=120)
    ranks(programs.every_count, size, collective, algorithm, timeout=120)


@pytest.mark.parametrize(("collective", "algorithm", "size"), sampled(in_pairs(grid(MOVEMENTS), 6), keep=7, seed=6))
def test_other_sizes_of_movements(ranks, collective, algorithm, size):
    ranks(programs.copies, size, collective, algorithm, timeout=120)


@pytest.mark.parametrize("algorithm", algorithms("all_reduce"))
def test_shapes_values_and_carriers(ranks, algorithm):
    for one in (programs.shapes_and_strides, programs.special_values, programs.carriers):
        ranks(one, 3, algorithm)
    assert len(set(ranks(programs.in_place_here_and_there, 3, algorithm))) == 1
    ranks(programs.shapes_of_the_others, 3)


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_the_same_bits_on_every_rank_and_in_every_run(ranks, collective):
    for algorithm in algorithms(collective):
        for name in ("float32", "bfloat16"):
            found = ranks(programs.digests, SIZE, collective, algorithm, name)
            assert len({digest for one in found for digest in one}) == 1, (algorithm, name)


def test_integers_wrap_over_their_whole_range(ranks):
    for algorithm in algorithms("reduce_scatter"):
        ranks(programs.whole_range, SIZE, "reduce_scatter", algorithm)


@pytest.mark.parametrize("algorithm", ["tree", "ring", "star"])
def test_pipelined(ranks, algorithm):
    """Long arrays in many segments, of which one is combined on a second stream while the next is under way."""
    ranks(programs.segmented, SIZE, "all_reduce", algorithm)


@program
def custom_ops(comm):
    x = numpy.linspace(0, 0.9, 500, dtype=numpy.float32) * (comm.rank + 1) / comm.size
    everyone = [numpy.linspace(0, 0.9, 500, dtype=numpy.float32) * (rank + 1) / comm.size for rank in range(comm.size)]
    total = everyone[0]
    for other in everyone[1:]:
        total = total + other - total * other
    union = gc.elementwise_op("a + b - a*b")
    assert comm.all_reduce(x, op=union, algorithm="star").tobytes() == total.tobytes()
    small = numpy.array([100, -100, 7], numpy.int8)
    wrapped = comm.all_reduce(small, op=gc.elementwise_op("a * b + 1"), algorithm="star")
    expected = small.copy()
    for _ in range(comm.size - 1):
        expected = expected * small + numpy.int8(1)
    assert wrapped.tobytes() == expected.tobytes()
    scaled = comm.all_reduce(x, op=gc.premul_sum(0.5 + comm.rank), algorithm="tree")
    factors = [numpy.float32(0.5 + rank) for rank in range(comm.size)]
    assert numpy.allclose(scaled, sum(factor * one for factor, one in zip(factors, everyone, strict=True)))
    assert comm.exscan(numpy.array([3.0]), op=gc.elementwise_op("max(a, b)", identity=-7))[0] == (
        3 if comm.rank else -7)
    assert (x == everyone[comm.rank]).all()


def test_ops_of_the_users_own(ranks):
    ranks(custom_ops, SIZE)


@program
def bad_expressions(comm):
    """Valid in NumPy, not in CUDA C++: refused on every rank before data move, with the compiler's line."""
    x = numpy.ones(5, numpy.complex64)
    try:
        comm.all_reduce(x, op=gc.elementwise_op("abs(a) + b"), algorithm="tree")
    except gc.GpucollError as error:
        refused = type(error).__name__, error.code, str(error)
    assert (x == 1).all()
    assert comm.all_reduce(x)[0] == comm.size  # nothing is broken
    return refused


def test_a_bad_expression_is_refused_with_the_compilers_line(ranks):
    for kind, code, words in ranks(bad_expressions, 2):
        assert kind in ("ArgumentError", "DtypeError"), words
        assert code.startswith("GC-OP")
        assert "complex64" in words


@program
def asynchronous(comm):
    x = numpy.arange(70_000.0) + comm.rank
    total = sum(numpy.arange(70_000.0) + rank for rank in range(comm.size))
    works = [comm.all_reduce(x * (k + 1), async_op=True) for k in range(5)]
    later = comm.all_reduce(x)  # a call in between comes after them
    assert all((work.wait() == total * (k + 1)).all() for k, work in enumerate(works))
    assert (later == total).all()
    assert all(work.is_completed() for work in works)
    out = numpy.zeros((300, 40))[:, ::2]
    comm.all_gather_v(numpy.ones((comm.rank, 2)), async_op=True).wait()
    work = comm.all_reduce(numpy.asfortranarray(numpy.ones((300, 20))), out=out, async_op=True)
    work.synchronize()
    assert (out == comm.size).all()
    comm.barrier(async_op=True).wait()


def test_async_calls(ranks):
    ranks(asynchronous, SIZE)


@program
def replayed(comm, algorithm):
    """From the fourth call on small calls are replayed as graphs: in place or not, on other arrays every time."""
    for repeat in range(9):
        x = numpy.arange(257, dtype=numpy.float32) * (repeat + 1) + comm.rank
        total = sum(numpy.arange(257, dtype=numpy.float32) * (repeat + 1) + rank for rank in range(comm.size))
        in_place = (repeat + comm.rank) % 3 == 0
        found = comm.all_reduce(x, out=x if in_place else None, algorithm=algorithm)
        assert oracle.same_bits(found, total), repeat
        comm.all_reduce(numpy.ones(8), op="max", algorithm=algorithm)
        root = repeat % comm.size
        y = numpy.full(31, comm.rank)
        comm.broadcast(y, root)
        assert (y == root).all()
        comm.barrier()
    (gpu,) = comm._gpus.values()
    return len(gpu.executors[0]._graphs._kept)


def test_calls_that_repeat_become_graphs(ranks):
    for algorithm in ("ring", "tree", "star"):
        assert min(ranks(replayed, 3, algorithm)) >= 3


@program
def points(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for name in ("bool", "float16", "complex128", "float8_e5m2"):
        x = oracle.values("sum", name, comm.rank, 11)
        out = numpy.empty_like(x)
        assert comm.sendrecv(x, out, right, left) is out
        assert oracle.same_bits(out, oracle.values("sum", name, left, 11))
    gaps = numpy.zeros((4, 6), numpy.int32)
    comm.sendrecv(numpy.asfortranarray(numpy.full((4, 3), comm.rank, numpy.int32)), gaps[:, ::2], right, left)
    assert (gaps[:, ::2] == left).all()
    assert not gaps[:, 1::2].any()
    outs = [numpy.zeros(3 + k) for k in range(3)]
    with comm.group():
        for k, out in enumerate(outs):
            comm.recv(out, left)
            comm.send(numpy.full(3 + k, comm.rank + k / 4), right)
        total = comm.all_reduce(numpy.array([comm.rank]))
    assert all((out == left + k / 4).all() for k, out in enumerate(outs))
    assert total[0] == sum(range(comm.size))
    if comm.size > 1 and comm.rank < 2:
        comm.send(numpy.arange(9), 1) if comm.rank == 0 else check_received(comm)


def check_received(comm):
    assert (comm.recv(numpy.empty(9, int), 0, async_op=True).wait() == numpy.arange(9)).all()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_messages_between_two_ranks(ranks, size):
    ranks(points, size, timeout=8)


@program
def executors(comm):
    x = numpy.ones(4)
    refused = []
    for executor in ("mpi", "nccl", "native"):
        with gc.Communicator.from_mpi(comm.mpi, executor=executor, timeout=30) as other:
            try:
                assert other.all_reduce(x)[0] == comm.size
                other.scatter(numpy.ones((comm.size, 2)) if comm.rank == 0 else None)
                other.barrier()
            except gc.ArgumentError as error:
                refused.append((executor, error.code))
    return refused


def test_executors_that_serve_the_device(ranks):
    assert ranks(executors, 2) == [[("mpi", "GC-EXECUTOR")]] * 2


@program
def late(comm):
    """A rank that does not come is a timeout on the device path as well; the communicator is then closed."""
    with gc.Communicator.from_mpi(comm.mpi, timeout=0.5) as other:
        if comm.rank == 0:
            try:
                other.all_reduce(numpy.ones(3), algorithm="ring")
            except gc.CollectiveTimeout:
                try:
                    other.barrier()
                except gc.RevokedError:
                    return "revoked"
    return "absent"


def test_a_rank_that_never_comes_is_a_timeout(ranks):
    assert ranks(late, 2) == ["revoked", "absent"]


@program
def mistakes(comm):
    """A length that differs between ranks fails the communicator on both, as on the host; nothing crashes later."""
    for _ in range(2):
        with gc.Communicator.from_mpi(comm.mpi, timeout=3) as other:
            x = numpy.ones(800 if comm.rank else 400)
            with pytest.raises((gc.BackendError, gc.CollectiveTimeout)):
                other.all_reduce(x, algorithm="ring")
            with pytest.raises(gc.RevokedError):
                other.all_reduce(numpy.ones(8))
    assert comm.all_reduce(numpy.ones(3))[0] == comm.size


def test_a_wrong_length_fails_the_communicator(ranks):
    ranks(mistakes, 2)


@program
def dropped(comm):
    """What is packed beside the caller's work lives until then, though the caller lets go of it at once."""
    works = []
    for repeat in range(20):
        works.append(comm.all_reduce(numpy.full((60, 80), comm.rank + repeat)[:, ::2], async_op=True))
        numpy.full((60, 80), -1)
    for repeat, work in enumerate(works):
        assert (work.wait() == repeat * comm.size + sum(range(comm.size))).all(), repeat


def test_strided_arrays_of_asynchronous_calls_are_kept(ranks):
    ranks(dropped, 3)


@program
def again(comm):
    """The same arrays once more, and once more with another look: what has changed is seen."""
    for algorithm in ("native", "ring", "auto"):
        x, out = numpy.arange(12.0).reshape(4, 3) + comm.rank, numpy.empty((4, 3))
        total = comm.size * numpy.arange(12.0).reshape(4, 3) + sum(range(comm.size))
        for _ in range(3):
            assert (comm.all_reduce(x, out=out, algorithm=algorithm) == total).all()
        out.flags.writeable = False
        refused(comm, "GC-READONLY", x, out, algorithm)
        out.flags.writeable = True
        out.shape = (12,)
        refused(comm, "GC-SHAPE", x, out, algorithm)
        whole, other = numpy.arange(4, dtype=numpy.int32), numpy.empty(4, numpy.int32)
        comm.all_reduce(whole.view(numpy.float32), out=other.view(numpy.float32), algorithm=algorithm)
        assert (comm.all_reduce(whole, out=other, algorithm=algorithm) == comm.size * whole).all()
    fixed = numpy.arange(5.0)
    fixed.flags.writeable = comm.rank != 0
    for _ in range(7):  # replayed in the end: the root's is only read
        assert (comm.broadcast(fixed, root=0) == numpy.arange(5.0)).all()
    carrier = numpy.full((2 * comm.size, 2), 0x38, numpy.uint8)  # ones
    found = comm.reduce_scatter_v(carrier, [2] * comm.size, dtype="float8_e4m3fn")
    assert (found.view(oracle.kind("float8_e4m3fn")) == comm.size).all()


def refused(comm, code, x, out, algorithm):
    with pytest.raises(gc.ArgumentError) as found:
        comm.all_reduce(x, out=out, algorithm=algorithm)
    assert found.value.code == code


def test_calls_that_come_again(ranks_anywhere):
    ranks_anywhere(again, 3)


@program
def works_in_a_group(comm):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = numpy.zeros(4)
    with comm.group():
        works = [comm.recv(out, left, async_op=True), comm.send(numpy.full(4, comm.rank / 2), right, async_op=True)]
    assert works[0].wait() is out
    assert (out == left / 2).all()
    assert all(work.is_completed() for work in works)


def test_works_of_a_group_end(ranks_anywhere):
    ranks_anywhere(works_in_a_group, 3)
