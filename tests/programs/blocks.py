"""Blocks of all ranks, stacked or concatenated, and gatherings in place: programs for ranks of any kind."""

import numpy
import pytest

import gpucoll as gc
from programs.collectives import check, program

SHAPES = [(3,), (1, 2), (2, 1, 2), (0, 2), (4099,)]


def concatenated(blocks):
    return numpy.concatenate(blocks) if blocks[0].ndim else numpy.stack(blocks)


def layouts(comm, blocks, number):
    """Return the blocks, stacked or concatenated in turn and different between ranks, sometimes with gaps."""
    whole = concatenated(blocks) if (number + comm.rank) % 2 else numpy.stack(blocks)
    if number % 3 == 2:
        gaps = numpy.zeros((2, *whole.shape), whole.dtype)
        gaps[0] = whole
        return numpy.moveaxis(gaps, 0, -1)[..., 0]
    return whole.copy()


@program
def either_layout(comm, collective, algorithm):
    """The result is the same for any layout on each rank; a newly allocated result is stacked."""
    size, rank = comm.size, comm.rank
    for shape in SHAPES:
        count = int(numpy.prod(shape))
        of = [[(numpy.arange(count) * 7 + 100 * source + 10 * target).astype("i4").reshape(shape)
               for target in range(size)] for source in range(size)]
        root = count % size
        for number in range(6):
            mine, from_all = of[rank], [row[rank] for row in of]
            own = [row[0] for row in of]
            x, expected, options = {
                "all_gather": (own[rank], own, {}), "gather": (own[rank], own, {"root": root}),
                "scatter": (layouts(comm, of[root], number) if rank == root else None, of[root][rank], {"root": root}),
                "reduce_scatter": (layouts(comm, mine, number), sum(from_all), {}),
                "all_to_all": (layouts(comm, mine, number), from_all, {})}[collective]
            blocks = isinstance(expected, list)
            has_result = collective != "gather" or rank == root
            wanted = numpy.stack(expected) if blocks else expected.astype("i4")
            out = None
            if number != 4 and has_result:
                out = layouts(comm, [0 * one for one in expected], number + (number > 2)) if blocks else 0 * wanted
            found = getattr(comm, collective)(x, out=out, algorithm=algorithm, **options)
            if not has_result:
                assert found is None
            elif out is None:
                assert found.ndim <= wanted.ndim
                check(found.reshape(wanted.shape), wanted, collective, algorithm, shape, number)
            else:
                assert found is out
                check(numpy.ascontiguousarray(out).reshape(wanted.shape), wanted, collective, algorithm, shape, number)


@program
def gathered_in_place(comm, collective, algorithm):
    """`x` is this rank's block of `out`, in either layout, with and without gaps, several times."""
    size, rank = comm.size, comm.rank
    for shape in [(), *SHAPES]:
        count = int(numpy.prod(shape))
        own = [(numpy.arange(count) * 5 + 1000 * source).astype("i8").reshape(shape) for source in range(size)]
        for number in range(4):
            out = layouts(comm, [numpy.full_like(own[0], -1)] * size, number)
            rows = out.shape[0] // size
            x = out[rank * rows:(rank + 1) * rows]
            if out.ndim > len(shape):
                x = x.reshape(shape)
            x[...] = own[rank]
            if collective == "all_gather":
                found, has_result = comm.all_gather(x, out, algorithm=algorithm), True
            else:
                root = number % size
                has_result = rank == root
                found = comm.gather(x, out if has_result else None, root, algorithm=algorithm)
            assert found is (out if has_result else None)
            if has_result:
                check(numpy.ascontiguousarray(out).reshape(size, *shape), numpy.stack(own), algorithm, shape, number)


@program
def unlike_in_place(comm, collective, algorithm):
    """The same with blocks of different lengths, some of them empty."""
    lengths = [(3 * rank + 2) % 5 * 7 for rank in range(comm.size)]
    starts = numpy.cumsum([0, *lengths])
    for number in range(4):
        wanted = (numpy.arange(2 * starts[-1]) * 3 + number).reshape(-1, 2)
        out = numpy.full_like(wanted, -1)
        mine = slice(starts[comm.rank], starts[comm.rank + 1])
        out[mine] = wanted[mine]
        root = number % comm.size
        if collective == "all_gather_v":
            assert comm.all_gather_v(out[mine], out, algorithm=algorithm) is out
        else:
            comm.gather_v(out[mine], root, out=out if comm.rank == root else None, algorithm=algorithm)
        if collective == "all_gather_v" or comm.rank == root:
            check(out, wanted, algorithm, number)


@program
def others(comm):
    """Plans, asynchronous calls, and refused calls with an error naming both shapes."""
    size, rank = comm.size, comm.rank
    out = numpy.zeros((size * 2, 3))
    x = out[2 * rank:2 * rank + 2]
    planned = comm.plan("all_gather", x, out)
    for turn in range(3):
        x[...] = rank + turn
        assert planned() is out
        check(out, numpy.repeat(numpy.arange(size) + turn, 6).reshape(out.shape) * 1.0)
        x[...] = rank - turn
        assert comm.all_gather(x, out, async_op=True).wait() is out
        check(out, numpy.repeat(numpy.arange(size) - turn, 6).reshape(out.shape) * 1.0)
    for shape, block in (((size, 3), (3,)), ((size, 1, 3), (1, 3)), ((2 * size, 3), (2, 3))):
        given = numpy.arange(float(numpy.prod(shape))).reshape(shape) + rank
        assert comm.reduce_scatter(given).shape == block
        assert comm.all_to_all(given).shape == (size, *block)
        assert comm.scatter(given if rank == 0 else None).shape == block
        assert comm.all_gather(given, numpy.zeros((size * shape[0], *shape[1:]))).shape == (size * shape[0], *shape[1:])
        assert comm.all_gather(given).shape == (size, *shape)
    refused = [("all_gather", x, numpy.zeros((2 * size, 2)), f"({size}, 2, 3) or ({2 * size}, 3)", "GC-SHAPE"),
               ("all_to_all", numpy.zeros((2 * size, 3)), numpy.zeros(3), f"({size}, 2, 3) or ({2 * size}, 3)",
                "GC-SHAPE"),
               ("reduce_scatter", numpy.zeros((size, 3)), numpy.zeros(4), "(3,) or (1, 3)", "GC-SHAPE")]
    if size > 1:
        both = "(size, *s) or (size * s[0], *s[1:])"
        refused += [("reduce_scatter", numpy.zeros(2 * size + 1), None, both, "GC-SHAPE"),
                    ("all_to_all", numpy.zeros(()), None, both, "GC-SHAPE"),
                    ("all_gather", out[2 * (rank - 1) % (2 * size):][:2], out, "overlap partly", "GC-OVERLAP"),
                    ("all_gather", out[(2 * rank + 1) % (2 * size - 1):][:2], out, "overlap partly", "GC-OVERLAP")]
    for collective, given, taken, words, code in refused:
        with pytest.raises(gc.ArgumentError) as error:
            getattr(comm, collective)(given, taken)
        assert error.value.code == code
        assert words in str(error.value)
    return True

