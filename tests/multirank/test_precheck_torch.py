"""`gpucoll precheck` for programs of torch.distributed: faults with their lines, right values, no false alarm.

The programs with faults are those of `faulty_torch_programs.py`, the random ones those of `torch_mixture.py`. The jobs
that compare gpucoll.torch with Gloo run here with virtual ranks, and check every result by themselves.
"""

import importlib.util
import json
import re

import pytest

from harness import jobs
from harness.sources import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None,
                                reason="PyTorch is not installed: pip install torch")
METHODS, TRAINING = (ROOT / "tests/multirank" / name for name in ("torch_job.py", "torch_training_job.py"))
FAULTY = ROOT / "tests/faults/faulty_torch_programs.py"
NAMES = re.findall(r"^@fault.*\ndef (\w+)", FAULTY.read_text(), re.MULTILINE)


def python(*words):
    return jobs.python(*words, cwd=ROOT, env={"PYTHONWARNINGS": "ignore"}, timeout=250)


def precheck(program, ranks, *options):
    """Return the findings of the command; a program without a finding ends with exit code 0."""
    job = python("-m", "gpucoll", "precheck", "-n", ranks, "--json", program, *options)
    found = json.loads(job.stdout)
    assert job.returncode == bool(found), job.stderr
    return found


@pytest.fixture(scope="module")
def faulty():
    """The kind and the ranks expected, the lines and the findings of each program with a fault, by name."""
    job = python(FAULTY)
    assert job.returncode == 0, job.stderr
    return {name: rest for name, *rest in map(json.loads, job.stdout.splitlines())}


@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_found_with_kind_ranks_and_line(faulty, name):
    kind, ranks, lines, found = faulty[name]
    assert [(one["kind"], one["ranks"]) for one in found] == [(kind, ranks)], found
    places = [place.rpartition(":") for place in found[0]["places"]]
    assert {file for file, _, _ in places} == {str(FAULTY)}  # no line inside of torch
    assert {*lines} <= {number for _, _, number in places}, found
    assert name.startswith("refused") == ("GC-PRECHECK" in found[0]["message"])


def test_random_programs_with_right_values_have_no_finding():
    job = python(ROOT / "tests/multirank/torch_mixture.py", 25, 0)
    assert job.returncode == 0, job.stderr
    assert re.fullmatch(r"25 programs, \d+ steps, 0 with a finding\n", job.stdout), job.stdout


@pytest.mark.parametrize(("program", "ranks", "names"), [
    (METHODS, 4, "objects messages groups"),
    (TRAINING, 16, "ddp"),
    pytest.param(METHODS, 3, "collectives several checks functional", marks=pytest.mark.slow),
    pytest.param(TRAINING, 4, "mesh_2d ddp_unused ddp_accumulated zero_redundancy fsdp dtensor tensor_parallel "
                 "checkpoint", marks=pytest.mark.slow),
    pytest.param(TRAINING, 64, "ddp", marks=pytest.mark.slow),
])
def test_every_method_and_training_has_right_values_and_no_finding(program, ranks, names):
    assert precheck(program, ranks, *names.split()) == []


def test_a_program_for_gpus_is_checked_without_any():
    program = ROOT / "tests/multirank/torch_gpu_training.py"
    assert precheck(program, 4) == []
    (found,) = precheck(program, 3, "unequal")
    assert (found["kind"], found["ranks"]) == ("shape", [1]), found
    assert all(place.startswith(f"{program}:") for place in found["places"])


def test_each_rank_has_stores_groups_and_random_numbers_of_its_own(tmp_path):
    program = tmp_path / "own.py"
    program.write_text(OWN)
    (tmp_path / "uses.py").write_text("import own\n")  # the module of the program names torch, the script does not
    assert precheck(tmp_path / "uses.py", 4) == []


OWN = """import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

torch.manual_seed(3)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.TCPStore("localhost", 29501, size, rank == 0)
dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
store.set(f"of {rank}", "a")
assert store.get(f"of {size - 1}") == b"a"
store.add("sum", rank)
dist.barrier()
assert store.add("sum", 0) == size * (size - 1) // 2
draws = [torch.rand(5) for _ in range(2) if dist.barrier() is None]
first = [torch.empty_like(draws[1]) for _ in range(size)]
dist.all_gather(first, draws[1])
assert all(torch.equal(one, draws[1]) for one in first)
for group in [dist.new_group([one, (one + 1) % size], backend="gloo") for one in range(size)]:
    assert dist.get_rank(group) in (-1, 0, 1)
x, late = torch.ones(2), torch.ones(2)
for _ in DataLoader(torch.arange(4.0), num_workers=1, batch_size=2):
    dist.all_reduce(x)
assert x[0] == size ** 2
work = dist.all_reduce(late, async_op=True)
if rank == 0:  # the other ranks end without a wait, and make the call all the same
    work.wait()
"""


def test_a_precheck_leaves_torch_as_it_was(tmp_path):
    program = tmp_path / "left.py"
    program.write_text(LEFT)
    job = python(program)
    assert (job.returncode, job.stdout) == (0, "as before\n"), job.stderr


LEFT = """import sys

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

import gpucoll as gc
import gpucoll.torch
from gpucoll.torch import handles


def state():
    names = [name for name in vars(c10d) if name.startswith("_pg_") or name in ("_world", "_backend", "rendezvous")]
    return [*(getattr(c10d, name) for name in names), c10d._new_process_group_helper, dist.TCPStore, handles.threading,
            torch.cuda.is_available, torch.zeros, torch.Tensor.to,
            handles.TorchWork.get_future, torch.futures.Future.wait, torch.multiprocessing.spawn, DeviceMesh.__init__,
            dist.Backend._plugins["GPUCOLL"], torch.get_num_threads(), dist.get_debug_level(), sys.excepthook,
            torch._C._distributed_c10d._get_thread_isolation_mode() if hasattr(
                torch._C._distributed_c10d, "_get_thread_isolation_mode") else None, dist.is_initialized()]


def program(comm):
    dist.init_process_group("gpucoll")
    torch.rand(comm.rank + 1)
    dist.all_reduce(torch.ones(2), async_op=True).wait()


torch.set_num_threads(2)
before, numbers = state(), torch.get_rng_state()
assert gc.precheck(program, 3) == []
assert state() == before and torch.equal(torch.get_rng_state(), numbers)
print("as before")
"""
