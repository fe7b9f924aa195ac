"""The shares of calls on a GPU, from events: exact times of an imitated GPU, and several ranks' stamps."""

import contextlib
import types

import numpy
import pytest

from gpucoll.health import device_shares
from gpucoll.health.device_shares import FIRST_PATIENCE, MOST, PATIENCE, TIMED_FROM, DeviceShares
from gpucoll.health.flight import CallRecord

SHIFT = 7_000_000_123  # nanoseconds by which the GPU's clock is ahead of the host's
HERE = ("all_reduce", TIMED_FROM)


class Gpu:
    """A GPU with a clock of its own: an event notes the time at which the stream has come to the event."""

    relaxed = contextlib.nullcontext()

    def __init__(self, host):
        self.host, self.answers = host, True

    def new_stream(self):
        return Stream(self)

    def new_event(self, *, timed):
        assert timed
        return Event()

    def nanoseconds(self, first, last):
        assert first.done
        assert last.done
        return last.time - first.time


class Stream:
    """A stream at time `time` of the GPU; a stream without work is at the time of the host."""

    def __init__(self, gpu, time=None):
        self.gpu, self.time, self.captures = gpu, time, False

    def is_capturing(self):
        return self.captures


class Event:
    done = False

    def record(self, stream):
        self.time = stream.gpu.host.now + SHIFT if stream.time is None else stream.time
        self.done = stream.time is not None or stream.gpu.answers


@pytest.fixture
def host(monkeypatch):
    """The clock of the host, advanced by each reading."""
    clock = types.SimpleNamespace(now=10**18, tick=0)

    def time_ns():
        clock.now += clock.tick
        return clock.now

    clock.time_ns, clock.monotonic = time_ns, lambda: 1e-9 * (time_ns() - 10**18)
    monkeypatch.setattr(device_shares, "time", clock)
    return clock


class Rank:
    def __init__(self, host, rank, size):
        self.record = CallRecord()
        self.gpu = Gpu(host)
        self.stream = Stream(self.gpu, SHIFT + 10**18)
        self.shares = DeviceShares(self.gpu, self.record, rank, size)

    def call(self, began, ended, nbytes=TIMED_FROM):
        """Make a call, which the GPU begins and ends at these times of the host."""
        sums, times = self.record.python["all_reduce", nbytes.bit_length()], None
        if nbytes >= TIMED_FROM:
            self.stream.time = SHIFT + began
            times = self.shares.begin(sums, self.stream)
            self.stream.time = SHIFT + ended
            self.shares.end(times, self.stream)
        self.record.enqueued(sums, nbytes)
        return times

    def figures(self, kind=HERE):
        found = self.record.stats()[kind]
        return [round(1e9 * found[f"{name}_seconds"]) for name in ("own", "waiting", "moving")]


def compared(ranks):
    """Carry the next stamps of each rank to all ranks, as a comparison does."""
    stamps = numpy.concatenate([one.shares.next_stamps() for one in ranks])
    for one in ranks:
        one.shares.exchanged(stamps)


def run(host, times, short=()):
    """Make calls, some of them short, that the ranks' GPUs begin and end at these times; return the figures."""
    ranks = [Rank(host, rank, len(times[0])) for rank in range(len(times[0]))]
    for number, call in enumerate(times):
        for one, (began, ended) in zip(ranks, call, strict=True):
            one.call(10**18 + began, 10**18 + ended, 8 if number in short else TIMED_FROM)
        compared(ranks)
    for _ in range(2):  # two calls of 0 ns carry the last stamps
        last = 10**18 + max(ended for _, ended in times[-1])
        for one in ranks:
            one.call(last, last)
        compared(ranks)
    return [one.figures() for one in ranks]


def test_the_late_rank_has_the_delay_and_the_other_ranks_the_wait(host):
    first = [(0, 100), (0, 100), (0, 100)]
    found = run(host, [first, [(150, 1000), (300, 1000), (900, 1000)]])
    assert found == [[0, 750, 100 + 100], [150, 600, 100 + 100], [750, 0, 100 + 100]]


def test_a_delay_is_at_most_the_time_since_the_call_before(host):
    found = run(host, [[(0, 100), (0, 800)], [(150, 1000), (850, 1000)]])
    assert found[1] == [50, 0, 800 + 150]  # late by 700, since the call before ended late


def test_a_wait_is_at_most_as_long_as_the_call(host):
    found = run(host, [[(0, 100), (0, 100)], [(150, 400), (900, 1000)]])  # rank 0 sends and goes on
    assert found[0] == [0, 250, 100]


def test_without_a_comparison_a_wait_counts_as_moving(host):
    assert run(host, [[(0, 100)], [(200, 500)]]) == [[0, 0, 400]]


def test_short_calls_are_only_counted(host):
    rank = Rank(host, 0, 1)
    for number in range(1, 6):
        times = rank.call(10**18 + 10 * number, 10**18 + 10 * number + 4, nbytes=TIMED_FROM >> number % 2)
        assert (times is None) == number % 2
    rank.call(10**18, 10**18)  # takes the events of the call before
    assert rank.figures() == [0, 0, 2 * 4]
    assert rank.figures(("all_reduce", TIMED_FROM // 2)) == [0, 0, 0]
    assert rank.record.stats()["all_reduce", TIMED_FROM // 2]["calls"] == 3
    rank.stream.captures = True  # nor are calls in a capture timed
    assert rank.call(10**18, 10**18 + 5) is None


def test_a_delay_after_short_calls_is_at_most_the_time_since_the_timed_call_before(host):
    times = [[(0, 100), (0, 800)], [(100, 110), (800, 810)], [(150, 1000), (850, 1000)]]
    assert run(host, times, short={1}) == [[0, 700, 100 + 150], [50, 0, 800 + 150]]


def test_stamps_that_a_rank_has_lost_leave_the_other_calls(host):
    ranks, host.tick = [Rank(host, rank, 2) for rank in range(2)], 1000
    for number in range(1, 3 * MOST):
        ranks[1].gpu.answers = number > 2 * MOST  # no stamps until then
        for one, began in zip(ranks, (0, 30), strict=True):
            one.call(10**18 + 100 * number + began, 10**18 + 100 * number + 50)
        compared(ranks)
        host.now += 10**7
    own, waited, moved = (sum(column) for column in zip(*(one.figures() for one in ranks), strict=True))
    assert own == waited
    assert own >= 30 * (MOST - 110)
    assert moved == 2 * 20 * own // 30
    for one in ranks:
        assert max(len(one.shares._open), len(one.shares._under_way)) <= MOST


def test_a_gpu_that_never_ends_a_call_keeps_few_events(host):
    rank = Rank(host, 0, 2)
    for _ in range(2 * MOST):
        times = rank.call(10**18, 10**18)
        rank.shares._under_way[-1].ended.done = False
        assert times is not None
    assert len(rank.shares._under_way) == MOST


def test_the_gpu_is_asked_again_and_the_quickest_answer_counts(host):
    rank = Rank(host, 0, 2)
    rank.call(10**18 + 100, 10**18 + 200)
    rank.call(10**18 + 300, 10**18 + 300)
    assert rank.shares.next_stamps().tolist() == [1, 10**18 + 100, 0, 0]
    anchor = rank.shares._anchor
    rank.call(10**18 + 400, 10**18 + 400)
    assert rank.shares._anchor is anchor
    host.now += 2 * 10**9
    rank.call(host.now, host.now)
    assert rank.shares._anchor is not anchor


def test_the_host_waits_a_moment_for_a_busy_gpu_and_not_longer(host):
    rank = Rank(host, 0, 2)
    host.tick = 1000
    rank.call(10**18, 10**18)
    for answers, patience in ((False, FIRST_PATIENCE), (True, 0), (False, PATIENCE)):
        rank.gpu.answers = answers
        for longest in (patience, 0):  # the next question comes later
            before = host.now
            rank.call(10**18, 10**18)
            assert longest <= 1e-9 * (host.now - before) < 1.01 * longest + 1e-4
        assert (not rank.shares.next_stamps().any()) == (patience == FIRST_PATIENCE)
        host.now += 2 * 10**9
