"""The executor shared in each of the ways in which it reaches memory, and calls that follow each other closely."""

import contextlib
import itertools
from unittest import mock

import numpy
import pytest

import mixture
import programs
from gpucoll.arrays.segments import Copier
from gpucoll.executors.shared import calls, neighbours
from grids import generator, sampled
from programs import MOVEMENTS, REDUCTIONS
from thread_ranks import on_threads

WAYS = ("small", "copied", "shared", "mapped")


@contextlib.contextmanager
def way(name):
    """Whatever a call's size: `small` as it comes; `copied` by the system; `shared`, but inputs that several read are
    mapped; `mapped` as where the system copies nothing."""
    with contextlib.ExitStack() as stack:
        if name != "small":
            for size in ("TINY", "SMALL"):
                stack.enter_context(mock.patch.object(calls, size, -1))
        if name == "copied":
            stack.enter_context(mock.patch.object(calls, "COPIED", -1))
        if name == "mapped":
            stack.enter_context(mock.patch.object(Copier, "read", side_effect=PermissionError("not permitted")))
        yield


@pytest.mark.parametrize("name", WAYS)
def test_ways_into_memory(name):
    random = generator(f"ways/{name}")
    for collective in (*REDUCTIONS, *MOVEMENTS):
        for algorithm in random.sample([one for one in programs.algorithms(collective) if one != "native"], 2):
            size, counts = random.choice((2, 3, 4, 5)), (random.choice((0, 1, 7)), random.choice((5000, 70001)))
            with way(name):
                on_threads(size, mixture.called, [(collective, algorithm, "sum", "float64", count, random.random())
                                                  for count in counts], executor="shared")


@pytest.mark.nightly
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("collective", [*REDUCTIONS, *MOVEMENTS])
def test_ways_into_memory_of_the_whole_grid(name, collective):
    for algorithm, size in itertools.product(programs.algorithms(collective), (1, 2, 3, 4, 5, 7, 8)):
        if algorithm != "native":
            with way(name):
                body = programs.copies if collective in MOVEMENTS else programs.every_count
                on_threads(size, body, collective, algorithm, executor="shared")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("size", sampled((2, 3, 8), keep=1, seed=13))
def test_the_bits_are_those_of_messages(name, size):
    with way(name):
        found = on_threads(size, programs.rounded, "float16", executor="shared")
    assert found == on_threads(size, programs.rounded, "float16", executor="mpi")


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("size", sampled((2, 3, 8), keep=1, seed=14))
def test_calls_one_after_the_other(name, size):
    with way(name):
        on_threads(size, mixture.run, mixture.draw(generator(f"mixture/{name}"), size), executor="shared")


def many_broadcasts(comm, count):
    """The root need not wait for anyone, and runs ahead as far as it can; what it only reads may be read-only."""
    for number in range(100):
        x = numpy.full(count, number if comm.rank == 0 else -1)
        x.flags.writeable = comm.rank != 0
        assert (comm.broadcast(x, algorithm="linear") == number).all()


@pytest.mark.parametrize("count", [7, 5000])
def test_a_root_that_runs_ahead(count):
    on_threads(4, many_broadcasts, count, executor="shared")


def test_other_processors_have_fences(monkeypatch):
    """As on another processor: every mark is told after a fence, and every wait followed by one."""
    monkeypatch.setattr(neighbours.platform, "machine", lambda: "x86_64")
    assert neighbours.make_fence(threads=False) is None
    monkeypatch.setattr(neighbours.platform, "machine", lambda: "aarch64")
    assert neighbours.make_fence(threads=True) is None
    fences = []
    monkeypatch.setattr("gpucoll.executors.shared.make_fence", lambda threads: lambda: fences.append(threads))
    assert on_threads(3, lambda comm: comm.all_reduce(numpy.ones(3), algorithm="ring")[0], executor="shared") == [3] * 3
    assert len(fences) >= 6
