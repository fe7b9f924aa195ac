"""Two hosts without MPI: after a death, a frozen host or a cut link, every rank names the ranks at fault and no other.

The hosts are network namespaces with process numbers of their own (scripts/hosts.py); UCX carries the messages.
"""

import contextlib
import json
import os
import re
import subprocess
import sys

import pytest

import hosts
from gpucoll.transport import ucx
from harness.grids import sampled
from harness.jobs import same_gpucoll
from harness.pace import seconds

# Rank VICTIM ends in its call NUMBER, of LENGTH elements, in the way HOW; "freeze" stops the victim's whole host.
JOB = """
import json, os, signal, subprocess, sys, time
import numpy
import gpucoll as gc

how, victim, number, length, timeout = sys.argv[1], *map(int, sys.argv[2:6])
comm = gc.init(timeout=timeout)
assert comm.nodes == 2, comm.nodes
frozen = how == "freeze" and comm.node == 1
calls = 0
try:
    while True:
        assert (comm.all_reduce(numpy.full(length, comm.rank + 1.0)) == 10).all()
        calls += 1
        if calls == number and comm.rank == victim and how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if calls == number and frozen:
            subprocess.Popen(["sh", "-c", f"sleep 8; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        if calls == number and how == "cut" and comm.rank == victim:
            print("READY", flush=True)
except gc.GpucollError as error:
    line = f"TOLD {json.dumps([comm.rank, type(error).__name__, error.ranks, str(error)])}\\n"
    os.write(1, line.encode())  # at once, so that the lines of two ranks do not mix
os._exit(0)
"""
MODULE, REASON = ucx.library()  # asked once: UCX's module sets variables for its library
SIZE = 4
KILLS = [(victim, number, length) for victim in range(SIZE) for number in (1, 3, 20) for length in
         (1, 5_000, 200_000)] + [(victim, 40, 2_000) for victim in range(SIZE)]


@contextlib.contextmanager
def running(tmp_path, *words, options=("--survive",)):
    """Run the job, two ranks on each of two hosts; yield the launchers and the hosts."""
    reason = hosts.lacking() or ("" if MODULE else f"UCX is not installed: {REASON}")
    if reason:
        pytest.skip(reason)
    program = tmp_path / "job.py"
    program.write_text(JOB)
    with hosts.made(2) as (_, *nodes), contextlib.ExitStack() as stack:
        jobs = []
        for number, host in enumerate(nodes):
            command = [sys.executable, "-m", "gpucoll", "run", "--nnodes", "2", "--node-rank", str(number), *options,
                       "--rendezvous", f"{nodes[0].address}:29471", "-n", "2", program, *words]
            environment = {**same_gpucoll(), **hosts.SOCKETS, "GPUCOLL_SECRET": "a secret",
                           "PYTHONPATH": os.pathsep.join(sys.path)}
            jobs.append(subprocess.Popen(host.apart(*map(str, command)), env={**os.environ, **environment}, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
            stack.callback(jobs[-1].wait)
            stack.callback(jobs[-1].kill)  # with the first process of a host all its processes end
        yield jobs, nodes


def told(jobs):
    """Return the errors of the ranks, by rank, once all jobs have ended."""
    output = "".join(job.communicate(timeout=seconds(90))[0] for job in jobs)
    found = [json.loads(words) for words in re.findall(r"TOLD (\[.*\])", output)]
    return {rank: told for rank, *told in found}, output


@pytest.mark.parametrize(("victim", "number", "length"), sampled(KILLS, 3, 65, (3, 20, 200_000), (1, 3, 5_000)))
def test_every_survivor_names_the_dead_rank(tmp_path, victim, number, length):
    with running(tmp_path, "kill", victim, number, length, 60) as (jobs, _):
        found, output = told(jobs)
    assert found.keys() == set(range(SIZE)) - {victim}, output
    for kind, ranks, words in found.values():
        assert (kind, ranks) == ("RankFailedError", [victim]), (found, output)
        assert f"rank {victim}" in words


@pytest.mark.slow
def test_a_frozen_host_names_itself(tmp_path):
    """The ranks of the other host give up at the deadline; the frozen ranks, running again, blame nobody else."""
    with running(tmp_path, "freeze", 3, 20, 1000, 3) as (jobs, _):
        found, output = told(jobs)
    assert found.keys() == set(range(SIZE)), output
    for rank, (kind, ranks, words) in found.items():
        assert set(ranks) <= {2, 3}, (rank, kind, words, output)
        if rank > 1:
            assert ranks == [rank], (kind, words)
            assert re.search(rf"this rank, {rank}, (did not run for|is blamed by other ranks)", words), words


@pytest.mark.slow
def test_a_cut_link_names_ranks_of_the_other_host(tmp_path):
    with running(tmp_path, "cut", 0, 20, 1000, 5) as (jobs, nodes):
        while "READY" not in jobs[0].stdout.readline():
            pass
        hosts.ip("-n", nodes[1].namespace, "link", "set", hosts.LINK, "down")
        found, output = told(jobs)
    assert found, output
    for rank, (kind, ranks, words) in found.items():
        assert ranks, (kind, words)
        assert all((other < 2) != (rank < 2) for other in ranks), (rank, kind, ranks, words)
