"""The engine alone, without Python: ranks that are threads, under ThreadSanitizer, AddressSanitizer and UBSan."""

import functools
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy
import pytest

import engine_mutants
from engine import written
from gpucoll.arrays.symmetric import Copier
from gpucoll.device import sources
from gpucoll.device.gxx import OPTIONS, recipe
from gpucoll.device.store import user_store
from grids import generator, sampled
from jobs import run_job

HEADER = "engine.h"
DRIVER = Path(__file__).with_name("driver.cc")
LIBRARIES = {"thread": ["libtsan"], "address,undefined": ["libasan", "libubsan"]}
FAILED = 66
SAYS = {"TSAN_OPTIONS": f"exitcode={FAILED}:halt_on_error=1", "ASAN_OPTIONS": f"exitcode={FAILED}:detect_leaks=0",
        "UBSAN_OPTIONS": f"exitcode={FAILED}:print_stacktrace=1"}
MUTANTS = {
    "what is shown does not carry what was written": (("head->mark.store(mark, std::memory_order_seq_cst)",
                                                       "head->mark.store(mark, std::memory_order_relaxed)"),),
    "what is seen does not bring it": (("head->mark.load(std::memory_order_acquire)",
                                        "head->mark.load(std::memory_order_relaxed)"),),
    **{name: engine_mutants.MUTANTS[name].changes[:1] for name in (
        "who still reads the workspace is not waited for", "who has read is forgotten", "nobody is awaited",
        "who reads the caller's memory is not waited for", "shown a round too early")},
}


def source(changes=()):
    """The driver with the engine in it, changed, and pieces so short that arrays have several."""
    text = DRIVER.read_text().replace(f'#include "{HEADER}"\n', sources.inlined(HEADER, set()))
    for old, new in (*changes, ("PIECE = 1 << 19", "PIECE = 1 << 11")):
        assert old in text, old
        text = text.replace(old, new)
    return text


def linked(compiler, text, options):
    """The program that a compiler makes of a text."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "driver")
        subprocess.run([*compiler, *options, "-x", "c++", "-", "-o", target], input=text, text=True, check=True)
        return target.read_bytes()


@pytest.fixture
def carries_out(tmp_path):
    """`carries_out(sanitizer, program, changes)`: the job of the driver that looks on while it carries out a program.
    """
    compiler = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]}")

    def run(sanitizer, program, changes=()):
        for name in LIBRARIES[sanitizer]:
            asked = [*compiler, f"-print-file-name={name}.so"]
            if not os.path.isabs(subprocess.run(asked, capture_output=True, text=True).stdout.strip()):
                pytest.skip(f"{compiler[0]} has no {name}")
        options = [*(one for one in OPTIONS if one != "-shared"), "-g", "-pthread", "-DGC_ONE_VERSION",
                   f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined"]
        text = source(changes)
        kept = user_store().path(text, ".program", functools.partial(linked, compiler, text, options),
                                 flags="\n".join([recipe(), *options]))
        place, words = tmp_path / "driver", tmp_path / "words"
        shutil.copyfile(kept, place)
        place.chmod(0o700)
        words.write_bytes(program)
        # ThreadSanitizer bears no addresses that are drawn from too many.
        before = ["setarch", "-R"] if sanitizer == "thread" and shutil.which("setarch") else []
        return run_job([*before, place, words], 120, SAYS)

    return run


def copies_by_system():
    """Whether the system lets a process copy from its own memory as from another's."""
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


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", MUTANTS)
def test_a_race_is_seen(carries_out, name):
    """The calls of a program are alike: in others ranks that are not together may see it by their signatures first."""
    random = generator(f"race/{name}")
    programs = (written.program(random, 3, 1, 1000, names=written.ONE_WAY) for _ in range(20))
    jobs = (carries_out("thread", one, MUTANTS[name]) for one in programs)
    assert any(job.returncode == FAILED and "data race" in job.stderr for job in jobs)


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize(("old", "new"), [("resize(plan->aside)", "resize(plan->aside / 2)"),
                                          ("copy(to, result, plan->taken)", "copy(to, result, plan->taken + 1)")])
def test_bytes_beyond_the_end_are_seen(carries_out, old, new):
    job = carries_out("address,undefined", written.program(generator(f"beyond/{old}"), 3, 100, 2000), ((old, new),))
    assert job.returncode == FAILED, job.stdout
    assert "AddressSanitizer" in job.stderr, job.stderr
