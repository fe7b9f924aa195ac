"""Messages name the partner: words of a late message, cycles of waits, messages under way at the end; without ranks."""

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest

from gpucoll.communicator import cycles
from gpucoll.communicator.cycles import Cycles
from gpucoll.errors import CollectiveTimeout, RankFailedError, RevokedError, UsageError
from gpucoll.progress import exits
from gpucoll.progress.operations import Work
from gpucoll.progress.partners import End
from gpucoll.progress.waits import Progress
from harness.pace import seconds

PATIENCE = seconds(60)


class Request:
    """A message that ends when told."""

    has_ended = False

    def Test(self):
        return self.has_ended


def never():
    """Return an operation that never ends."""
    yield lambda: False


def started(waits, *ends, name="recv"):
    return waits.start(Work(waits, never(), name, None, ends=ends))


# ---------------------------------------------------------------- words


@pytest.mark.parametrize(("ends", "ranks", "words"), [
    ([End("recv", 2, 3, 64, [(Request(),), None])], (2,), "recv of 64 bytes from rank 2, tag 3: .*not sent this"),
    ([End("send", 1, 0, 1_600_000, [None, ()])], (1,), "send of 1.6 MB to rank 1, tag 0: .*not received this"),
    ([End("recv", None, None, 8, [(), None])], (), "from any rank, any tag: .*no rank has sent"),
    ([End("recv", 2, 0, 8, [(), ()]), End("send", 1, 0, 8, [(), ()])], (1, 2), "and send of .*rank 1 .*rank 2 "),
    ([End("recv", 1, 0, 8, [(), ()]), End("send", 1, 0, 8, [(), ()])], (1,), "neither sent the one nor received"),
    ([End("probe", 1, 0, 0, [(), None])], (1,), "probe from rank 1, tag 0: "),
])
def test_a_late_message_names_its_partner(ends, ranks, words):
    waits = Progress(0.01)
    waits.describe = lambda rank: f"rank {rank} sleeps"
    with pytest.raises(CollectiveTimeout, match=words) as late:
        started(waits, *ends).wait()
    assert late.value.ranks == ranks
    assert all(f"rank {rank} sleeps" in str(late.value) for rank in ranks)


def test_only_what_is_still_under_way_is_named():
    """An exchange waits for the receive first, and the send may have ended earlier."""
    sent = Request()
    state = [(Request(),), (sent,)]
    ends = End("recv", 1, 0, 8, state), End("send", 2, 0, 8, state)
    sent.has_ended = True
    assert Progress(1).late("sendrecv", ends).ranks == (1,)
    sent.has_ended, state[0] = False, None
    assert Progress(1).late("sendrecv", ends).ranks == (2,)


# ---------------------------------------------------------------- cycles


class Board:
    """The waits of two ranks as read one after the other; the last ones last."""

    def __init__(self, *waits, by=()):
        self._waits, self._by, self.condemned, self.log = list(waits), dict(by), [], []

    def show_wait(self, requests, place):
        self.log.append(len(requests))
        return 1 if requests else 0

    def hide_wait(self):
        self.log.append("hidden")

    def shown_waits(self):
        return self._waits.pop(0) if len(self._waits) > 1 else self._waits[0]

    def verdict(self, by, on):
        return self._by.get((by, on), (0, False))

    def condemn(self, *step):
        self.condemned.append(step)
        self._by[0, step[0]] = step[1:]


def wait(partner, number=1, stuck_by=1, sends=True):
    return number, f"line {number}", [(sends, partner, 0, 8, stuck_by)]


EACH_OTHER = {0: wait(1), 1: wait(0, sends=False)}
LEFT = {0: wait(1), 1: wait(0, number=2, sends=False)}  # rank 1 has left its wait


def looked(board, monkeypatch, *ends, waits=None, others=()):
    """Return what a rank raises that waits for `ends`; None at the deadline."""
    monkeypatch.setattr(cycles, "AFTER", 0)
    monkeypatch.setattr(cycles, "BOARD_INTERVAL", 0)
    waits = waits or Progress(0.05)
    found = Cycles(waits, 0, lambda: board)
    message_wait = waits.message_wait
    message_wait.look, message_wait.leave, message_wait.told = found.look, found.hide, found.told
    for other in others:
        started(waits, other)
    try:
        started(waits, *ends or [End("send", 1, 0, 8, [None, (Request(),)])]).wait()
    except (CollectiveTimeout, RevokedError):  # of this message, or of another one
        return None
    except UsageError as error:
        return error


def test_a_cycle_is_named_and_told_to_its_ranks(monkeypatch):
    board = Board(EACH_OTHER)
    error = looked(board, monkeypatch, waits=Progress(seconds(5)))
    assert (error.code, error.ranks) == ("GC-DEADLOCK", (0, 1))
    assert "rank 0 sends 8 bytes to rank 1, tag 0 (line 1); rank 1 receives 8 bytes from rank 0, tag 0" in str(error)
    assert board.condemned == [(1, 1, False), (0, 1, True)]
    assert board.log[-1] == "hidden"


def test_a_cycle_found_by_another_rank_is_named_after_the_end_of_its_wait(monkeypatch):
    """The other rank has left the wait by the error, so no cycle is left to be found. The cycle counts, not the end."""
    board, waits = Board(LEFT, by={(1, 0): (1, True), (1, 1): (1, False)}), Progress(seconds(5))
    waits.hooks.append(mock.Mock(side_effect=RankFailedError("rank 1 has ended", ranks=(1,))))
    assert "rank 1 receives 8 bytes from rank 0" in str(looked(board, monkeypatch, waits=waits))


def test_a_cycle_is_believed_once_it_is_noted_for_all_its_ranks(monkeypatch):
    """The judge writes while this rank reads: of rank 1, the judge, the way to the next rank is not known yet."""
    assert looked(Board(LEFT, by={(1, 0): (1, True)}), monkeypatch) is None


@pytest.mark.parametrize("waits", [
    [EACH_OTHER, {0: wait(1), 1: wait(0, number=3)}] * 999,  # every second look sees another wait
    [LEFT],
    [{0: wait(1), 1: wait(0, stuck_by=0)}],  # rank 0 has begun the other end of rank 1's message
    [{0: wait(1, stuck_by=3), 1: wait(0, number=5)}],  # known of an earlier wait of rank 1
    [{0: wait(1), 1: wait(2, stuck_by=1), 2: wait(1)}],  # a cycle of others
    [{0: wait(1)}],
])
def test_other_waits_are_no_cycle(monkeypatch, waits):
    board = Board(*waits)
    assert looked(board, monkeypatch) is None
    assert board.log
    assert board.condemned == []


def test_a_wait_with_messages_that_have_not_begun_is_not_shown(monkeypatch):
    """A receive of any rank takes a message later: the rank can still make another rank go on."""
    for ends, others in (([End("recv", None, 0, 8, [(), None])], []), ([], [End("recv", None, 0, 8, [(), None])])):
        board = Board(EACH_OTHER)
        assert looked(board, monkeypatch, *ends, others=others) is None
        assert board.log == []


def test_the_wait_of_another_thread_is_not_shown(monkeypatch):
    """A helper thread waits for a message, and the thread of the calls may still send to other ranks."""
    board, waits = Board(EACH_OTHER), Progress(0.05)
    monkeypatch.setattr(cycles, "AFTER", 0)
    waits.message_wait.look = Cycles(waits, 0, lambda: board).look
    work = started(waits, End("send", 1, 0, 8, [None, (Request(),)]))
    with ThreadPoolExecutor(1) as pool, pytest.raises(CollectiveTimeout):
        pool.submit(work.wait).result()
    assert board.log == []
    waits.close()


# ---------------------------------------------------------------- the end of the process


def at_the_end(monkeypatch, *works, has_left=(), linger=PATIENCE, then=None):
    """Drain messages under way, each with these ends; return whether all have ended, and the seconds' words."""
    said, waits = [], Progress(seconds(5))
    waits.rank, waits.has_left = 0, lambda rank: rank in has_left
    monkeypatch.setattr(exits, "LINGER", linger)
    monkeypatch.setattr(exits, "SILENT", 0)
    monkeypatch.setattr(exits, "PARTNER_INTERVAL", 0)
    monkeypatch.setattr(logging.getLogger("gpucoll"), "warning", lambda text, *values: said.append(text % values))
    for ends in works:
        operation = iter([ends[0].state[1][0].Test]) if ends[0].sends else never()
        waits.start(Work(waits, operation, "message", None, ends=ends))
    if then is not None:
        monkeypatch.setattr(waits, "describe", then)
    ended = exits.drain(waits)
    assert not waits.has_messages
    assert waits.failure is None
    waits.close()
    return ended, said


def sending(partner):
    return (End("send", partner, 0, 8, [None, (Request(),)]),)


RECEIVING = (End("recv", 1, 0, 8, [(Request(),), None]),)


def test_a_receive_is_given_up_at_once(monkeypatch):
    ended, said = at_the_end(monkeypatch, RECEIVING)
    assert not ended
    assert len(said) == 1
    assert "rank 0: " in said[0]
    assert "ends with recv of 8 bytes from rank 1, tag 0 under way" in said[0]


def test_a_send_waits_for_a_partner_at_work(monkeypatch):
    """The wait is announced; the partner then receives."""
    ends, calls = sending(1), itertools.count()

    def describe(rank):
        ends[0].state[1][0].has_ended = True
        return f"rank {rank} computes {next(calls)}"

    ended, said = at_the_end(monkeypatch, ends, then=describe)
    assert ended
    assert said == [f"rank 0 ends, and waits {PATIENCE:g} s at most for its messages: send of 8 bytes to rank 1, tag 0 "
                    "(rank 1 computes 0)"]


@pytest.mark.parametrize(("left", "linger"), [([1], PATIENCE), ([2], 0.01)], ids=["left", "late"])
def test_a_send_ends_with_its_partner_or_soon(monkeypatch, left, linger):
    ended, said = at_the_end(monkeypatch, sending(1), has_left=left, linger=linger)
    assert not ended
    assert "ends with send of 8 bytes to rank 1, tag 0 under way" in said[-1]
