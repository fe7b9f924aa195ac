"""The pool of ranks returns results in rank order, and raises an error with evidence after any failure."""

import ctypes
import os
import re
import signal
import warnings

import pytest

from harness import leftovers
from harness.ranks import RankDied, RankError, RankPool, RanksHung


def who(comm, *args, **options):
    return comm.rank, comm.size, os.getpid(), args, options, os.environ.get("POOL_TEST")


def raise_on(comm, culprits, kind=ValueError, *args):
    if comm.rank in culprits:
        print(f"printed {comm.rank}")
        raise kind(*(args or ("as asked",)))
    comm.isend("stale", dest=culprits[0], tag=3).Free()


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


LEAVES = {
    "an algorithm": register, "a variable": lambda: os.environ.update(LEFT_HERE="1"),
    "a folder": lambda: os.chdir("/"),
    "a handler": lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
    "a filter": lambda: warnings.simplefilter("ignore", BytesWarning),
}
NAMES = {
    "an algorithm": r"table gpucoll.algorithms._REGISTRY: new \('all_reduce', 'left_here'\)",
    "a variable": "variable LEFT_HERE: new", "a folder": "state the current folder: .* has become '/'",
    "a handler": "signal handler SIGTERM: .*SIG_DFL.* has become .*SIG_IGN",
    "a filter": "state the filters of warnings: ",
}


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


@pytest.mark.parametrize("what", LEAVES)
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
