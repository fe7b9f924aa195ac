"""Nightly: planted faults, data races and SPIN models of the peer kernels, and compilers for all GPU architectures."""

import functools
import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import nvrtc, sources
from harness.compiled import compile_all
from harness.grids import generator
from harness.pace import seconds
from peer import mutants

HERE = Path(__file__).parent
gate = importlib.import_module("test_compile")  # in tests/kernels, on the path by the import of `peer.world`

pytestmark = [pytest.mark.kernel, pytest.mark.nightly]


@pytest.fixture(scope="module")
def changed():
    compile_all(map(mutants.changed, mutants.MUTANTS.values()))


@pytest.mark.mutant
@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_a_mutant_is_noticed(changed, name):
    assert mutants.is_noticed(mutants.MUTANTS[name])


def sanitizer():
    """Return the path of ThreadSanitizer's library; skip the test without the library or without setarch."""
    command = [os.environ.get("CXX", "g++"), "-print-file-name=libtsan.so"]
    path = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    if not path.is_absolute() or shutil.which("setarch") is None:
        pytest.skip("ThreadSanitizer's library or setarch is not installed")
    return path.resolve()


def below_sanitizer(*words):
    environment = {**os.environ, "LD_PRELOAD": str(sanitizer()), "TSAN_OPTIONS": "exitcode=66", "PYTHONPATH":
                   os.pathsep.join([str(HERE.parents[1]), *sys.path]), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(["setarch", "-R", sys.executable, HERE / "mutants.py", *words], capture_output=True,
                          text=True, timeout=seconds(240), env=environment)


@pytest.mark.parametrize("check", ["check_direct", "check_steps", "check_between"])
def test_no_data_race(check):
    job = below_sanitizer(check)
    assert (job.returncode, job.stdout) == (0, "ended\n"), job.stderr[-5000:]


@pytest.mark.mutant
@pytest.mark.parametrize("race", mutants.RACES)
def test_a_data_race_is_noticed(race):
    job = below_sanitizer(mutants.RACES[race].check.__name__, race)
    assert job.returncode == 66, job.stderr[-5000:]
    assert "data race" in job.stderr


@pytest.mark.parametrize(("words", "holds"), mutants.MODELS)
def test_a_model_holds_or_is_violated(words, holds, tmp_path):
    if shutil.which("spin") is None:
        pytest.skip("the models need SPIN: apt-get install spin")
    model, *options = words.split()
    path = HERE.parent / "spin" / model
    subprocess.run(["spin", *options, "-a", path], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([os.environ.get("CC", "gcc"), "-O1", "-w", "-o", "pan", "pan.c"], cwd=tmp_path, check=True)
    job = subprocess.run([tmp_path / "pan", "-m100000"], cwd=tmp_path, capture_output=True, text=True,
                         timeout=seconds(120))
    assert f"errors: {0 if holds else 1}" in job.stdout, job.stdout
    assert "max search depth too small" not in job.stdout


MAKERS = [functools.partial(sources.reducing, kernel) for kernel in sources.IN_PEER]
PAIRS = [(op, dtype) for op in OPS.values() for dtype in DTYPES.values() if dtype.kind in op.kinds]
MOVES = [sources.reducing("steps", None, DTYPES[name])
         for name in ("int8", "int16", "float32", "float64", "complex128")]


def test_kernels_compile(nvrtc_release):
    """A sample of ops and dtypes, drawn by the seed, compiles; the architectures share the kernels among them.

    Each architecture compiles two kernels of float32. GPUs of sm_120 have no NVLink, and so no use for `ll128`.
    """
    archs = [arch for arch in gate.ARCHS if int(arch.removeprefix("sm_")) in nvrtc.archs()]
    pairs = generator(44).sample(PAIRS, 24)
    always = [sources.reducing("fold_all", OPS["sum"], DTYPES["float32"]),
              sources.reducing("steps", OPS["max"], DTYPES["float32"])]
    switched = [sources.reducing("multimem_share", *pair) for pair in PAIRS if sources.is_switched(*pair)]
    kernels = [*MOVES, *(MAKERS[number % len(MAKERS)](*pair) for number, pair in enumerate(pairs))]
    for first, arch in enumerate(archs):
        share = [one for one in kernels[first::len(archs)] if (arch, one.entry[:5]) != ("sm_120", "ll128")]
        share += switched[first::len(archs)] if int(arch[3:]) >= 90 else []
        gate.check([*{one.entry: one for one in [*always, *share]}.values()], arch)
