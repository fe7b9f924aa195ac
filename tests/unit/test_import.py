"""What `import gpucoll` loads: the modules that every program needs, and what comes at the first use."""

import json

import pytest

import gpucoll as gc
from harness.jobs import python

MOST = 130  # of gpucoll's own modules
# Modules of the standard library that cost milliseconds, and packages of gpucoll that few programs use.
FORBIDDEN = {
    "bz2", "concurrent.futures", "difflib", "email", "http", "importlib.resources", "lzma", "pkgutil", "shutil", "ssl",
    "statistics", "subprocess", "tempfile", "tomllib", "xml", "zipfile", "cupy", "filelock", "matplotlib", "ml_dtypes",
    "mpi4py", "platformdirs", "prometheus_client", "threadpoolctl", "torch", *(f"gpucoll.{room}" for room in (
        "block_scaled", "cli", "distributed", "emulation",
        "executors.nccl", "executors.peer", "lab", "mpi", "msccl", "precheck", "torch", "training"))}
LOADED = "import json, sys, numpy; before = set(sys.modules); import gpucoll; " \
         "print(json.dumps(sorted(set(sys.modules) - before)))"


def test_import_loads_what_every_program_needs_and_no_more():
    loaded = json.loads(python("-c", LOADED).stdout)
    wrong = [name for name in loaded if any(f"{name}.".startswith(f"{one}.") for one in FORBIDDEN)]
    assert not wrong
    own = [name for name in loaded if name.partition(".")[0] == "gpucoll"]
    assert len(own) <= MOST, own


@pytest.mark.parametrize("first", ["gc.precheck", "import gpucoll.precheck", "import gpucoll.precheck.turns",
                                   "from gpucoll.precheck.script import main", "from gpucoll import precheck"])
def test_the_room_and_the_function_precheck_share_a_name(first):
    script = f"import gpucoll as gc; {first}; import gpucoll.precheck.turns as turns; " \
             "print(gc.precheck(lambda comm: None, 2), turns.Turns.__name__, gc.precheck.precheck.__name__)"
    found = python("-c", script)
    assert found.stdout == "[] Turns precheck\n", found.stderr


def test_rooms_come_at_the_first_use():
    script = "import gpucoll as gc; print(gc.training.Mesh.__name__, gc.distributed.ReduceOp.__name__)"
    found = python("-c", script)
    assert found.stdout == "Mesh ReduceOp\n", found.stderr
    with pytest.raises(AttributeError, match="module 'gpucoll' has no attribute 'nonsense'"):
        gc.nonsense  # noqa: B018
