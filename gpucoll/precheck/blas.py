"""The threads of NumPy's OpenBLAS: one during a precheck, because one virtual rank runs at a time.

Further threads spin while they wait for parts of products. On 2 processors that other programs kept busy, a step of
`scripts/train.py` on 1 rank took 3.9 ms of a processor with 2 threads, and 0.6 ms with 1 thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAPS = Path("/proc/self/maps")  # the libraries of this process; Linux only


def libraries() -> list[tuple[Any, Any]]:
    """Return the functions that read and set the number of threads, for each OpenBLAS of this process."""
    try:
        lines = MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line[line.index("/"):] for line in lines if "/" in line)
    found = []
    for path in (path for path in paths if "openblas" in path.rpartition("/")[2]):
        try:
            library = ctypes.CDLL(path)
        except OSError:  # a file replaced since the library was loaded
            continue
        # NumPy's wheels rename the functions of OpenBLAS: a prefix for SciPy's build, a suffix for 64-bit indices.
        for prefix, suffix in itertools.product(("", "scipy_"), ("", "64_", "_64_", "_64")):
            names = [f"{prefix}openblas_{verb}_num_threads{suffix}" for verb in ("get", "set")]
            if all(hasattr(library, name) for name in names):
                found.append(tuple(getattr(library, name) for name in names))
                break
    return found


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let each OpenBLAS loaded so far compute in the calling thread alone, until the end of the block."""
    before = [(write, read()) for read, write in libraries()]
    for write, _ in before:
        write(1)
    try:
        yield
    finally:
        for write, count in before:
            write(count)
