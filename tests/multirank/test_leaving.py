"""Ranks that leave early: the other ranks are told within a second, with the name, the last call and the line."""

import contextlib
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

import numpy
import pytest

import gpucoll as gc
from gpucoll.health.farewell import Farewell, Sent, Why, by_mpi
from gpucoll.transport.rendezvous import becomes
from harness import jobs
from harness.grids import sampled
from harness.pace import seconds
from harness.thread_ranks import all_on_threads
from multirank import leaving_job
from multirank.leaving_job import LONG, PLACES, RIGHT

JOB = Path(leaving_job.__file__)
LEAVES = [number for number, line in enumerate(JOB.read_text().splitlines(), 1) if line.endswith("# leaves")]
WAYS = ("mpiexec", "standalone")
TOLD = 1.0  # seconds


def environment(folder):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder)}


def outcomes(mpiexec, folder, way, size, place, leaver):
    """Run the job; return the outcome of every rank, and the output."""
    command = [JOB, folder, place, str(leaver)]
    if way == "mpiexec":
        job = mpiexec(size, sys.executable, *command, timeout=seconds(90))
    else:
        job = jobs.python("-m", "gpucoll", "run", "--standalone", "-n", size, *command, timeout=90,
                          env=environment(folder))
    found = {int(path.name): json.loads(path.read_text()) for path in folder.iterdir() if path.name.isdecimal()}
    assert found.keys() == set(range(size)), job
    return found, job.stdout + job.stderr


def check(found, place, leaver, output=None):
    """Check that every other rank names the leaver, in time; a leaver that waits in `close` is warned."""
    count, how, _ = PLACES[place]
    for rank, (error, ranks, words, lasted, leaves) in found.items():
        if place in RIGHT:
            assert error == "NoneType", (rank, words)
        elif not leaves:
            assert error == "RankFailedError", (rank, words)
            # Of several ranks that have closed, the message awaited from any of them names those seen to close first.
            named = ranks if how == "all close" else [leaver]
            assert ranks, words
            assert {*named} <= {*ranks} <= {*found, leaver} - {rank}, (rank, words)
            # `gpucoll.distributed` makes calls of its own when it starts.
            calls = r"after its call \d+" if how == "destroy" else \
                f"after its call {count}" if count else "before its first call"
            assert re.search(rf"rank {named[0]}( \(process \d+\))? has closed the communicator {calls}", words), words
            lines = [int(line) for line in re.findall(rf"{JOB.name}:(\d+)", words)]
            assert lines, words
            assert how == "end" or {*lines} & {*LEAVES}, words
            assert lasted < seconds(TOLD), (lasted, words)
        else:
            assert error == "NoneType", (rank, words)
            assert how not in ("with", "close", "destroy") or output is None \
                or re.search(rf"rank {leaver} has closed the communicator .*, but rank ", output), output


POSITIONS = [(way, place, size, leaver) for way in WAYS for place in PLACES for size in (2, 3, 5)
             for leaver in (0, size - 1) if not (place == "messages" and size < 3)]


@pytest.mark.parametrize(("way", "place", "size", "leaver"), sampled(
    POSITIONS, 0, 4, *[(WAYS[number % 2], place, 3, 2 * (number % 3 == 0)) for number, place in enumerate(PLACES)]))
def test_a_rank_that_leaves_is_named(mpiexec, tmp_path, way, place, size, leaver):
    found, output = outcomes(mpiexec, tmp_path, way, size, place, leaver)
    check(found, place, leaver, output)


THREADS = [place for place, (_, how, _) in PLACES.items() if how in ("with", "close")]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("place", THREADS)
def test_a_thread_that_leaves_is_named(place, size):
    """Threads do not wait in `close`, so only the others are told."""
    if (place, size) == ("messages", 2):
        return
    comms, found = gc.init_local(size, timeout=seconds(60)), {}

    def program(comm):
        count, how, act = PLACES[place]
        for _ in range(count):
            comm.all_reduce(numpy.ones(4))
        began, error = time.monotonic(), None
        try:
            if comm.rank == 0:
                leaving_job.leave(how, comm)
            else:
                act(comm, 0)
        except gc.GpucollError as raised:
            error = raised
        found[comm.rank] = [type(error).__name__, list(error.ranks) if error else [], str(error or ""),
                            time.monotonic() - began, comm.rank == 0]

    all_on_threads(comms, program)
    for comm in comms:
        try:
            comm.close()
        except gc.MismatchError:
            assert place not in RIGHT
    del found[0]
    check(found, place, 0)


def test_a_root_that_was_ahead_is_told_at_the_end(mpiexec, tmp_path):
    """The root of short broadcasts waits for no rank: only `close` tells of calls that no other rank has made."""
    program = tmp_path / "ahead.py"
    program.write_text("""
import os, numpy
import gpucoll as gc
try:
    with gc.init(timeout=60) as comm:
        for step in range(20 if comm.rank == 0 else 12):
            comm.broadcast(numpy.ones(3), root=0, algorithm="linear")
except gc.MismatchError as error:
    os.write(1, f"{comm.rank} {error.ranks} {error}\\n".encode())
""")
    job = mpiexec(3, sys.executable, program, timeout=seconds(60))
    told = dict(line.split(" ", 1) for line in job.stdout.splitlines())
    assert told.keys() == {"0", "1", "2"}, job
    assert told["0"].startswith("(1, 2) [GC-COLLECTIVE] close: this rank has closed the communicator after its call 20")
    assert told["1"].startswith("(0,) [GC-COLLECTIVE] close: this rank has closed the communicator after its call 12")
    assert "rank 0 has closed the communicator after its call 20" in told["1"]


def test_a_refused_call_is_no_unlike_number_of_calls():
    """A refusal counts as no call more than the other ranks have made."""
    def program(comm):
        comm.barrier()
        if comm.rank == 1:
            for _ in range(2):
                with pytest.raises(gc.ArgumentError):
                    comm.all_reduce(numpy.ones(3), algorithm="rng")

    gc.run_local(program, 3, timeout=seconds(60))


def test_threads_that_compute_are_said_to_compute():
    """At the deadline a rank outside of calls is said to compute."""
    comms, left = gc.init_local(3, timeout=0.5), threading.Event()

    def program(comm):
        comm.all_reduce(numpy.ones(3), algorithm="ring")
        if comm.rank == 0:
            assert left.wait(seconds(60))
            return ""
        try:
            comm.all_reduce(numpy.ones(LONG), algorithm="ring")
        except gc.CollectiveTimeout as error:
            return str(error)
        finally:
            left.set()

    _, *told = all_on_threads(comms, program)
    computes = r"rank 0 computes since its call 1, all_reduce by ring.* \(first made at .*test_leaving.py:\d+\)"
    assert any(re.search(computes, words) for words in told), told
    for comm in comms:
        with contextlib.suppress(gc.MismatchError):
            comm.close()


def test_ranks_of_several_communicators_are_told_of_all_ends(mpiexec, tmp_path):
    """A rank closes two communicators of the same ranks, while the others are in a call of the second one."""
    program = tmp_path / "two.py"
    program.write_text("""
import os, time
import numpy
import gpucoll as gc
from gpucoll import internal
comms = [gc.init(timeout=60), gc.init().split(0)]
began = time.monotonic()
try:
    if comms[0].rank == 1:
        internal.close_together(comms)
        os.write(1, f"1 {time.monotonic() - began < 20}\\n".encode())
    else:
        comms[1].all_reduce(numpy.ones(4))
except gc.GpucollError as error:
    words = f"{comms[0].rank} {type(error).__name__} {error.ranks} {time.monotonic() - began < 20}"
    os.write(1, f"{words}\\n".encode())
if comms[0].rank != 1:
    internal.close_together(comms)
""")
    job = mpiexec(3, sys.executable, program, timeout=seconds(90))
    assert sorted(job.stdout.splitlines()) == [
        "0 RankFailedError (1,) True", "1 True", "2 RankFailedError (1,) True"], job
    assert job.stderr.count("rank 1 has closed the communicator before its first call") >= 1, job


def test_a_broken_transport_is_nobodys_known_fault():
    """The farewell of a rank blames the rank named by an error, this rank for an error of its own, else nobody."""
    def culprits(comm):
        farewell = comm._core.life.leaving.farewell
        return [farewell(error).culprits for error in (
            gc.BackendError("a message broke off"), gc.BackendError("a message broke off", ranks=(0,)),
            gc.BackendError("out of memory", code="GC-NCCL"), gc.RankFailedError("gone", ranks=(0,)),
            gc.UsageError("no"))]

    assert gc.run_local(culprits, 2, timeout=seconds(60))[1] == [(), (0,), (1,), (0,), (1,)]


def looks_twice(mpi):
    """A second thread looks for farewells after the first one has found one, and before it has received it."""
    wire, found, others = mpi.Dup(), {}, {}

    class Looked:
        def __getattr__(self, name):
            assert name != "Recv", "the message may be gone: this would wait for ever"

            def probe(*arguments):
                message = getattr(wire, name)(*arguments)
                others.update(by_mpi(wire))
                return message

            return probe

    farewell = Farewell(Why.CLOSES, calls=3, words="has closed")
    sent = Sent(wire, [mpi.rank], farewell)
    assert becomes(lambda: found.update(by_mpi(Looked())) or found or others, seconds(30))
    assert becomes(sent.has_ended, seconds(30))
    assert (found, others) == ({mpi.rank: farewell}, {})
    wire.Free()


def test_two_threads_may_look_for_farewells_at_once(rank_pool):
    rank_pool.run(looks_twice, 1, timeout=seconds(60))


INSIDE = f"""
import json, os, sys, time
import numpy
import gpucoll as gc

def main(comm):
    with comm:
        part = comm.split(0 if comm.rank < 3 else 1, -comm.rank)
        if "deep" in sys.argv:
            part = part.split(0)
        try:
            for batch in range(1 if comm.rank == 2 else 2 if comm.rank < 2 else 0):
                began = time.monotonic()
                part.all_reduce(numpy.ones(10))
        except gc.RankFailedError as error:
            assert error.ranks == (0,) and time.monotonic() - began < {seconds(5)}, error
            return f"{{comm.rank}} {{error}}"
    return f"{{comm.rank}} closed"

if "threads" in sys.argv:
    print(*gc.run_local(main, 4, timeout={seconds(20)}), sep="\\n")
else:
    os.write(1, f"{{main(gc.init(timeout={seconds(20)}))}}\\n".encode())
"""


@pytest.mark.parametrize("way", ["mpiexec", "mpiexec deep", "standalone", "threads", "threads deep"])
def test_ranks_in_a_part_are_told_that_a_rank_closes_the_whole(mpiexec, tmp_path, way):
    program = tmp_path / "inside.py"
    program.write_text(INSIDE)
    starter, *deep = way.split()
    if starter == "mpiexec":
        job = mpiexec(4, sys.executable, program, *deep, timeout=seconds(120))
    else:
        start = ["-m", "gpucoll", "run", "--standalone", "-n", "4"] if starter == "standalone" else []
        job = jobs.run_job([sys.executable, *start, str(program), *way.split()], timeout=seconds(120))
    told = "has closed a communicator of which this one is a part (inside.py:7), after its call 1"
    lines = sorted(line.replace(f"{tmp_path}{os.sep}", "") for line in job.stdout.splitlines())
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"], job
    assert all(told in line for line in lines[:2]), job
    assert [line.split()[1] for line in lines[2:]] == ["closed", "closed"], job


def outlives(comm):
    """A rank that has closed the whole, as have all ranks, takes no earlier farewell for an end of the part."""
    part = comm.split(0)
    part.all_reduce(numpy.ones(2))
    comm.close()
    sums = [part.all_reduce(numpy.full(2, float(turn)))[0] for turn in range(4)]
    guard = part._core.life.guard
    guard._looked = 0.0
    guard.check()
    return sums


def closes_with_queued_calls(comm):
    """Rank 0 waits in `close` of the whole while calls of the part are queued; these end when the others make them."""
    part = comm.split(0)
    part.all_reduce(numpy.ones(2))
    works, arrays = [], [numpy.full(2_000_000, float(turn)) for turn in range(4)]
    if comm.rank == 0:
        works = [part.all_reduce(array, async_op=True) for array in arrays]
    else:
        guard = comm._core.life.guard
        becomes(lambda: guard.hear() or guard.left, seconds(0.5))  # so that calls are queued; threads tell at their end
    sums = [] if works else [part.all_reduce(array)[0] for array in arrays]
    comm.close()
    return sums or [work.wait()[0] for work in works]


def on_mpi(mpi, program):
    assert program(gc.Communicator.from_mpi(mpi, timeout=seconds(60))) == [0.0, 3.0, 6.0, 9.0]


@pytest.mark.parametrize("program", [outlives, closes_with_queued_calls])
def test_a_part_outlives_the_whole_and_ends_its_queued_calls(rank_pool, program):
    assert gc.run_local(program, 3, timeout=seconds(60)) == [[0.0, 3.0, 6.0, 9.0]] * 3
    rank_pool.run(on_mpi, 3, program, timeout=seconds(60))


def meets(mpi):
    """Rank 0 waits in `from_mpi` while the others are in a call; once they have come there, nobody is blamed."""
    from mpi4py import MPI

    comm = gc.Communicator.from_mpi(mpi, timeout=seconds(60))
    comm.all_reduce(numpy.ones(1))
    if comm.rank:
        began = time.monotonic()
        with pytest.raises(gc.RankFailedError, match=r"rank 0 .*waits in from_mpi \(.*\), after its call 1;") as raised:
            comm.all_reduce(numpy.ones(1))
        assert raised.value.ranks == (0,)
        assert time.monotonic() - began < seconds(10)
    comm = gc.Communicator.from_mpi(mpi, timeout=seconds(60))
    more = gc.Communicator.from_mpi(mpi, timeout=seconds(60))
    assert [one.all_reduce(numpy.full(1, turn))[0] for one in (comm, more) for turn in range(3)] == 2 * [0, 3, 6]
    if comm.rank == 0:  # the ranks of the others do not come here
        gc.Communicator.from_mpi(MPI.COMM_SELF).close()
    comm.barrier()
    guard = comm._core.life.guard
    guard._looked = 0.0
    guard.check()
    more.close()
    comm.close()


def test_a_rank_that_waits_in_from_mpi_is_told_to_the_others(rank_pool):
    rank_pool.run(meets, 3, timeout=seconds(120))
