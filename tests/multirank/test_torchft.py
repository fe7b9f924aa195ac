"""Training under torchft's lighthouse: replicas are killed at random moments and return; needs torchft."""

import contextlib
import copy
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from harness.grids import generator
from harness.jobs import same_gpucoll
from harness.pace import Patience, seconds

torchft_job = pytest.importorskip("multirank.torchft_job", reason="PyTorch is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.nightly, pytest.mark.skipif(importlib.util.find_spec("torchft") is None,
                                                      reason="torchft is not installed: pip install torchft")]
JOB = Path(torchft_job.__file__)
REPLICAS, KILLS = 3, 20
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=300, quorum_tick_ms=50,
                          heartbeat_timeout_ms=1000)
print("http://127.0.0.1:" + server.address().rpartition(":")[2], flush=True)
sys.stdin.read()
"""


class Replicas:
    """The processes of the replicas, and the lines told by each."""

    def __init__(self, folder, lighthouse):
        self.folder, self.processes = folder, {}
        self.variables = {**os.environ, **same_gpucoll(), "TORCHFT_LIGHTHOUSE": lighthouse, "TMPDIR": str(folder),
                          "GPUCOLL_DETERMINISTIC": "1", "GPUCOLL_SECRET": "s"}

    def start(self, replica):
        with open(self.folder / f"{replica}.log", "ab") as log:
            self.processes[replica] = subprocess.Popen(
                [sys.executable, JOB, str(replica), str(self.folder), str(seconds(20))], env=self.variables, stdout=log,
                stderr=log)

    def kill(self, replica):
        self.processes[replica].kill()
        self.processes[replica].wait()

    def lines(self, replica="*", pid="*"):
        """Return the words of the complete lines told by a replica."""
        return [line.split() for path in sorted(self.folder.glob(f"{replica}-{pid}.steps"))
                for line in path.read_text().split("\n")[:-1]]

    def first_step(self, replica, after):
        """Wait for the first step told by the replica's process after a moment; return the time."""
        patience, process = Patience(60), self.processes[replica]
        while True:
            for moment in (float(words[0]) for words in self.lines(replica, process.pid)):
                if moment > after:
                    return moment
            assert process.poll() is None, (self.folder / f"{replica}.log").read_text()[-5000:]
            assert patience.left(), (self.folder / f"{replica}.log").read_text()[-5000:]
            time.sleep(0.005)


@contextlib.contextmanager
def training():
    before = {*os.listdir("/dev/shm")}
    with tempfile.TemporaryDirectory() as folder, subprocess.Popen(
            [sys.executable, "-c", LIGHTHOUSE], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True) as lighthouse:
        found = Replicas(Path(folder), lighthouse.stdout.readline().strip())
        try:
            yield found
        finally:
            for replica in found.processes:
                found.kill(replica)
    assert [name for name in {*os.listdir("/dev/shm")} - before if "gpucoll" in name] == []


def check_bits(lines):
    """All replicas have the same parameters after each step, those of a replay with the same contributing replicas.

    A killed replica may have contributed to a step that it has not told: then any replica may be the missing one.
    """
    digests, told, counts = {}, {}, {}
    for replica, (_, step, place, count, digest) in lines:
        assert digests.setdefault(int(step), digest) == digest
        assert counts.setdefault(int(step), int(count)) == int(count)
        told.setdefault(int(step), set()).update({replica} if place != "-1" else ())
    assert [*sorted(digests)] == [*range(len(digests))]
    replay = torchft_job.Replay()
    for step in range(len(digests)):
        silent = sorted({*range(REPLICAS)} - told[step])
        for way in itertools.combinations(silent, counts[step] - len(told[step])):
            tried = copy.deepcopy(replay)
            if tried.step(step, told[step] | {*way}) == digests[step]:
                break
        else:
            pytest.fail(f"step {step} has unlike parameters")
        replay = tried
    return len(digests)


def test_a_training_survives_kills(monkeypatch):
    """After each kill the survivors go on, and the replica comes back with the others' state, received by gpucoll."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # torch sets the variable in a step of an optimizer
    chances = generator("torchft kills")
    with training() as job:
        for replica in range(REPLICAS):
            job.start(replica)
        for _ in range(KILLS):
            now = time.monotonic()
            for replica in range(REPLICAS):
                job.first_step(replica, now)
            time.sleep(chances.uniform(0, 0.05))  # a random moment of a step
            victim = chances.randrange(REPLICAS)
            job.kill(victim)
            killed = time.monotonic()
            went_on = max(job.first_step(replica, killed) for replica in range(REPLICAS) if replica != victim)
            job.start(victim)
            came_back = job.first_step(victim, killed)
            ready = float((job.folder / f"{victim}-{job.processes[victim].pid}.ready").read_text())
            print(f"survivors {went_on - killed:.2f} s; newcomer {came_back - ready:.2f} s after its imports")
        print(check_bits([(replica, words) for replica in range(REPLICAS) for words in job.lines(replica)]), "steps")
