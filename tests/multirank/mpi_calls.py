"""Programs of mpi4py, run by mpi4py and by `gpucoll.mpi.Comm`: afterwards the buffers are equal, byte by byte."""

import pickle
import random

import numpy
import pytest
from mpi4py import MPI
from mpi4py.util import pkl5

import gpucoll as gc
import gpucoll.mpi
from harness.pace import seconds

TYPES = {"f8": MPI.DOUBLE, "i4": MPI.INT, "u1": MPI.UNSIGNED_CHAR, "i8": MPI.LONG}
OPS = (MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX, MPI.BXOR, MPI.BAND)


def spelled(chance, array, count):
    """Return one of the ways to specify a whole buffer."""
    kind = TYPES[array.dtype.str[1:]]
    return chance.choice([array, [array, kind], (array, kind), [array, count, kind], [array, (count, 0), kind],
                          [array, None, kind], [array, kind.tocode()], [array, count], [array, (count, 0)]])


def spread(chance, counts, size):
    """Return displacements with gaps in between, and the length of the buffer."""
    starts, end = [], 0
    for count in counts:
        starts.append(end + chance.randrange(3))
        end = starts[-1] + count
    return starts, end + chance.randrange(3)


class Job:
    """The same calls on both communicators; draws from `alike` are equal on all ranks, draws from `own` differ."""

    def __init__(self, mpi, ours, seed):
        self.rank, self.size, self.both = mpi.rank, mpi.size, (mpi, ours)
        self.alike, self.own, self.number = random.Random(seed), random.Random(f"{seed}/{mpi.rank}"), 0

    def array(self, count, dtype, shape=None):
        self.number += 1
        values = numpy.random.default_rng([self.rank, self.number]).integers(1, 4, count)
        return values.astype(dtype).reshape(shape or -1)

    def compare(self, name, given, taken, *more, ways=lambda x, y: (x, y)):
        """Make a call by mpi4py and by gpucoll, blocking or not; compare the buffers, including unwritten parts."""
        begun, results, state = self.alike.random() < 0.4, [], self.own.getstate()
        for comm in self.both:
            self.own.setstate(state)
            x, y = (None if one is None else one.copy() for one in (given, taken))
            arguments = [one for one in ways(x, y) if one is not Ellipsis]
            found = getattr(comm, ("I" + name.lower()) if begun else name)(*arguments, *more)
            if begun and self.own.random() < 0.5:
                while not found.Test():
                    pass
            elif begun:
                found.Wait()
            results.append([None if one is None else one.tobytes() for one in (x, y)])
        assert results[0] == results[1], (name, begun, arguments, more)

    def reductions(self):
        dtype, op, count = self.alike.choice(["i4", "i8"]), self.alike.choice(OPS), self.alike.choice([0, 1, 6, 5000])
        root, shape = self.alike.randrange(self.size), self.own.choice([None, (2, -1)] if count > 1 else [None])
        x, y, inside = self.array(count, dtype, shape), self.array(count, dtype), self.own.random() < 0.3

        def ways(x, y):
            return MPI.IN_PLACE if inside else spelled(self.own, x, count), spelled(self.own, y, count)

        for name in ("Allreduce", "Scan"):
            self.compare(name, x, y, op, ways=ways)
        inside = False
        if self.rank:  # undefined on rank 0 after an exscan
            self.compare("Exscan", x, y, op, ways=ways)
        else:
            self.compare("Exscan", x, None, op, ways=lambda x, _: (x, numpy.empty(count, dtype)))
        self.compare("Reduce", x, y, op, root, ways=lambda x, y: (
            spelled(self.own, x, count), spelled(self.own, y, count) if self.rank == root else None))
        inside, each = self.alike.random() < 0.3, self.alike.choice([0, 1, 4])
        x, y = self.array(each * self.size, dtype), self.array(each * (self.size if inside else 1), dtype)
        self.compare("Reduce_scatter_block", x, y, op, ways=lambda x, y: (MPI.IN_PLACE if inside else x, y))
        counts = [self.alike.randrange(4) for _ in range(self.size)]
        x, y = self.array(sum(counts), dtype), self.array(sum(counts) if inside else counts[self.rank], dtype)
        self.compare("Reduce_scatter", x, y, counts, op, ways=lambda x, y: (
            MPI.IN_PLACE if inside else [x, TYPES[dtype]], y))

    def blocks(self):
        dtype, each = self.alike.choice([*TYPES]), self.alike.choice([0, 1, 3, 2000])
        root = self.alike.randrange(self.size)
        x, y = self.array(each, dtype), self.array(each * self.size, dtype)
        inside, is_root = self.alike.random() < 0.3, self.rank == root
        self.compare("Bcast", None, x, root, ways=lambda _, y: (spelled(self.own, y, each), ...))
        self.compare("Allgather", x, y, ways=lambda x, y: (
            MPI.IN_PLACE if inside else spelled(self.own, x, each), spelled(self.own, y, each)))
        self.compare("Gather", x, y, root, ways=lambda x, y: (
            MPI.IN_PLACE if inside and is_root else spelled(self.own, x, each),
            spelled(self.own, y, each) if is_root else None))
        self.compare("Scatter", y, x, root, ways=lambda x, y: (
            spelled(self.own, x, each) if is_root else None,
            MPI.IN_PLACE if inside and is_root else spelled(self.own, y, each)))
        self.compare("Alltoall", y, self.array(each * self.size, dtype), ways=lambda x, y: (
            MPI.IN_PLACE if inside else spelled(self.own, x, each), spelled(self.own, y, each)))

    def parts(self):
        """Blocks with different lengths and gaps: unwritten parts stay unchanged."""
        size, dtype, root = self.size, self.alike.choice([*TYPES]), self.alike.randrange(self.size)
        table = [[self.alike.choice([0, 1, 5, 700]) for _ in range(size)] for _ in range(size)]
        counts, mine, kind = table[0], self.array(table[0][self.rank], dtype), TYPES[dtype]
        starts, length = spread(self.own, counts, size)
        whole, is_root = self.array(length, dtype), self.rank == root

        def spec(array, counts, starts):
            return self.own.choice([[array, counts, starts, kind], [array, (counts, starts), kind],
                                    [array, (numpy.array(counts), starts)]])

        self.compare("Allgatherv", mine, whole, ways=lambda x, y: (x, spec(y, counts, starts)))
        packed = self.array(sum(counts), dtype)
        self.compare("Allgatherv", mine, packed,
                     ways=lambda x, y: (x, self.own.choice([[y, counts], [y, counts, kind]])))
        self.compare("Alltoallv", self.array(2 * size, dtype), self.array(2 * size, dtype), ways=lambda x, y: (
            self.own.choice([x, [x, 2], [x, (2, 2)], [x, 2, kind]]), self.own.choice([y, [y, [2] * size, None, kind]])))
        self.compare("Gatherv", mine, whole, root, ways=lambda x, y: (x, spec(y, counts, starts) if is_root else None))
        self.compare("Scatterv", whole, mine, root, ways=lambda x, y: (spec(x, counts, starts) if is_root else None, y))
        given, taken = table[self.rank], [row[self.rank] for row in table]
        (there, much), (here, more) = spread(self.own, given, size), spread(self.own, taken, size)
        self.compare("Alltoallv", self.array(much, dtype), self.array(more, dtype),
                     ways=lambda x, y: (spec(x, given, there), spec(y, taken, here)))


def against_mpi4py(mpi, seed, turns):
    ours = gpucoll.mpi.Comm(mpi, timeout=seconds(60))
    job = Job(mpi, ours, seed)
    for _ in range(turns):
        job.reductions()
        job.blocks()
        job.parts()
    ours.comm.close()


def others(mpi):
    """Refused calls, calls left to mpi4py, derived communicators, and messages beside collectives."""
    ours = gpucoll.mpi.Comm(mpi, timeout=seconds(60))
    x, y = numpy.full(4, ours.rank + 1.0), numpy.zeros(4)
    assert (ours.Get_rank(), ours.Get_size(), ours.rank, ours.size) == (mpi.rank, mpi.size, mpi.rank, mpi.size)
    assert ours.allreduce(ours.rank) == sum(range(ours.size))
    total = sum(range(1, ours.size + 1))
    op = MPI.Op.Create(lambda a, b, kind: numpy.frombuffer(b)[:].__iadd__(numpy.frombuffer(a)), commute=True)
    ours.Allreduce(x, y, op)
    assert (y == total).all()
    op.Free()
    pairs = MPI.DOUBLE.Create_contiguous(2).Commit()
    ours.Bcast([y, 2, pairs], root=0)
    pairs.Free()
    mine, found = (numpy.zeros(2, numpy.dtype([("value", "f8"), ("index", "i4")], align=True)) for _ in range(2))
    mine["value"], mine["index"] = [-ours.rank, 7], ours.rank
    ours.Allreduce([mine, MPI.DOUBLE_INT], [found, MPI.DOUBLE_INT], op=MPI.MINLOC)
    assert found.tolist() == [(1 - ours.size, ours.size - 1), (7, 0)]
    assert [array.tolist() for array in ours.comm.minloc(mine["value"])] == [[*found["value"]], [*found["index"]]]
    wide = numpy.full(3, 1, "g")
    ours.Allreduce(MPI.IN_PLACE, wide)
    assert (wide == ours.size).all()
    half = ours.Split(ours.rank % 2, -ours.rank)
    assert half.size == len(range(ours.rank % 2, ours.size, 2))
    works(half).Free()
    assert ours.Split(MPI.UNDEFINED) == MPI.COMM_NULL
    grid = ours.Create_cart([ours.size, 1], periods=[True, False])
    assert grid.Get_coords(ours.rank) == [ours.rank, 0]
    assert grid.Shift(0, 1) == ((ours.rank - 1) % ours.size, (ours.rank + 1) % ours.size)
    for line, ranks in ((grid.Sub([True, False]), range(ours.size)), (grid.Sub([False, True]), [ours.rank])):
        assert line.size == len(ranks)
        works(line, MPI.Cartcomm).Free()
    grid.Free()
    assert (ours.Create_cart([1]) == MPI.COMM_NULL) == (ours.rank > 0)
    with pytest.raises(gc.ArgumentError, match="BOTTOM"):
        ours.Bcast([MPI.BOTTOM, 1, MPI.INT])
    with pytest.raises(ValueError, match="mismatch"):
        ours.Allreduce(x, numpy.zeros(3))
    with pytest.raises(gc.ArgumentError, match="room"):
        ours.Allgatherv(x, [numpy.zeros(4 * ours.size), [3] * ours.size])
    for spec in ([y, 5], [y, -1], [y, (2, 3)]):
        with pytest.raises(gc.ArgumentError, match="not a valid count"):
            ours.Bcast(spec)
        if ours.size > 1:
            with pytest.raises(gc.ArgumentError if ours.rank == 1 else gc.PeerError):
                ours.Allreduce(x, spec if ours.rank == 1 else y)
    long, right, left = numpy.full(1 << 18, ours.rank), (ours.rank + 1) % ours.size, (ours.rank - 1) % ours.size
    for _ in range(3):  # a message under way does not delay a collective, and vice versa
        came = numpy.empty_like(long)
        if ours.rank == 0:
            begun = [ours.Irecv(came, left), ours.Isend(long, right)]
            ours.Allreduce(x, y)
            MPI.Request.Waitall(begun)
        else:
            ours.Recv(came, left)
            ours.Send(long, right)
            ours.Allreduce(x, y)
        assert (came == left).all()
        assert (y == total).all()
    ours.comm.close()


def works(comm, kind=gpucoll.mpi.Comm):
    y = numpy.zeros(3)
    comm.Allreduce(numpy.full(3, comm.rank + 1.0), y)
    total = comm.allreduce(comm.rank + 1)
    assert ([*y], isinstance(comm, kind)) == ([total] * 3, True)
    return comm


def as_mpi4py(mpi):
    """A `Comm` is mpi4py's communicator: by its handle, for windows and files, in a pickle, among its requests."""
    ours, exact = (gpucoll.mpi.Comm(mpi, timeout=seconds(60), deterministic=bits) for bits in (False, True))
    assert isinstance(ours, MPI.Intracomm)
    assert (ours, MPI.Comm.Compare(ours, mpi), MPI._addressof(ours) != 0) == (mpi, MPI.IDENT, True)
    x, y, total = numpy.full(4, ours.rank + 1.0), numpy.zeros(4), sum(range(1, ours.size + 1))
    copy, request = ours.Idup()
    request.Wait()
    grid = ours.Create_cart([ours.size])
    for made in (ours.Clone(), ours.Dup(), copy, grid.Dup(), grid, ours.Create(ours.Get_group())):
        works(made).Free()
        assert made == MPI.COMM_NULL
    works(gpucoll.mpi.Comm.fromhandle(ours.handle))
    works(gpucoll.mpi.Comm(pkl5.Intracomm(mpi), timeout=seconds(60)), pkl5.Intracomm)
    assert pkl5.Intracomm(ours).allgather(ours.rank) == [*range(ours.size)]
    if mpi == MPI.COMM_WORLD:
        works(pickle.loads(pickle.dumps(ours)))
    MPI.Win.Create(y, comm=ours).Free()
    right, left, came = (ours.rank + 1) % ours.size, (ours.rank - 1) % ours.size, numpy.zeros(1)
    for wait in (MPI.Request.Waitall, lambda ways: [one.Wait() for one in ways],
                 lambda ways: (MPI.Request.Waitany(ways), MPI.Request.Waitsome(ways), MPI.Request.Waitall(ways))):
        y[:] = came[:] = 0
        ways = [exact.Iallreduce(x, y), ours.Irecv(came, left), ours.Isend(x[:1], right), ours.Ibarrier()]
        assert isinstance(ways[0], gpucoll.mpi.Request)
        wait(ways)
        assert ([*y], [*came]) == ([total] * 4, [left + 1])
        assert ways[0].test() == (True, None)
    for comm in (ours, exact):
        comm.comm.close()


def derived(mpi):
    """Where a rank passes a derived datatype, mpi4py carries out the call on all ranks; wrong calls are refused."""
    ours = gpucoll.mpi.Comm(mpi, timeout=seconds(60))
    kinds = [(4, MPI.DOUBLE), (2, MPI.DOUBLE.Create_contiguous(2).Commit())]
    x, blocks = numpy.arange(4.0) + 10 * mpi.rank, numpy.arange(4.0 * mpi.size) + 100 * mpi.rank
    for some in ({*range(mpi.size)}, {0}, {mpi.size - 1}):
        each, kind = kinds[mpi.rank in some]
        parts = [each] * mpi.size, kind
        for call in (lambda comm, y, out, each, kind, _: comm.Bcast([y, each, kind]),
                     lambda comm, y, out, each, kind, _: comm.Gather([x, each, kind], [out, each, kind]),
                     lambda comm, y, out, each, kind, _: comm.Allgather([x, each, kind], [out, each, kind]),
                     lambda comm, y, out, each, kind, _: comm.Scatter([blocks, each, kind], [y, each, kind]),
                     lambda comm, y, out, each, kind, _: comm.Alltoall([blocks, each, kind], [out, each, kind]),
                     lambda comm, y, out, each, kind, parts: comm.Gatherv([x, each, kind], [out, *parts]),
                     lambda comm, y, out, each, kind, parts: comm.Allgatherv([x, each, kind], [out, *parts]),
                     lambda comm, y, out, each, kind, parts: comm.Scatterv([blocks, *parts], [y, each, kind]),
                     lambda comm, y, out, each, kind, parts: comm.Alltoallv([blocks, *parts], [out, *parts])):
            came = [[x.copy(), numpy.zeros(4 * mpi.size)] for _ in range(2)]
            for comm, arrays in zip((mpi, ours), came, strict=True):
                call(comm, *arrays, each, kind, parts)
            assert all(map(numpy.array_equal, *came))
    if mpi.size > 1:
        with pytest.raises(gc.MismatchError):
            ours.Bcast(numpy.zeros(3 + mpi.rank // (mpi.size - 1)))
        with pytest.raises(gc.MismatchError):
            ours.Bcast([x, *kinds[1]]) if mpi.rank else ours.Allgather(x, numpy.zeros(4 * mpi.size))
        with pytest.raises(gc.MismatchError):
            ours.Bcast([x, *kinds[1]]) if mpi.rank else ours.Gather([x, *kinds[1]], [numpy.zeros(8), *kinds[1]])
    works(ours)
    if mpi.size > 1:  # rank 0 goes on with the end, and does not ask the others
        with pytest.raises(gc.MismatchError):
            ours.Bcast(blocks) if mpi.rank else ours.comm.all_reduce(x)
    ours.comm.close()


def kept(mpi):
    """One `Comm` for each communicator and options, until either is closed or freed."""
    ours = gpucoll.mpi.Comm(mpi, timeout=seconds(60))
    assert gpucoll.mpi.Comm(mpi, timeout=seconds(60)) is ours
    exact = gpucoll.mpi.Comm(mpi, timeout=seconds(60), deterministic=True)
    assert exact is not ours
    assert exact.comm.options.deterministic
    twin = mpi.Dup()
    copies = [gpucoll.mpi.Comm(twin, timeout=seconds(60), deterministic=bits) for bits in (False, True)]
    assert ours not in copies
    assert gpucoll.mpi.Comm(twin, timeout=seconds(60)) is copies[0]
    for comm in (ours, exact, *copies):
        works(comm)
    twin.Free()
    assert [comm.comm.closed for comm in (*copies, ours, exact)] == [True, True, False, False]
    ours.comm.close()
    again = gpucoll.mpi.Comm(mpi, timeout=seconds(60))
    assert again is not ours
    works(again)
    works(exact)
    MPI.Finalize()
