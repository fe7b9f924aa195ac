"""Meetings for GPUs, on emulated ones: a rank that fails, hangs, dies or stays away is named soon."""

import json
import sys

import pytest

from gpu.emulated import environment
from gpucoll.launch import launchers
from harness.commands import kept
from harness.pace import seconds
from harness.ranks import launch

SIZE = 3
SOON = 3.0  # seconds on a fast machine, far below the deadline of the programs; documents say 1

pytestmark = [pytest.mark.kernel, pytest.mark.emulated]


@pytest.fixture
def told(launcher, emulated_kernels, tmp_path):
    """Return a function that runs programs of `gpu.meetings`, and returns what each rank was told, by program."""
    def run(*names, words=(), **variables):
        result = launch(SIZE, sys.executable, *words, "-m", "gpu.meetings", *names, timeout=seconds(120),
                        env=environment(**variables, SURVIVORS=str(tmp_path)))
        found = {name: {} for name in names}
        for line in result.stdout.splitlines():
            if line.startswith("{"):
                row = json.loads(line)
                found[row["program"]][row["rank"]] = row
        for name, rows in found.items():
            assert {0, 2} <= rows.keys(), (name, result.stdout + result.stderr)
        return found

    return run


def store():
    return {"STORE": f"tcp://127.0.0.1:{launchers.free_port()}"}


def check(rows, error, mine, text=""):
    """Check that the other ranks have raised `error` soon, naming rank 1, and rank 1 its own error, with `text`."""
    for rank, row in rows.items():
        expected = mine if rank == 1 else error
        assert row["error"] == expected, row
        assert row["revoked"], row
        assert rank == 1 or row["ranks"] == [1], row
        assert row["seconds"] < seconds(SOON), row
    assert text in rows[1]["text"], rows[1]


def test_a_rank_that_fails_alone_is_named_at_once(told):
    """The failure is in making NCCL's communicator of all ranks, or of a pair, or on this rank's GPU."""
    found = told("init", "points", "gpu", "multicast", "bound", "exchange")
    check(found["init"], "RankFailedError", "BackendError", "NCCL_DEBUG=INFO")
    check(found["points"], "RankFailedError", "BackendError", "GC-NCCL")
    check(found["gpu"], "RankFailedError", "CUDARuntimeError", "802")
    check(found["multicast"], "RankFailedError", "BackendError", "NCCL_NVLS_ENABLE=0")
    check(found["exchange"], "RankFailedError", "BackendError", "NCCL_CUMEM_ENABLE=0")
    check(found["bound"], "RankFailedError", "BackendError", "NCCL_NVLS_ENABLE=0")
    words = found["bound"][1]["text"]
    assert words.count("NCCL_NVLS_ENABLE") == 1  # NCCL's own words say so
    assert "\n" not in words  # the first line of an error says all


def test_a_rank_that_fails_in_a_later_meeting_is_named_at_once(told):
    found = told("split", "window", "handshake")
    check(found["split"], "RankFailedError", "BackendError", "GC-NCCL")
    check(found["window"], "RankFailedError", "BackendError", "NCCL window")
    check(found["handshake"], "RankFailedError", "RuntimeError", "a fault of this rank alone")


def test_ranks_with_another_call_than_the_first_one_on_a_gpu_are_told(told):
    """The calls are compared before the ranks meet inside NCCL."""
    for name, rows in told("host", "host_barrier", "empty", "host_split").items():
        check(rows, "MismatchError", "MismatchError")
        assert "the first call on a GPU" in rows[0]["text"], name


def test_a_rank_that_closes_instead_of_a_call_is_named(told):
    for name, rows in told("close", "later_close").items():
        assert rows.keys() == {*range(SIZE)}, name
        check(rows, "RankFailedError", "NoneType")
        # The meeting of the ranks on their GPUs is compared, and so counted, too.
        before = "before its first call" if name == "close" else "after its call 2"
        for rank in (0, 2):
            assert f"has closed the communicator {before}" in rows[rank]["text"], rows


def test_the_reason_of_a_failed_call_on_a_gpu_travels(told):
    """The other ranks read the number of the call, and the reason that NCCL gave to rank 1."""
    rows = told("call")["call"]
    check(rows, "RankFailedError", "BackendError", "out of memory")
    for rank in (0, 2):
        assert "has failed in its call 7: [GC-NCCL]" in rows[rank]["text"], rows
        assert "out of memory" in rows[rank]["text"], rows


@pytest.mark.slow
def test_a_communicator_of_nccl_that_comes_after_the_deadline_is_aborted(told):
    rows = told("hung")["hung"]
    for row in rows.values():
        assert row["error"] == "CollectiveTimeout", row
        assert "NCCL_CUMEM_ENABLE=0" in row["text"], row
        assert row["aborted"], row


@pytest.mark.parametrize("carrier", ["mpi", "store"])
def test_a_rank_killed_inside_ncclcomminitrank_is_named(told, carrier, tmp_path):
    rows = told("dies", words=kept(SIZE - 1, tmp_path), **(store() if carrier == "store" else {}))["dies"]
    assert rows.keys() == {0, 2}
    check({**rows, 1: {**rows[0], "error": ""}}, "RankFailedError", "")


def test_a_rank_that_fails_alone_is_named_without_mpi(told):
    check(told("init", **store())["init"], "RankFailedError", "BackendError", "GC-NCCL")
