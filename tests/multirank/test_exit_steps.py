"""The end of a process: a step that raises must not keep the other ranks from being told, nor MPI from its end."""

import pytest

from harness.commands import gpucoll_run

JOB = """
import sys, time
import gpucoll as gc
from gpucoll.communicator import leaving as end
step = sys.argv[1]
first = gc.init(timeout=100)
second = first.split(0)
comms = [first, second]
waited = comms.pop(1 if step.endswith("of first") else 0)
for comm in (first, second):
    comm.barrier()
if first.rank == 1:
    def breaks(*given):
        raise [RuntimeError, KeyboardInterrupt][step == "life.stop_watches"]("a broken step")
    life = comms[0]._core.life
    owners = {"drain_all": end, "host": life.host, "life": life,
              "processes": life.link.processes, "close_stores": end.PROCESS, "close_ports": end.PROCESS}
    owner, _, method = step.partition(" ")[0].partition(".")
    setattr(owners[owner], method or owner, breaks)
    sys.exit(0)
began = time.monotonic()
try:
    waited.barrier()
except gc.RankFailedError as error:
    assert error.ranks == (1,), error
    assert "has closed the communicator after its call " in str(error), error
    print(f"told after {time.monotonic() - began:.0f} s")
    sys.stdout.flush()
waited.close()
"""


@pytest.mark.parametrize("step", [
    "life.abort of first", "life.abort of second",
    *(pytest.param(step, marks=pytest.mark.slow) for step in (
        "drain_all", "life.stop_watches", "processes.ended of first", "host.fail of first", "host.fail of second",
        "close_stores", "close_ports"))])
@pytest.mark.parametrize("options", [[], ["--standalone"]])
def test_the_others_are_told_whatever_a_step_raises(launcher, tmp_path, options, step):
    (tmp_path / "job.py").write_text(JOB)
    job = gpucoll_run(*options, "-n", 2, tmp_path / "job.py", step)
    assert job.stdout.startswith("told after"), job.stdout + job.stderr
    assert job.returncode == 0, job.stdout + job.stderr
    # The steps that close stores and ports come at a deadline, or later by themselves.
    assert "a broken step" in job.stderr or step.startswith("close"), job.stderr
