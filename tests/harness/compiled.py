"""Kernels compiled for the CPU in advance, on every core; they stay in the user's cache.

Threads asking the store would not help: the store lets only one thread build at a time.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import filelock

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import sources
from gpucoll.device.store import compile_shared, recipe, user_store
from harness import budgets

# The peer kernels of an op and a dtype are one compilation unit, so by default not every pair is compiled: the list has
# the sums used by the programs, and every op and dtype at least once. The nightly grid has all pairs.
PEER = [*(("sum", name) for name in ("int32", "int64", "float16", "bfloat16", "float32", "float64", "complex128",
                                     "float8_e4m3fn", "float8_e5m2")),
        ("min", "float32"), ("max", "float32"), ("prod", "int8"), ("prod", "complex64"), ("max", "uint32"),
        ("min", "uint64"), ("avg", "float16"), ("band", "uint8"), ("bor", "uint16"), ("bxor", "int16"),
        ("land", "bool"), ("lor", "float64"), ("lxor", "int32")]


class Missing(Exception):
    """A source is not in the cache."""


def refuse():
    raise Missing


def is_kept(source):
    try:
        user_store().path(source, ".so", refuse, flags=recipe())
    except Missing:
        return False
    return True


def compile_all(texts):
    """Put the shared objects of all sources into the cache; among several processes, only one compiles."""
    with filelock.FileLock(user_store().folder / "tests.lock"):
        missing = [source for source in dict.fromkeys(texts) if not is_kept(source)]
        with budgets.compiling(), ThreadPoolExecutor(os.cpu_count()) as pool:
            for source, content in zip(missing, pool.map(compile_shared, missing), strict=True):
                user_store().path(source, ".so", lambda content=content: content, flags=recipe())


def make_families(instances):
    """Compile the kernels, in the units requested by the emulated device."""
    compile_all(sources.text(*family) for family in dict.fromkeys(map(sources.family, instances)))


def make_usual():
    """Compile the kernels used by collectives on every pair of ranks."""
    make_families([sources.instance("copy", 1),
                   *(sources.reducing("reduce", OPS["sum"], dtype) for dtype in DTYPES.values())])


def make_peer_kernels(pairs):
    make_families([sources.reducing("steps", None, DTYPES["int8"]),
                   *(sources.reducing("steps", OPS[op], DTYPES[name]) for op, name in pairs)])
