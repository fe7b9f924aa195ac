"""The backend "gpucoll" of torch.distributed: every method, PyTorch's own programs, and each way to start ranks."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.multirank,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install torch"),
]
FOLDER = Path(__file__).parent
METHODS, TRAINING = FOLDER / "torch_job.py", FOLDER / "torch_training_job.py"
SECONDS = 240  # PyTorch's imports take long where ranks outnumber cores


def check(job, ranks, names):
    assert job.returncode == 0, job.stdout + job.stderr
    for name in names.split():
        for rank in range(ranks):
            assert f"rank {rank}: {name} ok" in job.stdout


def torchrun(ranks, *argv):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*command, *map(str, argv)], capture_output=True, text=True, timeout=SECONDS, check=False)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_method_under_mpiexec(mpiexec, ranks):
    names = "collectives functional objects messages groups timeouts"
    check(mpiexec(ranks, sys.executable, METHODS, *names.split(), timeout=SECONDS), ranks, names)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ddp_trains_as_over_gloo(mpiexec, ranks):
    names = "ddp ddp_unused ddp_accumulated zero_redundancy sampler"
    check(mpiexec(ranks, sys.executable, "-W", "ignore", TRAINING, *names.split(), timeout=SECONDS), ranks, names)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp_and_dtensor_train_as_over_gloo(mpiexec, ranks):
    names = "fsdp dtensor tensor_parallel checkpoint"
    check(mpiexec(ranks, sys.executable, "-W", "ignore", TRAINING, *names.split(), timeout=SECONDS), ranks, names)


@pytest.mark.slow
def test_a_mesh_of_two_axes_trains_as_over_gloo(mpiexec):
    check(mpiexec(4, sys.executable, "-W", "ignore", TRAINING, "mesh_2d", timeout=SECONDS), 4, "mesh_2d")


def test_torchrun_starts_ranks_without_mpi():
    names = "messages groups disagreement timeouts no_mpi"
    check(torchrun(3, METHODS, *names.split()), 3, names)


@pytest.mark.slow
def test_every_method_under_torchrun():
    names = "collectives functional objects"
    check(torchrun(3, METHODS, *names.split()), 3, names)


@pytest.mark.slow
def test_ddp_trains_under_torchrun():
    check(torchrun(2, TRAINING, "ddp", "fsdp"), 2, "ddp fsdp")
