"""`cupy.cuda.profiler`: no profiler listens."""

from .nvtx import _ignored

start = stop = _ignored
