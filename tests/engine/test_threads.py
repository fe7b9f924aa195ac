"""The engine alone, without Python: ranks as threads below sanitizers, and ranks taking turns in one thread."""

import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy
import pytest

from engine import written
from faults import tables
from gpucoll.arrays.segments import Copier
from gpucoll.device import sources
from gpucoll.device.store import OPTIONS, recipe, user_store
from harness import budgets
from harness.grids import generator, sampled
from harness.jobs import JobTimeout, run_job

HEADER = "engine/walker.h"
DRIVER = Path(__file__).with_name("driver.cc")
LIBRARIES = {"thread": ["libtsan"], "address,undefined": ["libasan", "libubsan"], "": []}  # by sanitizer
FAILED = 66
SAYS = {"TSAN_OPTIONS": f"exitcode={FAILED}:halt_on_error=1", "ASAN_OPTIONS": f"exitcode={FAILED}:detect_leaks=0",
        "UBSAN_OPTIONS": f"exitcode={FAILED}:print_stacktrace=1"}


def source(changes=()):
    """Return the driver's source with the changed engine inside, and pieces so short that arrays have several."""
    text = DRIVER.read_text().replace(f'#include "{HEADER}"\n', sources.inlined(HEADER, set()))
    for old, new in (*changes, ("COPY_BYTES = 1 << 19", "COPY_BYTES = 1 << 11")):
        assert old in text, old
        text = text.replace(old, new)
    return text


def linked(compiler, text, options):
    """Return the program compiled from a text."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "driver")
        with budgets.compiling():
            subprocess.run([*compiler, *options, "-x", "c++", "-", "-o", target], input=text, text=True, check=True)
        return target.read_bytes()


@pytest.fixture
def carries_out(tmp_path):
    """`carries_out(sanitizer, program, changes, *words)`: return the job of a driver carrying out a program."""
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]}")

    def run(sanitizer, program, changes=(), *words, limit=120):
        for name in LIBRARIES[sanitizer]:
            asked = [*compiler, f"-print-file-name={name}.so"]
            if not os.path.isabs(subprocess.run(asked, capture_output=True, text=True).stdout.strip()):
                pytest.skip(f"{compiler[0]} has no {name}")
        options = [*(one for one in OPTIONS if one != "-shared"), "-g", "-pthread", "-DGC_ONE_VERSION",
                   *([f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined"] if sanitizer else [])]
        text = source(changes)
        kept = user_store().path(text, ".program", functools.partial(linked, compiler, text, options),
                                 flags="\n".join([recipe(), *options]))
        place, file = tmp_path / "driver", tmp_path / "program"
        shutil.copyfile(kept, place)
        place.chmod(0o700)
        file.write_bytes(program)
        # ThreadSanitizer does not bear addresses randomised over a large range.
        before = ["setarch", "-R"] if sanitizer == "thread" and shutil.which("setarch") else []
        return run_job([*before, place, file, *words], limit, SAYS)

    return run


def copies_by_system():
    """Return whether the system lets a process copy from its own memory as from another process's."""
    row = numpy.arange(2)
    try:
        Copier().read(os.getpid(), row.ctypes.data, row.ctypes.data + 8, 8)
    except OSError:
        return False
    return True


WAYS = {"here": {}, "mapped": {"copies": False}, "far": {"far": True}}


@pytest.mark.parametrize(("sanitizer", "way", "size"), sampled(
    [("thread", way, size) for way in WAYS for size in (2, 3, 4, 5)], keep=3, seed=201) + sampled(
    [("address,undefined", way, size) for way in WAYS for size in (2, 3, 4, 5)], keep=3, seed=202))
def test_calls_one_after_the_other(request, carries_out, sanitizer, way, size):
    if way == "far" and not copies_by_system():
        pytest.skip("the system does not let a process copy from its own memory as from another's")
    nightly = request.node.get_closest_marker("nightly") is not None
    program = written.program(generator(f"engine/{sanitizer}/{way}/{size}"), size, 200 if nightly else 30,
                              10000 if nightly else 500, **WAYS[way])
    job = carries_out(sanitizer, program)
    assert (job.returncode, "wrong: 0\n" in job.stdout) == (0, True), job.stdout + job.stderr


def in_turns(carries_out, name, way, size, names=written.ONE_WAY, changes=(), kinds=30, turns=3000):
    """Carry out calls with ranks taking turns. A one-way call without a wait would let a rank overtake the others."""
    random = generator(f"turns/{name}/{way}/{size}")
    program = written.program(random, size, kinds, turns, names=names, **WAYS[way])
    return carries_out("", program, changes, str(random.getrandbits(32)))


TURNS = [("here", 3), ("mapped", 3), ("here", 4)]
MOST_DRAWS = 10  # of programs that may show a missing wait: a single draw of TURNS misses one in some nights


@pytest.mark.parametrize(("way", "size", "names"), [
    *((*one, written.ONE_WAY) for one in TURNS), ("mapped", 5, written.ONE_WAY), ("here", 4, written.NAMES)])
def test_ranks_that_are_held_back_are_waited_for(carries_out, way, size, names):
    """The seed alone decides the order of the ranks and the rank left behind."""
    job = in_turns(carries_out, "sound", way, size, names)
    assert (job.returncode, "wrong: 0\n" in job.stdout) == (0, True), job.stdout + job.stderr


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", tables.of_kinds("order", "behind"))
def test_a_rank_that_is_not_waited_for_is_noticed(carries_out, name):
    """The test of the default tier notices the missing wait, with the first programs drawn or with later ones."""
    changes = tables.of_kinds("order", "behind")[name].changes
    jobs = (in_turns(carries_out, f"sound{number or ''}", *one, changes=changes)
            for number in range(MOST_DRAWS) for one in TURNS)
    assert any(job.returncode for job in jobs)


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", tables.of_kinds("thread"))
def test_a_race_is_seen(carries_out, name):
    """A program has one kind of call: with several, unlike signatures could reveal the fault without a race."""
    random, changes = generator(f"race/{name}"), tables.of_kinds("thread")[name].changes
    for number in range(150):  # many programs, as the threads of ranks rarely meet on a busy machine
        program = written.program(random, 3, 1, 1000, names=written.ONE_WAY, alike=number % 2 > 0)
        with contextlib.suppress(JobTimeout):  # ranks out of step may wait for ever
            job = carries_out("thread", program, changes, limit=10)
            if job.returncode == FAILED and "data race" in job.stderr:
                return
    raise AssertionError("no race was seen")


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", tables.of_kinds("address"))
def test_bytes_beyond_the_end_are_seen(carries_out, name):
    """Programs have few kinds of calls: memory left by a larger call would hide a smaller call's overrun."""
    random, changes = generator(f"beyond/{name}"), tables.of_kinds("address")[name].changes
    jobs = (carries_out("address,undefined", written.program(random, 3, 3, 60), changes)
            for _ in range(300))  # up to the first that sees them
    assert any(job.returncode == FAILED and "AddressSanitizer" in job.stderr for job in jobs)
