"""A long run over the contract of bits: drawn cases on every executor, with threads or processes as ranks.

    python tests/draws.py 60                      for 60 seconds, threads as ranks, on the host and the emulated device
    mpiexec -n 3 python tests/draws.py 60 hybrid  a single executor, with processes as ranks

A case is a call with its collective, algorithm, op, dtype, shape, offset and cut. Each rank compares its result with
the oracle. The first difference ends the run with an error.
"""

import collections
import json
import os
import sys
import time

import bits
import gpucoll as gc
from contract.conftest import EXECUTORS, Executor
from grids import generator
from mixture import PEER

ORACLES = {True: bits.in_order, "exact": bits.exact}
ROUND = 10  # draws on a communicator
WEIGHTS = {"shared": 8, "mpi": 4, "walker": 2, "nccl": 1, "peer": 1}
SMALL = 1000  # elements: the most where the kernels run on the CPU
MOST = 16  # ranks


def draw(random, deterministic, size, pairs=None, most=None):
    """Return a drawn case for `size` ranks, of at most `most` elements, with a dtype and op among `pairs`."""
    exact = deterministic == "exact"
    names = [name for name in bits.FLOATS if not exact or name in bits.FORMATS or "complex" in name]
    pairs = pairs or [(op, name) for op in (bits.ROUNDED if exact else bits.ORDERED) for name in names
                      if not (op in ("min", "max") and "complex" in name)]
    op, name = random.choice(pairs)
    drawn = bits.case(random, name, op, size)
    return drawn if most is None or drawn.count <= most else drawn._replace(count=most, cuts=(0, most))


def peer_pairs(deterministic):
    """Return the ops and dtypes of the compiled kernels of the executor `peer`."""
    if deterministic == "exact":
        return [(op, name) for op in bits.ROUNDED for name in ("float32", "float16")]
    return [pair for pair in PEER if pair[0] in bits.ORDERED and pair[1] in bits.FLOATS]


def checked(comm, cases, deterministic, seed):
    """Make and compare all calls of the cases; return the number of results compared by this rank, by dtype."""
    found, random = collections.Counter(), generator(seed)
    for one in cases:
        found[one.name] += bits.check(comm, one, ORACLES[deterministic], random)
    return found


def on_executor(name, random, seed):
    """Draw and check cases with threads as ranks; return the key of the kind of case, and the numbers of results."""
    executor: Executor = EXECUTORS[name]
    deterministic = random.choice([*ORACLES])
    emulated = executor.device != "cpu"
    size = random.choice(executor.sizes if emulated or random.random() < 0.7 else range(1, MOST + 1))
    os.environ["GPUCOLL_DEVICE"] = "emulated" if emulated else ""
    pairs = peer_pairs(deterministic) if name == "peer" else None
    most = SMALL if emulated or not executor.engine else None
    cases = [draw(random, deterministic, size, pairs, most) for _ in range(ROUND)]
    found = executor.run(size, checked, cases, deterministic, seed, deterministic=deterministic, timeout=600)
    return (name, str(deterministic), size), sum(found, collections.Counter())


def threads(seconds):
    """Check drawn cases until the time is over; return the numbers of results, by kind of case and by dtype."""
    total, dtypes, turn = collections.Counter(), collections.Counter(), 0
    names, weights = zip(*WEIGHTS.items(), strict=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        random = generator(f"draws/{turn}")
        kind, found = on_executor(*random.choices(names, weights), random, f"algorithms/{turn}")
        total[kind] += found.total()
        dtypes += found
        turn += 1
    return total, dtypes


def processes(seconds, how):
    """Check drawn cases on the executor `how`, "auto" for any, with the ranks of mpiexec, until rank 0 ends the run."""
    from mpi4py import MPI

    from multirank.test_bits_of_processes import made

    total, dtypes, turn, world = collections.Counter(), collections.Counter(), 0, MPI.COMM_WORLD
    end = time.monotonic() + seconds
    while world.bcast(time.monotonic() < end):
        random = generator(f"draws/{how}/{world.size}/{turn}")
        deterministic = random.choice([*ORACLES])
        cases = [draw(random, deterministic, world.size) for _ in range(ROUND)]
        with made(world, None if how == "auto" else how, deterministic) as comm:
            found = sum(world.allgather(checked(comm, cases, deterministic, turn)), collections.Counter())
        total[how, str(deterministic), world.size] += found.total()
        dtypes += found
        turn += 1
    return (total, dtypes) if world.rank == 0 else None


if __name__ == "__main__":
    done = threads(float(sys.argv[1])) if len(sys.argv) == 2 else processes(float(sys.argv[1]), sys.argv[2])
    if done is not None:
        print(json.dumps({" ".join(map(str, kind)): count for kind, count in sorted(done[0].items())}), flush=True)
        print(json.dumps(done[1]), f"{done[0].total()} results, 0 differ", gc.__version__, flush=True)
