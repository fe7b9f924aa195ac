"""The pool of ranks returns results in rank order, and raises an error with evidence after any failure."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from multiprocessing.connection import wait
from pathlib import Path

import numpy
import pytest

from harness import leftovers
from harness.jobs import JOB_MARK, JobTimeout, marked
from harness.pace import seconds
from harness.ranks import RankDied, RankError, RankPool, RanksHung


class Picky(Exception):
    """An exception that can be pickled, but not unpickled: the constructor needs two arguments."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def who(comm, *args, **options):
    return comm.rank, comm.size, os.getpid(), args, options, os.environ.get("POOL_TEST")


def raise_on(comm, culprits, kind=ValueError, *args):
    if comm.rank in culprits:
        print(f"printed {comm.rank}")
        raise kind(*(args or ("as asked",)))
    comm.isend("stale", dest=culprits[0], tag=3).Free()


def exchange(comm):
    return comm.sendrecv("fresh", dest=1 - comm.rank, sendtag=3, source=1 - comm.rank, recvtag=3)


def wait_for(comm, culprit, action=None):
    """Let all ranks but the culprit wait in MPI; then let the culprit perform the action, or nothing."""
    if comm.rank != culprit:
        comm.send(None, dest=culprit, tag=8)  # from here on, the stack of this rank shows this function
        comm.recv(source=culprit, tag=9)
    else:
        for _ in range(comm.size - 1):
            comm.recv(tag=8)
    if action:
        comm.isend(0, dest=comm.rank, tag=5)
        {"raise": lambda: raise_on(comm, [culprit]), "exit": lambda: os._exit(3), "abort": lambda: comm.Abort(5),
         "crash": lambda: ctypes.string_at(0)}[action]()


def register():
    import gpucoll as gc

    gc.algorithm("all_reduce", "left_here", chunks=1)(lambda rank, size: iter(()))


def wait_forever():
    threading.Thread(target=FOREVER.wait, name="waits forever", daemon=True).start()


def patch():
    from gpucoll.algorithms import Algorithm

    Algorithm.price = patch


FOREVER = threading.Event()
LEAVES = {
    "an algorithm": register, "a variable": lambda: os.environ.update(LEFT_HERE="1"), "a thread": wait_forever,
    "a descriptor": lambda: os.open("/dev/null", os.O_RDONLY), "a folder": lambda: os.chdir("/"), "a patch": patch,
    "a handler": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "a child": lambda: os.posix_spawn("/bin/true", ["true"], {}),
    "a filter": lambda: warnings.simplefilter("ignore", BytesWarning),
    "a setting": lambda: numpy.seterr(divide="ignore"),
}
NAMES = {
    "an algorithm": r"table gpucoll.algorithms._REGISTRY: new \('all_reduce', 'left_here'\)",
    "a variable": "variable LEFT_HERE: new", "a thread": "thread .* waits forever",
    "a descriptor": "descriptor .* /dev/null", "a folder": "state the current folder: .* has become '/'",
    "a patch": "attribute gpucoll.algorithms.Algorithm.price: replaced",
    "a handler": "signal handler SIGTERM: .*SIG_DFL.* has become .*SIG_IGN", "a child": "child .* not waited for",
    "a filter": "state the filters of warnings: ", "a setting": "state numpy.seterr: .* has become .*ignore",
}
LASTS = ("a thread", "a descriptor", "a child")  # the pool cannot undo these


def works(ranks, *sizes):
    return all([found[:2] for found in ranks(who, size)] == [(rank, size) for rank in range(size)] for size in sizes)


@pytest.fixture(scope="module")
def three(launcher):
    """Yield the `run` method of a separate pool, so that spoilt ranks do not affect other tests."""
    with RankPool(3) as pool:
        yield pool.run


def test_results_come_in_rank_order_from_lasting_processes(ranks):
    found = ranks(who, 3, b"x" * (1 << 24), env={"POOL_TEST": "1"}, scale=2)
    assert [one[3:] for one in found] == [((b"x" * (1 << 24),), {"scale": 2}, "1")] * 3
    assert [one[2] for one in ranks(who, 3)] == [one[2] for one in found]
    assert ranks(who, 1)[0][5] is None
    assert works(ranks, 1, 3, 8)
    for size in (0, 9):
        with pytest.raises(ValueError, match=f"8 ranks, not {size}"):
            ranks(who, size)
    with pytest.raises(TypeError, match="top level"):
        ranks(lambda comm: None, 1)


def test_errors_show_where_and_what_was_printed_or_are_results(ranks):
    with pytest.raises(RankError) as caught:
        ranks(raise_on, 4, [1, 2])
    assert caught.value.ranks == [1, 2]
    for words in ("raised on ranks 1, 2 of 4", "--- rank 1 raised; rank 2 raised ---", "in raise_on",
                  "--- printed by rank 1 ---\nprinted 1\n"):
        assert words in str(caught.value)
    assert ranks(exchange, 2) == ["fresh", "fresh"]  # not the stale message of the failed run
    (state, error), _ = ranks(raise_on, 2, [0], allow_errors=True)
    assert (state, type(error), error.args) == ("error", ValueError, ("as asked",))
    (_, error), _ = ranks(raise_on, 2, [0], Picky, "this", "that", allow_errors=True)
    assert (type(error), str(error)) == (RuntimeError, "Picky: this and that")


@pytest.mark.parametrize("what", [what for what in LEAVES if what not in LASTS])
def test_what_a_test_leaves_in_this_process_is_named_and_put_back(what):
    before = leftovers.look()
    LEAVES[what]()
    assert re.search(NAMES[what], "; ".join(leftovers.restored(before)))
    assert leftovers.restored(before) == []


@pytest.mark.parametrize(("action", "kind", "options"), [
    ("exit", RankDied, {}),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [
        (None, RanksHung, {"timeout": 1}), ("raise", RankError, {"grace": 0.2}),
        ("raise", RanksHung, {"timeout": 1, "allow_errors": True}),
        ("abort", RankDied, {}), ("crash", RankDied, {})])])
def test_ranks_that_wait_in_vain_show_their_stacks(three, action, kind, options):
    assert works(three, 1, 3)  # import this file on all ranks first, so that the timeout covers only `wait_for`
    with pytest.raises(kind) as caught:
        three(wait_for, 3, 1, action, **options)
    message = str(caught.value)
    if action != "abort":
        # The launcher ends all ranks after the first death, so that a late check finds no rank alive.
        assert caught.value.ranks[0] == 0 if kind is RanksHung else 1 in caught.value.ranks
    if action not in ("abort", "crash"):  # after these, mpiexec may end all ranks
        for words in ("rank 0: running", "rank 2: running", "in wait_for"):
            assert words in message
    assert ("Segmentation fault" in message) == (action == "crash")
    assert ("as asked" in message) == (action == "raise")


PARENT = """
import os, sys
sys.path[:0] = {path!r}
import test_pool
from harness import ranks
pool = ranks.RankPool(size=2)
pool.run(test_pool.who, 2)
assert "mpi4py.MPI" not in sys.modules
print(pool.job.token, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_ranks_end_with_their_pool_or_their_parent(launcher):
    with RankPool(size=2) as pool:
        pool.run(who, 2)
        job = pool.job
    assert (job.process.returncode, marked(JOB_MARK, job.token), job.folder.exists()) == (0, [], False)
    script = PARENT.format(path=[str(Path(__file__).parent), str(Path(__file__).parents[1])])
    token = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    for member in marked(JOB_MARK, token):
        assert wait([member], seconds(60)), "a process of the job outlived the parent"
        os.close(member)


@pytest.mark.slow
def test_a_launched_job_returns_what_it_wrote_or_is_ended_with_all_its_children(mpiexec):
    """A hanging job is ended with its child, although the child has left the process group."""
    script = "import os; os.write(1, os.environ['ANSWER'].encode()); raise SystemExit(3)"
    done = mpiexec(1, sys.executable, "-c", script, env={"ANSWER": "42"})
    assert (done.returncode, done.stdout) == (3, "42")
    script = ("import os, subprocess, sys\n"
              "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=-1, start_new_session=True)\n"
              f"print('of', os.environ['{JOB_MARK}'], flush=True)\nchild.wait()\n")
    with pytest.raises(JobTimeout) as caught:
        mpiexec(1, sys.executable, "-c", script, timeout=3)
    assert marked(JOB_MARK, str(caught.value).rsplit("of ", 1)[1].split()[0]) == []
