"""Kernels of the peer executor on the emulated device, made before ranks ask for them: at once, on every core."""

import concurrent.futures
import functools
import os

from gpucoll.device import emulated, sources
from gpucoll.dtypes import DTYPES
from gpucoll.ops import OPS

MAKERS = (sources.steps, sources.packets, functools.partial(sources.shots, "one_shot"),
          functools.partial(sources.shots, "two_shot"))


def make(ops, names):
    """All kernels of these ops and dtypes, and those that only move elements; they stay in the user's cache."""
    made = [maker(OPS[op], DTYPES[name]) for maker in MAKERS for op in ops for name in names]
    moves = [sources.steps(None, DTYPES[name]) for name in ("int8", "int16", "int32", "int64", "complex128")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(emulated.compiled, [*made, *moves]))
