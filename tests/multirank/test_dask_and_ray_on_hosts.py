"""Dask's workers and Ray's actors on two hosts: collectives between the hosts by UCX, and a worker that is killed."""

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hosts
from gpucoll.transport import ucx
from gpucoll.transport.rendezvous import becomes
from harness.jobs import run_job, same_gpucoll
from harness.pace import seconds

MODULE, REASON = ucx.library()
LACKING = f"UCX is not installed: {REASON}" if MODULE is None else hosts.lacking()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(LACKING), reason=LACKING)]
DASK, RAY = ":8786", ":6379"
WORKERS = """
import os, signal, sys
import numpy
import gpucoll as gc
from distributed import Client
from gpucoll.dask import Workers

def calls(comm):
    x = numpy.arange(100_000) + comm.rank
    total = comm.all_reduce(x) == comm.size * numpy.arange(100_000) + sum(range(comm.size))
    blocks = comm.all_to_all(numpy.arange(comm.size) + 10 * comm.rank) == 10 * numpy.arange(comm.size) + comm.rank
    return comm.size, comm.nodes, bool(total.all() and blocks.all())

def dies(comm):
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()

with Client(sys.argv[1]) as client:
    client.wait_for_workers(4, timeout=60)
    first = sorted(client.nthreads())
    with Workers(client, first, timeout=60) as ranks:
        assert ranks.run(calls) == [(4, 2, True)] * 4
        try:
            ranks.run(dies)
        except gc.RankFailedError as error:
            assert error.ranks == (3,)
    while sorted(client.nthreads()) == first:  # until the scheduler knows the loss
        pass
    client.wait_for_workers(4, timeout=60)
    with Workers(client, timeout=60) as ranks:
        assert ranks.run(calls) == [(4, 2, True)] * 4
print("done")
"""
ACTORS = """
import os, sys
import numpy
import ray
import gpucoll.ray
from ray.util import collective

@ray.remote(num_cpus=1)
class Actor:
    def __init__(self):
        gpucoll.ray.register(timeout=60)

    def join(self, rank):
        collective.init_collective_group(4, rank, "gpucoll")

    def calls(self, rank):
        x = numpy.arange(100_000, dtype="f4") + rank
        collective.allreduce(x)
        total = x == 4 * numpy.arange(100_000) + 6
        comm = gpucoll.ray.communicator()
        blocks = comm.all_to_all(numpy.arange(4) + 10 * rank) == 10 * numpy.arange(4) + rank
        return os.uname().nodename, comm.nodes, bool(total.all() and blocks.all())

gpucoll.ray.register()
ray.init(address=sys.argv[1], log_to_driver=False)
actors = [Actor.options(resources={f"node{number}": 1}).remote() for number in (1, 1, 2, 2)]
ray.get([actor.join.remote(rank) for rank, actor in enumerate(actors)])
rows = ray.get([actor.calls.remote(rank) for rank, actor in enumerate(actors)])
assert rows == [(f"node{number}", 2, True) for number in (1, 1, 2, 2)], rows
print("done")
"""


@pytest.fixture
def nodes():
    with hosts.made(2) as found:
        yield found


@contextlib.contextmanager
def started(commands, variables, folder):
    """Run commands beside the block, each with a file of output; kill them at its end."""
    with contextlib.ExitStack() as stack:
        for number, command in enumerate(commands):
            output = stack.enter_context((folder / f"{number}.log").open("w"))
            job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **variables})
            stack.callback(job.wait)
            stack.callback(job.kill)
        yield


def check(status, output, errors, folder):
    logs = "".join(path.read_text()[-3000:] for path in sorted(folder.glob("*.log")))
    assert (status, output[-5:]) == (0, "done\n"), output + errors + logs


@pytest.mark.skipif(importlib.util.find_spec("distributed") is None, reason="pip install distributed")
def test_dasks_workers(nodes, tmp_path):
    head, *others = nodes
    variables = {**same_gpucoll(), **hosts.SOCKETS}
    place = f"tcp://{head.address}{DASK}"
    scheduler = head.within(sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", head.address,
                            "--no-dashboard")
    workers = [host.apart(sys.executable, "-m", "distributed.cli.dask_worker", place, "--host", host.address,
                          "--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--local-directory",
                          str(tmp_path / host.name)) for host in others]
    with started([scheduler, *workers], variables, tmp_path):
        job = run_job(head.within(sys.executable, "-c", WORKERS, place), seconds(200), variables)
    check(job.returncode, job.stdout, job.stderr, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="pip install ray")
def test_rays_actors(nodes, tmp_path):
    _, first, second = nodes
    variables = {**same_gpucoll(), **hosts.SOCKETS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0f" * 32}
    (tmp_path / "actors.py").write_text(ACTORS)
    ray, place = Path(sys.executable).with_name("ray"), f"{first.address}{RAY}"
    begin = f"'{ray}' start --num-cpus 2 --object-store-memory 100000000 --node-ip-address"
    # Both hosts see one disk, and the folder of Ray's sockets must be each host's own.
    own = "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray"
    driver = (f"{own} && {begin} {first.address} --head --port {RAY[1:]} "
              f"--include-dashboard=false --resources '{{\"node1\": 2}}' >&2 && touch '{tmp_path}/head' && "
              f"'{sys.executable}' '{tmp_path}/actors.py' {place}")
    joins = f"{own} && {begin} {second.address} --address {place} --resources '{{\"node2\": 2}}' --block"
    with subprocess.Popen(first.apart("sh", "-c", driver), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          env={**os.environ, **variables}) as job:
        try:
            assert becomes(lambda: (tmp_path / "head").exists() or job.poll() is not None, seconds(60))
            with started([second.apart("sh", "-c", joins)], variables, tmp_path):
                output, errors = job.communicate(timeout=seconds(200))
        finally:
            job.kill()
    check(job.returncode, output, errors, tmp_path)
