"""NVML's view of this host's GPUs, by pynvml: PCI ids, names, memory, NVLinks, and who reaches whom in which way."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from gpucoll.doctor.findings import Findings

# NVML's numbers. pynvml's own NVML_P2P_CAPS_INDEX_READ is, by a comma too many, a tuple.
READ, BY_NVLINK = 0, 2
STATUS = {1: "chipset not supported", 2: "GPU not supported", 3: "I/O hub not supported", 4: "disabled by the driver",
          5: "not supported"}
PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # as nvidia-smi's topo -m says them


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Yield pynvml with its library started."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def gpus() -> Findings:
    """Find `gpus`, in NVML's order, and between each two of them `p2p`, the way, and `paths`, the distance."""
    found, survey = Findings(), Findings()
    found.facts.update(gpus=None, p2p=None, paths=None)
    survey.look("gpus", lambda: _survey(found))
    found.missing.update(survey.missing)
    return found


def _survey(found: Findings) -> None:
    with nvml() as library:
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        found.facts["gpus"] = [_gpu(found, library, index, handle) for index, handle in enumerate(handles)]
        found.facts["p2p"] = _matrix(found, "p2p", handles, lambda one, two: _way(library, one, two))
        found.facts["paths"] = _matrix(found, "paths", handles, lambda one, two: _path(library, one, two))


def _gpu(found: Findings, library: Any, index: int, handle: Any) -> dict[str, Any]:
    """Return the facts of one GPU; of those that NVML does not tell the reason is kept as ``gpus[0].memory``."""
    one = Findings()
    one.facts["index"] = index
    one.look("name", lambda: text(library.nvmlDeviceGetName(handle)))
    one.look("pci", lambda: text(library.nvmlDeviceGetPciInfo(handle).busId))
    one.look("memory_bytes", lambda: int(library.nvmlDeviceGetMemoryInfo(handle).total))
    one.look("memory_free_bytes", lambda: int(library.nvmlDeviceGetMemoryInfo(handle).free))
    one.look("nvlinks", lambda: _nvlinks(library, handle))
    found.missing.update({f"gpus[{index}].{name}": why for name, why in one.missing.items()})
    return one.facts


def _nvlinks(library: Any, handle: Any) -> dict[str, int]:
    """Return how many NVLinks are up and how many down; a GPU has fewer than NVML has numbers for, or none."""
    states = []
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        with contextlib.suppress(library.NVMLError_InvalidArgument, library.NVMLError_NotSupported):
            states.append(bool(library.nvmlDeviceGetNvLinkState(handle, link)))
    return {"up": sum(states), "down": len(states) - sum(states)}


def _matrix(found: Findings, name: str, handles: list[Any], cell: Callable[[Any, Any], str]) -> list[list[str | None]]:
    """Return `cell` for each two GPUs; "self" on the diagonal, None where NVML does not tell."""
    looks = Findings()
    rows = [["self" if one is two else looks.look(f"{name}[{i}][{j}]", functools.partial(cell, one, two))
             for j, two in enumerate(handles)] for i, one in enumerate(handles)]
    found.missing.update(looks.missing)
    return rows


def _way(library: Any, one: Any, two: Any) -> str:
    """Return by what one GPU reads the other's memory, else why it cannot."""
    if library.nvmlDeviceGetP2PStatus(one, two, BY_NVLINK) == 0:
        return "NVLink"
    status = library.nvmlDeviceGetP2PStatus(one, two, READ)
    return "PCI" if status == 0 else f"no: {STATUS.get(status, 'unknown')}"


def _path(library: Any, one: Any, two: Any) -> str:
    level = library.nvmlDeviceGetTopologyCommonAncestor(one, two)
    return PATHS.get(level, str(level))


def text(value: str | bytes) -> str:
    """Return what NVML says as text: older versions of pynvml give bytes."""
    return value.decode() if isinstance(value, bytes) else value
