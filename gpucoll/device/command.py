"""`gpucoll kernels`: compile kernels in advance into the user's cache, for later use by programs on GPUs.

NVRTC needs no GPU, so a login node can compile for the other nodes. NVRTC compiles one program at a time in a process,
so the command uses several processes.
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gpucoll.core.dtypes import DTYPES, SMALL_RANGE
from gpucoll.core.ops import EXACT, OPS
from gpucoll.device import CompileError, nvrtc, sources
from gpucoll.device.sources import Instance, Scale
from gpucoll.device.store import user_store
from gpucoll.errors import ArgumentError, BackendError

HEADING = ("arch", "kernels", "count", "cached", "CPU s", "registers", "spills")
COLUMN_FORMATS = ("<8", "<9", ">6", ">7", ">8", ">10", ">7")
# ptxas' report on one function: name, bytes of spill stores and loads, and the registers, reported for kernels only.
REPORT = re.compile(r"Function properties for (\w+)\n\D*\d+ bytes stack frame, (\d+) bytes spill stores, "
                    r"(\d+) bytes spill loads\n(?:.*Used (\d+) registers)?")
# The kinds of dtypes scaled by collectives in each of the three ways.
_SCALES: tuple[tuple[Scale, tuple[str, ...]], ...] = (
    ("divide", ("float", "complex")), ("multiply", ("int", "float", "complex")), ("truth", ("bool", "int", "float")))
DEFAULT_ARCH = "sm_90"  # without a GPU here: H100 and H200
TRAINING = ("float32", "float16", "bfloat16")  # the dtypes of gradients


class CompileJob(NamedTuple):
    """A kernel to compile for one architecture; `major` as in `compile_cubin`."""

    kind: str
    instance: Instance
    arch: str
    major: int | None = None


class Compiled(NamedTuple):
    """The result of a job: processor time in seconds, registers, and spilled bytes.

    `cached` is true for a kernel already in the cache. `registers` and `spills` are None if unknown: the compilation
    failed with `error`, or the process that compiled the kernel stored no report.
    """

    kind: str
    kernel: str
    arch: str
    cached: bool
    seconds: float
    registers: int | None = None
    spills: int | None = None
    error: str = ""
    line: str = ""  # the source line of the error


def instances(*, everything: bool) -> dict[str, list[Instance]]:
    """Return the kernels by kind, the slowest to compile first: all, or only sums on the dtypes of gradients.

    `everything` means all built-in ops and dtypes; a user's own ops are unknown here.
    """
    dtypes = list(DTYPES.values()) if everything else [DTYPES[name] for name in TRAINING]
    pairs = [(op, dtype) for op in OPS.values() for dtype in dtypes
             if dtype.kind in op.kinds and (everything or op.name == "sum")]
    exact = [(op, dtype) for op in EXACT.values() for dtype in dtypes if everything and dtype.kind in op.kinds]
    widths = {dtype.itemsize: dtype for dtype in DTYPES.values()}.values()
    by_kind = {
        **{kernel: [sources.reducing(kernel, *pair) for pair in (*pairs, *exact)]
           for kernel in ("steps", "fold_share", "fold_all", "reduce")},
        **{kernel: [sources.reducing(kernel, *pair) for pair in pairs] for kernel in sources.IN_PACKETS},
        "multimem_share": [sources.reducing("multimem_share", *pair) for pair in pairs if sources.is_switched(*pair)],
        "scale": [sources.instance("scale", what, dtype) for what, kinds in _SCALES for dtype in dtypes
                  if dtype.kind in kinds and (everything or what == "divide" or
                                              (what == "multiply" and dtype.name in SMALL_RANGE))],  # see scaled_mean
        "compress": [*itertools.chain(*sources.compressing_families())],
        **{kernel: [sources.instance(kernel, width) for width in sources.UNIT_TYPES]
           for kernel in ("multimem_gather", "pack", "unpack", "copy")},
    }
    by_kind["steps"] += [sources.reducing("steps", None, dtype) for dtype in widths]
    # Ops with the same CUDA expression share a kernel, so remove duplicates.
    return {kind: list(dict.fromkeys(some)) for kind, some in by_kind.items()}


def compile_all(tasks: Sequence[CompileJob], jobs: int, library: str = "") -> Iterator[Compiled]:
    """Compile `tasks` in `jobs` processes and yield the results in order; one job runs in this process.

    `library` is the path of an NVRTC for the new processes, already loaded in this process; empty for the default.
    Kernels in the cache are not compiled again. Raises BackendError if a process dies.
    """
    if jobs == 1:
        yield from map(compile_one, tasks)
        return
    # Spawn, do not fork: this process may have initialised CUDA, and CUDA does not survive a fork.
    # After Ctrl-C, `multiprocessing` removes the semaphores of the processes, and would print a warning for that.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"),
                                                          "ignore:resource_tracker:UserWarning"]))
    pool = concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (library,))
    try:
        yield from pool.map(compile_one, tasks)
    except concurrent.futures.BrokenExecutor as error:
        raise BackendError(f"a compiling process has died, perhaps for lack of memory; try a smaller -j: {error}",
                           code="GC-COMPILE") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(library: str) -> None:
    # The parent process handles the interrupt and ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A killed parent ends no worker: the workers hold the other ends of each other's pipes.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if library:
        nvrtc.use(library)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def compile_one(task: CompileJob) -> Compiled:
    """Compile one kernel into the cache, if missing, and return the result, with figures from ptxas' report.

    The key is the key used by `CudaDevice`. The report is cached, too.
    """
    store, started = user_store(), time.process_time()
    source, flags = sources.text(task.instance), nvrtc.recipe(task.arch, task.major)
    log: str | None = None  # None unless this call compiles the kernel

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
        made = made._replace(registers=registers, spills=spills, error=store.unavailable_reason)
    except BackendError as error:
        row = error.row if isinstance(error, CompileError) else 0
        line = dict(enumerate(source.splitlines(), 1)).get(row, "").strip()
        made = made._replace(error=str(error.args[0]), line=line)
    return made._replace(seconds=time.process_time() - started)


def usage(log: str) -> tuple[int | None, int | None]:
    """Return the largest number of registers in ptxas' report, and the spilled bytes, stores plus loads.

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
    """Compile the requested kernels and print a table or a JSON object; return 0, or 1 if a kernel failed."""
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
        print("\n".join([*table(made), *failures(made, release), _total(made, release, seconds, jobs)]))
    return int(any(one.error for one in made))


def _nvrtc(given: str) -> tuple[int, str]:
    """Return the major version meant by the option --nvrtc, and the path of a library given as path, now loaded."""
    if given in map(str, nvrtc.MAJORS):
        return int(given), ""
    if not os.path.exists(given):
        majors = " nor ".join(map(str, sorted(nvrtc.MAJORS)))
        raise ArgumentError(f"--nvrtc {given}: neither {majors} nor an existing library")
    return nvrtc.use(given), os.path.abspath(given)


def _cupys() -> tuple[int | None, list[str]]:
    """Return the major CUDA version of CuPy, part of the cache key, and the architectures of this host's GPUs."""
    major = None
    try:
        import cupy

        major = int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
        count = cupy.cuda.runtime.getDeviceCount()
        return major, [f"sm_{cupy.cuda.Device(ordinal).compute_capability}" for ordinal in range(count)]
    # CuPy raises RuntimeError without a driver or without a GPU.
    except (ImportError, RuntimeError):
        return major, []


def _archs(names: Sequence[str], major: int | None) -> list[str]:
    """Return `names` without duplicates, or the default without names; raise an error for an unsupported one."""
    if not names:
        sys.stderr.write(f"gpucoll kernels: CuPy finds no GPU here, so the kernels are for {DEFAULT_ARCH} (H100); "
                         "--arch sm_80,sm_90 names others\n")
        names = [DEFAULT_ARCH]
    archs = list(dict.fromkeys(name.strip() for name in names))
    for name in archs:
        nvrtc.check_arch(name, major)
    return archs


def table(made: Sequence[Compiled]) -> Iterator[str]:
    """Yield a line for each kind of kernel and architecture; "-" if the registers of a kernel are unknown."""
    yield _row(HEADING)
    for arch, kind in dict.fromkeys((one.arch, one.kind) for one in made):
        some = [one for one in made if (one.arch, one.kind) == (arch, kind)]
        yield _row((arch, kind, len(some), sum(one.cached for one in some), f"{sum(one.seconds for one in some):.1f}",
                    _or_dash(max, [one.registers for one in some]), _or_dash(sum, [one.spills for one in some])))


def _or_dash(total: Callable[[Iterable[int]], int], numbers: Sequence[int | None]) -> int | str:
    known = [number for number in numbers if number is not None]
    return total(known) if len(known) == len(numbers) else "-"


def _row(cells: Sequence[object]) -> str:
    return " ".join(f"{cell!s:{form}}" for cell, form in zip(cells, COLUMN_FORMATS, strict=True))


def failures(made: Sequence[Compiled], release: str) -> Iterator[str]:
    """Yield for each kind and architecture the first failed kernel: name, compiler, error and source line."""
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
