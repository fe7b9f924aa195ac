"""GPUCOLL_DEBUG=nvtx: a range for each call, by a recorder in place of NVTX."""

import sys
import threading
from types import SimpleNamespace

import numpy
import pytest

import gpucoll as gc
from gpucoll.health.observed import Ranges
from harness.pace import seconds


@pytest.fixture
def ranges(monkeypatch):
    """Yield the begins and ends that NVTX is told."""
    found = []

    def start_range(words, domain):
        assert domain == "gpucoll"
        found.append(("begin", words))
        return len(found)

    monkeypatch.setitem(sys.modules, "nvtx", SimpleNamespace(
        start_range=start_range, end_range=lambda number: found.append(("end", found[number - 1][1]))))
    monkeypatch.setenv("GPUCOLL_DEBUG", "nvtx")
    return found


def test_each_call_is_a_range(ranges):
    comm, = gc.init_local(1)
    ranges.clear()
    for _ in range(3):  # the third call would be the engine's alone
        comm.all_reduce(numpy.ones(5, numpy.float32), algorithm="ring")
    comm.broadcast(numpy.ones(2), async_op=True).wait()
    comm.close()
    words = [words for kind, words in ranges if kind == "begin"]
    assert words[:3] == ["all_reduce by ring, 20 bytes of float32 in (5,), op sum, root 0"] * 3
    assert words[3].startswith("broadcast by ")
    assert ranges == [(kind, one) for one in words for kind in ("begin", "end")]


def test_a_call_that_fails_leaves_no_range_open(ranges, monkeypatch):
    monkeypatch.setenv("GPUCOLL_FAULT", "rank:0,seq:1,phase:after_send,do:raise")
    comm, = gc.init_local(1)
    ranges.clear()
    with pytest.raises(gc.BackendError, match="GC-FAULT"):
        comm.all_reduce(numpy.ones(5))
    monkeypatch.delenv("GPUCOLL_FAULT")
    with pytest.raises(gc.RevokedError):
        comm.barrier()
    comm.close()
    assert [kind for kind, _ in ranges] == ["begin", "end"]


def test_the_package_may_be_missing(monkeypatch):
    monkeypatch.setenv("GPUCOLL_DEBUG", "nvtx")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(gc.ArgumentError, match=r"GPUCOLL_DEBUG=nvtx.*pip install") as found:
        gc.init_local(1)
    assert found.value.code == "GC-OPTION"


def test_a_range_contains_the_waiting(ranges, monkeypatch):
    """Rank 0 waits for rank 1, which begins its call only then: the range of rank 0 is open."""
    monkeypatch.setenv("GPUCOLL_CHECK", "off")  # a comparison would wait before the call
    comms, waits, seen, real = gc.init_local(2), threading.Event(), [], Ranges.on_phase
    ranges.clear()

    def on_phase(self, phase, request, rows):
        real(self, phase, request, rows)
        if phase == "after_send":
            seen.append([kind for kind, _ in ranges])
            waits.set()

    monkeypatch.setattr(Ranges, "on_phase", on_phase)
    first = threading.Thread(target=lambda: comms[0].all_reduce(numpy.ones(5), algorithm="ring"))
    first.start()
    assert waits.wait(seconds(60))
    comms[1].all_reduce(numpy.ones(5), algorithm="ring")
    first.join()
    for comm in comms:
        comm.close()
    assert seen[0] == ["begin"]
    assert sorted(kind for kind, _ in ranges) == ["begin"] * 2 + ["end"] * 2
