"""The backend "gpucoll" of torch.distributed: every method, PyTorch's own programs, and each way to start ranks."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.launch import launchers
from harness.jobs import outputs_of, python
from oracles import global_batch

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
    return python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, *argv, timeout=SECONDS)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_method_under_mpiexec(mpiexec, ranks):
    names = "collectives several checks functional objects callbacks messages groups timeouts"
    check(mpiexec(ranks, sys.executable, METHODS, *names.split(), timeout=SECONDS), ranks, names)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ddp_trains_as_over_gloo(mpiexec, ranks):
    names = "ddp ddp_unused ddp_accumulated ddp_powersgd zero_redundancy"
    check(mpiexec(ranks, sys.executable, "-W", "ignore", TRAINING, *names.split(), timeout=SECONDS), ranks, names)


@pytest.mark.parametrize("ranks", [1, 2, *(pytest.param(many, marks=pytest.mark.slow) for many in (4, 8))])
def test_ddp_has_the_same_bits_on_any_number_of_ranks(mpiexec, monkeypatch, ranks):
    monkeypatch.setenv("GPUCOLL_DETERMINISTIC", "exact")
    script = FOLDER / "torch_bits_job.py"
    # MPI alone gives no address of torch's store to a single rank.
    job = torchrun(1, script) if ranks == 1 else mpiexec(ranks, sys.executable, "-W", "ignore", script, timeout=SECONDS)
    wanted = global_batch.trained().tobytes().hex()
    assert re.findall("weights ([0-9a-f]+)", job.stdout) == [wanted] * ranks, job.stdout + job.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_fsdp_and_dtensor_train_as_over_gloo(mpiexec, ranks):
    names = "fsdp fsdp1 dtensor tensor_parallel checkpoint"
    check(mpiexec(ranks, sys.executable, "-W", "ignore", TRAINING, *names.split(), timeout=SECONDS), ranks, names)


@pytest.mark.slow
def test_a_mesh_of_two_axes_trains_as_over_gloo(mpiexec):
    check(mpiexec(4, sys.executable, "-W", "ignore", TRAINING, "mesh_2d", timeout=SECONDS), 4, "mesh_2d")


def test_torchrun_starts_ranks_without_mpi():
    names = "messages groups disagreement timeouts no_mpi"
    check(torchrun(3, METHODS, *names.split()), 3, names)


ELASTIC = """
import os, sys
import numpy
import gpucoll as gc
with gc.init() as comm:
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    total = comm.all_reduce(numpy.full(3, comm.rank + 10 * restarts))
    if comm.rank == 1 and restarts == 0:
        sys.exit("planted")
    comm.barrier()
    sys.stdout.write(f"rank {comm.rank} of {comm.size}: {total[0]} after {restarts}\\n")
"""


@pytest.mark.slow
def test_torchruns_agents_meet_and_start_all_ranks_again(tmp_path):
    """The rendezvous c10d: both agents, as of two hosts, agree on ranks; the end of a rank starts all of them again."""
    (tmp_path / "elastic.py").write_text(ELASTIC)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2", "--rdzv-id",
               "two", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{launchers.free_port()}",
               "--rdzv-conf", "last_call_timeout=30", "--max-restarts", "1", str(tmp_path / "elastic.py")]
    agents = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    output = "".join(output for output, _ in outputs_of(agents, SECONDS))
    assert [agent.returncode for agent in agents] == [0, 0], output
    assert sorted(re.findall(r"rank \d of.*", output)) == [f"rank {rank} of 4: 46 after 1" for rank in range(4)], output
