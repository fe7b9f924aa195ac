"""This process and its host: cores, NUMA nodes, shared memory, limits, clock."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpucoll.doctor.findings import Findings

SHARED = "/dev/shm"
NODES = Path("/sys/devices/system/node")
CLOCK = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
QUOTA = Path("/sys/fs/cgroup/cpu.max")
RDMA = Path("/sys/class/infiniband")
LIMITS = {"memlock": resource.RLIMIT_MEMLOCK, "nofile": resource.RLIMIT_NOFILE, "stack": resource.RLIMIT_STACK}
READS = 1000  # of the clock


def machine() -> Findings:
    """Return the facts of this process's host; sizes are in bytes."""
    found = Findings()
    found.look("cores", os.cpu_count)
    found.look("affinity", lambda: ranges(os.sched_getaffinity(0)))
    found.look("quota_cores", _quota)
    found.look("numa", _numa)
    found.look("shm", _shared_memory)
    found.look("limits", lambda: {name: _limit(kind) for name, kind in LIMITS.items()})
    found.look("clock", _clock)
    found.look("slots", _slots)
    found.look("rdma", lambda: sorted(path.name for path in RDMA.iterdir()) if RDMA.is_dir() else [])
    return found


def host_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the host's name as the launcher calls it, else as it calls itself."""
    return environment.get("PMI_HOSTNAME") or environment.get("PMIX_HOSTNAME") or socket.gethostname()


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as people and the kernel write them.

    >>> ranges([3, 0, 1, 2, 8, 10, 11])
    '0-3,8,10-11'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _quota() -> float | None:
    """Return the cores' worth of time that the control group allows; None for all that there are."""
    if not QUOTA.exists():
        return None
    allowed, period = QUOTA.read_text().split()
    return None if allowed == "max" else int(allowed) / int(period)


def _numa() -> list[dict[str, Any]]:
    nodes = sorted(NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    if not nodes:
        raise LookupError(f"the kernel names no NUMA nodes in {NODES}")
    return [{"node": int(path.name[4:]), "cores": (path / "cpulist").read_text().strip()} for path in nodes]


def _shared_memory() -> dict[str, int]:
    found = os.statvfs(SHARED)
    return {"size": found.f_frsize * found.f_blocks, "free": found.f_frsize * found.f_bavail}


def _slots() -> bool:
    """Return that short calls on the host can be compiled; raise what says why not."""
    from gpucoll.executors.shared.slots import built

    return built() is not None


def _limit(kind: int) -> dict[str, int | str]:
    soft, hard = resource.getrlimit(kind)
    return {name: "unlimited" if value == resource.RLIM_INFINITY else value
            for name, value in (("soft", soft), ("hard", hard))}


def _clock() -> dict[str, Any]:
    """Return the kernel's clock, the resolution that it claims, and the smallest step seen."""
    reads = [time.perf_counter_ns() for _ in range(READS)]
    steps = [later - earlier for earlier, later in itertools.pairwise(reads) if later > earlier]
    return {"source": CLOCK.read_text().strip() if CLOCK.exists() else None,
            "resolution_ns": round(time.get_clock_info("perf_counter").resolution * 1e9),
            "step_ns": min(steps, default=None)}
