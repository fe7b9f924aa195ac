"""Ranks started by ssh on two hosts, as Kubernetes' MPIJob does: places, a killed rank, and the way of ssh itself."""

import json
import os

import pytest

import hosts
from harness.clusters import PLACE, made_cluster
from harness.pace import seconds
from harness.ranks import run_job
from harness.sources import ROOT

pytestmark = pytest.mark.nightly



@pytest.fixture
def cluster(tmp_path, launcher):
    with made_cluster("ssh", tmp_path, launcher) as cluster:
        yield cluster


def mpiexec(launcher):
    """Return the words to start two ranks on each host of the file of hosts."""
    if launcher.vendor.mark == "HYDRA":
        return "mpiexec -f $HOSTFILE -ppn 2 -n 4"
    # Open MPI's own daemons take the address of the one network that all hosts share.
    return "mpiexec --hostfile $HOSTFILE --map-by ppr:2:node:oversubscribe --allow-run-as-root -x UCX_TLS -x PATH -n 4"


EXPECTED = [["node1", 0, 0, 2], ["node1", 0, 1, 2], ["node2", 1, 0, 2], ["node2", 1, 1, 2]]


def test_ranks_by_a_file_of_hosts(cluster, launcher):
    found = cluster.printed(f"{mpiexec(launcher)} {cluster.program(PLACE)}", 90)
    assert json.loads(found.splitlines()[-1])[0] == EXPECTED


def test_ranks_by_gpucoll_run(cluster):
    words = cluster.program(PLACE).removeprefix("python ")
    found = cluster.printed(f"gpucoll run --nproc-per-node 2 --hosts node1,node2 {words}", 90)
    assert json.loads(found.splitlines()[-1])[0] == EXPECTED


def test_the_script_runs_a_command_with_its_quotes(cluster):
    """The words reach the program as they are; namespaces, daemons and names of hosts are gone afterwards."""
    there = {*os.listdir("/run/netns"), *os.listdir(hosts.NAMES)}
    job = run_job([ROOT / "scripts" / "cluster", "ssh", "--hosts", "3", "sh", "-c", "ssh node3 hostname; exit 7"],
                  seconds(120))
    assert (job.returncode, job.stdout) == (7, "node3\n"), job.stderr
    assert {*os.listdir("/run/netns"), *os.listdir(hosts.NAMES)} == there
