"""`bench.training servers`: parameter servers, for every split of the ranks, compared with a ring all-reduce."""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy

import gpucoll as gc
from gpucoll.simulator import DEFAULT, Level, shipped, simulate
from gpucoll.training import SGD, ParameterServer

from .contestants import LeftOutPeer
from .training import MIB, medians

TIMED_STEPS = 4  # of each contestant per round, after a warm-up
TIE_FACTOR = 1.1  # times up to this factor above the best split are considered equal


class SplitRow(NamedTuple):
    """A split of the ranks and the cost of a step: bytes into and out of the busiest server and a worker, and ms."""

    servers: int
    workers: int
    moved: tuple[int, ...]
    measured: float
    simulated: float


def measure(comm: gc.Communicator, options: argparse.Namespace) -> list[str]:
    """Return measured and simulated times and the traffic of a synchronous step, for every number of servers."""
    ranks, elements = comm.size, options.bytes // 4
    if ranks < 2:
        raise LeftOutPeer("servers: at least one rank must be a server, and one a worker")
    nbytes, x, splits = 4 * elements, numpy.ones(elements, "f4"), range(1, ranks)
    times: dict[int | str, list[float]] = {way: [] for way in (*splits, "ring", "auto")}
    moved: dict[int, tuple[int, ...]] = {}
    calls = {name: functools.partial(comm.all_reduce, x, out=x, op="avg", algorithm=name) for name in ("ring", "auto")}
    for _ in range(-(-options.repeats // TIMED_STEPS)):
        for servers in splits:
            some, moved[servers] = steps(comm, servers, elements)
            times[servers] += some
        for name, ms in medians(comm, calls, TIMED_STEPS).items():
            times[name].append(ms)
    measured = {way: statistics.median(each) for way, each in times.items()}
    level = shipped(DEFAULT).levels[0]
    rows = [SplitRow(servers, ranks - servers, moved[servers], measured[servers],
                     foretold(level, servers, ranks - servers, nbytes)) for servers in splits]
    ring = simulate("all_reduce", "ring", ranks, nbytes).seconds * 1e3
    each = 2 * (ranks - 1) / ranks * nbytes / MIB
    return [f"{nbytes / MIB:g} MiB of float32, {ranks} ranks; MiB into and out of the busiest server and a worker in a "
            f"step, ms measured, and ms simulated with links of {1e-9 / level.beta:g} GB/s each way",
            f"{'servers':>8} {'workers':>8} {'server in':>10} {'out':>8} {'worker in':>10} {'out':>8} {'measured':>9} "
            f"{'simulated':>10}",
            *("{:8} {:8} {:10.2f} {:8.2f} {:10.2f} {:8.2f} {:9.2f} {:10.3f}".format(
                row.servers, row.workers, *(moved / MIB for moved in row.moved), row.measured, row.simulated)
              for row in rows),
            f"{'ring':>8} {ranks:8} {'':10} {'':8} {each:10.2f} {each:8.2f} {measured['ring']:9.2f} {ring:10.3f}",
            f"{'auto':>8} {ranks:8} {'':10} {'':8} {'':10} {'':8} {measured['auto']:9.2f} {'':>10}",
            verdict(rows, ring)]


def steps(comm: gc.Communicator, servers: int, elements: int) -> tuple[list[float], tuple[int, ...]]:
    """Return the milliseconds of the steps on the slowest worker, and the bytes of a step, as in `Row`."""
    place = ParameterServer({"w": numpy.zeros(elements, "f4")}, comm, servers, SGD(1e-3))
    gradient, seconds = {"w": numpy.ones(elements, "f4")}, list[float]()
    if place.is_server:
        place.serve()
    else:
        for _ in range(1 + TIMED_STEPS):
            began = time.perf_counter()
            place.pull()
            place.push(gradient)
            seconds.append(time.perf_counter() - began)
        place.done()
    traffic, clocks = zip(*comm.mpi.allgather((place.traffic, seconds[1:])), strict=True)
    workers = comm.size - servers
    moved = tuple(traffic[rank][way] // (1 + TIMED_STEPS) for rank in (workers, 0) for way in ("in", "out"))
    return [max(each) * 1e3 for each in zip(*clocks[:workers], strict=True)], moved


def foretold(level: Level, servers: int, workers: int, nbytes: int) -> float:
    """Return the milliseconds of a pull and then a push, in the model of the simulator.

    In each, the busiest link carries the larger of a worker's b bytes and a server's (P - N) / N b, one way.
    """
    gaps = max(servers, workers) - 1
    seconds = 2 * (level.alpha + gaps * level.gap + max(1, workers / servers) * nbytes * level.beta)
    return (seconds + workers / servers * nbytes * level.gamma) * 1e3


def verdict(rows: Sequence[SplitRow], ring: float) -> str:
    """Return the verdict on the rule: few servers are the bottleneck, about as many servers as workers match a ring."""
    best, rule = min(row.simulated for row in rows), [row.servers for row in rows if row.servers >= row.workers]
    good = [row for row in rows if row.simulated <= TIE_FACTOR * best]
    narrow = [row.servers for row in rows if row.moved[0] > row.moved[2]]
    return (f"With {listed(narrow)} servers their links are the bottleneck, and a step takes up to "
            f"{max(row.simulated for row in rows) / ring:.1f} times as long as a ring's; with "
            f"{listed([row.servers for row in good])}, {best / ring:.2f} to "
            f"{max(row.simulated for row in good) / ring:.2f} times: that only about as many servers as workers match "
            f"a ring is {'confirmed' if [row.servers for row in good] == rule else 'refuted'}.")


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "no"
