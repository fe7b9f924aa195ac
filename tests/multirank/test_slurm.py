"""Jobs of Slurm on two hosts: places, requeued jobs, failures; with MPI and without.

Slurm's own daemons serve two network namespaces: see scripts/schedulers.py.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from harness.clusters import FAILS, PLACE, made_cluster
from harness.pace import Patience, seconds
from harness.thread_ranks import on_threads

pytestmark = pytest.mark.nightly

# A training by ZeRO, with a checkpoint at the end of each run. The first run of the job ends after three steps.
LEARNS = """
import numpy
from gpucoll.training import Adam, ZeRO

def learned(comm, training, steps):
    training = training or ZeRO({"w": numpy.zeros((5, 3))}, comm, Adam(0.1), stage=3)
    for step in steps:
        x = numpy.random.default_rng([step, comm.rank]).standard_normal((4, 5))
        with training.layer(["w"]) as given:
            gradient = x.T @ (x @ given["w"] - 1)
        training.ready("w", gradient)
        training.step()
    with training.layer(["w"]) as given:
        return training, given["w"].tobytes().hex()
"""
TRAINS = LEARNS + """
import os, sys
from pathlib import Path
import gpucoll as gc

folder, again = Path(sys.argv[2]), int(os.environ.get("SLURM_RESTART_COUNT", 0))
with gc.init(timeout=float(sys.argv[1]), deterministic=True) as comm:
    training = ZeRO.load(folder / "checkpoint", comm, Adam(0.1), stage=3) if again else None
    training, w = learned(comm, training, range(3, 6) if again else range(3))
    training.save(folder / "checkpoint")
    if comm.rank == 0:
        Path(folder, f"run-{again}").write_text(w)
"""
ENDLESS = """
import os, sys
from pathlib import Path
import numpy
import gpucoll as gc

with gc.init(timeout=float(sys.argv[1])) as comm:
    while True:
        comm.all_reduce(numpy.ones(4))
        Path(sys.argv[2], f"began-{comm.rank}").touch()
"""
PAGE = Path(__file__).parents[2] / "docs" / "clusters.md"
WITHOUT = "GPUCOLL_SECRET=secret MASTER_ADDR=node1 MASTER_PORT=29400"


@pytest.fixture
def cluster(tmp_path, launcher):
    with made_cluster("slurm", tmp_path, launcher) as cluster:
        yield cluster


def check_places(printed, size):
    """Check that ranks on one host have one node, with local ranks in order; return the number of each rank's host."""
    places, _ = json.loads(printed.splitlines()[-1])
    names = [name for name, *_ in places]
    first = list(dict.fromkeys(names))
    on = [first.index(name) for name in names]
    assert len(on) == size
    assert [numbers for _, *numbers in places] == [
        [host, on[:rank].count(host), on.count(host)] for rank, host in enumerate(on)]
    return on


@pytest.mark.parametrize(("size", "how", "on"), [
    (2, "-N1", [0, 0]), (8, "-N1", [0] * 8), (4, "-N2 --ntasks-per-node=2", [0, 0, 1, 1]),
    (3, "-N2 --ntasks-per-node=2", [0, 0, 1]), (4, "-N2 --ntasks-per-node=2 --distribution=cyclic", [0, 1, 0, 1]),
    (5, "-N2 --distribution=plane=2", [0, 0, 1, 0, 0]), (4, "-N2 --exclusive --ntasks-per-node=2", [0, 0, 1, 1])])
@pytest.mark.parametrize("by", ["mpi", "none"])
def test_ranks_know_their_places(cluster, by, size, how, on):
    variables, kind = ("", cluster.mpi) if by == "mpi" else (WITHOUT, "--mpi=none")
    found = cluster.printed(f"{variables} srun {kind} {how} -n {size} {cluster.program(PLACE)}")
    assert check_places(found, size) == on


def test_the_job_of_the_page_without_mpi(cluster):
    """Two of these jobs run side by side on the same hosts, and have different ports."""
    text, = re.findall(r"\*\*Slurm without MPI\.\*\*.*?```sh\n#!/bin/bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = cluster.program(PLACE)
    assert "python train.py" in text
    script = cluster.script(text.replace("python train.py", program))
    cluster.printed(f"sbatch --wait --output=a.txt {script} & sbatch --wait --output=b.txt {script} && wait $!", 120)
    for name in "ab":
        assert check_places((cluster.folder / f"{name}.txt").read_text(), 8) == [0] * 4 + [1] * 4


def test_a_job_is_requeued_and_resumes(cluster):
    """The second run begins with the checkpoint of the first, and ends with the bits of an undisturbed training."""
    program = cluster.program(TRAINS, cluster.folder)
    script = cluster.script(f"{WITHOUT} srun --mpi=none {program} && test $SLURM_RESTART_COUNT || "
                            "scontrol requeue $SLURM_JOB_ID")
    said = cluster.folder / "said.txt"
    cluster.printed(f"sbatch --requeue -n 4 -N2 --open-mode=append --output={said} {script}")
    patience = Patience(120)
    while cluster.printed("sleep 0.5; squeue -h") and patience.left():
        pass
    assert (cluster.folder / "run-1").exists(), said.read_text()
    names = {}
    exec(LEARNS, names)
    undisturbed = on_threads(4, lambda comm: names["learned"](comm, None, range(6))[1], deterministic=True)
    assert (cluster.folder / "run-1").read_text() == undisturbed[0]


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("by", ["mpi", "none"])
def test_a_rank_that_fails_ends_the_step(cluster, by, how):
    """Without MPI the ranks left name the failed rank; with MPI the first end may end all ranks at once."""
    variables, kind = ("", cluster.mpi) if by == "mpi" else (WITHOUT, "--mpi=none")
    program = cluster.program(FAILS, 3, how, cluster.folder)
    job = cluster.run(f"{variables} srun {kind} -N2 -n 4 --ntasks-per-node=2 {program}", 90)
    assert job.returncode, job.stdout + job.stderr
    assert (cluster.folder / "failed").exists()
    if how == "raise":
        assert "ZeroDivisionError: on purpose" in job.stderr
    if by == "none":
        assert re.search(r"RankFailedError.*rank 3", job.stderr), job.stderr


@pytest.mark.parametrize("by", ["mpi", "none"])
def test_a_host_that_dies_ends_the_job(cluster, by):
    """All processes of the second host end at once, Slurm's daemon first. Without MPI its ranks are named."""
    variables, kind = ("", cluster.mpi) if by == "mpi" else (WITHOUT, "--mpi=none")
    program = cluster.program(ENDLESS, cluster.folder, deadline=20)
    step = cluster.everyone[0].within(
        "sh", "-c", f"{variables} exec srun {kind} -N2 -n 4 --ntasks-per-node=2 {program}")
    with open(cluster.folder / "said.txt", "w") as said:
        job = subprocess.Popen(step, env=cluster.variables, stdout=said, stderr=said, start_new_session=True)
    try:
        patience = Patience(60)
        while len(list(cluster.folder.glob("began-*"))) < 4 and job.poll() is None and patience.left():
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(0.1)
        assert len(list(cluster.folder.glob("began-*"))) == 4
        assert job.poll() is None
        daemon, = (int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline")
                   if is_daemon(path, cluster.everyone[2]))
        os.kill(daemon, signal.SIGKILL)
        assert job.wait(seconds(90)), (cluster.folder / "said.txt").read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    if by == "none":
        found = (cluster.folder / "said.txt").read_text()
        assert re.search(r"(RankFailedError|CollectiveTimeout).*ranks? 2", found), found


def is_daemon(path, host):
    """Return whether a process is `unshare` of the host's daemon: the end of this process ends all others."""
    with contextlib.suppress(OSError):
        words = path.read_bytes().split(b"\0")
        return words[0] == b"unshare" and b"--kill-child" in words and host.name.encode() in words and \
            os.path.samefile(path.with_name("ns") / "net", f"/run/netns/{host.namespace}")
    return False


def test_a_wrong_pmi_is_told(cluster):
    """N ranks that each see a world of one stop, with the right option; the doctor has the same sentence."""
    for command in (cluster.program(PLACE), "gpucoll doctor"):
        job = cluster.run(f"srun --mpi=none -N2 -n 4 {command}", 120)
        said = " ".join((job.stdout + job.stderr).split())
        assert job.returncode, said
        assert f"launch with srun {cluster.mpi}" in said
        assert "[GC-LAUNCHER] Slurm's srun started 4 ranks" in said
