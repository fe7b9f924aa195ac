"""The clocks of two pretended hosts, one of them wrong by seconds: records of both hosts are by one clock."""

import os
import time
from types import SimpleNamespace
from unittest import mock

import numpy
import pytest

from gpucoll.health import clocks
from gpucoll.health.report import delays, stories, straggler, summary
from harness.node_ranks import on_two_nodes

SECOND = 10**9
WRONG = 7 * SECOND  # by which the clock of the second host is ahead


def recorded(mpi, folder):
    """Make calls with the clock of odd ranks ahead; return the offset of this rank, of two communicators in turn."""
    def now():
        return time.time_ns() + WRONG * (mpi.rank % 2)

    with mock.patch.object(clocks, "now", now), mock.patch("gpucoll.health.flight.now", now), \
            mock.patch.object(clocks, "_own", None), mock.patch.dict(os.environ, GPUCOLL_DUMP_DIR=folder):
        found = []
        for _ in range(2):
            with on_two_nodes(mpi, None) as comm:
                for _ in range(5):
                    comm.all_reduce(numpy.ones(3))
                    comm.barrier()
            found.append(clocks._own)
        return found


@pytest.fixture(scope="module")
def records(rank_pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    return folder, rank_pool.run(recorded, 4, str(folder))


def test_offsets_undo_the_wrong_clock_within_the_stated_error(records):
    for rank, found in enumerate(records[1]):
        assert found[0] == found[1]  # measured once
        assert abs(found[0].nanoseconds + WRONG * (rank % 2)) <= found[0].error < SECOND
        assert (found[0].error > 0) == (rank % 2 == 1)


def test_records_of_two_hosts_are_by_one_clock(records):
    groups, damaged = stories(records[0])
    assert (len(groups), damaged) == (2, [])
    for name, files in groups.items():
        error = max(story.clock_error for story in files)
        for calls in zip(*(story.calls for story in files), strict=True):
            # Each rank ends a barrier after all ranks have begun it.
            if calls[0].signature.collective == "barrier":
                assert max(call.began for call in calls) <= min(call.ended for call in calls) + 2 * error
        assert summary(name, files)["clock_error"] > 0


def test_a_delay_within_the_error_is_none(records):
    groups, _ = stories(records[0])
    certain, vague = ({name: [story._replace(clock_error=error) for story in files] for name, files in groups.items()}
                      for error in (0, SECOND))
    assert any(one.nanoseconds for one in delays(certain))
    assert not any(one.nanoseconds for one in delays(vague))
    assert straggler(vague)["rank"] is None


def test_a_host_that_joins_later_lets_all_hosts_ask_again():
    """The first rank of each host asks, and its ranks take its answer; a store gathers lists in place of tuples."""
    known, calls, asked = [[5, 1], [6, 2], None, None], [], []

    class Gathering:
        @staticmethod
        def allgather(mine):
            calls.append(mine)
            return known if len(calls) == 1 else [[5, 1], [7, 2], [8, 3], list(mine)]

    def compared(wire, rank, other, offset, found):
        asked.append((rank, other, offset))
        yield from ()

    for rank, own, result in ((0, clocks.ClockOffset(5, 1), (5, 1)), (1, clocks.ClockOffset(6, 2), (7, 3)),
                              (3, None, (8, 4))):
        calls.clear()
        with mock.patch.object(clocks, "_own", own), mock.patch.object(clocks, "_compared", compared):
            place = SimpleNamespace(rank=rank, nodes=(0, 1, 2, 2))
            link = SimpleNamespace(place=place, mpi=Gathering, wire=None)
            assert clocks.align(link, lambda operation, name: [*operation]) == result
    assert asked == [(0, 1, 5), (0, 2, 5), (1, 1, 0)]
    known[2:] = [[8, 4], [8, 4]]
    calls.clear()
    with mock.patch.object(clocks, "_own", clocks.ClockOffset(6, 2)):
        assert clocks.align(SimpleNamespace(place=SimpleNamespace(rank=1, nodes=(0, 1, 2, 2)), mpi=Gathering,
                                            wire=None), None) == (6, 2)  # nothing is measured anew
