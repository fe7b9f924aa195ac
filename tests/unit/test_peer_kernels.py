"""The kernels for memory that ranks share: in every order of their threads NumPy's bits, and every fault is noticed."""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import peer_direct
import peer_made
import peer_mutants
import peer_schedules
from compiled import compile_all
from gpucoll.algorithms import algorithms
from gpucoll.collectives import COLLECTIVES
from gpucoll.device import sources
from gpucoll.device.peer import Room
from gpucoll.dtypes import DTYPES
from gpucoll.ops import OPS
from grids import batches, in_pairs, naming
from oracle import kind
from peer_schedules import Case
from peer_world import ALL, Fault, World, library

TESTS = Path(__file__).parents[1]
SIZES = (2, 3, 4, 8)
SCHEDULES = 10  # random ones; 200 where there is time
SEEDS = batches([(seed,) for seed in range(200)], 50, keep=SCHEDULES, seed=0)

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def both():
    """All kernels of the op and dtype that most checks use."""
    made = library(sources.text(*peer_mutants.DIRECT, *peer_mutants.STEPS))
    return made, made


def in_turns(seeds, run, **options):
    """Run with all blocks under way at once, or with one of each rank: in turns."""
    for number, (seed,) in enumerate(seeds):
        residency = (ALL, 1)[number % 2]
        with naming((seed, residency)):
            run(seed=seed, residency=residency, **options)


# ---------------------------------------------------------------- direct all-reduces


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seeds", SEEDS)
def test_direct_operations_back_to_back(both, size, seeds):
    in_turns(seeds, functools.partial(peer_direct.run, both, peer_mutants.OP, peer_mutants.NAME), ranks=size, blocks=3)


@pytest.mark.parametrize("size", SIZES)
def test_more_than_there_is_room_for(both, size):
    """What the ranks do not share is staged section by section."""
    for seed in range(SCHEDULES):
        with naming(seed):
            peer_direct.run(both, peer_mutants.OP, peer_mutants.NAME, ranks=size, seed=seed, count=(33, 100)[seed % 2],
                            sections=2 + seed % 3)


def test_many_threads_and_blocks(both):
    peer_direct.run(both, peer_mutants.OP, peer_mutants.NAME, ranks=4, count=20_000, blocks=4, threads=128)


def test_one_way_operations_between_packets(both):
    for seed in range(SCHEDULES):
        with naming(seed):
            peer_mutants.check_between(both, seed)


# ---------------------------------------------------------------- ops and dtypes


def kernels_of(op, name):
    return sources.text(*peer_direct.instances(op, name), sources.steps(OPS[op], DTYPES[name]))


@pytest.mark.parametrize("pairs", batches(peer_made.PAIRS, 12, keep=12, seed=11))
def test_ops_and_dtypes(pairs):
    compile_all(kernels_of(*pair) for pair in pairs)
    for pair in pairs:
        with naming(pair):
            check_op_on_dtype(*pair)


def check_op_on_dtype(op, name):
    made = library(kernels_of(op, name))
    for count, threads in ((1, 4), (33, 4), (1000, 64)):
        peer_direct.run((made, made), op, name, ranks=3, count=count, threads=threads)
    step = kind(name).itemsize // (2 if name.startswith("complex") else 1)
    peer_direct.run((made, made), op, name, ranks=4, count=131, threads=8, misaligned=step)
    for algorithm in ("ring", "one_shot", "recursive_doubling"):
        peer_schedules.run((made, made), Case("all_reduce", algorithm, 3, 100, op=op, name=name), slot=64, threads=16)


# ---------------------------------------------------------------- schedules

ALIKE = [(row.name, name) for row in COLLECTIVES.values() if row.ragged is None for name in algorithms(row.name)]
SHAPES = [(1, 1, 2, 0), (1, 100, 1, 1), (2, 67, 2, 2), (3, 200, 3, 0)]  # segments, elements, blocks, seed
IN_PLACE = ("all_reduce", "scan", "exscan", "broadcast")
WALKS = [(*case, size, shape, False) for case in ALIKE for size in (1, 2, 3, 4, 5, 8) for shape in SHAPES]
WALKS += [(*walk[:4], True) for walk in WALKS if walk[0] in IN_PLACE]


@pytest.mark.parametrize("walks", batches(in_pairs(WALKS, 3), 25, keep=150, seed=3))
def test_every_schedule(both, walks):
    for walk in walks:
        collective, algorithm, size, (segments, count, channels, seed), in_place = walk
        case = Case(collective, algorithm, size, count, segments=segments, root=size // 2, in_place=in_place)
        with naming(walk):
            peer_schedules.run(both, case, channels=channels, seed=seed)


RAGGED = [(row.name, name, size, channels) for row in COLLECTIVES.values() if row.ragged
          for name in algorithms(row.name) for size in (2, 3, 8) for channels in (1, 2)]


@pytest.mark.parametrize(("collective", "algorithm", "size", "channels"), RAGGED)
def test_blocks_that_are_not_alike(both, collective, algorithm, size, channels):
    case = Case(collective, algorithm, size, 0, ragged=lambda i, j: (7 * i + 5 * j) % 11 * 3)
    peer_schedules.run(both, case, channels=channels, seed=1)


def back_to_back(libraries, size, seed, residency):
    cases = [Case("all_reduce", "ring", size, 67, segments=2), Case("broadcast", "chain", size, 40, root=1, segments=3),
             Case("reduce", "tree", size, 33), Case("all_to_all", "direct", size, 21),
             Case("broadcast", "binomial", size, 50), Case("all_reduce", "recursive_doubling", size, 29)]
    peer_schedules.run(libraries, *cases, channels=3, depth=1 + seed % 3, seed=seed, residency=residency)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("seeds", SEEDS)
def test_schedules_back_to_back(both, size, seeds):
    """What is left in the slots, and the counters, go on from one to the next."""
    in_turns(seeds, functools.partial(back_to_back, both), size=size)


@pytest.mark.parametrize("name", ["int8", "float16", "float64", "complex128"])
def test_copies_of_every_width(name):
    made = library(sources.text(sources.steps(None, DTYPES[name])))
    for algorithm in algorithms("all_gather"):
        peer_schedules.run((made, made), Case("all_gather", algorithm, 4, 61, name=name), slot=64, threads=16)


def test_fibers_by_the_c_library():
    made = library("#define GC_UCONTEXT\n" + sources.text(*peer_mutants.DIRECT))
    peer_direct.run((made, made), peer_mutants.OP, peer_mutants.NAME, ranks=3, seed=4)


# ---------------------------------------------------------------- waits that come to no good end


@pytest.mark.parametrize("kernel", ["packets", "one_shot", "ring", "barrier"])
def test_a_rank_that_never_comes_is_told(both, kernel):
    """Every wait ends, and the control block says what was missing."""
    world = World(Room(3, 2, packets=64, slot=32, staging=64), both, patience=1e-2)
    x = numpy.zeros((3, 16), numpy.int32)
    case = Case("barrier", "dissemination", 3, 0) if kernel == "barrier" else Case("all_reduce", "ring", 3, 40)
    ranks = [peer_schedules.Rank(case, rank, 2) for rank in range(3)]
    for rank in (0, 2):
        if kernel in ("ring", "barrier"):
            ranks[rank].launch(world, case, rank, 2, 4)
        else:
            ends = x[rank].ctypes.data, x[rank].ctypes.data, 16
            heap = world.heaps[rank]
            arguments = heap.packets(*ends) if kernel == "packets" else heap.shots(*ends)
            world.launch(rank, f"{kernel}_int32_sum", arguments, 2, 4)
    with pytest.raises(Fault, match="gave up") as told:
        world.run()
    # In a ring, one that waits for the missing rank keeps the next one waiting.
    assert {"packets": "where 2, peer 1,", "one_shot": "where 1, peer 1,"}.get(kernel, "where 3,") in str(told.value)


def test_the_host_ends_a_wait(both):
    world = World(Room(2, 1, packets=64, slot=32, staging=64), both, patience=1e9)
    world.controls[0]["aborted"] = 1
    x = numpy.zeros(4, numpy.int32)
    world.launch(0, "packets_int32_sum", world.heaps[0].packets(x.ctypes.data, x.ctypes.data, 4), 1, 4)
    with pytest.raises(Fault, match="failures 0"):
        world.run()


# ---------------------------------------------------------------- faults that the checks must notice


@pytest.fixture(scope="module")
def mutants():
    """All of them compiled."""
    compile_all(map(peer_mutants.changed, peer_mutants.MUTANTS.values()))


@pytest.mark.mutant
@pytest.mark.parametrize("name", peer_mutants.MUTANTS)
def test_a_mutant_is_noticed(mutants, name):
    assert peer_mutants.is_noticed(peer_mutants.MUTANTS[name])


def sanitizer():
    """What makes a process one that ThreadSanitizer looks at: its library, at addresses that it can bear."""
    command = [os.environ.get("CXX", "g++"), "-print-file-name=libtsan.so"]
    found = subprocess.run(command, capture_output=True, text=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute() or shutil.which("setarch") is None:
        pytest.skip("ThreadSanitizer's library or setarch is not installed")
    return path.resolve()


def below_sanitizer(*words):
    environment = {**os.environ, "LD_PRELOAD": str(sanitizer()), "TSAN_OPTIONS": "exitcode=66", "PYTHONPATH":
                   os.pathsep.join([str(TESTS.parent), *sys.path]), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(["setarch", "-R", sys.executable, TESTS / "peer_races.py", *words], capture_output=True,
                          text=True, timeout=240, env=environment)


@pytest.mark.parametrize("check", ["check_direct", "check_steps", "check_between"])
def test_no_data_race(check):
    job = below_sanitizer(check)
    assert (job.returncode, job.stdout) == (0, "ended\n"), job.stderr[-5000:]


@pytest.mark.mutant
@pytest.mark.parametrize("race", peer_mutants.RACES)
def test_a_data_race_is_noticed(race):
    job = below_sanitizer(peer_mutants.RACES[race].check.__name__, race)
    assert job.returncode == 66, job.stderr[-5000:]
    assert "data race" in job.stderr


# ---------------------------------------------------------------- models of the protocols

MODELS = {
    "packets": ["packets.pml"],
    "packets: one buffer": ["packets.pml", "-DBUFFERS=1"],
    "packets: one way": ["packets.pml", "-DONE_WAY"],
    "packets: one way, three buffers": ["packets.pml", "-DONE_WAY", "-DBUFFERS=3"],
    "credits": ["credits.pml"],
    "credits: one slot": ["credits.pml", "-DDEPTH=1"],
    "credits: one way": ["credits.pml", "-DONE_WAY"],
    "credits: not waited for": ["credits.pml", "-DONE_WAY", "-DNO_CREDIT"],
    "credits: sends before receives": ["credits.pml", "-DIN_ORDER"],
    "tickets": ["tickets.pml"],
    "tickets: blocks by their index": ["tickets.pml", "-DBY_INDEX"],
    "tickets: operations are not counted": ["tickets.pml", "-DSTALE"],
}
HOLD = {"packets", "credits", "credits: one slot", "credits: one way", "tickets"}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_holds_or_is_violated(name, tmp_path):
    if shutil.which("spin") is None:
        pytest.skip("the models need SPIN: apt-get install spin")
    model, *options = MODELS[name]
    subprocess.run(["spin", *options, "-a", TESTS / "spin" / model], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([os.environ.get("CC", "gcc"), "-O1", "-w", "-o", "pan", "pan.c"], cwd=tmp_path, check=True)
    job = subprocess.run([tmp_path / "pan", "-m100000"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert "errors: 0" in job.stdout if name in HOLD else "errors: 1" in job.stdout, job.stdout
    assert "max search depth too small" not in job.stdout
