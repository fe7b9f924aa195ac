"""Tables shared by the engine and Python stand once: Python prints the header, in any order of the rows."""

import subprocess
import sys

import pytest

import gpucoll as gc
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device.sources import folder
from gpucoll.executors.engine import instructions, plans, tables
from harness import extension
from harness.thread_ranks import on_threads
from oracles import oracle

HEADER = "engine/tables.h"


def test_the_header_is_what_python_prints():
    printed = subprocess.run([sys.executable, tables.__file__], capture_output=True, text=True, check=True).stdout
    assert printed == tables.header() == folder().joinpath(HEADER).read_text()


def every_pair(comm):
    """Reduce by each op on each dtype defined for the op."""
    for op, row in OPS.items():
        for name, dtype in DTYPES.items():
            if dtype.kind not in row.kinds:
                continue
            inputs = [oracle.values(op, name, rank, 9) for rank in range(comm.size)]
            found = comm.all_reduce(inputs[comm.rank].copy(), op=op, algorithm="ring", dtype=name)
            assert oracle.same_bits(found, oracle.reduced(op, name, inputs)), (op, name)


@pytest.mark.slow  # compiles the engine
def test_a_permuted_table_changes_nothing(monkeypatch):
    """Each dtype and op has another number, in Python and in C++."""
    permuted = dict(reversed(DTYPES.items())), tables.OP_NAMES[::-1]
    text = extension.text()
    assert text.count(tables.header().partition("#pragma once\n")[2]) == 1
    changed = text.replace(tables.header().partition("#pragma once\n")[2],
                           tables.header(*permuted).partition("#pragma once\n")[2])
    assert changed != text
    monkeypatch.setattr(plans, "DTYPES", permuted[0])
    monkeypatch.setattr(instructions, "DTYPES", permuted[0])
    monkeypatch.setattr(tables, "OP_NAMES", permuted[1])
    with extension.serving(extension.built(changed)):
        on_threads(2, every_pair, executor="shared")


@pytest.mark.slow
@pytest.mark.mutant
def test_tables_that_differ_are_noticed(monkeypatch):
    monkeypatch.setattr(tables, "OP_NAMES", tables.OP_NAMES[::-1])
    with pytest.raises((AssertionError, gc.GpucollError, ValueError)):
        on_threads(2, every_pair, executor="shared")
