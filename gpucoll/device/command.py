"""`gpucoll kernels`: from its options to what it prints."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpucoll.device import nvrtc
from gpucoll.device.precompile import Compiled, CompileJob, compile_all, instances
from gpucoll.device.store import user_store
from gpucoll.errors import ArgumentError, BackendError

HEADING = ("arch", "kernels", "count", "cached", "CPU s", "registers", "spills")
COLUMNS = ("<8", "<9", ">6", ">7", ">8", ">10", ">7")


def main(options: Any) -> int:
    """Compile what was asked for; print a table or a JSON object; return 0, or 1 where a kernel cannot be compiled."""
    jobs = _jobs(options.jobs)
    major, library = _nvrtc(options.nvrtc)
    archs = _archs(options.arch, major)
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


def _jobs(given: int | None) -> int:
    if given is not None and given < 1:
        raise ArgumentError(f"-j {given}: it takes one process at least")
    return given or len(os.sched_getaffinity(0))


def _nvrtc(given: str | None) -> tuple[int | None, str]:
    """Return the major version and, where a library was named, its path; it is loaded."""
    if given is None:
        return _cupys_major(), ""
    if given in map(str, nvrtc.MAJORS):
        return int(given), ""
    if not os.path.exists(given):
        majors = " nor ".join(map(str, sorted(nvrtc.MAJORS)))
        raise ArgumentError(f"--nvrtc {given}: neither {majors} nor a library that is there")
    return nvrtc.use(given), os.path.abspath(given)


def _cupys_major() -> int | None:
    """Return the CUDA version that CuPy was built for, by which it will ask; None without a CuPy."""
    try:
        import cupy

        return int(cupy.cuda.runtime.runtimeGetVersion()) // 1000
    except (ImportError, RuntimeError):
        return None


def _archs(given: str | None, major: int | None) -> list[str]:
    """Return the architectures that were named, or those of the GPUs here; all can be compiled for."""
    names = [name.strip() for name in given.split(",")] if given else _gpus()
    if not names:
        raise ArgumentError("there is no GPU here that CuPy can use: say for which ones to compile, as in "
                            "--arch sm_80,sm_90 (A100, H100)")
    for name in names:
        nvrtc.check_arch(name, major)
    return list(dict.fromkeys(names))


def _gpus() -> list[str]:
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        return [f"sm_{cupy.cuda.Device(ordinal).compute_capability}" for ordinal in range(count)]
    except (ImportError, RuntimeError):  # of CuPy where there is no driver, or none of its GPUs
        return []


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
    """Return cells in columns, the first two from the left."""
    return " ".join(f"{cell!s:{form}}" for cell, form in zip(cells, COLUMNS, strict=True))


def failures(made: Sequence[Compiled], release: str) -> Iterator[str]:
    """Yield for each kind and architecture the first kernel that failed: name, compiler, error and line."""
    wrong: dict[tuple[str, str], list[Compiled]] = {}
    for one in made:
        if one.error:
            wrong.setdefault((one.arch, one.kind), []).append(one)
    for first, *others in wrong.values():
        more = f" ({len(others)} more of its kind fail)" if others else ""
        yield f"{first.kernel} for {first.arch} by NVRTC {release}: {first.error}{more}"
        if first.line:
            yield f"    {first.line}"


def _total(made: Sequence[Compiled], release: str, seconds: float, jobs: int) -> str:
    failed, cached = sum(bool(one.error) for one in made), sum(one.cached for one in made)
    processes, compiled = f"{jobs} process{'es' * (jobs > 1)}", len(made) - cached - failed
    return (f"{len(made)} kernels by NVRTC {release} in {seconds:.1f} s, {processes}: {compiled} compiled, "
            f"{cached} cached, {failed or 'none'} failed; {user_store().folder}")
