"""`gpucoll run --bind`: each rank gets a core, or the processors near the rank's GPU, before the program starts.

    python -IS binding.py numa python -m gpucoll.cli.jobs ...

chooses the processors of this rank, and becomes the command after the first word. Libraries count processors when they
are loaded, as OpenBLAS for threads, so this file runs before them: by path, with the standard library alone. The
choice is the same under every mpiexec and without MPI, and knows the GPUs; mpiexec is told not to bind. A rank chooses
among the processors of the process, so the binding of a batch system holds.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

WAYS = ("core", "numa", "none")
SYSTEM_ROOT = Path("/")


def processors(how: str, rank: int, size: int, allowed: Collection[int], *, root: Path = SYSTEM_ROOT,
               environment: Mapping[str, str] = os.environ) -> set[int]:
    """Return the processors, among those `allowed`, of the rank number `rank` of the `size` ranks of this host.

    `how` is one of `WAYS`, or "auto": "numa" if the ranks fill the host, as many as GPUs or cores, else "none".
    `root` is the folder of ``sys`` and ``proc``.
    """
    cores, gpus = _cores(allowed, root), _homes(root, environment)
    fill = size == len(gpus) or len(cores) <= size
    if how == "none" or size > len(allowed if how != "core" else cores) or (how == "auto" and not fill):
        return {*allowed}
    nodes = numa_nodes(allowed, root)
    # Rank i has GPU i. Otherwise neighbours share a node, because most algorithms send to neighbours.
    homes = [home if (home := gpus[one % len(gpus)] if gpus else None) in nodes else [*nodes][one * len(nodes) // size]
             for one in range(size)]
    own = [core for core in cores if core <= nodes[homes[rank]]]
    alone = how == "core" and homes.count(homes[rank]) <= len(own)
    return own[homes[:rank].count(homes[rank])] if alone else nodes[homes[rank]]


def numa_nodes(allowed: Collection[int], root: Path = SYSTEM_ROOT) -> dict[int, set[int]]:
    """Return the processors `allowed` of each NUMA node with any, by the node's number."""
    files = root.glob("sys/devices/system/node/node[0-9]*/cpulist")
    found = {int(file.parent.name[4:]): numbers(file.read_text()) & {*allowed} for file in files}
    return {node: found[node] for node in sorted(found) if found[node]} or {0: {*allowed}}


def near(pci: str, root: Path = SYSTEM_ROOT) -> set[int]:
    """Return the processors near the GPU of a PCI id, for example 0000:17:00.0; empty if unknown."""
    try:
        return numbers(root.joinpath("sys/bus/pci/devices", pci[-12:].lower(), "local_cpulist").read_text())
    except OSError:
        return set()


def numbers(text: str) -> set[int]:
    """Return the numbers of a list of Linux.

    >>> numbers("0-2,8")
    {0, 1, 2, 8}
    """
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {number for pair in ends for number in range(int(pair[0]), int(pair[-1]) + 1)}


def processor_list(processors: Collection[int]) -> str:
    """Return a list of Linux.

    >>> processor_list({8, 0, 2, 1})
    '0-2,8'
    """
    starts = [one for one in sorted(processors) if one - 1 not in processors]
    ends = [one for one in sorted(processors) if one + 1 not in processors]
    return ",".join(f"{start}-{end}" if start < end else str(start) for start, end in zip(starts, ends, strict=True))


def _cores(allowed: Collection[int], root: Path) -> list[set[int]]:
    """Return the processors of each core: its hardware threads."""
    found: dict[frozenset[int], set[int]] = {}
    for one in sorted(allowed):
        try:
            text = root.joinpath(f"sys/devices/system/cpu/cpu{one}/topology/thread_siblings_list").read_text()
        except OSError:
            text = str(one)
        found.setdefault(frozenset(numbers(text)), set()).add(one)
    return [*found.values()]


def _homes(root: Path, environment: Mapping[str, str]) -> list[int | None]:
    """Return the NUMA node of each GPU of this process, in the order of PCI; empty if unknown."""
    # Not by CUDA: a program may choose the GPUs that its process sees, before it starts CUDA.
    found: list[int | None] = []
    for gpu in sorted(root.glob("proc/driver/nvidia/gpus/*")):
        try:
            found.append(int(root.joinpath("sys/bus/pci/devices", gpu.name, "numa_node").read_text()))
        except (OSError, ValueError):
            found.append(None)
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    chosen = visible.split(",")
    is_known = all(one.isdecimal() and int(one) < len(found) for one in chosen)  # and not names of GPUs
    return [found[int(one)] for one in chosen] if is_known else []


if __name__ == "__main__":
    place = runpy.run_path(str(Path(__file__).with_name("launchers.py")))["local_place"]()
    if place is not None:
        own_rank, local_size = place
        os.sched_setaffinity(0, processors(sys.argv[1], own_rank, local_size, os.sched_getaffinity(0)))
    os.execv(sys.argv[2], sys.argv[2:])
