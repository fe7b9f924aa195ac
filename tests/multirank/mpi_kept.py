"""Typical programs with `gpucoll.mpi.Comm`: small buffers of frequent kinds, and communicators made when needed."""

import itertools
import mmap

import numpy
import pytest
from mpi4py import MPI

import gpucoll as gc
import gpucoll.mpi
from harness.pace import seconds


def mapped(data):
    """Return shared memory beginning with these bytes."""
    memory = mmap.mmap(-1, 4096)
    memory[:len(data)] = data
    return memory


MAKERS = {"bytearray": bytearray, "mmap": mapped, "array": lambda data: numpy.frombuffer(bytearray(data), "u1")}
MOVES = {"Allgather": (1, 0), "Gather": (1, 0), "Scatter": (0, 1), "Alltoall": (0, 0), "Bcast": (1, 1)}
SUMS = {"Allreduce": (1, 1), "Reduce": (1, 1), "Scan": (1, 1), "Reduce_scatter_block": (0, 1)}
SIDES = MOVES | SUMS  # blocks of input and output; 0: a block for each rank
STYLES = {"[data, count, type]": lambda data, count, kind: [data, count, kind],
          "(data, type)": lambda data, count, kind: (data, kind), "data": lambda data, count, kind: data}


def buffers():
    """Yield the frequent kinds of buffers: maker, style of specification, number and type of elements."""
    for maker, style, (count, kind) in itertools.product(
            MAKERS, STYLES, [(3, MPI.BYTE), (3, MPI.UNSIGNED_CHAR), (2, MPI.DOUBLE)]):
        is_known_by = {"mmap": style.startswith("["), "array": kind != MPI.DOUBLE}  # other lengths
        if is_known_by.get(maker, True):
            yield maker, style, count, kind


def frequent_calls(comm, rank, size):
    """Make each call on frequent kinds of buffers; return the contents of the result buffers."""
    written, root, values = {}, size - 1, numpy.random.default_rng([7, rank]).integers(1, 250, 24 * size, "u1")
    for (maker, style, count, kind), name in itertools.product(buffers(), SIDES):
        if name in SUMS and kind == MPI.BYTE:
            continue  # bytes have no maximum
        extra = 0 if style != "[data, count, type]" else 5
        lengths = [(blocks or size) * count * kind.Get_size() + extra for blocks in SIDES[name]]
        x, y = (MAKERS[maker](data.tobytes()[:length]) for data, length in zip((values, values[::-1]), lengths,
                                                                              strict=True))
        given, taken = (STYLES[style](data, count, kind) for data in (x, y))
        if rank != root:
            taken = None if name in ("Gather", "Reduce") else taken
            given = None if name == "Scatter" else given
        operands = (taken,) if name == "Bcast" else (given, taken)
        more = {"op": MPI.MAX} if name in SUMS else {}
        more |= {"root": root} if name in ("Bcast", "Gather", "Scatter", "Reduce") else {}
        getattr(comm, name)(*operands, **more)
        written[maker, style, kind.name, name] = bytes(y)
        if maker == "bytearray":
            y.append(0)  # fails if some object still holds the memory
    return written


def frequent(mpi):
    """Bytes and arrays in frequent specifications are read as by mpi4py, on the fast path, and released."""
    ours = gpucoll.mpi.Comm(mpi, timeout=seconds(60))
    theirs, slow = frequent_calls(mpi, mpi.rank, mpi.size), []
    do, ours._do = ours._do, lambda name, *arguments: (slow.append((name, arguments)), do(name, *arguments))
    found = frequent_calls(ours, mpi.rank, mpi.size)
    assert len(found) > 50
    for case, data in theirs.items():
        assert found[case] == data, case
    assert not slow, slow
    memory = mapped(bytes(8))
    memory.close()
    for wrong in ([bytearray(3), 4, MPI.BYTE], [bytearray(3), -1, MPI.BYTE], memory):
        with pytest.raises((gc.ArgumentError, ValueError)):
            ours.Bcast(wrong)
    ours.comm.close()


def kept(mpi):
    """One `Comm` for each communicator and options, until either is closed or freed."""
    ours = gpucoll.mpi.Comm(mpi, timeout=seconds(60))
    assert gpucoll.mpi.Comm(mpi, timeout=seconds(60)) is ours
    exact = gpucoll.mpi.Comm(mpi, timeout=seconds(60), deterministic=True)
    assert exact is not ours
    assert exact.comm.options.deterministic

    def works(comm):
        y = numpy.zeros(3)
        comm.Allreduce(numpy.full(3, comm.rank + 1.0), y)
        assert (y == sum(range(1, comm.size + 1))).all()

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
    copy = again.Dup()
    works(copy)
    copy.Free()
    assert copy.comm.closed
    MPI.Finalize()
