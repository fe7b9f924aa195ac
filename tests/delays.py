"""Delays injected at random moments of a job, and the share of delays that `gpucoll report --stragglers` names rightly.

    python tests/delays.py [--jobs 4] [--seed 7]   # in computing, and by a neighbour that takes the core

Two ranks compute for some milliseconds and call all_reduce, again and again. A delay of a rank is named rightly if
the report has at least half of it on this rank, and less than half on the other rank. A report of 5 ms is false if
nothing of the kind was injected, and the ranks themselves have measured no delay. The machine must be idle: other
programs delay ranks, too.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from gpucoll.health.report import stories
from gpucoll.health.stragglers import delays

RANKS, CALLS, NBYTES = 2, 900, 65536
OFTEN = 0.12  # the probability of a delay before a call
LEAST, LONGEST = 5e-3, 50e-3  # seconds of the injected delays
PORT = 29517
# Prints a line for each call: the kind of the delay or "-", the delayed rank, and the seconds before the call.
PROGRAM = f"""
import os, random, subprocess, sys, time
import numpy, gpucoll as gc
rank, seed, often = int(sys.argv[1]), int(sys.argv[2]), {OFTEN}
os.sched_setaffinity(0, {{sorted(os.sched_getaffinity(0))[rank]}})
neighbour = subprocess.Popen(["nice", "-n", "-20", sys.executable, "-c", '''
import sys, time
for line in sys.stdin:
    end = time.monotonic() + float(line)
    while time.monotonic() < end:
        pass
'''], stdin=subprocess.PIPE, text=True)
chances, matrix, x = random.Random(seed), numpy.ones((100, 100)), numpy.ones({NBYTES} // 8)
with gc.init(store="tcp://127.0.0.1:{PORT}", rank=rank, size={RANKS}, timeout=60) as comm:
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


def started(folder, rank, seed):
    """Start a rank with the flight recorder."""
    words = [sys.executable, "-c", PROGRAM, str(rank), str(seed)]
    environment = {**os.environ, "GPUCOLL_DUMP_DIR": folder, "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)


def told(ranks):
    """Return the lines of all ranks, once they have ended: kind, delayed rank, and seconds before the call."""
    found = [rank.communicate()[0].split("\n")[:-1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), [rank.returncode for rank in ranks]
    return [[(kind, int(victim), float(took)) for kind, victim, took in map(str.split, lines)] for lines in found]


class Report:
    """The delays of ranks by call, in seconds, and the numbers of the calls."""

    def __init__(self, folder):
        groups, damaged = stories(Path(folder))
        assert not damaged, damaged
        self.late = {(one.call.number, one.rank): one.nanoseconds / 1e9 for one in delays(groups)}
        ((first, *_),) = groups.values()
        self.calls = [call.number for call in first.calls if call.nbytes == NBYTES]

    def names_a_rank(self, number):
        return any(self.late.get((number, rank), 0.0) >= LEAST for rank in range(RANKS))


def of_ranks(score, folder, seed):
    """Count the delays of a job whose ranks are delayed."""
    ranks = [started(folder, rank, seed) for rank in range(RANKS)]
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4, help="jobs, each of some hundred calls")
    parser.add_argument("--seed", type=int, default=7, help="seed of the first job")
    options, score = parser.parse_args(), Score()
    for seed in range(options.seed, options.seed + options.jobs):
        with tempfile.TemporaryDirectory() as folder:
            of_ranks(score, folder, seed)
    print(*score.lines(), sep="\n")


if __name__ == "__main__":
    main()
