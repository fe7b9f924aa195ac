"""`gpucoll report DIR --stragglers`: delays of ranks, from records written here and from a real run."""

import inspect
import json
import time

import numpy
import pytest

import gpucoll as gc
from gpucoll.cli import main
from gpucoll.core.signature import Signature
from gpucoll.health.flight import RecordedCall, Story
from gpucoll.health.report import delays, straggler
from harness.pace import seconds
from harness.thread_ranks import all_on_threads

SECOND = 10**9
START = 1_700_000_000 * SECOND
PERIOD, LENGTH = SECOND, SECOND // 100  # between the begins of calls, and the length of a call


def stories(late, calls=20, size=4):
    """Return records in which rank r comes `late(number, r)` ns to each call; all ranks leave together."""
    found = []
    for rank in range(size):
        made = []
        for number in range(1, calls + 1):
            start = START + number * PERIOD
            end = start + max(late(number, other) for other in range(size)) + LENGTH
            made.append(RecordedCall(number, start + late(number, rank), end, 8, Signature("barrier"),
                                     f"train.py:{10 + number % 2}"))
        found.append(Story("g", rank, size, 100 + rank, "host", tuple(made)))
    return {"g": found}


def test_the_late_rank_is_named_with_its_place_and_since_when():
    late = SECOND // 5
    found = straggler(stories(lambda number, rank: late * (rank == 2 and number >= 7 and number % 2)))
    assert (found["rank"], found["place"], found["calls"]) == (2, "train.py:11", 7)
    assert found["seconds"] == pytest.approx(7 * 0.2)
    assert found["share"] == 1
    assert found["since"] == pytest.approx((START + 7 * PERIOD) / SECOND, rel=0, abs=1e-3)


def test_shares_are_parts_of_all_delays():
    found = straggler(stories(lambda number, rank: (0, 0, 30, 90)[rank] * 1000 * 1000))
    assert [(row["rank"], row["share"]) for row in found["ranks"]] == [(3, 0.75), (2, 0.25)]


def test_a_single_early_rank_makes_no_rank_late():
    found = straggler(stories(lambda number, rank: SECOND // 2 * (rank > 0)))
    assert (found["rank"], found["ranks"]) == (None, [])


def test_the_clock_of_a_host_counts_for_the_calls_of_a_process():
    """Rank 1's record before has the host's own clock, a second behind: the delay is at most the time in between."""
    barrier = Signature("barrier")
    alone = Story("own", 0, 1, 101, "host", (RecordedCall(1, START, START + 505, 8, barrier),))
    first, second = (Story("g", rank, 2, 100 + rank, "host", (
        RecordedCall(1, START, START, 8, barrier),
        RecordedCall(2, START + SECOND + 15 + 500 * rank, START + SECOND + 600, 8, barrier)),
        clock_offset=SECOND * rank) for rank in range(2))
    found = [(one.rank, one.nanoseconds) for one in delays({"own": [alone], "g": [first, second]}) if one.nanoseconds]
    assert found == [(1, 10)]


def test_a_call_that_ended_late_is_no_delay_before_the_next():
    barrier, broadcast = Signature("barrier"), Signature("broadcast")
    first, second = (Story("g", rank, 2, 100 + rank, "host", (
        RecordedCall(1, START - 20, START - 10, 8, barrier), RecordedCall(2, START - 5, START - 4, 8, broadcast),
        RecordedCall(3, START, START + 10 + 500 * rank, 8, broadcast),
        RecordedCall(4, START + 20 + 500 * rank, START + 600, 8, barrier))) for rank in range(2))
    # Rank 1 leaves the third call 500 ns later, and takes 10 ns until the second, as rank 0 does.
    assert [(one.rank, one.nanoseconds) for one in delays({"g": [first, second]}) if one.nanoseconds] == [(1, 10)]


def test_a_real_rank_is_named_with_the_line_of_its_call(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("GPUCOLL_DUMP_DIR", str(tmp_path))
    comms = gc.init_local(2, timeout=seconds(60))
    lines = []

    def run(comm):
        x = numpy.ones(100)
        for _ in range(8):  # the engine's own table does most of the calls
            if comm.rank == 1:
                while comms[0]._core.life._awaited() != {1}:
                    time.sleep(1e-4)
                time.sleep(0.02)  # the delay itself
            lines.append(inspect.currentframe().f_lineno + 1)
            comm.all_reduce(x)

    before = time.time()
    all_on_threads(comms, run)
    after = time.time()
    figures = [comm.stats()["all_reduce", 512] for comm in comms]
    for comm in comms:
        comm.close()
    # `stats` is the sum of the records, but that Python may take a delay before a first call for its own work.
    assert main(["report", str(tmp_path), "--json"]) == 0
    shares, = json.loads(capsys.readouterr().out)["shares"]
    added = {name: sum(one[name] for one in figures) for name in figures[0]}
    assert (shares["collective"], shares["calls"], shares["bytes"]) == ("all_reduce", 16, added["bytes"])
    assert shares["waiting_seconds"] == pytest.approx(added["waiting_seconds"])
    assert shares["own_seconds"] >= added["own_seconds"] - 1e-9 > 7 * 0.02
    assert main(["report", str(tmp_path)]) == 0
    assert f"{__file__}:{lines[0]}"[-100:] in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--stragglers", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rank"], found["place"][-100:]) == (1, f"{__file__}:{lines[0]}"[-100:])
    assert found["seconds"] >= 7 * 0.02  # the first call of a kind has no delay
    assert before <= found["since"] <= after
    assert 0.5 < found["share"] <= 1
    assert main(["report", str(tmp_path), "--stragglers"]) == 0
    assert capsys.readouterr().out.startswith("rank 1 delays the other ranks: ")
