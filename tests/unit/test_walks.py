"""How far a reader walks: the files, ways from file to file and lines of Python of a first and of a repeated call.

Rank 0 of two threads is traced. A way is counted once. The looks of a wait at other ranks, and emulation, do not count.
"""

import itertools
import operator
import sys

import numpy
import pytest

import gpucoll as gc
from gpucoll.health.flight import CallRecord
from gpucoll.progress.waits import Progress, nap_after, yields_at_once

PACKAGE = gc.__file__.removesuffix("__init__.py")
# How late the other rank is decides whether a call passes these.
WAITS = {one.__code__ for one in (Progress.look, Progress.slow_wait, yields_at_once, nap_after, CallRecord.delayed)}
CALLS = {
    "all_reduce out=": lambda comm, kept: comm.all_reduce(kept["x"], kept["out"], algorithm="ring"),
    "all_reduce": lambda comm, kept: comm.all_reduce(kept["x"], algorithm="ring"),
    "broadcast": lambda comm, kept: comm.broadcast(kept["x"], algorithm="tree"),
    "all_gather out=": lambda comm, kept: comm.all_gather(kept["x"], kept["all"]),
    "exscan": lambda comm, kept: comm.exscan(kept["x"]),
    "all_gather_v": lambda comm, kept: comm.all_gather_v(kept["x"]),
    "sendrecv": lambda comm, kept: comm.sendrecv(kept["x"], kept["out"], 1 - comm.rank, 1 - comm.rank),
}
# The most files and ways of a first call, then the most files and lines of a repeated call. The aim is 16, 60, 3 and 40
# on the host; on GPUs 22 files, and then 6 files and 60 lines. Here the host waits for each call on a GPU: its arrays
# are NumPy's, and copies between threads stand for NCCL. Calls on CuPy's arrays, which the host only enqueues, keep to
# 6 files and 60 lines: see `gpu/streams.py`.
MOST = {
    "shared": dict.fromkeys(CALLS, (16, 60, 3, 40)) | {"all_gather_v": (18, 67, 3, 40), "sendrecv": (10, 27, 2, 10)},
    "mpi": dict.fromkeys(CALLS, (16, 60, 3, 40)) | {
        "all_gather out=": (17, 60, 3, 40), "all_gather_v": (21, 80, 3, 40), "sendrecv": (10, 28, 4, 40)},
    "nccl": dict.fromkeys([*CALLS][:4], (24, 102, 7, 138)),
    "peer": dict.fromkeys([*CALLS][:4], (29, 129, 5, 92)),
}


def walk(call):
    """Return the numbers of files, ways and lines of a call."""
    lines, order, looking = set(), [], []

    def local(frame, event, _):
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return local

    def looked(frame, event, _):
        if event == "return":
            looking.clear()
        return looked

    def tracer(frame, event, _):
        code = frame.f_code
        name = code.co_filename.removeprefix(PACKAGE)
        if looking or name == code.co_filename or name.startswith("emulation") or code.co_name == "__del__":
            return None
        if code in WAITS:
            looking.append(frame)
            return looked
        lines.add((code.co_filename, frame.f_lineno))
        if order[-1:] != [name]:
            order.append(name)
        return local

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    finally:
        sys.settrace(before)
    return len({*order}), len({*itertools.pairwise(order)}), len(lines)


@pytest.mark.parametrize(("executor", "name"), [(executor, name) for executor, rows in MOST.items() for name in rows])
def test_calls_pass_few_files(executor, name, monkeypatch):
    if executor in ("nccl", "peer"):
        monkeypatch.setenv("GPUCOLL_DEVICE", "emulated")

    def run(comm):
        kept = {"x": numpy.arange(100.0), "out": numpy.zeros(100), "all": numpy.zeros((2, 100))}
        calls = [lambda: CALLS[name](comm, kept)] * 20
        return [call() for call in calls] if comm.rank else [walk(call) for call in calls]

    gc.run_local(run, 2, executor=executor)  # a process parses formulas once, and loads modules once
    first, _, *later = gc.run_local(run, 2, executor=executor)[0]
    found = (*first[:2], *min((files, lines) for files, _, lines in later))
    assert all(map(operator.le, found, MOST[executor][name])), found
