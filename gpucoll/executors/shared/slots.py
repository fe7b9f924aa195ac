"""Collectives of a node by slots: C++ that calls nothing of ours, where it can be compiled.

All ranks come, the last one wakes the others, and each takes what is for it from the slots of all. A call like one that
was made before is done without a step in Python. It takes a compiler, and Python's and NumPy's headers.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable
from typing import Any

import numpy

from gpucoll.arrays import Array, address
from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.sources import inlined
from gpucoll.device.store import user_store
from gpucoll.errors import BackendError, GpucollError
from gpucoll.executors import Task
from gpucoll.executors.shared.neighbours import BOARDS, Neighbours
from gpucoll.work import Operation

SLOT = 1 << 18  # bytes; longer arrays go by in segments
LINE = 64
ROOM = 3 * LINE + 2 * SLOT  # bytes of each rank's part of the shared memory
MOST_RANKS = SLOT // LINE  # for each of whom there must be a line in a slot
# As kernels/slots.h has them
KINDS = ("float32", "float64", "int32", "int64", "uint32", "uint64", "int8", "uint8", "int16", "uint16")
OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
SPINS, YIELDS = 2000, 60  # looks before a rank goes to sleep
CROWDED = (0, 60)  # the same where ranks outnumber cores: who yields lets another one come
WHATS = {("all_reduce", "one_shot"): 0, ("all_reduce", "two_shot"): 1, ("all_gather", "direct"): 2,
         ("broadcast", "linear"): 3, ("all_to_all", "direct"): 4, ("reduce_scatter", "direct"): 5}
COPY = 6  # of a rank alone, which has no others' slots
COLLECTIVES = {collective for collective, _ in WHATS}
Step = tuple[int, int, int, int]  # what, places in KINDS and OPS, which count where it reduces, and a signature


@functools.cache
def library() -> Any:
    """Return the compiled module, None where there is no compiler, or one that cannot."""
    try:
        return built()
    except (BackendError, ImportError, OSError):
        return None


def built() -> Any:
    """Return the compiled module; raise BackendError, ImportError or OSError, which say what is lacking."""
    source = inlined("slots.cc", set())
    options = ["-O3", *(f"-I{folder}" for folder in (sysconfig.get_paths()["include"], numpy.get_include()))]
    made_by = "\n".join([recipe(), *options, sys.version, numpy.__version__])
    build = functools.partial(compile_shared, source, *options)
    return imported(user_store().loadable(source, ".so", build, flags=made_by))


def imported(path: str) -> Any:
    """Return the compiled module at `path`."""
    loader = importlib.machinery.ExtensionFileLoader("slots", path)
    spec = importlib.util.spec_from_loader("slots", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def make_slots(near: Neighbours, progress: Array) -> Any:
    """Return one rank's part in the exchanges of its communicator, None where they cannot be.

    The line at the beginning of rank 0's area is everybody's. `progress` stays.
    """
    areas, heads = near.extras(), near.beginnings()
    found = library() if len(areas) <= MOST_RANKS else None
    looks = CROWDED if len(areas) > len(os.sched_getaffinity(0)) else (SPINS, YIELDS)
    return None if found is None else found.Slots(near.rank, tuple(areas), *looks, SLOT, tuple(heads),
                                                  tuple(head + BOARDS for head in heads), address(progress))


def takes(task: Task) -> bool:
    """Return whether slots do such calls on such arrays, by some algorithm: the same on every rank."""
    return (task.collective in COLLECTIVES and task.device == "cpu" and task.nbytes > 0
            and kinds_of(task) is not None)


def step_of(task: Task) -> Step | None:
    """Return what slots do for a task, None where it takes another way: the same on every rank."""
    what, kinds = WHATS.get((task.collective, task.algorithm)), kinds_of(task)
    if what is None or kinds is None or not takes(task):
        return None
    op = "" if task.op is None else task.op.name
    signature = zlib.crc32(f"{task.collective} {op} {task.dtype.name}".encode()) << 32
    return what, *kinds, signature


def kinds_of(task: Task) -> tuple[int, int] | None:
    """Return the places of a task's dtype and op in KINDS and OPS, None where C++ does not combine such."""
    if task.op is None:
        return 0, 0
    if task.dtype.name not in KINDS or task.op.factor is not None or task.op.name not in OPS:
        return None
    return KINDS.index(task.dtype.name), OPS.index(task.op.name)


def alone(task: Task) -> Step | None:
    """Return what slots do for a rank that is the only one."""
    what = WHATS["broadcast", "linear"] if task.collective == "broadcast" else COPY
    return (what, 0, 0, 0) if task.input is not None and task.output is not None else None


def exchange(slots: Any, task: Task, step: Step, watch: Callable[[], None]) -> Operation:
    """Do a call as an operation, which never blocks; `watch` raises where another rank has failed."""
    def is_done() -> bool:
        if slots.go_on(task.collective):
            return True
        try:
            watch()
        except GpucollError:  # all may have come meanwhile, and one have failed since: then this call is over
            if not slots.go_on(task.collective):
                raise
            return True
        return False

    slots.begin(task.output if task.input is None else task.input, task.output, *step, task.root)
    if not slots.go_on(task.collective):
        yield is_done
