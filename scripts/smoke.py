"""A check of an installed wheel: extension modules present, and three ranks right; `python scripts/smoke.py`."""

import importlib

import numpy

import gpucoll
from gpucoll.executors.engine.extension import library

importlib.import_module("gpucoll._ucx")
library()
sums = gpucoll.run_local(lambda comm: comm.all_reduce(numpy.full(9, comm.rank + 1.0)), 3)
assert [*map(float, numpy.concatenate(sums))] == [6.0] * 27, sums
