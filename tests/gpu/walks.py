"""The tables of docs/architecture.md about calls on GPUs, compared with the functions that run; see gpu/programs.py."""

import os
import re
import sys
from pathlib import Path

import cupy
import numpy

import gpucoll as gc
from gpu.helpers import ramp, ranges, same

PACKAGE = os.path.dirname(gc.__file__) + os.sep
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
COUNT = 1 << 18  # float32: 1 MiB


def tables():
    """Return the rows (file, function) of each table of the section, in the order of the page."""
    section = PAGE.read_text().partition("## A call on GPUs")[2].partition("\nFive questions")[0]
    rows = [re.findall(r"^\| `([^`]+)` \| `([^`]+)` \|", part, re.MULTILINE) for part in section.split("|---|---|---|")]
    return [[(file, function) for function, file in part] for part in rows[1:]]


def ran(call):
    """Return the functions of the package that a call runs on this thread, in the order of their first calls."""
    found = {}

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.setdefault((code.co_filename[len(PACKAGE):], code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [*found]


def walks(comm, first, later):
    """Compare the first call with table `first` of the page, and the sixth call with table `later`."""
    x, out = ramp(comm, COUNT), cupy.empty(COUNT, numpy.float32)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True):
        calls = [ran(lambda: comm.all_reduce(x, out, algorithm="ring")) for _ in range(6)]
        same(out, sum(ranges(comm, COUNT)))
    for rows, functions in ((tables()[first], calls[0]), (tables()[later], calls[-1])):
        assert len(rows) > 3
        places = [functions.index(row) for row in rows]
        assert places == sorted(places), [rows[i] for i in range(1, len(rows)) if places[i] < places[i - 1]]
