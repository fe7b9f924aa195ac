"""The calls keep the array's type; checked by the type checker itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
from typing import Any, assert_type

import numpy
from numpy.typing import NDArray

import gpucoll as gc

comm = gc.init()
x: NDArray[numpy.float32] = numpy.ones(3, numpy.float32)
assert_type(comm.all_reduce(x), NDArray[numpy.float32])
assert_type(comm.all_reduce(x, op="max", algorithm="ring"), NDArray[numpy.float32])
assert_type(comm.all_reduce(x, async_op=True), gc.Work)
assert_type(comm.all_reduce([1], out=x), NDArray[numpy.float32])
assert_type(comm.reduce(x, root=1), NDArray[numpy.float32] | None)
assert_type(comm.all_gather_v(x), list[NDArray[numpy.float32]])
assert_type(comm.all_gather_v(x, out=[x]), list[NDArray[numpy.float32]])
assert_type(comm.gather_v(x, out=x), NDArray[numpy.float32] | None)
assert_type(comm.scatter_v([x] if comm.rank == 0 else None), NDArray[numpy.float32])
assert_type(comm.all_to_all_v([x], x), NDArray[numpy.float32])
assert_type(comm.reduce_scatter_v(x, [3], async_op=True), gc.Work)
assert_type(comm.recv(x, gc.ANY_SOURCE, gc.ANY_TAG, gc.Status()), NDArray[numpy.float32])
assert_type(comm.recv(x, 0, async_op=True), gc.Work)
assert_type(comm.probe(), gc.Status)
assert_type(comm.iprobe(0), gc.Status | None)
grid = comm.cart([2, 2])
assert grid is not None
assert_type(grid.neighbor_all_gather(x), NDArray[numpy.float32])
assert_type(grid.shift(0), tuple[int, int])
comm.all_reduce(x, opp="sum")  # type: ignore[call-overload]
"""


def test_the_type_checker_sees_the_arrays_type(tmp_path):
    mypy = Path(sys.executable).with_name("mypy")
    if not mypy.exists():
        pytest.skip("mypy is not installed beside this Python: pip install gpucoll[test]")
    (tmp_path / "program.py").write_text(PROGRAM)
    job = subprocess.run([mypy, "--config-file=", "--warn-unused-ignores", "--follow-imports=silent", "program.py"],
                         cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    assert job.returncode == 0, job.stdout + job.stderr
