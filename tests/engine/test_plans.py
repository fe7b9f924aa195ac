"""Plans given to the engine: faulty plans are refused, or do no harm."""

import ast
import os
import sys
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from engine import written
from faults import tables
from gpucoll.algorithms import find, registry, schedule
from gpucoll.executors.engine.extension import library
from gpucoll.executors.engine.neighbours import SMALL, TINY, head_bytes
from gpucoll.executors.engine.tables import CALL, PUBLISH, REDUCE, WAIT, PlanFlag
from harness.grids import generator
from harness.jobs import run_job

FUZZED = Path(__file__).with_name("fuzzed.py")
# Runs fuzzed.py on an engine built here, with one text replaced.
CHANGED = f"""
import sys
sys.path.insert(0, {str(FUZZED.parents[1])!r})
from harness import extension
from engine import fuzzed
old, new, seed, count = sys.argv[1:]
fuzzed.main(extension.built(extension.text().replace(old, new)), seed, int(count))
"""


def plan(**changes):
    """Make rank 0's plan of two ranks, copying 8 bytes of rank 1; raise the engine's refusal."""
    heads = [numpy.zeros(head_bytes(2) + 6 * 8192, numpy.uint8) for _ in range(2)]
    engine = library().Engine(None, gc.GpucollError, 0, 2, os.getpid(), False, 1, False, head_bytes(2), 4096, 0,
                              tuple(head.ctypes.data for head in heads), (1, 2), (os.getpid(), os.getpid() + 1))
    mine, theirs = (0, 1, 0), (1, 0, 0)
    given = {"text": "a copy", "signature": 5, "sizes": (8, 8, 0, 0, 8), "kinds": (4, -1, 0),
             "flags": PlanFlag.IN_CONTROL | PlanFlag.OWN_IN_CONTROL, "root": 0, "peers": (1,), "readers": ((0, 1, 2),),
             "starts": (), "steps": ((WAIT, 1, 2, None, 0, (), ()), (REDUCE, 0, 0, mine, 8, (theirs,), ()),
                                     (PUBLISH, 0, 2, None, 0, (), ())), "calls": ()}
    assert set(changes) <= set(given)
    return engine.plan(*(given | changes).values())


def step(opcode, peer=0, mark=0, to=None, nbytes=0, sources=(), copies=()):
    return {"steps": ((opcode, peer, mark, to, nbytes, sources, copies),)}


def test_plans_that_are_not_whole_are_refused():
    plan()
    mine, theirs = (0, 1, 0), (1, 0, 0)
    for changes in (step(WAIT, 2, 2), step(WAIT, 1, -1), step(7), step(PUBLISH, 0, 1 << 20),
                    step(REDUCE, 0, 0, mine, 8), step(REDUCE, 0, 0, theirs, 8, (mine,)),
                    step(REDUCE, 0, 0, mine, 0, (theirs,)), step(REDUCE, 0, 0, mine, 8, (0,)),
                    step(REDUCE, 0, 0, mine, 16, (theirs,)),
                    step(REDUCE, 0, 0, (0, 1, 4), 8, (theirs,)), step(REDUCE, 0, 0, (0, 1, 1 << 63), 8, (theirs,)),
                    step(REDUCE, 0, 0, mine, 8, ((1, 0, 4090),)), step(REDUCE, 0, 0, mine, 8, ((1, 3, 0),)),
                    step(REDUCE, 0, 0, mine, 8, ((2, 0, 0),)), step(REDUCE, 0, 0, mine, 8, (theirs, theirs)),
                    step(REDUCE, 0, 0, mine, 7, (theirs,)), step(REDUCE, 0, 0, mine, 8, (theirs,), ((2, 1, 0),)),
                    step(CALL, 0, 0), {**step(CALL, 0, 2), "calls": (print, print)}, {"steps": (5,)}, {"peers": (2,)},
                    {"peers": (0,)}, {"peers": ()}, {"readers": ((0, 2, 2),)}, {"readers": ((3, 1, 2),)},
                    {"readers": (3,)}, {"root": 2}, {"starts": (0, 1)}, {"kinds": (4, 4, 2)},
                    step(REDUCE, 0, 0, mine, 8, (mine,), (mine,)),
                    {**step(CALL, 0, 1, theirs), "calls": (print, print)},
                    {**step(CALL, 0, 1, mine, 8, (theirs,)), "calls": (print, print)},
                    step(REDUCE, 0, 0, mine, 8, (mine,) * (1 << 14)), {"starts": (0, 1, 2, 0, 1, 1)},
                    {"starts": (0, 1, 1, 0, 1, 2)}, {"starts": (0, -1, 1, 0, 1, 1)},
                    {"sizes": (8, 8, 0, 0, 0)}, {"sizes": (8, 1 << 20, 0, 0, 8)},
                    *({"sizes": (*sizes, 0, 8), "flags": flags}  # no memory for these sizes
                      for sizes in ((8, 5000, 0), (5000, 8, 0), (8, 8, 5000))
                      for flags in (0, PlanFlag.OWN_IN_CONTROL))):
        with pytest.raises((ValueError, TypeError, SystemError)) as refusal:
            plan(**changes)
        assert refusal.type is not SystemError, changes


def ended(*command):
    """Return the outcomes of the plans; if the process has died, fail with the text of the last plan."""
    job = run_job([sys.executable, *command], 600)
    assert job.returncode == 0, (job.returncode, job.stderr[-4000:])
    return ast.literal_eval(job.stdout)


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.nightly)])
def test_plans_with_something_wrong_do_no_harm(count):
    came = ended(FUZZED, str(generator(f"plans/{count}").random()), str(count))
    assert came.keys() >= {"done", "ValueError", "TypeError", "OverflowError", "GpucollError"}
    assert came["done"] > count / 10


@pytest.mark.nightly
@pytest.mark.mutant
@pytest.mark.parametrize("name", tables.of_kinds("plan"))
def test_what_is_not_checked_is_noticed(name):
    (old, new), = tables.of_kinds("plan")[name].changes
    command = [sys.executable, "-c", CHANGED, old, new]
    assert any(run_job([*command, str(seed), "20000"], 600).returncode for seed in range(8))


def scratch_of(rounds):
    """Return the number of scratch chunks of a schedule."""
    return max((part.first + part.count for steps in rounds for step in steps for part in step
                if isinstance(part, tuple) and part.buffer == "scratch"), default=0)


@pytest.mark.parametrize("size", [2, 3, 5, 8, 13, 17])
def test_scratch_of_small_calls_has_its_workspace(size):
    """Small calls use the control segments on all ranks or on none: every rank's scratch must fit the workspace."""
    for collective, name in registry():
        if find(collective, name).unfit(size, None) is None and not collective.endswith("_v"):
            for rank in range(size):
                rounds = schedule(collective, name, rank=rank, size=size, nodes=(0,) * size)
                assert scratch_of(rounds) <= rounds.chunks * (SMALL // TINY), (collective, name, rank)


def test_all_collectives_are_written():
    assert {collective for collective, _ in written.NAMES} == {collective for collective, _ in registry()}
