"""The three shares of calls: own delay, waiting, moving; counted by the engine, by messages, on devices."""

import contextlib
import time
from types import SimpleNamespace

import numpy
import pytest

import gpucoll as gc
from gpucoll.health import flight
from gpucoll.health.flight import HEADER, CallRecord
from harness.extension import by_python
from harness.pace import seconds
from harness.thread_ranks import all_on_threads, on_threads

DELAY = 0.02  # seconds by which a rank comes late: only lower bounds are tested
ATTEMPTS = 5
SHARES = ("own_seconds", "waiting_seconds", "moving_seconds")
WAYS = {"auto": {}, "shared": {"executor": "shared"}, "mpi": {"executor": "mpi"}, "python": {"executor": "mpi"},
        "deferred": {"executor": "shared", "check": "deferred"}}


def growth(before, after, kind):
    """Return by how much the figures of one kind have grown."""
    known = before.get(kind, dict.fromkeys(after[kind], 0))
    return {name: value - known[name] for name, value in after[kind].items()}


def late_by(comms, make):
    """Let rank 1 come to a call DELAY seconds after rank 0 waits for it; return the figures' growth on both ranks."""
    before, host = [comm.stats() for comm in comms], comms[0]._core.host

    def run(comm):
        if comm.rank == 1:
            while not host._shared.under_way():
                time.sleep(1e-4)
            began = time.monotonic()
            while time.monotonic() < began + DELAY:
                time.sleep(DELAY / 10)
        make(comm)

    all_on_threads(comms, run)
    return before, [comm.stats() for comm in comms]


def calls():
    """Return calls by name: the kind of figures that each adds to, its bytes, and the call."""
    def plan(comm):
        found = getattr(comm, "a_plan", None) or comm.plan("all_gather", numpy.ones(6, "float32") + comm.rank)
        comm.a_plan = found
        found()

    def several(comm):
        for _ in range(8):  # eager from the fifth on
            comm.all_reduce(numpy.ones(1000, "float32"))

    return [("all_reduce", 2048, 4000, lambda comm: comm.all_reduce(numpy.ones(1000, "float32"))),
            ("broadcast", 8, 8, lambda comm: comm.broadcast(numpy.ones(1), root=1)),
            ("barrier", 0, 0, lambda comm: comm.barrier()),
            ("reduce", 32, 40, lambda comm: comm.reduce(numpy.ones(5), async_op=True).wait()),
            ("all_gather", 32, 48, plan),
            ("all_reduce", 2048, 8 * 4000, several),
            ("all_gather_v", 32, 40, lambda comm: comm.all_gather_v(numpy.ones(2 + comm.rank)))]


@pytest.mark.parametrize("way", WAYS)
def test_a_late_rank_has_the_delay_and_the_other_the_wait(way):
    with by_python() if way == "python" else contextlib.nullcontext():
        comms = gc.init_local(2, timeout=seconds(60), **WAYS[way])
    delays = comms[1]._core.record.delays
    for _ in range(2):  # the first time by Python, the second time by the engine's table of known calls
        for name, size, nbytes, make in calls():
            # On a loaded machine the first reading of the clock in a wait may come late: a part of the wait is lost.
            for _attempt in range(ATTEMPTS):
                known = dict(delays)
                before, after = late_by(comms, make)
                first, late = (growth(*pair, (name, size)) for pair in zip(before, after, strict=True))
                if first["waiting_seconds"] >= DELAY:
                    break
            number = 8 if nbytes == 32000 else 1
            assert [(one["calls"], one["bytes"]) for one in (first, late)] == [(number, nbytes)] * 2
            assert first["waiting_seconds"] >= DELAY, (name, first)
            assert late["own_seconds"] >= DELAY, (name, late)
            grown = {site: taken - known.get(site, 0) for site, taken in delays.items() if taken > known.get(site, 0)}
            assert sum(grown.values()) >= DELAY, (name, grown)
            assert all(not site or site.startswith(f"{__file__}:") for site in grown), grown
            # Others' starts are scheduled by the system: only the seconds' signs are known.
            assert min(one[share] for one in (first, late) for share in SHARES) > -1e-9
    for comm in comms:
        comm.close()
        assert comm.stats()["barrier", 0]["calls"] >= 2  # outlives `close`


def test_every_call_is_counted_once():
    def run(comm):
        x, work = numpy.ones((comm.size, 3)), []
        for _ in range(5):
            comm.all_to_all(x)
            comm.reduce_scatter(x)
            work.append(comm.scan(x, async_op=True))
        with comm.group():
            comm.all_gather(x[0])
            comm.all_gather(x[1])
        for one in work:
            one.wait()
        comm.scatter(x if comm.rank == 0 else None)
        return {kind: (figures["calls"], figures["bytes"]) for kind, figures in comm.stats().items()}

    # 72 bytes of three ranks' rows are in the class of 64.
    expected = {(name, 64): (number, number * 72) for name, number in
                [("all_gather", 2), ("all_to_all", 5), ("reduce_scatter", 5), ("scan", 5), ("scatter", 1)]}
    assert on_threads(3, run) == [expected] * 3


def test_shares_stay_inside_the_call_and_the_time_before_it(monkeypatch):
    times = iter([700, 1000, 1100, 1100, 1200])  # ends of calls, and the begins between them
    monkeypatch.setattr(flight, "time", SimpleNamespace(monotonic_ns=lambda: next(times)))
    counter = SimpleNamespace(total=(5, 7, 0), shares=lambda: counter.total)
    record, ended = CallRecord(lambda: [counter]), []
    record.file = SimpleNamespace(ended=lambda *given: ended.append(given))

    def call(*total):
        yield lambda: True
        counter.total = total

    kind = "barrier", 0
    assert len([*record.measured(call(5 + 400, 7 + 60, 0), kind, 64)]) == 1  # 400 ns late, 300 ns between the calls
    assert numpy.array(record.python[kind]) == pytest.approx([1, 64, 300e-9, 60e-9, 40e-9])
    assert len([*record.measured(call(405 - 10, 67 + 500, 0), kind, 64)]) == 1  # waited 500 ns, in a call of 100 ns
    assert numpy.array(record.python[kind]) == pytest.approx([2, 128, 300e-9, 160e-9, 40e-9])
    assert ended == [(1000, 1100, 300, 60), (1100, 1200, 0, 100)]  # the record of each call has the same shares


def test_headers_belong_to_the_calls_that_they_announce():
    rows = [(("gather_v", 5), [3, 60, 0.0, 0.0, 1.0]), (("gather_v", 7), [1, 64, 1.0, 0.0, 2.0]),
            (("gather_v", HEADER), [4, 4096, 4.0, 8.0, 0.0]), (("check_numerics", HEADER), [2, 2048, 0, 1.0, 0])]
    record = CallRecord()
    record.python |= dict(rows)
    assert record.stats() == {
        ("check_numerics", 1024): {"calls": 2, "bytes": 2048, "own_seconds": 0, "waiting_seconds": 1,
                                   "moving_seconds": 0},
        ("gather_v", 16): {"calls": 3, "bytes": 60, "own_seconds": 3, "waiting_seconds": 6, "moving_seconds": 1},
        ("gather_v", 64): {"calls": 1, "bytes": 64, "own_seconds": 2, "waiting_seconds": 2, "moving_seconds": 2}}
    both = CallRecord()
    for _ in range(2):
        both.absorb(record)
    assert both.stats()["gather_v", 16]["calls"] == 6


def test_each_call_is_logged(monkeypatch, caplog):
    """Also the third equal call, which would be the engine's alone."""
    monkeypatch.setenv("GPUCOLL_DEBUG", "detail")
    comm, = gc.init_local(1)
    with caplog.at_level("INFO", "gpucoll"):
        for _ in range(3):
            comm.all_reduce(numpy.ones(5, numpy.float32), algorithm="ring")
    comm.close()
    told = [one.getMessage() for one in caplog.records]
    assert sum(text.startswith("rank 0: all_reduce by ring, 20 bytes") and " took " in text for text in told) == 3
