"""Kernels compiled for the CPU before they are asked for, on every core; they stay in the user's cache.

Not by threads that ask the store: it lets one of them build at a time.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import filelock

from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import sources
from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.store import user_store

# The peer kernels of an op and a dtype are a unit to compile, so that by default it is not tried on every pair: on sums
# that the programs take, and on every op and every dtype at least once. The nightly grid has all pairs.
PEER = [*(("sum", name) for name in ("int32", "int64", "float16", "bfloat16", "float32", "float64", "complex128",
                                     "float8_e4m3fn", "float8_e5m2")),
        ("min", "float32"), ("max", "float32"), ("prod", "int8"), ("prod", "complex64"), ("max", "uint32"),
        ("min", "uint64"), ("avg", "float16"), ("band", "uint8"), ("bor", "uint16"), ("bxor", "int16"),
        ("land", "bool"), ("lor", "float64"), ("lxor", "int32")]


class Missing(Exception):
    """The cache does not have it."""


def refuse():
    raise Missing


def is_kept(source):
    try:
        user_store().path(source, ".so", refuse, flags=recipe())
    except Missing:
        return False
    return True


def compile_all(texts):
    """The shared objects of all these sources are in the cache; of several processes that need them, one makes them."""
    with filelock.FileLock(user_store().folder / "tests.lock"):
        missing = [source for source in dict.fromkeys(texts) if not is_kept(source)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for source, content in zip(missing, pool.map(compile_shared, missing), strict=True):
                user_store().path(source, ".so", lambda content=content: content, flags=recipe())


def make_families(instances):
    """The kernels, in the units in which the emulated device asks for them."""
    compile_all(sources.text(*family) for family in dict.fromkeys(map(sources.family, instances)))


def make_usual():
    """What the collectives use on every pair of ranks."""
    make_families([sources.instance("copy", 1),
                   *(sources.reducing("reduce", OPS["sum"], dtype) for dtype in DTYPES.values())])


def make_peer_kernels(pairs):
    make_families([sources.reducing("steps", None, DTYPES["int8"]),
                   *(sources.reducing("steps", OPS[op], DTYPES[name]) for op, name in pairs)])
