"""Calls keep the array's type, as seen by the type checker itself."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from gpucoll.core.collectives import COLLECTIVES, CollectiveName
from gpucoll.core.ops import OPS, OpName
from harness.sources import ROOT

PROGRAM = """
from typing import Any, assert_type

import numpy
from numpy.typing import NDArray

import gpucoll as gc

comm = gc.init()
x: NDArray[numpy.float32] = numpy.ones(3, numpy.float32)
assert_type(comm.all_reduce(x), NDArray[numpy.float32])
assert_type(comm.all_reduce(x, op="max", algorithm="ring"), NDArray[numpy.float32])
assert_type(comm.all_reduce(x, async_op=True), gc.Work[NDArray[numpy.float32]])
assert_type(comm.all_reduce([1], out=x), NDArray[numpy.float32])
assert_type(comm.all_reduce(x, async_op=True).wait(), NDArray[numpy.float32])
assert_type(comm.reduce(x, op=gc.ReduceOp.MAX, async_op=True).wait(), NDArray[numpy.float32] | None)
assert_type(comm.reduce(x, root=1), NDArray[numpy.float32] | None)
assert_type(comm.all_gather_v(x), list[NDArray[numpy.float32]])
assert_type(comm.all_gather_v(x, out=[x]), list[NDArray[numpy.float32]])
assert_type(comm.gather_v(x, out=x), NDArray[numpy.float32] | None)
assert_type(comm.scatter_v([x] if comm.rank == 0 else None), NDArray[numpy.float32])
assert_type(comm.all_to_all_v([x], x), NDArray[numpy.float32])
assert_type(comm.reduce_scatter_v(x, [3], async_op=True), gc.Work[NDArray[numpy.float32]])
values, ranks = comm.maxloc(x, index=x.astype(int))
assert_type(comm.recv(x, gc.ANY_SOURCE, gc.ANY_TAG, gc.Status()), NDArray[numpy.float32])
assert_type(comm.recv(x, 0, async_op=True), gc.Work[NDArray[numpy.float32]])
assert_type(comm.probe(), gc.Status)
assert_type(comm.iprobe(0), gc.Status | None)
assert_type((comm.rank, comm.size, comm.local_rank, comm.timeout, comm.closed), tuple[int, int, int, float, bool])
assert_type(comm.scan(x, op=numpy.add), NDArray[numpy.float32])
assert_type(comm.explain("all_reduce", 8).candidates[0]["algorithm"], Any)


async def hidden(work: gc.Work[NDArray[numpy.float32]]) -> float:
    return float((await work).sum())
"""
WRONG = """
import numpy
from numpy.typing import NDArray

import gpucoll as gc

comm = gc.init(timeout=5, executor=None)
x: NDArray[numpy.float32] = numpy.ones(3, numpy.float32)
comm.all_reduce(x, opp="sum")                            # call-overload
comm.all_reduce(x, op="summ")                            # call-overload
comm.explain("all_reduced", 8)                           # arg-type
name: str = comm.rank                                    # assignment
comm.size = 3                                            # assignment
comm.all_reduce(x, algorithm=3)                          # call-overload
total: str = comm.all_reduce(x)                          # assignment
comm.reduce(x).sum()                                     # union-attr
comm.all_gather_v(x).sum()                               # attr-defined
comm.all_reduce(x, async_op=True).shape                  # attr-defined
comm.maxloc(x, indices=x)                                # call-arg
comm.reduce_all(x)                                       # attr-defined
gc.init(timeot=5)                                        # call-arg
gc.Communicator.from_mpi(comm.mpi, check=1)              # arg-type
"""


def test_the_names_in_types_are_those_of_the_tables():
    assert get_args(OpName) == (*OPS,)
    assert get_args(CollectiveName) == (*COLLECTIVES,)


def test_the_type_checker_sees_the_arrays_type_and_what_is_wrong(tmp_path):
    """One run for both programs, with the results of earlier runs: to read NumPy's types takes most of the time."""
    mypy = Path(sys.executable).with_name("mypy")
    if not mypy.exists():
        pytest.skip("mypy is not installed beside this Python: pip install gpucoll[test]")
    for name, text in (("program.py", PROGRAM), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text)
    options = ["--config-file=", "--strict", "--warn-unused-ignores", "--follow-imports=silent",
               f"--cache-dir={ROOT / '.mypy_cache' / 'users'}"]
    job = subprocess.run([mypy, *options, "program.py", "wrong.py"], cwd=tmp_path, env={"MYPYPATH": str(ROOT)},
                         capture_output=True, text=True)
    wanted = [(str(number), line.split("# ")[1]) for number, line in enumerate(WRONG.splitlines(), 1) if "# " in line]
    assert "program.py:" not in job.stdout, job.stdout
    assert sorted({*re.findall(r"^wrong.py:(\d+): error: .*\[([a-z-]+)\]$", job.stdout, re.MULTILINE)}) \
        == sorted(wanted), job.stdout + job.stderr
