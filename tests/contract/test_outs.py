"""The v-variants into a user's memory: an array or a list of arrays, strided or in place; and refusals."""

import numpy
import pytest

import gpucoll as gc
from oracles import oracle
from programs.collectives import program

LENGTHS = ((3, 0, 2, 5), (1, 1, 1, 1), (0, 0, 4, 0), (700, 20, 0, 1))


def block(source, target, length, name):
    return oracle.values("sum", name, 10 * source + target, length * 2).reshape(length, 2)


def room(comm, shape, name, strided):
    """Return memory with gaps, filled with a value absent from all results, and the array inside of the memory."""
    whole = numpy.full((shape[0], 2 * shape[1]) if strided else shape, 77).astype(oracle.kind(name))
    return whole, whole[:, ::2] if strided else whole


def calls(comm, name, lengths, root, strided):
    """Yield each call, the expected content of its `out`, and whether this rank has a result."""
    size, rank = comm.size, comm.rank
    rows = [block(source, 0, lengths[source], name) for source in range(size)]
    pairs = [[block(source, target, lengths[(source + target) % size], name) for target in range(size)]
             for source in range(size)]
    whole = [numpy.concatenate([block(source, target, lengths[target], name) for target in range(size)])
             for source in range(size)]
    first = sum(lengths[:rank])
    total = oracle.reduced("sum", name, whole)[first:first + lengths[rank]]
    yield lambda out: comm.all_gather_v(rows[rank], out), rows, True
    yield lambda out: comm.gather_v(rows[rank], root, out=out), rows, rank == root
    yield lambda out: comm.all_to_all_v(pairs[rank], out), [row[rank] for row in pairs], True
    yield lambda out: comm.scatter_v(pairs[root] if rank == root else None, root, out=out), pairs[root][rank], True
    yield lambda out: comm.reduce_scatter_v(whole[rank], lengths[:size], out=out), total, True


@program
def taken(comm):
    for turn, lengths in enumerate(LENGTHS):
        name, root, strided = ("float32", "int64", "uint8")[turn % 3], turn % comm.size, turn % 2 == 1
        lengths = [lengths[(rank + turn) % 4] for rank in range(comm.size)]
        for number, (call, expected, has_result) in enumerate(calls(comm, name, lengths, root, strided)):
            for is_list in (False, True) if isinstance(expected, list) else (False,):
                wanted = expected if is_list else [numpy.concatenate(expected) if isinstance(expected, list)
                                                   else expected]
                for again in range(2):
                    places = [room(comm, one.shape, name, strided) for one in wanted]
                    out = [array for _, array in places] if is_list else places[0][1]
                    found = call(out)
                    assert found is (out if has_result else None), (turn, number)
                    for (memory, array), one in zip(places, wanted, strict=True):
                        right = oracle.same_bits(array.copy(), one) if has_result else (memory == 77).all()
                        assert right, (turn, number, again)
                        assert not strided or (memory[:, 1::2] == 77).all()


@program
def in_place(comm):
    """A rank's own block of `out`, or own array of the list, is input and output."""
    lengths = [rank + 1 for rank in range(comm.size)]
    rows = [block(rank, 0, length, "int64") for rank, length in enumerate(lengths)]
    first, many = sum(lengths[:comm.rank]), sum(lengths)
    for _ in range(3):
        out = numpy.zeros((many, 2), numpy.int64)
        mine = out[first:first + comm.rank + 1]
        mine[...] = rows[comm.rank]
        assert comm.all_gather_v(mine, out) is out
        assert oracle.same_bits(out, numpy.concatenate(rows))
        listed = [numpy.zeros((length, 2), numpy.int64) for length in lengths]
        listed[comm.rank][...] = rows[comm.rank]
        assert comm.gather_v(listed[comm.rank], out=listed) is (None if comm.rank else listed)
        assert comm.rank or all(oracle.same_bits(*pair) for pair in zip(listed, rows, strict=True))
        xs = [numpy.full((2, 2), 10 * comm.rank + other) for other in range(comm.size)]
        assert comm.all_to_all_v(xs, out=xs) is xs
        assert [one[0, 0] for one in xs] == [10 * other + comm.rank for other in range(comm.size)]
        xs = [numpy.full((2, 2), 10 * comm.rank + other) for other in range(comm.size)]
        root = comm.size - 1
        got = xs[root] if comm.rank == root else numpy.zeros((2, 2), int)
        assert comm.scatter_v(xs if comm.rank == root else None, root, out=got) is got
        assert (got == 10 * root + comm.rank).all()
        if comm.size == 1:
            assert comm.reduce_scatter_v(got, [2], out=got) is got


@program
def later(comm):
    """An `out` works with async_op, in a group, and in a plan."""
    x, counts = numpy.full((comm.rank + 1, 2), comm.rank), [rank + 1 for rank in range(comm.size)]
    expected = numpy.repeat(numpy.arange(comm.size), counts)
    outs = [numpy.zeros((sum(counts), 2), int) for _ in range(3)]
    assert comm.all_gather_v(x, outs[0], async_op=True).wait() is outs[0]
    with comm.group():
        comm.all_gather_v(x, outs[1])
    plan = comm.plan("all_gather_v", x, outs[2])
    assert plan() is outs[2]
    assert all((out[:, 0] == expected).all() for out in outs)
    x += 1
    assert (plan()[:, 1] == expected + 1).all()


def wrong_outs(comm):
    """Yield calls with a common end on all ranks, a valid `out`, and invalid values of `out` by error code."""
    size = comm.size
    x, xs, counts = numpy.ones((2, 3)), list(numpy.ones((size, 2, 3))), [2] * size
    sealed, twice = numpy.zeros((2 * size, 3)), numpy.zeros((2, 3))
    sealed.flags.writeable = False
    yield lambda out: comm.all_gather_v(x, out), numpy.zeros((2 * size, 3)), {
        "GC-SHAPE": numpy.zeros((2 * size, 2)), "GC-DTYPE": numpy.zeros((2 * size, 3), "f4"), "GC-READONLY": sealed,
        "GC-COUNTS": [], "GC-ARRAY": 3, "GC-OVERLAP": [twice] * size}
    yield lambda out: comm.all_to_all_v(xs, out), numpy.zeros((2 * size, 3)), {
        "GC-SHAPE": numpy.zeros(3), "GC-DTYPE": list(numpy.zeros((size, 2, 3), int)),
        "GC-OVERLAP": xs[0].base.reshape(-1)[3:-3].reshape(-1, 3)[:1] if size == 1 else [*xs[1:], xs[1]]}
    yield lambda out: comm.reduce_scatter_v(numpy.ones((2 * size, 3)), counts, out=out), twice, {
        "GC-SHAPE": numpy.zeros(6), "GC-DTYPE": numpy.zeros((2, 3), "i8"), "GC-ARRAY": [twice]}


@program
def refused(comm):
    """With a wrong `out` on the last rank, this rank gets the reason, the others a PeerError; nothing is written."""
    last, size = comm.rank == comm.size - 1, comm.size
    for call, right, wrongs in wrong_outs(comm):
        for _ in range(3):  # a known call is refused as well
            call(numpy.zeros_like(right))
        for code, wrong in wrongs.items():
            outs = wrong if last and isinstance(wrong, list) else [numpy.asarray(wrong if last else right)]
            before = [one.copy() for one in outs]
            with pytest.raises((gc.ArgumentError, gc.DtypeError) if last else gc.PeerError) as error:
                call(wrong if last else right)
            assert error.value.code == code if last else error.value.ranks == (size - 1,), (code, error.value)
            assert all(numpy.array_equal(*pair) for pair in zip(outs, before, strict=True)), code
    big = numpy.zeros((2 * size + 1, 3))
    with pytest.raises(gc.ArgumentError, match="overlap"):
        comm.all_gather_v(big[2 * comm.rank + 1:2 * comm.rank + 3], big[:-1])
    big[2 * comm.rank:2 * comm.rank + 2] = comm.rank
    assert (comm.all_gather_v(big[2 * comm.rank:2 * comm.rank + 2], big[:-1])[::2, 0] == numpy.arange(size)).all()


@program
def refused_at_the_root(comm, name):
    """A wrong `out` on the root alone, in a gather or a scatter, is an error on all ranks."""
    wrong = [numpy.zeros((3, 3))] * comm.size if name == "gather_v" else numpy.zeros((3, 3))
    x = numpy.ones((2, 3)) if name == "gather_v" else [numpy.ones((2, 3))] * comm.size if comm.rank == 0 else None

    def call():
        for _ in range(5):  # a sending rank may run ahead, and fails in a later call
            getattr(comm, name)(x, out=wrong if comm.rank == 0 else None)

    with pytest.raises(gc.ArgumentError if comm.rank == 0 else gc.PeerError) as error:
        call()
    assert error.value.code == ("GC-PEER" if comm.rank else "GC-SHAPE")


PROGRAMS = (taken, in_place, later)
REFUSALS = ((refused, ()), (refused_at_the_root, ("gather_v",)), (refused_at_the_root, ("scatter_v",)))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_on_threads(executor, program):
    executor.run(3, program)


@pytest.mark.parametrize("executor", ["shared"], indirect=True)  # `shared` compares the calls of ranks, even of threads
@pytest.mark.parametrize(("program", "arguments"), REFUSALS)
def test_refused_on_threads(executor, program, arguments):
    executor.run(3, program, *arguments)
