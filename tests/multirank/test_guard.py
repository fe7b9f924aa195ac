"""No rank waits for ever: the error names the rank that died, left, stopped or made another call."""

import json
import sys
import time

import numpy
import pytest

import gpucoll as gc
from gpucoll.health.observed import Fault
from gpucoll.health.report import stories, summary
from harness.grids import often
from harness.pace import seconds
from multirank.failing import JOB, came_of, check_all

SLOW = pytest.mark.slow


def ended(mpiexec, folder, how, executor):
    """Run a job of three ranks in which rank 1 fails; return the outcomes written by ranks, and the job."""
    job = mpiexec(3, sys.executable, JOB, folder, how, executor, timeout=seconds(40))
    return came_of(folder), job


@pytest.mark.parametrize("executor", ["auto", *(pytest.param(name, marks=SLOW) for name in ("mpi", "native"))])
def test_a_rank_that_leaves_by_an_error_is_named_at_once(mpiexec, tmp_path, executor):
    found, job = ended(mpiexec, tmp_path, "with", executor)
    assert found.keys() == {0, 2}, job
    check_all(found, "RankFailedError", 1, within=1, closing=1)


@pytest.mark.parametrize("executor", ["auto", pytest.param("mpi", marks=SLOW)])
def test_a_rank_that_exits_is_named(mpiexec, tmp_path, executor):
    found, job = ended(mpiexec, tmp_path, "exit", executor)
    assert found, job
    check_all(found, "RankFailedError", 1, within=1)


def test_who_is_told_to_end_saves_first(mpiexec, tmp_path):
    ended(mpiexec, tmp_path, "term", "auto")
    found = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir() if path.suffix != ".memory"}
    assert found.pop("saved") == []
    check_all(found, "RankFailedError", 1, within=1)


@pytest.mark.parametrize(("how", "named"), often(
    [("raise", "KeyError: 'raise'"), ("thread", "KeyError: 'thread'"), ("gradient", "KeyError: 'gradient'"),
     ("memory", "MemoryError"), ("interrupt", "KeyboardInterrupt")],
    ("gradient", "KeyError: 'gradient'")))
def test_an_exception_that_nobody_catches_ends_the_job(mpiexec, tmp_path, how, named):
    began = time.monotonic()
    _, job = ended(mpiexec, tmp_path, how, "auto")
    assert job.returncode != 0
    assert named in job.stderr
    assert "rank 1 has ended by an exception that nobody caught" in job.stderr
    assert job.stderr.count("Traceback") == 1
    assert time.monotonic() - began < seconds(20)


def numerics(mpi):
    with gc.Communicator.from_mpi(mpi, timeout=seconds(60)) as comm:
        x = numpy.ones((3, 4), "f4")
        comm.check_numerics(x)
        comm.check_numerics(numpy.arange(3))
        if comm.rank:
            x[2, comm.rank] = numpy.nan if comm.rank == 1 else numpy.inf
        with pytest.raises(gc.ArgumentError, match=r"gradient\[2, 1\] is nan on rank 1") as told:
            comm.check_numerics(x, "gradient")
        assert (told.value.code, told.value.ranks) == ("GC-NUMERICS", (1, 2))


def test_numerics_are_checked(ranks):
    ranks(numerics, 3)


# ---------------------------------------------------------------- the flight recorder


def recorded(mpi, folder):
    """Make the same calls with the default executor and by messages, to record both."""
    import os

    os.environ["GPUCOLL_DUMP_DIR"] = folder
    try:
        for executor in (None, "mpi"):
            with gc.Communicator.from_mpi(mpi, executor=executor, timeout=seconds(60)) as comm:
                x = numpy.ones(5)
                for _ in range(7):
                    comm.all_reduce(x)
                comm.scatter(numpy.ones((comm.size, 2)) if comm.rank == 0 else None)
    finally:
        del os.environ["GPUCOLL_DUMP_DIR"]


def test_every_executor_is_recorded(ranks, tmp_path):
    ranks(recorded, 3, str(tmp_path))
    groups, damaged = stories(tmp_path)
    assert (len(groups), damaged) == (2, [])
    for name, files in groups.items():
        found = summary(name, files)
        assert (found["unheard"], found["divergence"], found["missing"]) == ([], None, [])
        for story in files:
            words = [call.description.split()[0] for call in story.calls]
            assert words[:7] == ["all_reduce"] * 7
            assert words[-1] == "closed"
            assert all(call.ended >= call.began for call in story.calls)


@pytest.mark.parametrize("text", ["", "rank:1", "rank:1,seq:x,do:raise", "rank:1,seq:1,do:nothing",
                                  "rank:1,seq:1,phase:now,do:raise", "rank:1,seq:1,do:raise,more:1", ":,:"])
def test_faults_are_spelt_right(text):
    with pytest.raises(gc.ArgumentError):
        Fault.of(text)
