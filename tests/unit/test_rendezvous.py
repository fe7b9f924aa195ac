"""The absence of imports in calls of a finished communicator."""

import os
import subprocess
import sys

import pytest

from harness.pace import seconds

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
