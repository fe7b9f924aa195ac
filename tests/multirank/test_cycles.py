"""Cycles of blocking messages inside a node: every rank of a cycle raises the same error at once, and no other rank."""

import os
import sys
import time
from unittest import mock

import numpy
import pytest

import gpucoll as gc
from gpucoll.communicator import cycles
from gpucoll.communicator.cycles import ring
from harness.node_ranks import on_shared
from harness.pace import seconds

LONG = 200_000  # elements: a message waits for its receiver


def neighbours(comm):
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def sends(comm, x, y):
    right, left = neighbours(comm)
    comm.send(x, right)
    comm.recv(y, left)


def receives(comm, x, y):
    right, left = neighbours(comm)
    comm.recv(y, left, tag=3)
    comm.send(x, right, tag=3)


def mixed(comm, x, y):
    """Even ranks receive from the next rank, odd ranks send to the next rank, with other tags."""
    right, _ = neighbours(comm)
    if comm.rank % 2:
        comm.send(x, right, tag=5)
    else:
        comm.recv(y, right, tag=7)


def exchanges(comm, x, y):
    """The sends of the exchanges end, and the receives wait for each other: all ranks pass the same neighbour twice."""
    right, _ = neighbours(comm)
    comm.sendrecv(x[:4], y, right, right, tag=1) if comm.size > 2 else comm.recv(y, right)


def works(comm, x, y):
    right, left = neighbours(comm)
    work = comm.send(x, right, async_op=True)
    later = comm.recv(y, left, tag=9, async_op=True)
    later.wait()
    work.wait()


def in_groups(comm, x, y):
    right, _ = neighbours(comm)
    with comm.group():
        comm.send(x, right)
    comm.recv(y, right)


@on_shared
def raises_alike(comm, program):
    """Return the words of the error."""
    began = time.monotonic()
    with pytest.raises(gc.UsageError) as told:
        program(comm, numpy.ones(LONG), numpy.empty(LONG))
    assert time.monotonic() - began < seconds(30)
    assert told.value.code == "GC-DEADLOCK"
    assert told.value.ranks == (*range(comm.size),)
    assert str(told.value).count(f"{os.path.basename(__file__)}:") == comm.size
    with pytest.raises(gc.RevokedError):
        comm.send(numpy.ones(1), 0)
    return str(told.value)


CASES = [(program, size) for program in (sends, receives) for size in (2, 3, 5, 7)]
CASES += [(program, 3) for program in (mixed, exchanges, works, in_groups)] + [(mixed, 2), (sends, 1), (receives, 1)]


@pytest.mark.parametrize(("program", "size"), CASES)
def test_every_rank_of_a_cycle_raises_the_same_error(ranks, program, size):
    assert len({*ranks(raises_alike, size, program)}) == 1


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("program", [sends, receives])
def test_every_thread_of_a_cycle_raises_the_same_error(program, size):
    assert len({*gc.run_local(lambda comm: raises_alike.__wrapped__(comm, program), size, timeout=seconds(60))}) == 1


# ---------------------------------------------------------------- programs without a cycle


@on_shared
def right_programs(comm):
    """Programs that look like a cycle for a while."""
    right, left = neighbours(comm)
    for turn in range(60):
        x, y = numpy.full(LONG, turn + comm.rank), numpy.empty(LONG, int)
        for program in (in_turns, posted_before, from_anybody, at_once, beside_collectives, one_after_another):
            program(comm, x, y, right, left)
            assert (y == turn + left).all(), program


def looked_at(mpi):
    """Show and look at every poll of every wait."""
    with mock.patch.multiple(cycles, AFTER=0, BOARD_INTERVAL=0):
        right_programs(mpi)


def in_turns(comm, x, y, right, left):
    if comm.rank == 0:
        comm.send(x, right)
        comm.recv(y, left)
    else:
        comm.recv(y, left)
        comm.send(x, right)


def posted_before(comm, x, y, right, left):
    """The sends go around the ring at once, into receives begun before."""
    work = comm.recv(y, left, async_op=True)
    comm.send(x, right)
    work.wait()


def from_anybody(comm, x, y, right, left):
    """The receives take the messages only once these are there: no receive is known to the engine before."""
    work = comm.recv(y, gc.ANY_SOURCE, tag=gc.ANY_TAG, async_op=True)
    comm.send(x, right)
    work.wait()


def at_once(comm, x, y, right, left):
    with comm.group():
        comm.send(x, right)
        comm.recv(y, left)
    comm.sendrecv(x, y, right, left)


def beside_collectives(comm, x, y, right, left):
    total = comm.all_reduce(x[:5], async_op=True)
    posted_before(comm, x, y, right, left)
    total.wait()


def one_after_another(comm, x, y, right, left):
    """Rank 0 waits in a send for rank 1, rank 1 for rank 2, and so on, until the last rank receives."""
    short = numpy.empty(1)
    sent = comm.send(x, right, async_op=True)
    if comm.rank:
        comm.recv(y, left)
        comm.send(numpy.ones(1), left, tag=8)
        sent.wait()
    if comm.rank != comm.size - 1:
        comm.recv(short, right, tag=8)
    if comm.rank == 0:
        comm.recv(y, left)
        sent.wait()


@pytest.mark.parametrize("size", [2, 3])
def test_a_right_program_is_no_cycle(ranks, size):
    ranks(looked_at, size)


def test_a_right_program_of_threads_is_no_cycle():
    with mock.patch.multiple(cycles, AFTER=0, BOARD_INTERVAL=0):
        gc.run_local(right_programs.__wrapped__, 4, timeout=seconds(60))


# ---------------------------------------------------------------- the engine's board, step by step


def board(comm):
    return comm._points.board


def found(comm):
    """Return the cycle through each rank, as read by this rank."""
    waits = cycles._waits(board(comm))
    return [ring(rank, waits) for rank in range(comm.size)]


@on_shared
def step_by_step(comm):
    """Rank 0 sends tag 4 to rank 1, which receives tag 5: both are stuck. Then rank 1 receives tag 4."""
    engine, other = board(comm), 1 - comm.rank
    sent = engine.message(comm.rank == 0, numpy.zeros(LONG), other, 4 + comm.rank)
    for _ in range(3):  # the second time each has seen the other's messages, the third time the other's wait
        number = engine.show_wait((sent,), "a line")
        comm.mpi.Barrier()
    assert number == 1
    assert found(comm) == [[(0, 1, True), (1, 1, False)], [(1, 1, False), (0, 1, True)]]
    comm.mpi.Barrier()
    if comm.rank == 1:
        engine.message(False, numpy.zeros(1), 0, 77)  # a rank that begins a message does not wait
    comm.mpi.Barrier()
    assert found(comm) == [[], []]
    comm.mpi.Barrier()
    if comm.rank == 0:
        # Of rank 1's next wait nothing is known yet: a receive may have begun before it.
        engine.hide_wait()
        assert engine.show_wait((sent,), "a line") == 3
    comm.mpi.Barrier()
    if comm.rank == 1:
        took = engine.message(False, numpy.zeros(LONG), 0, 4)
        assert took.Test()
        assert engine.show_wait((sent,), "a line") == 3
        assert found(comm) == [[], []]
    comm.mpi.Barrier()
    assert engine.show_wait((sent,), "a line") == (0 if comm.rank == 0 else 3)
    comm.mpi.Barrier()
    assert found(comm) == [[], []]
    engine.hide_wait()
    comm.mpi.Barrier()


@on_shared
def on_its_way(comm):
    """A message that the receiver has not looked at, short or long, or that meets a receive begun before: no cycle."""
    engine = board(comm)
    for count in (1, LONG):
        row, out, shown = numpy.ones(count), numpy.zeros(count), numpy.zeros(1)
        if comm.rank == 0:
            waits_for = [engine.message(False, out, 1, 4)]
            engine.show_wait(tuple(waits_for), "rank 0")
        comm.mpi.Barrier()
        if comm.rank == 1:
            sent = engine.message(True, row, 0, 4)
            waits_for = [engine.message(False, shown, 0, 6)]
            engine.show_wait((*waits_for, *([] if count == 1 else [sent])), "rank 1")
            assert [*map(len, found(comm))] == [0, 0]
        comm.mpi.Barrier()
        if comm.rank == 0:
            # The message comes in this look, and so this rank no longer waits.
            assert engine.show_wait(tuple(waits_for), "rank 0") == 0
            engine.message(True, shown, 1, 6)
        comm.mpi.Barrier()
        assert waits_for[0].Test()
        engine.hide_wait()
        comm.mpi.Barrier()


@on_shared
def into_a_posted_receive(comm):
    """Rank 0 sends a long message into a receive of rank 1 begun before, while rank 1 waits for another message."""
    engine = board(comm)
    if comm.rank == 1:
        posted = engine.message(False, numpy.zeros(LONG), 0, 4)
        requests = [engine.message(False, numpy.zeros(1), 0, 6)]
    comm.mpi.Barrier()
    if comm.rank == 0:
        requests = [engine.message(True, numpy.ones(LONG), 1, 4)]
        assert engine.show_wait(tuple(requests), "rank 0") == 1
    comm.mpi.Barrier()
    if comm.rank == 1:
        assert engine.show_wait(tuple(requests), "rank 1") == 1
    comm.mpi.Barrier()
    assert found(comm) == [[], []]
    comm.mpi.Barrier()
    assert comm.rank == 0 or posted.Test()


@pytest.mark.parametrize("body", [step_by_step, on_its_way, into_a_posted_receive])
def test_what_ranks_show(ranks, body):
    ranks(body, 2)


# ---------------------------------------------------------------- whole programs

PROGRAM = """
import sys, numpy, gpucoll as gc
comm = gc.init(timeout={timeout})
x, y = numpy.ones(200_000), numpy.empty(200_000)
{body}
"""
CYCLE = "comm.send(x, (comm.rank + 1) % comm.size)"
LEAVES = "comm.barrier(); work = comm.{call}(x, 1, async_op=True) if comm.rank == 0 else None"


def job(run, tmp_path, body):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(timeout=seconds(60), body=body))
    return run(3, sys.executable, program, timeout=seconds(50))


def test_a_job_ends_at_once_with_the_cycle_named(mpiexec, tmp_path):
    began = time.monotonic()
    ended = job(mpiexec, tmp_path, CYCLE)
    assert ended.returncode != 0
    assert "rank 2 sends 1.6 MB to rank 0, tag 0" in ended.stderr
    assert time.monotonic() - began < seconds(30)


@pytest.mark.parametrize("call", ["recv", "send"])
def test_the_end_of_a_process_does_not_wait_for_its_messages(mpiexec, tmp_path, call):
    began = time.monotonic()
    ended = job(mpiexec, tmp_path, LEAVES.format(call=call))
    assert ended.returncode == 0, ended.stderr
    assert f"rank 0: [GC-USAGE] the process ends with {call} of 1.6 MB" in ended.stderr
    assert time.monotonic() - began < seconds(30)
