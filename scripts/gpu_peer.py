"""The `peer` executor measured by scripts/gpu_check: ranks as threads on one GPU, in symmetric memory.

Large all-reduces against a copy of the same bytes, small ones captured in a graph. All ranks' kernels are under way at
once, so that P ranks of a GPU move P times the bytes.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpu_parts import PASSED, Finding, finding

RANKS = (2, 4, 8)
SMALL = (8, 64, 512, 1024, 4096, 8192)  # bytes
CALLS, REPEATS, GRAPH = 4, 9, 20  # calls timed at a time, how often, and calls in a graph
PATIENCE = 60.0


def peer_bandwidth(megabytes: int = 64) -> Iterator[Finding]:
    """GB/s that memory sees of one_shot, two_shot and a copy, in turn; shares are of the copy's."""
    for ranks in RANKS:
        measured = _on_threads(ranks, lambda comm, met: _large(comm, met, megabytes << 20))
        copied = measured.pop("device copy")
        yield finding(f"{ranks} ranks, device copy", PASSED, gigabytes_per_second=round(copied, 1))
        for name, rate in measured.items():
            yield finding(f"{ranks} ranks, {name}", PASSED, gigabytes_per_second=round(rate, 1),
                          share_of_copy=round(rate / copied, 3))


def peer_latency() -> Iterator[Finding]:
    """Microseconds of an all-reduce in a captured graph."""
    for ranks in RANKS:
        for nbytes in SMALL:
            taken = _on_threads(ranks, lambda comm, met, nbytes=nbytes: _small(comm, met, nbytes))  # type: ignore[misc]
            yield finding(f"{ranks} ranks, {nbytes} bytes", PASSED, microseconds=round(taken, 2))


def _on_threads(ranks: int, program: Callable[[Any, threading.Barrier], Any]) -> Any:
    """Return what rank 0 finds; the error of any rank is raised."""
    import cupy

    import gpucoll as gc

    found: dict[int, Any] = {}
    errors: list[BaseException] = []
    met = threading.Barrier(ranks, timeout=PATIENCE)

    def run(comm: Any) -> None:
        try:
            with comm, cupy.cuda.Stream(non_blocking=True):
                found[comm.rank] = program(comm, met)
        except BaseException as error:
            errors.append(error)
            met.abort()

    comms = gc.init_local(ranks, timeout=PATIENCE, executor="peer")
    threads = [threading.Thread(target=run, args=(comm,)) for comm in comms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found[0]


def _large(comm: Any, met: threading.Barrier, nbytes: int) -> dict[str, float]:
    """Return the medians of GB/s read and written, of all ranks together."""
    import cupy

    x, y = (comm.zeros(nbytes // 4, "float32", device="cuda") for _ in range(2))
    stream, runtime = cupy.cuda.get_current_stream(), cupy.cuda.runtime
    size, inside = comm.size, runtime.memcpyDeviceToDevice
    works: dict[str, tuple[float, Callable[[], Any]]] = {
        "device copy": (2, lambda: runtime.memcpyAsync(y.data.ptr, x.data.ptr, nbytes, inside, stream.ptr)),
        "one_shot": (size + 1, comm.plan("all_reduce", x, y, algorithm="one_shot")),
        "two_shot": (2 + 2 * (size - 1) / size + 1 / size, comm.plan("all_reduce", x, y, algorithm="two_shot"))}
    rates: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(REPEATS + 2):
        for name, (moved, call) in works.items():
            taken = _together(met, stream, call)
            if repeat >= 2:
                rates[name].append(size * moved * nbytes / taken / 1e9)
    return {name: statistics.median(some) for name, some in rates.items()}


def _small(comm: Any, met: threading.Barrier, nbytes: int) -> float:
    import cupy

    x = cupy.ones(nbytes // 4, "float32")
    y = cupy.empty_like(x)
    plan = comm.plan("all_reduce", x, y, algorithm="one_shot")
    plan()
    stream = cupy.cuda.get_current_stream()
    stream.begin_capture()
    for _ in range(GRAPH):
        plan()
    graph = stream.end_capture()
    taken = [_together(met, stream, graph.launch) for _ in range(REPEATS + 2)][2:]
    return statistics.median(taken) / GRAPH * 1e6


def _together(met: threading.Barrier, stream: Any, call: Callable[[], Any]) -> float:
    """Return the seconds of one of some calls that all ranks begin at about the same time and see to their end."""
    stream.synchronize()
    met.wait()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    stream.synchronize()
    met.wait()
    return (time.perf_counter() - began) / CALLS
