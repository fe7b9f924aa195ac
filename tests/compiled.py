"""Kernels compiled for the CPU before they are asked for, on every core; they stay in the user's cache.

Not by threads that ask the store: it lets one of them build at a time.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import filelock

from gpucoll.device import sources
from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.store import user_store


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
