"""Recognition of the launcher of a process and of an MPI vendor by text."""

import subprocess
import sys

import pytest

from gpucoll.launch import launchers


@pytest.mark.parametrize(("environment", "name", "size_and_rank", "local"), [
    ({}, None, (1, 0), (None, None)),
    ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
     "Open MPI's mpiexec", (8, 5), (1, None)),
    ({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "SLURM_PROCID": "0",
      "SLURM_STEP_NUM_TASKS": "2"}, "MPICH's mpiexec", (4, 3), (1, 2)),  # inside a Slurm job
    ({"PMI_SIZE": "4", "PMI_RANK": "3", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, "Slurm's srun", (4, 3), (1, None)),
    ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, None, (1, 0), (None, None)),  # a batch script
    ({"MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_RANK": "0"}, "MVAPICH's mpirun_rsh", (2, 0), (None, None)),
    ({"PMI_SIZE": "4", "PMI_RANK": "x"}, None, (1, 0), (None, None)),
    ({"RANK": "1", "WORLD_SIZE": "2"}, None, (1, 0), (None, None))])
def test_a_process_knows_who_started_it(environment, name, size_and_rank, local):
    told = launchers.started(environment)
    assert (told and told.launcher.name) == name
    assert launchers.launched(environment) == size_and_rank
    assert (told and told.local_rank, told and told.local_size) == local


@pytest.mark.parametrize(("environment", "number"), [
    ({}, None), ({"RANK": "5", "LOCAL_RANK": "1"}, 1), ({"LOCAL_RANK": "x"}, None),
    ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "LOCAL_RANK": "3"}, 1),
    # torchrun and gpucoll run, once on each host below srun
    ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0", "LOCAL_RANK": "2",
      "TORCHELASTIC_RUN_ID": "x"}, 2),
    ({"PMI_RANK": "5", "PMI_SIZE": "8", "FLUX_TASK_LOCAL_ID": "2"}, 2), ({"PALS_LOCAL_RANKID": "4"}, 4),
    ({"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_LOCALID": "0"}, None)])  # mpiexec's rank: srun started the daemon only
def test_a_process_knows_its_number_on_its_host(environment, number):
    assert launchers.local_rank(environment) == number


def test_vendors_are_known_by_what_they_say_and_the_file_alone_is_enough():
    """Scripts load this file before any installation: no package, no site-packages, only the standard library."""
    for text, vendor in (("HYDRA build details:\n    Version:     5.0.2\n", "mpich"),
                         ("MVAPICH2 Version      :     2.3.7\n", "mpich"), ("Intel(R) MPI Library for Linux", "impi"),
                         ("mpiexec (OpenRTE) 4.1.4\n", "openmpi"), ("slurm 24.05\n", None), ("", None)):
        found = launchers.vendor_of(text)
        assert (found and found.name) == vendor
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("launchers", {launchers.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.launched({{"PMI_SIZE": "2", "PMI_RANK": "1"}}) == (2, 1)
assert not {{"numpy", "mpi4py", "gpucoll"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
