"""`gpucoll kernels`: compile them before they are asked for, into the user's cache, where a GPU's device finds them.

NVRTC compiles one program at a time in a process, and needs no GPU: this is what a login node does for the others.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gpucoll.core.dtypes import DTYPES, SMALL_RANGE
from gpucoll.core.ops import OPS
from gpucoll.device import CompileError, nvrtc, sources
from gpucoll.device.sources import Instance, Scale
from gpucoll.device.store import user_store
from gpucoll.errors import ArgumentError, BackendError

HEADING = ("arch", "kernels", "count", "cached", "CPU s", "registers", "spills")
COLUMNS = ("<8", "<9", ">6", ">7", ">8", ">10", ">7")
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
        **{kernel: [sources.reducing(kernel, *pair) for pair in pairs]
           for kernel in ("steps", "fold_share", "fold_all", "reduce", "packets")},
        "cast": [sources.instance("cast", *pair) for pair in itertools.permutations(real, 2)],
        "scale": [sources.instance("scale", what, dtype) for what, kinds in _SCALES for dtype in dtypes
                  if dtype.kind in kinds and (everything or what == "divide" or
                                              (what == "multiply" and dtype.name in SMALL_RANGE))],  # see scaled_mean
        "compress": sources.compressing(),
        **{kernel: [sources.instance(kernel, width) for width in sources.UNITS]
           for kernel in ("pack", "unpack", "copy")},
    }
    by_kind["steps"] += [sources.reducing("steps", None, dtype) for dtype in widths]
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
    except BackendError as error:
        row = error.row if isinstance(error, CompileError) else 0
        line = dict(enumerate(source.splitlines(), 1)).get(row, "").strip()
        made = made._replace(error=str(error.args[0]), line=line)
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


def main(options: Any) -> int:
    """Compile what was asked for; print a table or a JSON object; return 0, or 1 where a kernel cannot be compiled."""
    if options.jobs is not None and options.jobs < 1:
        raise ArgumentError(f"-j {options.jobs}: it takes one process at least")
    jobs = options.jobs or len(os.sched_getaffinity(0))
    cupys_major, cupys_archs = (None, []) if options.nvrtc and options.arch else _cupys()
    major, library = (cupys_major, "") if options.nvrtc is None else _nvrtc(options.nvrtc)
    archs = _archs(options.arch.split(",") if options.arch else cupys_archs, major)
    by_kind = instances(everything=options.all)
    tasks = [CompileJob(kind, instance, arch, major) for kind, some in by_kind.items() for arch in archs
             for instance in some]
    started, release = time.perf_counter(), ".".join(map(str, nvrtc.version(major)))
    try:
        made = list(compile_all(tasks, jobs, library))
    except BackendError as error:
        sys.stderr.write(f"gpucoll kernels: {error.args[0]}\n")
        return 1
    seconds = time.perf_counter() - started
    if options.json:
        print(json.dumps({"nvrtc": release, "folder": str(user_store().folder), "jobs": jobs,
                          "seconds": round(seconds, 2), "failed": sum(bool(one.error) for one in made),
                          "kernels": [one._asdict() for one in made]}))
    else:
        print("\n".join([*table(made), *failures(made, release),
                         _total(made, release, seconds, jobs)]))
    return int(any(one.error for one in made))


def _nvrtc(given: str) -> tuple[int, str]:
    """Return the major version and, where a library was named, its path; it is loaded."""
    if given in map(str, nvrtc.MAJORS):
        return int(given), ""
    if not os.path.exists(given):
        majors = " nor ".join(map(str, sorted(nvrtc.MAJORS)))
        raise ArgumentError(f"--nvrtc {given}: neither {majors} nor a library that is there")
    return nvrtc.use(given), os.path.abspath(given)


def _cupys() -> tuple[int | None, list[str]]:
    """Return the CUDA version that CuPy was built for, by which it will ask, and the architectures of its GPUs here."""
    major = None
    try:
        import cupy

        major = int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
        count = cupy.cuda.runtime.getDeviceCount()
        return major, [f"sm_{cupy.cuda.Device(ordinal).compute_capability}" for ordinal in range(count)]
    except (ImportError, RuntimeError):  # of CuPy where there is no driver, or none of its GPUs
        return major, []


def _archs(names: Sequence[str], major: int | None) -> list[str]:
    """Return the architectures that were named, or those of the GPUs here, each once; all can be compiled for."""
    if not names:
        raise ArgumentError("there is no GPU here that CuPy can use: say for which ones to compile, as in "
                            "--arch sm_80,sm_90 (A100, H100)")
    archs = list(dict.fromkeys(name.strip() for name in names))
    for name in archs:
        nvrtc.check_arch(name, major)
    return archs


def table(made: Sequence[Compiled]) -> Iterator[str]:
    """Yield a line for each kind of kernel and architecture; "-" where nothing is known of a kernel's registers."""
    yield _row(HEADING)
    for arch, kind in dict.fromkeys((one.arch, one.kind) for one in made):
        some = [one for one in made if (one.arch, one.kind) == (arch, kind)]
        yield _row((arch, kind, len(some), sum(one.cached for one in some), f"{sum(one.seconds for one in some):.1f}",
                    _or_dash(max, [one.registers for one in some]), _or_dash(sum, [one.spills for one in some])))


def _or_dash(total: Callable[[Iterable[int]], int], numbers: Sequence[int | None]) -> int | str:
    known = [number for number in numbers if number is not None]
    return total(known) if len(known) == len(numbers) else "-"


def _row(cells: Sequence[object]) -> str:
    return " ".join(f"{cell!s:{form}}" for cell, form in zip(cells, COLUMNS, strict=True))


def failures(made: Sequence[Compiled], release: str) -> Iterator[str]:
    """Yield for each kind and architecture the first kernel that failed: name, compiler, error and line."""
    wrong = [one for one in made if one.error]
    for kernels in dict.fromkeys((one.arch, one.kind) for one in wrong):
        first, *others = (one for one in wrong if (one.arch, one.kind) == kernels)
        more = f" ({len(others)} more of its kind fail)" if others else ""
        yield f"{first.kernel} for {first.arch} by NVRTC {release}: {first.error}{more}"
        if first.line:
            yield f"    {first.line}"


def _total(made: Sequence[Compiled], release: str, seconds: float, jobs: int) -> str:
    failed, cached = sum(bool(one.error) for one in made), sum(one.cached for one in made)
    processes, compiled = f"{jobs} process{'es' * (jobs > 1)}", len(made) - cached - failed
    return (f"{len(made)} kernels by NVRTC {release} in {seconds:.1f} s, {processes}: {compiled} compiled, "
            f"{cached} cached, {failed or 'none'} failed; {user_store().folder}")
