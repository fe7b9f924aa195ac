"""A training of four ranks that loses a rank again and again, by SIGKILL at random moments, and gets newcomers.

Every second newcomer has been started before the kill, and waits in `gpucoll.join`. The losses of every step on every
rank must have the bits of an undisturbed training by threads. Nothing may be left in shared memory or in the temporary
folder.
"""

import contextlib
import itertools
import random
import signal
import tempfile
import time
from pathlib import Path

import gpucoll as gc
from harness.pace import Patience, seconds
from multirank.elastic_group import BEGIN, group_in

RANKS = 4
STARTS = 1.0  # seconds for a newcomer to start
# Data parallel training (stage 0) or ZeRO, with losses told by step, until `stops`. A rank that has begun a step may be
# lost before the others have taken the step.
TRAINS = """
import contextlib
from gpucoll.training import Adam, DataParallel, PartnerCopy, ZeRO, resume

def trained(comm, stage, stops, tell, timeout):
    parameters = {"w": numpy.zeros((4, 3), numpy.float32), "v": numpy.zeros(4)}
    optimizer, partner, failed = Adam(0.05), PartnerCopy(), False
    while True:
        try:
            if failed:
                comm, failed = comm.replace(timeout), False
            if stage:
                training = ZeRO(parameters, comm, optimizer, stage, partner=partner)
            else:
                resume(parameters, optimizer, comm)
                training = DataParallel(parameters, comm, bucket_bytes=40)
            while not stops(comm, optimizer.steps):
                x = numpy.random.default_rng([optimizer.steps, comm.rank]).standard_normal((8, 4))
                with training.layer(parameters) if stage else contextlib.nullcontext(parameters) as weights:
                    error, rest = x @ weights["w"] - x[:, :3], x @ weights["v"] - x.sum(1)
                training.ready("v", x.T @ rest)
                training.ready("w", (x.T @ error).astype(numpy.float32))
                loss = comm.all_reduce(numpy.square(error).sum(keepdims=True).sum(1))[0]
                tell(optimizer.steps, float(loss).hex())
                if stage:
                    training.step()
                else:
                    training.finish()
                    optimizer.step(parameters, training.gradients)
            return comm
        except (gc.RankFailedError, gc.RevokedError):
            failed = True
"""
# A rank writes a line for each step: the time, the step and the loss. It stops as soon as the file `stop` is there.
PROGRAM = TRAINS + """
import faulthandler
faulthandler.register(signal.SIGUSR1)
folder, stage, host = how[0], int(how[1]), how[2]
if host:  # ranks of other hosts see neither this process nor its memory
    from gpucoll.communicator import links
    from gpucoll.health import processes
    links.process_namespace = processes.process_namespace = lambda: host
lines = open(os.path.join(folder, f"{os.getpid()}.steps"), "w", buffering=1)
stop = os.path.join(folder, "stop")
comm = gc.join(place, timeout) if rank < 0 else gc.init(store=place, rank=rank, size=size, timeout=timeout,
                                                      deterministic=True)
steps = []
def tell(step, loss):
    steps.append(step)
    print(time.monotonic(), step, loss, file=lines)
trained(comm, stage, lambda comm, step: comm.all_reduce(numpy.array([os.path.exists(stop)]), op="max")[0], tell,
        timeout).close()
say(last=max(steps))
"""


class Training:
    """The processes of the training, and the steps that each has told."""

    def __init__(self, group, folder, stage, hosts):
        self.group, self.folder, self.stage, self.ranks = group, folder, stage, []
        self.hosts = itertools.cycle([f"host {number}" for number in range(hosts)] if hosts > 1 else [""])

    def start(self, rank):
        """Start a process: a rank, or a newcomer for -1."""
        return self.group.start(PROGRAM, rank, RANKS, str(self.folder), self.stage, next(self.hosts), timeout=60.0)

    def first_step(self, process, after):
        """Return the time of the first step told after a moment; None without a step."""
        with contextlib.suppress(FileNotFoundError):
            lines = (self.folder / f"{process.pid}.steps").read_text().split("\n")[:-1]
            return next((moment for line in lines if (moment := float(line.split()[0])) > after), None)
        return None

    def wait(self, processes, after):
        """Wait for these processes' first steps after a moment; raise if a process ends, or is late."""
        patience = Patience(30)  # less than `gpucoll.join` waits
        while None in (found := [self.first_step(process, after) for process in processes]):
            # A rank that has failed is the cause if another rank waits in vain.
            ended = [process for process in [*self.ranks, *processes] if process.poll() is not None]
            if ended:
                raise RuntimeError(f"a rank ended with {ended[0].returncode}: {self.stacks()}")
            if not patience.left():
                raise RuntimeError(f"no step after a kill: {found}; {self.stacks()}")
            time.sleep(0.002)

    def stacks(self):
        """Return the stacks of all ranks, and kill the ranks."""
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(signal.SIGUSR1)
        time.sleep(1)
        for rank in self.ranks:
            rank.kill()
        return "\n".join(f"rank {rank.pid}: {rank.stderr.read()}" for rank in self.ranks)


def disturbed(training, kills, chances):
    """Run the training with this many kills; after each of them all ranks take a step."""
    training.ranks = [training.start(rank) for rank in range(RANKS)]
    for number in range(kills):
        newcomer = training.start(-1) if number % 2 == 0 else None
        training.wait(training.ranks, time.monotonic() + (STARTS if newcomer else 0))
        time.sleep(chances.uniform(0, 0.05))  # a random moment of a step
        victim = training.ranks.pop(chances.randrange(RANKS))
        moment = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        training.ranks.append(newcomer or training.start(-1))
        training.wait(training.ranks[-1:], moment)  # the survivors take the step together with the newcomer
        print(f"{training.first_step(training.ranks[-1], moment) - moment:.2f} s, newcomer waits: {number % 2 == 0}")
    (training.folder / "stop").touch()


def undisturbed(steps, stage, ranks=RANKS):
    """Return the losses of a training by threads, by step."""
    names = {}
    exec(BEGIN.partition("place, rank")[0] + TRAINS, names)
    losses = {}

    def run(comm):
        tell = (lambda step, loss: losses.update({step: loss})) if comm.rank == 0 else lambda step, loss: None
        names["trained"](comm, stage, lambda comm, step: step == steps, tell, 0)

    gc.run_local(run, ranks, timeout=seconds(60), deterministic=True)
    return losses


def run(kills, seed, stage=0, hosts=1):
    """Run the series on pretended hosts; return the number of losses told, and those that differ."""
    chances = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as lines, \
            group_in(Path(folder)) as group:
        training = Training(group, Path(lines), stage, hosts)
        disturbed(training, kills, chances)
        steps = {one["last"] + 1 for one in group.said()}
        told = [line.split()[1:] for path in Path(lines).glob("*.steps") for line in path.read_text().splitlines()]
    assert len(steps) == 1, steps
    expected = undisturbed(*steps, stage)
    return len(told), [(step, loss) for step, loss in told if expected[int(step)] != loss]
