"""The kernels for shared memory of ranks: NumPy's bits in every order of the threads, and no endless wait."""

import ctypes
import functools
import itertools

import numpy
import pytest

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import sources
from gpucoll.executors.peer.tables import Room
from harness.compiled import compile_all
from harness.grids import batches, naming
from oracles import oracle
from peer import direct, mutants, schedules
from peer.schedules import Case
from peer.world import ALL, Fault, World, library

SIZES = (2, 3, 4, 8)
SEEDS = batches([(seed,) for seed in range(200)], 50, keep=2, seed=0)
# These pairs cover every way of computing; tests/contract covers all pairs.
OFTEN = [("sum", "bfloat16"), ("prod", "complex64"), ("min", "float8_e4m3fn"), ("lxor", "bool"), ("avg", "int16")]

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def made():
    """Return the libraries of all default tests, compiled on all cores."""
    units = {"once": sources.text(*mutants.SWITCH, *mutants.GATHER, *mutants.STEPS),
             "floats": sources.text(*mutants.FLOATS),
             "often": sources.text(*(one for op, name in OFTEN for one in (
                 *direct.instances(op, name), sources.reducing("steps", OPS[op], DTYPES[name]))))}
    compile_all(units.values())
    libraries = {name: library(source) for name, source in units.items()}
    return {name: (one, one) for name, one in libraries.items()}


@pytest.fixture
def both(made):
    """Return the libraries of the op and dtype of most checks."""
    return made["once"]


@pytest.mark.parametrize("check", mutants.NEEDED, ids=lambda check: check.__name__)
def test_every_order_gives_numpys_bits(made, check):
    """Every check passes in several orders of the threads; each fault of `mutants.MUTANTS` fails a check."""
    libraries = made["floats" if mutants.NEEDED[check] is mutants.FLOATS else "once"]
    for seed in mutants.SEEDS:
        with naming(seed):
            check(libraries, seed)


@pytest.mark.parametrize("script", [direct.SCRIPT, direct.SWITCHED], ids=["direct", "switch"])
@pytest.mark.parametrize("seeds", SEEDS)
def test_operations_back_to_back(both, seeds, script):
    """All blocks or a single block of each rank are under way at once; unshared arrays are staged in sections."""
    run = functools.partial(direct.run, both, mutants.OP, mutants.NAME, script=script)
    by_switch = script is direct.SWITCHED
    for size, (seed,) in itertools.product(SIZES, seeds):
        with naming((size, seed)):
            run(ranks=size, seed=seed, blocks=3, residency=(ALL, 1)[seed % 2])
            run(ranks=size, seed=seed, count=(33, 100)[seed % 2], sections=2 + seed % 3,
                misaligned=4 * (seed % 2) * by_switch)
            if by_switch:
                direct.gather(both, ranks=size, seed=seed, count=1 + seed % 70, sections=1 + seed % 4, blocks=3)
    run(ranks=4, count=20_000, blocks=4, threads=128)
    if by_switch:
        direct.gather(both, ranks=4, count=20_000, blocks=4, threads=128, sections=3)


# A piece of the kernels, and the number that counts its bytes in front of the piece's last word.
COUNTED = (("read(Unit (&units)[AT_ONCE], const void* from, const Place& place) const {", 0, "sizeof units"),
           ("write(void* to, const Unit (&units)[AT_ONCE], const Place& place) const {", 1, "sizeof units"),
           ("multimem_load(u64 group, u64 offset) {\n    const u64 ranks", 2, "sizeof(Word)"),
           ("multimem_store(u64 group, u64 offset, Word word) {\n    for", 3, "sizeof(Word)"))


def test_bytes_of_an_all_reduce_by_the_switch():
    """Arrays in multicast memory are neither staged nor read from each rank: one load and one store a word."""
    source = sources.text(*direct.instances("sum", "int32", ("fold_share", "multimem_share")))
    for text, number, nbytes in COUNTED:
        assert source.count(text) == 1, text
        source = source.replace(text, text.replace("{", f"{{ counted[{number}] += {nbytes};"))
    place = source.index("template <u32 AT_ONCE> struct Batch")
    made = library(f'{source[:place]}extern "C" {{ unsigned long counted[4]; }}\n{source[place:]}')
    counted, ranks, count = (ctypes.c_ulong * 4).in_dll(made, "counted"), 4, 1024

    def bytes_of(kernel, shared):
        counted[:] = [0] * 4
        direct.run((made, made), "sum", "int32", ranks=ranks, count=count, script=[(kernel, "a", "b", shared)])
        return [number // (4 * count) for number in counted]  # in arrays: read, written; by the switch the same

    assert bytes_of("multimem_share", False) == [2 * ranks, 2 * ranks, 1, 1]  # staged, and collected
    assert bytes_of("fold_share", True) == [ranks, ranks, 0, 0]
    assert bytes_of("multimem_share", "switch") == [0, 0, 1, 1]


def test_ops_and_dtypes(made):
    libraries = made["often"]
    for op, name in OFTEN:
        with naming((op, name)):
            for count, threads in ((1, 4), (33, 4), (1000, 64)):
                direct.run(libraries, op, name, ranks=3, count=count, threads=threads)
            step = oracle.kind(name).itemsize // (2 if name.startswith("complex") else 1)
            direct.run(libraries, op, name, ranks=4, count=131, threads=8, misaligned=step)
            for algorithm in ("ring", "one_shot", "recursive_doubling"):
                schedules.run(libraries, Case("all_reduce", algorithm, 3, 100, op=op, name=name), slot=64, threads=16)


# In a ring, a rank waiting for the missing rank also keeps the next rank waiting.
@pytest.mark.parametrize(("kernel", "told"), [("packets", "where 2, peer 1,"), ("ll128", "where 2, peer 1,"),
                                              ("fold_all", "where 1, peer 1,"),
                                              ("ring", "where 3,")])
def test_a_rank_that_never_comes_is_told(both, kernel, told):
    """The other ranks give up and name the wait; their results have all bits set, NaN as floating-point numbers."""
    world = World(Room(3, 2, packets=64, ll128=64, slot=32, staging=64), both, patience=1e-2)
    case = Case("all_reduce", "ring", 3, 16)
    ranks = schedules.ranks_of(case, 2)
    for rank, own in enumerate(ranks):
        if kernel == "ring" and rank != 1:
            own.launch(world, case, rank, 2, 4, nan_bytes=64)
        elif rank != 1:
            make = world.heaps[rank].packets if kernel in sources.IN_PACKETS else world.heaps[rank].shots
            world.launch(rank, f"{kernel}_int32_sum", make(*own.buffers[:2], 16, nan_bytes=64), 2, 8)
    with pytest.raises(Fault, match=f"gave up.*{told}"):
        world.run()
    for rank in (0, 2):
        assert (ranks[rank].kept[1].view(numpy.uint8)[:64] == 255).all()


def test_the_host_ends_a_wait(both):
    world = World(Room(2, 1, packets=64, ll128=64, slot=32, staging=64), both, patience=1e9)
    world.controls[0]["aborted"] = 1
    x = numpy.zeros(4, numpy.int32)
    world.launch(0, "packets_int32_sum", world.heaps[0].packets(x.ctypes.data, x.ctypes.data, 4), 1, 4)
    with pytest.raises(Fault, match="failures 0"):
        world.run()
