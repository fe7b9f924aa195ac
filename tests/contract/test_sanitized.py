"""AddressSanitizer and UndefinedBehaviorSanitizer over random programs; a finding ends the process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults import tables
from gpucoll.device.sources import inlined
from harness import extension
from harness.jobs import launch, run_job
from multirank import ucx_hosts

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(3600)]  # the tests compile everything anew
BUILT_IN = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g"
PROGRAMS = Path(__file__).parents[1] / "mixture.py"
# Runs the programs on an engine built here, from sources with some texts changed.
ENGINE = """
import json, runpy, sys
from harness import extension
changes, path = json.loads(sys.argv[1]), sys.argv[2]
del sys.argv[:2]
with extension.serving(extension.built(extension.changed(changes), "-O3")):
    runpy.run_path(path, run_name="__main__")
"""

KEPT = "kept.release();  // `end` takes it"  # in the binding of UCX

PLANS = """
from harness import extension
from engine import fuzzed
fuzzed.main(extension.built(extension.text(), "-g"), "sanitized", 20000)
"""


@pytest.fixture(scope="module")
def environment():
    """Return the variables and preload of a process with both sanitizers; sanitized kernels are cached apart."""
    compiler = os.environ.get("CXX", "g++")
    asked = [subprocess.run([compiler, f"-print-file-name={name}.so"], capture_output=True, text=True)
             for name in ("libasan", "libubsan")]
    libraries = [job.stdout.strip() for job in asked]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip(f"{compiler} has no sanitizers' libraries")
    path = os.pathsep.join([str(PROGRAMS.parent), os.environ.get("PYTHONPATH", "")])
    return {"CXX": f"{compiler} {BUILT_IN}", "ASAN_OPTIONS": "detect_leaks=0:exitcode=66:quarantine_size_mb=4",
            "UBSAN_OPTIONS": "print_stacktrace=1:exitcode=66", "PYTHONMALLOC": "malloc",
            "PYTHONPATH": path}, f"LD_PRELOAD={':'.join(libraries)}"


def sanitized(environment, ranks, *words):
    variables, preload = environment
    command = ["env", preload, sys.executable, *words]  # preloads into Python, not into the launcher
    if not ranks:
        return run_job(command, 2400, variables)
    job = launch(ranks, *command, timeout=900, env=variables)
    # MPICH 5.0 with AddressSanitizer sometimes reads a wrong address in MPI_Init, before any code of gpucoll
    if "in PMPI_Init_thread" in job.stdout + job.stderr:
        job = launch(ranks, *command, timeout=900, env=variables)
    return job


def assert_clean(job):
    assert (job.returncode in (0, 1), job.stdout.count("wrong: 0;")) == (True, 2), job.stdout + job.stderr  # 1: memory


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_extension(environment, ranks):
    assert_clean(sanitized(environment, ranks, "-c", ENGINE, "[]", PROGRAMS, "--programs", "24", "--steps", "100",
                           "--executors", "shared,any"))


def test_the_emulated_device(environment):
    assert_clean(sanitized(environment, 0, PROGRAMS, "--programs", "12", "--steps", "100", "--executors", "nccl,peer",
                           "--ranks", "1,3,4"))


def test_plans_with_something_wrong(environment):
    job = sanitized(environment, 0, "-c", PLANS)
    assert (job.returncode, "'done'" in job.stdout) == (0, True), job.stdout + job.stderr[-5000:]


@pytest.fixture(scope="module")
def binding(environment):
    """Return the sources of the binding of UCX, and a function giving the variables of ranks with a build of a text."""
    pytest.importorskip("nanobind")
    pytest.importorskip("libucx")
    variables, preload = environment
    source = inlined("binding/ucx.cc", set())

    def built(text):
        name, _, libraries = preload.partition("=")
        # UCX replaces the allocator's functions for its cache of registered memory, and the sanitizer has its own.
        return {**variables, name: libraries, "UCX_MEM_EVENTS": "n",
                "UCX_BINDING": str(extension.binding(text, *BUILT_IN.split()))}

    return source, built


@pytest.mark.parametrize(("ranks", "program"), [(2, "calls"), (1, "points"), (2, "unlike")])
def test_messages_between_hosts(binding, ranks, program):
    source, built = binding
    outputs, codes = ucx_hosts.on_hosts(ranks, program, variables=built(source))
    assert codes == [0, 0], outputs


def test_strangers_at_the_ports(binding, tmp_path):
    source, built = binding
    outputs, codes, _ = ucx_hosts.attacked_by_strangers(tmp_path, variables=built(source))
    assert codes == [0, 0], outputs


@pytest.mark.mutant
def test_a_message_freed_too_early_is_seen(binding):
    source, built = binding
    assert source.count(KEPT) == 1
    outputs, codes = ucx_hosts.on_hosts(1, "points", variables=built(source.replace(KEPT, "")))
    assert any(codes)
    assert "heap-use-after-free" in "".join(outputs)


@pytest.mark.mutant
@pytest.mark.parametrize("said", tables.of_kinds("sanitizer"))
def test_what_is_wrong_is_seen(environment, said):
    changes = tables.of_kinds("sanitizer")[said].changes
    job = sanitized(environment, 4, "-c", ENGINE, json.dumps(changes), PROGRAMS, "--programs", "8", "--steps", "100",
                    "--executors", "shared", "--seed", "1")
    assert job.returncode != 0
    assert said in job.stderr + job.stdout
