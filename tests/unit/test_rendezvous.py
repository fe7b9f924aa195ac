"""Meetings of ranks outside of collectives, and the absence of imports in calls of a finished communicator."""

import os
import subprocess
import sys

import pytest

from gpucoll.errors import BackendError
from gpucoll.transport import rendezvous
from harness.pace import seconds


class Others:
    """The used part of an mpi4py communicator; the other ranks arrive at the `polls`-th test."""

    def __init__(self, rank=0, polls=0, news=None):
        self.rank, self.left, self.news = rank, polls, news

    def Ibarrier(self):
        return self

    def Test(self):
        self.left -= 1
        return self.left < 0

    def bcast(self, value):
        self.news = value if self.rank == 0 else self.news
        return self.news


def test_waiting_for_all_has_a_deadline_and_what_rank_0_does_is_everybodys():
    assert rendezvous.wait_for_all(Others(polls=3), seconds(60))
    assert not rendezvous.wait_for_all(Others(polls=sys.maxsize), 0.01)
    first = Others()
    assert rendezvous.by_first_rank(first, lambda: 3) == 3
    assert rendezvous.by_first_rank(Others(1, news=first.news), lambda: pytest.fail("not rank 0")) == 3

    def fail():
        raise BackendError("no room")

    for told in (lambda: first, lambda: Others(1, news=first.news)):
        with pytest.raises(BackendError, match="no room"):
            rendezvous.by_first_rank(told(), fail)


CALLS = """
import sys, threading
import numpy
import gpucoll as gc
assert not {"cupy", "mpi4py.MPI"} & set(sys.modules), "import gpucoll imports too much"

def calls(comm):
    x, blocks = numpy.ones(comm.size), numpy.ones((comm.size, 2))
    for name in ("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scan", "exscan"):
        getattr(comm, name)(x)
    for name in ("all_to_all", "reduce_scatter"):
        getattr(comm, name)(blocks)
    comm.scatter(blocks if comm.rank == 0 else None)
    comm.all_gather_v(x), comm.gather_v(x), comm.reduce_scatter_v(x, [1] * comm.size)
    comm.all_to_all_v([x] * comm.size), comm.scatter_v([x] * comm.size if comm.rank == 0 else None)
    comm.all_reduce(x, algorithm="ring"), comm.all_reduce(x, async_op=True).wait(), comm.plan("all_reduce", x)()
    comm.barrier(), comm.explain("all_reduce", 8)
    with comm.group():
        comm.sendrecv(x, x.copy(), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)

comms = [gc.init()] if "init" in sys.argv else gc.init_local(2)
before = set(sys.modules)
threads = [threading.Thread(target=calls, args=(comm,)) for comm in comms]
[thread.start() for thread in threads], [thread.join() for thread in threads]
print(sorted(name for name in set(sys.modules) - before if name.startswith("gpucoll")))
"""


@pytest.mark.parametrize(("made_by", "device"), [
    ("init_local", ""), ("init", ""),
    pytest.param("init_local", "emulated", marks=[pytest.mark.emulated, pytest.mark.slow])])
def test_calls_import_nothing(made_by, device, request):
    """A signal handler may make a call during another call, and must not meet a half-imported module."""
    request.getfixturevalue("emulated_kernels" if device else "launcher")
    job = subprocess.run([sys.executable, "-c", CALLS, made_by], capture_output=True, text=True, check=False,
                         env={**os.environ, "GPUCOLL_DEVICE": device}, timeout=seconds(300))
    assert (job.returncode, job.stdout) == (0, "[]\n"), job.stderr
