"""The backend "gpucoll" on GPU tensors, with streams: programs of PyTorch for CPUs, on emulated GPUs."""

import importlib.util
import sys
from pathlib import Path

import pytest

from gpu.emulated import environment
from harness.pace import seconds
from harness.ranks import launch, run_job

pytestmark = [
    pytest.mark.multirank, pytest.mark.emulated,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: pip install torch"),
]
FOLDER = Path(__file__).parent
MESSAGES = FOLDER / "torch_messages_job.py", "first_message singly object_messages ordered"
METHODS = FOLDER / "torch_job.py", "several functional groups"
TRAINING = FOLDER / "torch_training_job.py", "ddp fsdp pipeline"
SEEDS = 100  # of a night: orders in which the streams go on
TORCHRUN = "torch.distributed.run", "--standalone", "--nproc-per-node"


def check(launcher, ranks, seeds, program, names, limit=120):
    words = ["-m", "gpu.torch_streams", str(seeds), str(program), *names.split()]
    if launcher == "mpiexec":
        job = launch(ranks, sys.executable, "-W", "ignore", *words, timeout=seconds(limit), env=environment())
    else:
        job = run_job([sys.executable, "-m", *TORCHRUN, str(ranks), *words], seconds(limit), environment())
    assert job.returncode == 0, job.stdout + job.stderr
    for name in names.split():
        for rank in range(ranks):
            assert job.stdout.count(f"rank {rank}: {name} ok") == seeds


@pytest.mark.parametrize("launcher", ["mpiexec", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_the_backend_on_streams(launcher):
    check(launcher, 3, 1, *MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("program", [METHODS, TRAINING], ids=["methods", "training"])
@pytest.mark.parametrize(("launcher", "ranks"), [("mpiexec", 4), ("torchrun", 2)])
def test_programs_on_streams(launcher, ranks, program):
    check(launcher, ranks, 1, *program)


@pytest.mark.nightly
@pytest.mark.parametrize("program", [MESSAGES, TRAINING], ids=["messages", "training"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("launcher", ["mpiexec", "torchrun"])
def test_streams_in_many_orders(launcher, ranks, program):
    check(launcher, ranks, SEEDS, *program, limit=3000)
