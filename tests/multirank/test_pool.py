"""The pool of ranks keeps its promises: results in order, and an error with evidence for whatever goes wrong."""

import ctypes
import os
import re
import subprocess
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from ranks import JobTimeout, RankDied, RankError, RankException, RankPool, RanksHung, job_members

SIZES = (1, 2, 3, 8)


def who(comm):
    return comm.rank, comm.size


def process(comm):
    return os.getpid()


def total(comm, first, *, scale=1):
    return comm.allreduce((first + comm.rank) * scale)


def same_communicator(comm, box=[]):  # noqa: B006 (the box is meant to last)
    box.append(comm)
    return box[0] is box[-1]


def shout(comm, text):
    print(f"{text} {comm.rank}")
    os.write(2, b"from the depths\n")
    raise RuntimeError("after printing")


class Picky(Exception):
    """Can be pickled, but not be made again from its text alone."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_on(comm, culprits, kind=ValueError, *args):
    if comm.rank in culprits:
        raise kind(*(args or ("as asked",)))
    return comm.rank


def raise_each_its_own(comm):
    if comm.rank == 1:
        raise KeyError("one")
    raise ValueError("the others")


def raise_while_others_wait(comm, culprit):
    if comm.rank == culprit:
        raise ValueError("gone fishing")
    comm.recv(source=culprit, tag=7)


def leave_a_message_and_raise(comm):
    comm.isend("stale", dest=1 - comm.rank, tag=3).Free()
    raise ValueError("with a message on its way")


def exchange(comm):
    return comm.sendrecv("fresh", dest=1 - comm.rank, sendtag=3, source=1 - comm.rank, recvtag=3)


def leave(comm):
    sys.exit(3)


def wait_for_nothing(comm, waiting):
    if comm.rank in waiting:
        wait_in_mpi(comm)


def wait_in_mpi(comm):
    comm.recv(source=comm.size - 1, tag=9)


def die(comm, culprit):
    comm.barrier()  # everybody is in here by now, for the stacks
    if comm.rank == culprit:
        os._exit(3)
    comm.recv(source=culprit, tag=7)


def segfault(comm):
    if comm.rank == 1:
        ctypes.string_at(0)
    comm.barrier()


def abort(comm):
    if comm.rank == 2:
        comm.Abort(5)
    comm.barrier()


def variables(comm, *names):
    return [os.environ.get(name) for name in names]


def unpicklable(comm):
    return lambda: None


@pytest.fixture
def still_works(ranks):
    """After the test the pool works on all sizes."""
    yield
    assert [ranks(who, size) for size in SIZES] == [[(rank, size) for rank in range(size)] for size in SIZES]


# Results


@pytest.mark.parametrize("size", range(1, 9))
def test_results_come_in_rank_order_from_exactly_these_ranks(ranks, size):
    assert ranks(who, size) == [(rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_arguments_reach_every_rank_and_the_ranks_reach_each_other(ranks, size):
    assert ranks(total, size, 10, scale=2) == [sum(2 * (10 + rank) for rank in range(size))] * size


def test_processes_and_communicators_last(ranks):
    assert ranks(process, 8) == ranks(process, 8)
    assert all(ranks(same_communicator, 3) + ranks(same_communicator, 3))


def test_a_large_array_goes_there_and_back(ranks):
    data = bytes(range(256)) * 65536
    assert ranks(echo, 2, data) == [data, data]


def echo(comm, value):
    return value


def test_the_parent_does_not_load_mpi():
    """In a process of its own: tests of other files may have loaded it in this one."""
    code = "import sys, ranks, rank_worker; print('mpi4py.MPI' in sys.modules)"
    job = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], capture_output=True, text=True,
                         timeout=60)
    assert job.stdout == "False\n", job.stderr


def test_a_run_does_not_load_mpi_in_the_parent(ranks):
    before = "mpi4py.MPI" in sys.modules
    ranks(who, 1)
    assert ("mpi4py.MPI" in sys.modules) == before


def test_environment_holds_for_the_run_only(ranks):
    names = ("POOL_TEST_NEW", "HOME")
    before = ranks(variables, 2, *names)
    assert ranks(variables, 2, *names, env={"POOL_TEST_NEW": "1", "HOME": None}) == [["1", None]] * 2
    assert ranks(variables, 2, *names) == before
    with pytest.raises(RankError):
        ranks(raise_on, 2, [0], env={"POOL_TEST_NEW": "1"})
    assert ranks(variables, 2, *names) == before


@pytest.mark.parametrize("size", [0, 9])
def test_a_size_that_the_pool_does_not_have(ranks, size):
    with pytest.raises(ValueError, match=f"8 ranks, not {size}"):
        ranks(who, size)


def test_a_program_must_be_found_by_name(ranks):
    with pytest.raises(TypeError, match="top level"):
        ranks(lambda comm: None, 1)


# Ranks that raise


def test_one_rank_raises(ranks, still_works):
    with pytest.raises(RankError) as caught:
        ranks(raise_on, 3, [1])
    message = str(caught.value)
    assert caught.value.ranks == [1]
    assert isinstance(caught.value.exceptions[1], ValueError)
    assert "raised on rank 1 of 3" in message
    assert "in raise_on" in message
    assert "ValueError: as asked" in message
    assert "rank_worker" not in message
    assert "printed" not in message


def test_like_tracebacks_are_shown_once(ranks):
    with pytest.raises(RankError) as caught:
        ranks(raise_each_its_own, 4)
    message = str(caught.value)
    assert message.count("Traceback") == 1
    assert "ranks 2, 3: the same traceback as rank 0" in message
    assert "rank 1: KeyError: 'one'" in message


def test_what_ranks_print_is_shown_when_they_fail(ranks):
    with pytest.raises(RankError) as caught:
        ranks(shout, 2, "earlier")
    with pytest.raises(RankError) as caught:
        ranks(shout, 2, "hello from")
    message = str(caught.value)
    assert "--- printed by rank 1 ---\nhello from 1\nfrom the depths\n" in message
    assert "earlier" not in message


@pytest.mark.parametrize("size", [2, 8])
def test_one_rank_raises_while_the_others_wait_for_it(ranks, still_works, size):
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(raise_while_others_wait, size, 1, timeout=60, grace=0.5)
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert caught.value.ranks == [1]
    raised, stacks = message.split("--- rank 0: running ---")
    assert "gone fishing" in raised
    assert "in raise_while_others_wait" in stacks
    assert "rank 1: raised" in message


def test_a_failed_run_leaves_no_message_to_the_next(ranks):
    ranks(leave_a_message_and_raise, 2, allow_errors=True)
    assert ranks(exchange, 2) == ["fresh", "fresh"]


def test_errors_can_be_results(ranks):
    (first, value), (second, error) = ranks(raise_on, 2, [1], allow_errors=True)
    assert (first, value) == ("ok", 0)
    assert second == "error"
    assert type(error) is ValueError
    assert error.args == ("as asked",)
    assert "in raise_on" in error.rank_traceback


def test_an_exception_that_cannot_be_pickled_keeps_its_name_and_text(ranks):
    [(_, error)] = ranks(raise_on, 1, [0], Picky, "this", "that", allow_errors=True)
    assert type(error) is RankException
    assert error.type_name == "Picky"
    assert "this and that" in str(error)
    assert "in raise_on" in error.rank_traceback


def test_errors_as_results_know_no_grace(ranks, still_works):
    with pytest.raises(RanksHung) as caught:
        ranks(raise_while_others_wait, 3, 1, timeout=0.5, grace=0.1, allow_errors=True)
    assert caught.value.ranks == [0, 2]
    assert "gone fishing" in str(caught.value)


def test_exit_is_an_error_like_others(ranks, still_works):
    [(_, error)] = ranks(leave, 1, allow_errors=True)
    assert isinstance(error, SystemExit)
    assert error.code == 3


def test_a_result_that_cannot_be_pickled(ranks, still_works):
    with pytest.raises(RankError, match="pickle"):
        ranks(unpicklable, 2)


def test_many_failures_do_not_use_up_the_communicators(ranks, monkeypatch):
    monkeypatch.setattr("ranks.GENERATIONS", 3)
    before = ranks(process, 1)
    for _ in range(4):
        ranks(raise_on, 2, [0], allow_errors=True)
    assert ranks(process, 1) != before


# Ranks that hang or die


def test_a_hang_shows_every_ranks_stack(ranks, still_works):
    before = ranks(process, 8)
    with pytest.raises(RanksHung) as caught:
        ranks(wait_for_nothing, 4, [0, 2], timeout=1)
    message = str(caught.value)
    assert caught.value.ranks == [0, 2]
    assert "wait_for_nothing did not end within 1 s on ranks 0, 2" in message
    assert "--- rank 0: running ---" in message
    assert "in wait_in_mpi" in message
    assert "--- rank 2: running; the same stack as rank 0" in message
    assert "--- rank 1: finished ---" in message
    assert "rank 3: finished" in message
    assert "end_with_parent" not in message
    assert not set(before) & set(ranks(process, 8))


@pytest.mark.parametrize(("culprit", "size"), [(0, 2), (1, 3), (7, 8)])
def test_a_death_is_noticed_at_once(ranks, still_works, culprit, size):
    start = time.monotonic()
    with pytest.raises(RankDied) as caught:
        ranks(die, size, culprit, timeout=60)
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert caught.value.ranks == [culprit]
    assert message.startswith(f"rank {culprit} (process ")
    survivor = min({0, 1} - {culprit})
    assert f"--- rank {survivor}: running ---" in message
    assert "in die" in message


def test_a_crash_shows_where(ranks, still_works):
    with pytest.raises(RankDied) as caught:
        ranks(segfault, 3)
    message = str(caught.value)
    assert caught.value.ranks[0] == 1
    assert "printed by rank 1" in message
    assert "Segmentation fault" in message
    assert "in segfault" in message


def test_an_abort_ends_all(ranks, still_works):
    """The rank that calls MPI_Abort need not be the first to die, nor dead by the time of the report."""
    with pytest.raises(RankDied, match="rank 2"):
        ranks(abort, 3)


# The life of a pool


def test_closing_ends_every_process(launcher):
    with RankPool(size=2) as pool:
        assert pool.run(who, 2) == [(0, 2), (1, 2)]
        job = pool.job
        assert len(job_members(job.token)) >= 3
    assert job.process.returncode == 0
    assert job_members(job.token) == []
    assert not job.folder.exists()


PARENT = """
import os, sys
sys.path[:0] = {path!r}
import ranks, test_pool
pool = ranks.RankPool(size=2)
pool.run(test_pool.who, 2)
print(pool.job.token, flush=True)
if {busy}:
    import threading
    threading.Timer(0.5, os._exit, [0]).start()
    pool.run(test_pool.wait_for_nothing, 2, [0, 1])
os._exit(0)
"""


@pytest.mark.parametrize("busy", [False, True])
def test_ranks_end_with_their_parent(launcher, busy):
    here = Path(__file__).parent
    script = PARENT.format(path=[str(here), str(here.parent)], busy=busy)
    token = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60).stdout.strip()
    for member in job_members(token):
        assert wait([member], 20), "a process of the job outlived the parent"
        os.close(member)
    assert token
    assert not job_members(token)


# Jobs of their own


def test_a_launched_job_returns_what_it_wrote(mpiexec):
    script = "import os, sys; os.write(1, f'out {os.environ[\"ANSWER\"]}\\n'.encode()); os.write(2, b'err\\n')"
    done = mpiexec(2, sys.executable, "-c", script, env={"ANSWER": "42"})
    assert done.returncode == 0
    assert done.stdout.count("out 42") == 2
    assert done.stderr.count("err") == 2


def test_a_launched_job_returns_its_exit_code(mpiexec):
    assert mpiexec(1, sys.executable, "-c", "raise SystemExit(3)").returncode == 3


def test_a_launched_job_that_hangs_is_ended_with_all_its_children(mpiexec, tmp_path):
    """Each rank has a child, which has left the process group and ignores SIGTERM."""
    script = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE, start_new_session=True)\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with pytest.raises(JobTimeout) as caught:
        mpiexec(2, sys.executable, "-c", script, timeout=2)
    children = re.findall(r"child (\d+)", str(caught.value))
    assert len(children) == 2
    assert not [child for child in children if is_running(child)]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
