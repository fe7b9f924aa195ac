"""Kernels compiled before they are asked for, in processes: into the user's cache, where a GPU's device finds them.

NVRTC compiles one program at a time in a process, and needs no GPU: this is what a login node does for the others.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import multiprocessing
import re
import signal
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gpucoll.device import nvrtc, sources
from gpucoll.device.compilers import SOURCE_NAME, CompileError
from gpucoll.device.sources import Instance, Scale
from gpucoll.device.store import user_store
from gpucoll.dtypes import DTYPES
from gpucoll.errors import BackendError
from gpucoll.ops import OPS

# What ptxas says of one function: its name, the bytes of its spill stores and loads, and the registers of a kernel.
REPORT = re.compile(r"Function properties for (\w+)\n\D*\d+ bytes stack frame, (\d+) bytes spill stores, "
                    r"(\d+) bytes spill loads\n(?:.*Used (\d+) registers)?")
_SCALES: tuple[tuple[Scale, tuple[str, ...]], ...] = (  # and the kinds of dtypes that collectives scale so
    ("divide", ("float", "complex")), ("multiply", ("int", "float", "complex")), ("truth", ("bool", "int", "float")))
TRAINING = ("float32", "float16", "bfloat16")  # the dtypes of gradients


class CompileJob(NamedTuple):
    """A kernel to compile, for one architecture; `major` as of `compile_cubin`."""

    kind: str
    instance: Instance
    arch: str
    major: int | None = None


class Compiled(NamedTuple):
    """What became of a task: `seconds` of processor time, the registers and the bytes that are spilled.

    A kernel that was in the cache is `cached`. Registers and spills are None where nothing is known of them: the
    compiler has failed, for which `error` has the reason, or the process that compiled the kernel kept no report.
    """

    kind: str
    kernel: str
    arch: str
    cached: bool
    seconds: float
    registers: int | None = None
    spills: int | None = None
    error: str = ""
    line: str = ""  # of the source, where the error is


def instances(*, everything: bool) -> dict[str, list[Instance]]:
    """Return the kernels by their kind, those first that take long: all, or those of sums on gradients' dtypes.

    All are those of the table's ops and dtypes; of ops of a user's own there is no end.
    """
    dtypes = list(DTYPES.values()) if everything else [DTYPES[name] for name in TRAINING]
    pairs = [(op, dtype) for op in OPS.values() for dtype in dtypes
             if dtype.kind in op.kinds and (everything or op.name == "sum")]
    real = [dtype for dtype in dtypes if dtype.kind != "complex"]
    widths = {dtype.itemsize: dtype for dtype in DTYPES.values()}.values()
    by_kind = {
        "steps": [*itertools.starmap(sources.steps, pairs), *(sources.steps(None, dtype) for dtype in widths)],
        "two_shot": [sources.shots("two_shot", *pair) for pair in pairs],
        "one_shot": [sources.shots("one_shot", *pair) for pair in pairs],
        "reduce": list(itertools.starmap(sources.reduce, pairs)),
        "packets": list(itertools.starmap(sources.packets, pairs)),
        "cast": [sources.cast(*pair) for pair in itertools.permutations(real, 2)],
        "scale": [sources.scale(what, dtype) for what, kinds in _SCALES for dtype in dtypes
                  if dtype.kind in kinds and (everything or what == "divide")],
        "compress": sources.compressing(),
        **{make.__name__: [make(width) for width in sources.UNITS]
           for make in (sources.pack, sources.unpack, sources.copy)},
    }
    return {kind: list(dict.fromkeys(some)) for kind, some in by_kind.items()}  # ops that are alike share a kernel


def compile_all(tasks: Sequence[CompileJob], jobs: int, library: str = "") -> Iterator[Compiled]:
    """Yield what became of each task, in their order, from so many processes; with one job it is this process.

    `library` is the path of the NVRTC that the processes load; this one has it already. What is in the cache is not
    compiled again. Raises BackendError where a process dies.
    """
    if jobs == 1:
        yield from map(compile_one, tasks)
        return
    # Not forks: this process may have started CUDA.
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (library,))
    try:
        yield from pool.map(compile_one, tasks)
    except concurrent.futures.BrokenExecutor as error:
        raise BackendError(f"a process that compiles has died, perhaps for want of memory; fewer need less: {error}",
                           code="GC-COMPILE") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(library: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started the process ends it
    if library:
        nvrtc.use(library)


def compile_one(task: CompileJob) -> Compiled:
    """The cache has the kernel, under the key by which a GPU's device asks for it, and beside it ptxas' report."""
    store, started = user_store(), time.process_time()
    source, flags = sources.text(task.instance), nvrtc.recipe(task.arch, task.major)
    log: str | None = None

    def build() -> bytes:
        nonlocal log
        cubin, log = nvrtc.compile_cubin(source, task.arch, task.major)
        return cubin

    made = Compiled(task.kind, task.instance.entry, task.arch, cached=False, seconds=0.0)
    try:
        store.path(source, ".cubin", build, flags=flags)
        made = made._replace(cached=log is None)
        report = store.path(source, ".log", lambda: (log or "").encode(), flags=flags).read_text()
        registers, spills = usage(report)
        made = made._replace(registers=registers, spills=spills, error=store.trouble)
    except CompileError as error:
        made = made._replace(error=str(error.args[0]), line=_line(source, str(error.args[0])))
    except BackendError as error:
        made = made._replace(error=str(error.args[0]))
    return made._replace(seconds=time.process_time() - started)


def usage(log: str) -> tuple[int | None, int | None]:
    """Return the most registers of a kernel in ptxas' report, and the bytes that functions spill, stored and loaded.

    >>> usage("Function properties for f\\n    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\\n"
    ...       "ptxas info    : Used 52 registers, used 0 barriers")
    (52, 12)
    >>> usage("")
    (None, None)
    """
    functions = REPORT.findall(log)
    registers = [int(used) for *_, used in functions if used]
    if not registers:
        return None, None
    return max(registers), sum(int(stores) + int(loads) for _, stores, loads, _ in functions)


def _line(source: str, message: str) -> str:
    """Return the line of `source` that a compiler's message names."""
    place = re.search(rf"{re.escape(SOURCE_NAME)}:(\d+)", message)
    lines = source.splitlines()
    return lines[int(place[1]) - 1].strip() if place and int(place[1]) <= len(lines) else ""
