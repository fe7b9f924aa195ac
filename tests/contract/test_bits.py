"""The contract of bits on every executor: drawn cases against oracles, with `deterministic` True and "exact"."""

import math
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from harness.grids import generator
from harness.thread_ranks import on_threads
from mixture import PEER
from oracles import bits
from programs.collectives import program

ORACLES = {"in order": (True, bits.in_order), "exact": ("exact", bits.exact)}
OWN = Path(__file__).parents[1] / "programs" / "own.py"
DRAWS = 8  # for an executor and an option
EXACT_ON_PEER = ("float32", "float16")  # each dtype more takes a compiler 10 s


def cases(random, which, executor, draws):
    """Return drawn cases, each with a number of ranks."""
    names = [name for name in bits.FLOATS if which == "in order" or name in bits.FORMATS or "complex" in name]
    ops = bits.ORDERED if which == "in order" else bits.ROUNDED
    pairs = [(op, name) for op in ops for name in names if not (op in ("min", "max") and "complex" in name)]
    if executor.name == "peer":
        pairs = [(op, name) for op, name in pairs
                 if ((op, name) in PEER if which == "in order" else name in EXACT_ON_PEER)]
    for _ in range(draws):
        size, (op, name) = random.choice(executor.sizes), random.choice(pairs)
        drawn = bits.case(random, name, op, size)
        if executor.device != "cpu":  # slow
            drawn = drawn._replace(count=min(drawn.count, 1000), cuts=(0, min(drawn.count, 1000)))
        yield size, drawn


@program
def drawn_cases(comm, which, drawn, seed):
    bits.check(comm, drawn, ORACLES[which][1], generator(seed))


@pytest.mark.parametrize("draws", [DRAWS, pytest.param(60 * DRAWS, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("which", ORACLES)
def test_drawn_cases(executor, which, draws):
    random = generator(f"bits/{executor.name}/{executor.by_python}/{which}/{draws}")
    for number, (size, drawn) in enumerate(cases(random, which, executor, draws)):
        executor.run(size, drawn_cases, which, drawn, f"algorithm/{number}", deterministic=ORACLES[which][0])


@program
def mean_of_zeros(comm):
    x = numpy.array([1, 1, -1, 0, -0.0], "complex64")
    x.imag = [-0.0, 0.0, -0.0, -0.0, 0.0]
    assert bits.same_bits(comm.all_reduce(x, op="avg"), bits.in_order("avg", numpy.stack([x] * comm.size)))


def test_a_complex_mean_has_the_sign_of_zero_of_a_division(executor):
    """As NumPy's division by the number of ranks, also on devices."""
    if executor.name != "peer":  # its kernels for complex64 take a compiler 10 s; the last step is the same
        for size in (2, 3):
            executor.run(size, mean_of_zeros, deterministic=True)


@program
def padded(comm, rows, places):
    """Sums do not change with more ranks, all with -0, or with other ranks for the same rows."""
    mine = numpy.full(rows.shape[1], -0.0, rows.dtype)
    if comm.rank in places:
        mine[...] = rows[places.index(comm.rank)]
    return comm.all_reduce(mine)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_the_number_and_the_order_of_ranks_do_not_matter(name):
    random = generator(f"ranks/{name}")
    for _ in range(4):
        rows = bits.columns(name, 3, random.getrandbits(32))
        wanted = bits.exact("sum", rows)
        for size in (3, 4, 8, 11):
            places = random.sample(range(size), 3)
            for found in on_threads(size, padded, rows, places, deterministic="exact"):
                assert bits.same_bits(found, wanted), (size, places)


def test_float64_equals_fsum():
    rows = numpy.random.default_rng(1).standard_normal((5, 2000)) * 10.0 ** numpy.arange(-30, 30, 0.03)
    wanted = numpy.array([math.fsum(column) for column in rows.T])
    for found in on_threads(5, lambda comm: comm.all_reduce(rows[comm.rank]), deterministic="exact"):
        assert found.tobytes() == wanted.tobytes()


def ties(name, size):
    """Return rows whose exact sum or mean lies just beside a tie of the dtype: a second rounding goes the wrong way."""
    part, random = bits.real(name), numpy.random.default_rng(size)
    precision, *_ = bits.FORMATS[part.name]
    rows = numpy.zeros((size, 200), part)
    rows[0] = (1 + 2 * random.integers(0, 2 ** (precision - 2), 200) * 2.0 ** (1 - precision)).astype(part)
    if size > 2:
        rows[1] = part.type(2.0 ** -precision)  # half of the last bit
        # Of float16 the least number is the half of float32's last bit beside 1.
        least = bits.FORMATS[part.name][1]
        tiny = 2.0 ** random.choice([least, least + precision, max(least, -30)], 200)
        rows[2] = (tiny * random.choice([-1, 1], 200)).astype(part)
    return rows


@program
def rounded_once(comm, name):
    rows = ties(name, comm.size)
    for op in bits.ROUNDED:
        assert bits.same_bits(comm.all_reduce(rows[comm.rank], op=op), bits.exact(op, rows)), (name, op)
    rows = numpy.random.default_rng(3).standard_normal((comm.size, 1500)).astype(bits.real(name))
    assert bits.same_bits(comm.all_reduce(rows[comm.rank], op="avg"), bits.exact("avg", rows)), name


def test_means_are_rounded_once():
    for name, size in (("float32", 3), ("float16", 3), ("float64", 5), ("float16", 4)):
        on_threads(size, rounded_once, name, deterministic="exact")


@pytest.mark.usefixtures("own_algorithms")
def test_algorithms_of_the_user_are_not_taken(monkeypatch):
    """A rule of GPUCOLL_ALGO may name an algorithm of the user, of unknown order."""
    name = gc.load(f"{OWN}:own_line")
    monkeypatch.setenv("GPUCOLL_ALGO", f"all_reduce:{name}")
    for deterministic in ORACLES.values():
        with pytest.raises(gc.ArgumentError, match="GC-DETERMINISTIC"):
            on_threads(3, lambda comm: comm.all_reduce(numpy.ones(3)), deterministic=deterministic[0])


@program
def refused(comm):
    x = numpy.ones(comm.size * 3, "f4")
    own = gc.elementwise_op("a + b - a*b")
    for call, options in ((comm.all_reduce, {"op": "prod"}), (comm.all_reduce, {"op": own}),
                          (comm.all_reduce, {"algorithm": "ring"}), (comm.scan, {"algorithm": "linear"})):
        with pytest.raises(gc.ArgumentError, match="GC-DETERMINISTIC]"):
            call(x, **options)
    # Integers are exact in any order, and so are the extremes of floats.
    assert (comm.all_reduce(x.astype("i4"), op="prod", algorithm="ring") == 1).all()
    assert (comm.all_reduce(x * comm.rank, op="max") == comm.size - 1).all()
    # Each rank's own factor; the sum is exact.
    assert (comm.all_reduce(x, op=gc.premul_sum(0.5 ** comm.rank)) == 2 - 0.5 ** (comm.size - 1)).all()
    assert comm.explain("all_reduce", 1 << 20).choice in ("one_shot", "two_shot", "star")


def test_what_cannot_be_exact_is_refused():
    on_threads(3, refused, deterministic="exact")


@program
def refused_in_order(comm):
    x = numpy.ones(12, "f2")
    with pytest.raises(gc.ArgumentError, match=r"GC-DETERMINISTIC.*single reduction"):
        comm.scan(x, algorithm="linear")  # rounds a partial sum on each rank
    assert (comm.scan(x.astype("f4"), algorithm="linear") == comm.rank + 1).all()
    assert (comm.all_reduce(x.astype("i8"), algorithm="ring") == comm.size).all()


def test_partial_sums_of_narrow_floats_are_refused(monkeypatch):
    on_threads(3, refused_in_order, deterministic=True)
    monkeypatch.setenv("GPUCOLL_ALGO", "all_reduce:ring")
    with pytest.raises(gc.ArgumentError, match="GC-DETERMINISTIC"):
        on_threads(3, lambda comm: comm.all_reduce(numpy.ones(3)), deterministic=True)
