"""check="data": flipped bits in moved data and sums are found, ranks and links named, and right data accepted."""

import contextlib
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.executors import Call
from gpucoll.health.integrity import PAGE, SAMPLE, checksum
from grids import generator
from thread_ranks import on_threads

MOVES = ("broadcast", "all_gather", "gather", "scatter", "all_to_all", "all_gather_v", "all_to_all_v")
SUMS = ("all_reduce", "reduce", "reduce_scatter", "scan", "exscan")
INTEGERS = ("int8", "uint16", "int32", "uint64")


class Flipping(Call):
    """A call with a flipped bit: of this rank's input at the begin, or of its output at the end.

    `flip` is the list of at most one flip, (side, byte, bit), to be made at present.
    """

    def __init__(self, call, flip):
        super().__init__(call.executor, call.request)
        self._call, self._flip, self.completes = call, flip, call.completes

    @property
    def engine_plan(self):
        return self._call.engine_plan

    def run(self, source, target, stream=None, *, repeated=False):
        side, *place = self._flip[0] if self._flip else (None,)
        row = {"input": source, "output": target}.get(side)
        is_chosen = row is not None and not self.request.header
        if is_chosen and side == "input":
            if not self.request.in_place:  # the program's array stays right
                source = source.copy()
            flipped(source, *place)
        yield from self._call.run(source, target, stream, repeated=repeated)
        if is_chosen and side == "output":
            flipped(target, *place)


def flipped(row, byte, bit):
    raw = row.view(numpy.uint8)
    raw[byte % len(raw)] ^= 1 << bit


@contextlib.contextmanager
def flipping(comm):
    """Let the flip in the list that this returns be made in this rank's calls, repeated calls included."""
    def resolve(*arguments, **options):
        ready = original(*arguments, **options)
        return ready._replace(call=Flipping(ready.call, flip))

    original, flip = comm._core.resolve, []
    with mock.patch.object(comm._core, "resolve", resolve):
        yield flip


def call(comm, name, x, **options):
    """Make a call on this rank's data, with a block for each rank where the collective has blocks."""
    blocks = numpy.stack([x + other for other in range(comm.size)]).astype(x.dtype)
    match name:
        case "broadcast":
            return comm.broadcast(x.copy(), comm.size - 1, **options)
        case "scatter":
            return comm.scatter(blocks if comm.rank == 0 else None)
        case "all_gather_v":
            return comm.all_gather_v(x[:len(x) - comm.rank])
        case "all_to_all_v":
            return comm.all_to_all_v([block[:len(x) - comm.rank - other] for other, block in enumerate(blocks)])
        case "all_to_all" | "reduce_scatter":
            return getattr(comm, name)(blocks, **options)
    return getattr(comm, name)(x, **options)


def found(comm, name, x, **options):
    """Return the error of a call, None without one."""
    try:
        call(comm, name, x, **options)
    except gc.BackendError as error:
        return error if error.code == "GC-DATA" else None
    return None


def flips(comm, cases):
    """Make each call without a flip, and once more with a flip on one rank: repeated calls are judged, too."""
    with flipping(comm) as flip:
        for name, dtype, length, victim, side, byte, bit in cases:
            x = numpy.random.default_rng(comm.rank).integers(0, 100, length).astype(dtype)
            what = name, dtype, length, victim, side, byte, bit
            assert found(comm, name, x) is None, what
            flip[:] = [(side, byte, bit)] * (comm.rank == victim)
            error = found(comm, name, x)
            flip.clear()
            assert error is not None, what
            assert name in str(error)
            if side == "output":
                assert error.ranks == (victim,), what


@pytest.mark.parametrize("executor", ["shared", "mpi", "walker"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_flipped_bit_of_moved_data_and_of_integer_sums_is_found(executor, size):
    random = generator(f"flips/{executor}/{size}")
    cases = []
    for name in MOVES + SUMS:
        for side in ("input", "output"):
            root = {"broadcast": size - 1, "scatter": 0, "gather": 0, "reduce": 0}.get(name)
            rooted = root is not None and ((side == "input") == (name in ("broadcast", "scatter")))
            victim = root if rooted else random.randrange(1 if name == "exscan" and side == "output" else 0, size)
            if name in ("scan", "exscan") and side == "input":
                victim = 0
            dtype = random.choice(INTEGERS if name in SUMS else (*INTEGERS, "float32", "complex128", "bool"))
            length, byte = random.choice((size + 1, 300, 3 * PAGE)), random.randrange(1 << 20)
            cases.append((name, dtype, length, victim, side, byte, 0 if dtype == "bool" else random.randrange(8)))
    lacking = mock.patch("gpucoll.executors.engine.library", return_value=None)
    with lacking if executor == "walker" else contextlib.nullcontext():
        on_threads(size, flips, cases * 2, check="data", executor="shared" if executor == "shared" else "mpi")


def reductions(comm, cases):
    with flipping(comm) as flip:
        for op, dtype, victim, byte, bit, wanted in cases:
            x = (numpy.random.default_rng(comm.rank).random(SAMPLE) + 1).astype(dtype)
            flip[:] = [("output", byte, bit)] * (comm.rank == victim)
            error = found(comm, "all_reduce", x, op=op)
            assert error is not None or not wanted, (op, dtype, byte, bit)
            assert error is None or error.ranks == (victim,)


def test_a_flipped_bit_of_another_reduction_is_found_in_the_sample():
    """Of two contributions each bit counts; of more, each bit above the error of the sum in any order."""
    random = generator("samples")
    every = [(op, dtype, random.randrange(2), random.randrange(SAMPLE) * numpy.dtype(dtype).itemsize + byte, bit, True)
             for op, dtype in (("sum", "float32"), ("avg", "float64"), ("prod", "int32"), ("min", "float16"),
                               ("max", "int16"), ("bxor", "uint8"))
             for byte in range(numpy.dtype(dtype).itemsize) for bit in range(8)]
    on_threads(2, reductions, every, check="data")
    # The last bits lie within the error of a sum of four in any order.
    four = [("sum", "float32", random.randrange(4), 4 * random.randrange(SAMPLE) + bit // 8, bit % 8, bit > 5)
            for bit in range(32)]
    on_threads(4, reductions, four, check="data")
    on_threads(4, reductions, [(*one[:5], True) for one in four], check="data", deterministic=True)


def accepted(comm):
    for dtype in ("bool", "int8", "uint64", "float16", "float32", "float64", "complex64"):
        x = numpy.random.default_rng(comm.rank).integers(-50, 50, 5 * PAGE).astype(dtype)
        x = (x / 3).astype(dtype) if x.dtype.kind in "fc" else x
        for name in MOVES + SUMS if dtype != "bool" else MOVES:
            call(comm, name, x)
        for op in ("max", "lor") if dtype != "complex64" else ("prod", "avg"):
            call(comm, "all_reduce", x, op=op, algorithm="recursive_doubling")
        call(comm, "broadcast", x[::3])
    if comm.size > 1:
        for op in ("prod", gc.elementwise_op("a + b + a * b")):
            call(comm, "all_reduce", (x + x[::-1]) / 7, op=op)
    special = numpy.array([numpy.nan, numpy.inf, -numpy.inf, 0.0, -0.0, 3e38], "f4")
    for op in ("sum", "min", "avg", "prod"):
        call(comm, "all_reduce", numpy.roll(special, comm.rank), op=op)
    planned = comm.plan("all_reduce", x)
    assert (planned() == planned()).all()
    works = [comm.all_reduce(x, async_op=True) for _ in range(3)]
    assert (works[2].wait() == planned()).all()


@pytest.mark.parametrize("size", [1, 2, 5])
def test_right_data_are_accepted(size):
    on_threads(size, accepted, check="data")


def rows_of_a_call(comm, name, algorithm):
    """Return the check of this rank, and the rows of all ranks."""
    kept = []
    with mock.patch.object(comm._core, "_compared", lambda check, name: kept.append(check) or iter(())):
        call(comm, name, numpy.arange(8) + comm.rank, algorithm=algorithm)
    return kept[0], comm.all_gather(kept[0].completed())


def test_the_link_before_the_first_wrong_rank_is_named():
    """Ranks that pass on wrong data are named, and not their links."""
    check, rows = on_threads(4, rows_of_a_call, "broadcast", "chain", check="data")[0]
    check.compare(rows)
    words = rows.view(numpy.uint64)
    words[:3, 1] += 1  # the chain goes from rank 3 over 0 and 1 to 2
    with pytest.raises(gc.BackendError, match="from rank 3") as wrong:
        check.compare(rows)
    assert wrong.value.ranks == (0, 1, 2)
    assert str(wrong.value).count("on the link") == 1


def test_a_sum_of_arrays_has_the_sum_of_their_checksums_and_pages_have_places():
    for name in INTEGERS:
        rows = numpy.random.default_rng(1).integers(0, 256, (3, 3 * PAGE + 8), numpy.uint8).view(name)
        word = numpy.dtype(f"u{rows.dtype.itemsize}")
        total = sum(checksum(row, word) for row in rows)
        assert checksum(rows.sum(axis=0, dtype=name), word) == total % 2 ** (8 * word.itemsize)
        swapped = numpy.roll(rows[0], PAGE // word.itemsize)
        assert checksum(swapped, word) != checksum(rows[0], word)
