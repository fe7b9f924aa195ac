"""Completion times of schedules in ASTRA-sim and in gpucoll's simulator, from a built checkout of ASTRA-sim.

The checkout needs build/astra_analytical/build.sh to have run. Every schedule is written as Chakra traces. Two networks
are simulated: a link for each pair of ranks, with congestion; and a switch, without congestion, which ASTRA-sim takes
for two hops. All schedules have one message a rank in each direction and round, because ASTRA-sim starts a rank's next
send when the send before has arrived.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from gpucoll.algorithms import schedules
from gpucoll.analysis.simulate import Level, Topology, simulate
from gpucoll.analysis.traces import chakra

SCHEDULES = (
    ("all_reduce", "ring", 8, 1), ("all_reduce", "halving_doubling", 8, 1), ("all_reduce", "halving_doubling", 12, 1),
    ("all_reduce", "recursive_doubling", 16, 1), ("all_reduce", "circulant", 11, 1), ("all_reduce", "swing", 16, 1),
    ("all_reduce", "torus", 12, 1), ("all_reduce", "hierarchical", 12, 1), ("all_reduce", "reduce_broadcast", 8, 1),
    ("broadcast", "binomial", 13, 1), ("all_gather", "bruck", 10, 1), ("all_to_all", "pairwise", 8, 1),
    ("scan", "linear", 8, 4),
)
PROGRAMS = "build/astra_analytical/build/bin"
NBYTES = 1 << 20
WITHIN = 0.01
SYSTEM = '{"scheduling-policy": "LIFO", "endpoint-delay": 10, "active-chunks-per-dimension": 1, ' \
    '"preferred-dataset-splits": 1, "all-reduce-implementation": ["ring"], "all-gather-implementation": ["ring"], ' \
    '"reduce-scatter-implementation": ["ring"], "all-to-all-implementation": ["ring"], ' \
    '"collective-optimization": "localBWAware", "local-mem-bw": 1600, "boost-mode": 0}'


class Network(NamedTuple):
    """A network of ASTRA-sim: the topology's name, the program, the number of links of a way, and our medium."""

    name: str
    program: str
    hops: int
    medium: str


NETWORKS = (Network("FullyConnected", "AstraSim_Analytical_Congestion_Aware", 1, "mesh"),
            Network("Switch", "AstraSim_Analytical_Congestion_Unaware", 2, "switch"))


def theirs(checkout: Path, network: Network, case: tuple[str, str, int, int], link: tuple[float, float]) -> float:
    """Return ASTRA-sim's completion time in microseconds; raise SystemExit with its last words where it fails."""
    collective, algorithm, size, segments = case
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        for one in schedules(collective, algorithm, size=size, segments=segments):
            (here / f"trace.{one.rank}.et").write_bytes(chakra(one, NBYTES))
        files = {"system": SYSTEM, "remote-memory": '{"memory-type": "NO_MEMORY_EXPANSION"}', "network":
                 f"topology: [ {network.name} ]\nnpus_count: [ {size} ]\nbandwidth: [ {link[0]} ]\n"
                 f"latency: [ {link[1]} ]\n"}
        for name, text in files.items():
            (here / name).write_text(text)
        program = checkout / PROGRAMS / network.program
        ran = subprocess.run([program, f"--workload-configuration={here / 'trace'}",
                              *(f"--{name}-configuration={here / name}" for name in files)],
                             capture_output=True, text=True, timeout=300, cwd=folder)
    ends = [int(cycles) for cycles in re.findall(r"finished, (\d+) cycles", ran.stdout)]
    if len(ends) != size:
        sys.exit(f"{program.name}: {len(ends)} of {size} ranks finished {case}\n{ran.stdout[-500:]}{ran.stderr[-500:]}")
    return max(ends) / 1000


def ours(network: Network, case: tuple[str, str, int, int], link: tuple[float, float]) -> float:
    """Return the predicted time in microseconds; ASTRA-sim's GB are 2^30 bytes, and its latency is that of a link."""
    level = Level("link", network.hops * link[1] * 1e-9, 1 / (link[0] * (1 << 30)), medium=network.medium)
    collective, algorithm, size, segments = case
    return 1e6 * simulate(collective, algorithm, size, NBYTES, Topology("astrasim", (level,)),
                          segments=segments).seconds


def main() -> int:
    """Print both times of every schedule, and the ratio; return 1 if a ratio is more than 1 % from 1."""
    if len(sys.argv) < 2:
        sys.exit("scripts/astrasim PATH_OF_ASTRA_SIM_CHECKOUT [GiB per second] [ns]")
    words = [*sys.argv[2:4], *["50", "500"][len(sys.argv) - 2:]]
    checkout, link = Path(sys.argv[1]).resolve(), (float(words[0]), float(words[1]))
    for program in (checkout / PROGRAMS / network.program for network in NETWORKS):
        if not program.exists():
            sys.exit(f"{program} does not exist: run build/astra_analytical/build.sh of the checkout")
    worst = 0.0
    print("network         collective  algorithm           ranks ASTRA-sim us gpucoll us  ratio")
    for network in NETWORKS:
        for case in SCHEDULES:
            one, other = theirs(checkout, network, case, link), ours(network, case, link)
            worst = max(worst, math.inf if not other else abs(one / other - 1))
            print(f"{network.name:15} {case[0]:11} {case[1]:19} {case[2]:5} {one:12.3f} {other:10.3f} "
                  f"{one / other:6.4f}")
    print(f"at most {100 * worst:.2f} % apart")
    return int(worst > WITHIN)


if __name__ == "__main__":
    sys.exit(main())
