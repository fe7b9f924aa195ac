"""Delays injected at random moments of a job, and the share of delays that `gpucoll report --stragglers` names rightly.

    python tests/delays.py [--jobs 4] [--seed 7]             # in computing, and by a neighbour that takes the core
    python tests/delays.py --network [--jobs 4] [--seed 7]   # in the network between two hosts, as root

Two ranks compute for some milliseconds and call all_reduce, again and again. A delay of a rank is named rightly if
the report has at least half of it on this rank, and less than half on the other rank. A delay of the network is named
rightly if the report has a slow transfer and no late rank. A report of 5 ms is false if nothing of the kind was
injected, and the ranks themselves have measured no delay. The machine must be idle: other programs delay ranks, too.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import hosts
from gpucoll.health.report import stories
from gpucoll.health.stragglers import delays, slow_transfers

RANKS, CALLS, NBYTES = 2, 900, 65536
OFTEN = 0.12  # the probability of a delay before a call
LEAST, LONGEST = 5e-3, 50e-3  # seconds of the injected delays
NETWORK, PAUSE = 20e-3, (0.1, 0.3)  # seconds by which the network delays frames, and seconds between its changes
STARTS = 3  # seconds until all ranks compute
PORT = 29517
# Prints a line for each call: the kind of the delay or "-", the delayed rank, and the seconds before the call.
PROGRAM = f"""
import os, random, subprocess, sys, time
import numpy, gpucoll as gc
rank, store, executor, seed, often = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5])
os.sched_setaffinity(0, {{sorted(os.sched_getaffinity(0))[rank]}})
neighbour = subprocess.Popen(["nice", "-n", "-20", sys.executable, "-c", '''
import sys, time
for line in sys.stdin:
    end = time.monotonic() + float(line)
    while time.monotonic() < end:
        pass
'''], stdin=subprocess.PIPE, text=True)
chances, matrix, x = random.Random(seed), numpy.ones((100, 100)), numpy.ones({NBYTES} // 8)
with gc.init(store=store, rank=rank, size={RANKS}, executor=executor or None, timeout=60) as comm:
    for _ in range({CALLS}):
        began, kind, victim = time.perf_counter(), "-", chances.randrange({RANKS})
        length, drawn = chances.uniform({LEAST}, {LONGEST}), chances.random()
        if drawn < often:
            kind = "computing" if drawn < often / 2 else "neighbour"
            if victim == rank and kind == "computing":
                time.sleep(length)
            elif victim == rank:
                print(length, file=neighbour.stdin, flush=True)
        for _ in range(60):
            matrix @ matrix
        took = time.perf_counter() - began
        comm.all_reduce(x)
        print(kind, victim, took, flush=True)
neighbour.stdin.close()
neighbour.wait()
"""


class Score:
    """By kind of delay: the number of delays and of those named rightly; calls without a delay, and false reports."""

    def __init__(self):
        self.delays, self.named = Counter(), Counter()
        self.quiet = self.false = 0

    def injected(self, kind, *, named):
        self.delays[kind] += 1
        self.named[kind] += named

    def without(self, *, named):
        self.quiet += 1
        self.false += named

    def lines(self):
        for kind, number in self.delays.items():
            yield f"{kind}: {self.named[kind]} of {number} delays named rightly ({self.named[kind] / number:.1%})"
        yield f"false: {self.false} of {self.quiet} calls without a delay ({self.false / max(1, self.quiet):.1%})"


def started(folder, rank, store, executor, seed, often, within=lambda *words: [*words]):
    """Start a rank with the flight recorder."""
    words = within(sys.executable, "-c", PROGRAM, str(rank), store, executor, str(seed), str(often))
    environment = {**os.environ, **hosts.SOCKETS, "GPUCOLL_DUMP_DIR": folder, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


def told(ranks):
    """Return the lines of all ranks, once they have ended: kind, delayed rank, and seconds before the call."""
    found = [rank.communicate()[0].split("\n")[:-1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), [rank.returncode for rank in ranks]
    return [[(kind, int(victim), float(took)) for kind, victim, took in map(str.split, lines)] for lines in found]


class Report:
    """The delays of ranks and the slow transfers by call, in seconds; and the begin and the end of each call."""

    def __init__(self, folder):
        groups, damaged = stories(Path(folder))
        assert not damaged, damaged
        self.late = {(one.call.number, one.rank): one.nanoseconds / 1e9 for one in delays(groups)}
        self.slow = {one.call.number: one.nanoseconds / 1e9 for one in slow_transfers(groups)}
        ((first, *others),) = groups.values()
        ends = [{call.number: call for call in story.calls} for story in others]
        self.calls = {call.number: (min(call.began, *(one[call.number].began for one in ends)),
                                    max(call.ended, *(one[call.number].ended for one in ends)))
                      for call in first.calls if call.nbytes == NBYTES}

    def names_a_rank(self, number):
        return any(self.late.get((number, rank), 0.0) >= LEAST for rank in range(RANKS))


def of_ranks(score, folder, seed):
    """Count the delays of a job whose ranks are delayed."""
    ranks = [started(folder, rank, f"tcp://127.0.0.1:{PORT}", "", seed, OFTEN) for rank in range(RANKS)]
    lines = told(ranks)
    report = Report(folder)
    usual = [statistics.median(took for *_, took in of_rank) for of_rank in lines]
    for number, calls in list(zip(report.calls, zip(*lines, strict=True), strict=True))[1:]:
        kind, victim, _ = calls[0]
        took = [seconds - usual[rank] for rank, (*_, seconds) in enumerate(calls)]
        behind = took[victim] - took[1 - victim]
        if kind != "-" and behind >= LEAST:
            late = [report.late.get((number, rank), 0.0) for rank in (victim, 1 - victim)]
            score.injected(kind, named=late[0] >= behind / 2 > late[1])
        elif abs(behind) < LEAST / 2:  # otherwise another program has delayed a rank
            score.without(named=report.names_a_rank(number))


def of_network(score, folder, seed):
    """Count the delays of a job on two hosts, whose network is slow now and then."""
    carriers, windows, chances = [], [], random.Random(seed)
    with hosts.made(2, delay=NETWORK, carriers=carriers) as (_, *nodes):
        carriers[0].send_signal(signal.SIGUSR1)
        ranks = [started(folder, rank, f"tcp://{nodes[0].address}:{PORT}", "ucx", seed, 0.0, node.within)
                 for rank, node in enumerate(nodes)]
        time.sleep(STARTS)
        while all(rank.poll() is None for rank in ranks):
            moments = []
            for _ in range(2):
                time.sleep(chances.uniform(*PAUSE))
                carriers[0].send_signal(signal.SIGUSR1)
                moments.append(time.time_ns())
            windows.append(moments)
        told(ranks)
    report = Report(folder)
    for begin, end in windows:
        inside = [number for number, (first, last) in report.calls.items() if begin < first and last < end]
        if inside:
            score.injected("network", named=any(number in report.slow for number in inside)
                           and not any(map(report.names_a_rank, inside)))
    for number, (first, last) in report.calls.items():
        if not any(begin < last and first < end + 3e9 * NETWORK for begin, end in windows):
            score.without(named=report.slow.get(number, 0.0) >= LEAST or report.names_a_rank(number))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="jobs, each of some hundred calls")
    parser.add_argument("--seed", type=int, default=7, help="seed of the first job")
    parser.add_argument("--network", action="store_true", help="delay frames between two hosts")
    options, score = parser.parse_args(), Score()
    for seed in range(options.seed, options.seed + options.jobs):
        with tempfile.TemporaryDirectory() as folder:
            (of_network if options.network else of_ranks)(score, folder, seed)
    print(*score.lines(), sep="\n")


if __name__ == "__main__":
    main()
