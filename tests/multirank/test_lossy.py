"""Hosts joined by a link that loses frames and delays the others: every call is slow and right, or tells a loss."""

import contextlib
import os
import subprocess
import sys

import pytest

import hosts
from gpucoll.transport import ucx
from jobs import run_job, same_gpucoll
from pace import seconds

MODULE, REASON = ucx.library()
LACKING = f"UCX is not installed: {REASON}" if MODULE is None else hosts.lacking()
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(LACKING), reason=LACKING)]
LOSS, DELAY = 0.05, 0.05
CALLS = """
import time
import numpy
import gpucoll as gc

with gc.init() as comm:
    assert comm.nodes == 2 and comm.mpi is None
    comm.barrier()
    began = time.monotonic()
    comm.all_reduce(numpy.ones(1))
    assert time.monotonic() - began >= DELAY, "the link does not delay frames"
    for count in (1, 100, 20_000):
        index = numpy.arange(count) % 1009
        x = index + comm.rank
        total = comm.size * index + sum(range(comm.size))
        for name in ("auto", "ring", "tree"):
            assert (comm.all_reduce(x, algorithm=name) == total).all(), (count, name)
        assert (comm.broadcast(x.copy(), root=comm.size - 1) == index + comm.size - 1).all(), count
        assert (comm.all_gather(x) == index + numpy.arange(comm.size)[:, None]).all(), count
        blocks = comm.all_to_all(numpy.stack([x + 10 * rank for rank in range(comm.size)]))
        assert (blocks == index + numpy.arange(comm.size)[:, None] + 10 * comm.rank).all(), count
        came = numpy.empty_like(x)
        comm.sendrecv(x, came, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
        assert (came == index + (comm.rank - 1) % comm.size).all(), count
    comm.barrier()
    names, counts = [line.split() for line in open("/proc/net/snmp") if line.startswith("Tcp:")]
    assert int(counts[names.index("RetransSegs")]) > 0, "the link loses no frames"
print("done")
"""


@pytest.fixture
def nodes():
    with hosts.made(2, LOSS, DELAY) as (_, *found):
        yield found


def test_calls_are_right(nodes, tmp_path):
    """Losses cost time, and no call ends wrongly; hosts of two ranks each."""
    variables = {**same_gpucoll(), **hosts.SOCKETS, "GPUCOLL_SECRET": "s", "GPUCOLL_TIMEOUT": str(seconds(120)),
                 "PYTHONUNBUFFERED": "1"}
    program = tmp_path / "calls.py"
    program.write_text(f"DELAY = {DELAY}\n{CALLS}")
    first, second = (node.apart(sys.executable, "-m", "gpucoll", "run", "--nnodes", "2", "--node-rank", str(number),
                                "--rendezvous", f"{nodes[0].address}:29400", "-n", "2", str(program))
                     for number, node in enumerate(nodes))
    with contextlib.ExitStack() as stack:
        other = stack.enter_context(subprocess.Popen(first, env={**os.environ, **variables}, text=True,
                                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        stack.callback(other.kill)
        job = run_job(second, seconds(400), variables)
        output = other.communicate(timeout=seconds(60))[0]
    assert (job.returncode, other.returncode) == (0, 0), job.stdout + job.stderr + output
    assert (job.stdout + output).count("done") == 4
