"""Start and end: one world, places, launchers of another MPI, GPUs claimed and shared, uncaught errors."""

import sys
from unittest import mock

import pytest

import gpucoll as gc
from gpucoll.device import gpus
from harness.jobs import python
from harness.leftovers import modules_in_place

PLACE = """
import sys
import gpucoll as gc
assert "mpi4py.MPI" not in sys.modules and "cupy" not in sys.modules, "import gpucoll starts MPI"
comm = gc.init(timeout=200)
assert gc.init() is comm and gc.init(timeout=200) is comm
try:
    gc.init(timeout=201)
except gc.UsageError as error:
    assert error.code == "GC-INIT"
else:
    raise SystemExit("init took other options")
with comm:
    assert comm.mpi is not None and comm.mpi.size == comm.size
    facts = comm.rank, comm.size, comm.local_rank, comm.local_size, comm.node, comm.nodes
again = gc.init(timeout=500)
assert again is not comm and again.timeout == 500
again.barrier()
again.close()
sys.stdout.write(" ".join(map(str, facts)) + "\\n")
"""


def test_init_is_one_object_and_knows_its_place(mpiexec):
    job = mpiexec(3, sys.executable, "-c", PLACE)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")[:3]) == ["0 3 0 3 0 1", "1 3 1 3 0 1", "2 3 2 3 0 1"]


def test_a_lone_process_is_a_world_of_one_and_another_launcher_one_clear_error(launcher):
    def alone(script, **variables):
        return python("-W", "ignore", "-c", script, env=variables)

    job = alone("import numpy, gpucoll as gc; comm = gc.init(); print(comm.size, comm.all_reduce(numpy.ones(2)))")
    assert job.stdout == "1 [1. 1.]\n", job.stderr
    for variable, words in (("OMPI_COMM_WORLD", "Open MPI's mpiexec"), ("SLURM", "Slurm's srun")):
        size, rank = ("_STEP_NUM_TASKS", "_PROCID") if variable == "SLURM" else ("_SIZE", "_RANK")
        job = alone("import gpucoll as gc; gc.init()", **{variable + size: "4", variable + rank: "0"})
        assert job.returncode != 0
        assert f"GC-LAUNCHER] {words} started 4 ranks" in job.stderr
        option = "--mpi=pmix" if launcher.vendor.mark == "Open MPI" else "--mpi=pmi2"
        assert (f"launch with srun {option}, or with" in job.stderr) == (variable == "SLURM")


def claim(mpi, same, share):
    """Claim a pretended GPU for this rank: with `same`, the ranks share a GPU; `share` permits sharing."""
    bus = "0000:01:00.0" if same else f"0000:0{mpi.rank + 1}:00.0"
    mine = gpus.ClaimedGpu(mpi.rank, bus, "H200")
    return gpus.claim_gpu(mpi, mine, {"GPUCOLL_SHARE_GPU": "1"} if share else {})


def test_two_ranks_on_one_gpu_are_named(ranks):
    assert [[gpu.ordinal for gpu in found] for found in ranks(claim, 3, False, False)] == [[0, 1, 2]] * 3
    assert [gpu.pci for gpu in ranks(claim, 2, True, True)[0]] == ["0000:01:00.0"] * 2
    for outcome, error in ranks(claim, 3, True, False, allow_errors=True):
        assert outcome == "error"
        assert isinstance(error, gc.UsageError)
        assert error.ranks == (0, 1, 2)
        assert "H200 at 0000:01:00.0" in str(error)
    for _, error in ranks(gpus.claim_gpu, 2, None, allow_errors=True):
        assert isinstance(error, gc.BackendError)
        assert error.ranks == (0, 1)


def no_id(mpi):
    """Ask for the id of an NCCL that rank 0 cannot use. Tests on emulated GPUs compare the ids of all ranks."""
    cuda = mock.Mock()
    cuda.nccl.get_unique_id.side_effect = RuntimeError("no NCCL here")
    with modules_in_place(**{"cupy": mock.Mock(cuda=cuda), "cupy.cuda": cuda}):
        return gpus.nccl_id(mpi)


def test_without_nccl_on_rank_0_every_rank_is_told(ranks):
    for _, error in ranks(no_id, 3, allow_errors=True):
        assert isinstance(error, gc.BackendError)
        assert "no NCCL here" in str(error)


def no_communicator(mpi):
    with pytest.raises(gc.ArgumentError, match=r"GC-ARGUMENT.*intracommunicator"):
        gc.Communicator.from_mpi("world")
    with pytest.raises(TypeError, match="speed"):
        gc.Communicator.from_mpi(mpi, speed=11)
    for wrong in ({"timeout": 0}, {"timeout": "soon"}, {"check": "some"}, {"executor": "mpl"}):
        with pytest.raises(gc.ArgumentError):
            gc.Communicator.from_mpi(mpi, **wrong)
    return True


def test_what_is_no_communicator_is_refused(ranks):
    ranks(no_communicator, 1)
