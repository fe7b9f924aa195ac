"""NVLink between the GPUs of a node, as reported by NVML."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

BY_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
CAPABILITIES = {70, 80, 90, 100, 120}  # GPUs on which NCCL uses LL128; others are not tested by NVIDIA


def numbered(pci: str) -> int:
    """Return CUDA's PCI id as a number of 32 bits.

    >>> hex(numbered("0000:3B:01.0"))
    '0x3b01'
    """
    domain, bus, device = pci.partition(".")[0].split(":")
    return int(domain, 16) << 16 | int(bus, 16) << 8 | int(device, 16)


def moves_rows(gpus: Sequence[tuple[int, int]]) -> bool:
    """Return whether 128 bytes stored by one instruction on any of these GPUs reach the other GPUs together.

    A GPU is a pair: the number of its PCI id, and its compute capability (90 for 9.0). True on the conditions of NCCL's
    LL128 protocol: NVLink between all pairs, one compute capability of `CAPABILITIES`. False also without NVML or
    pynvml. Source: NCCL's tuning.cc.
    """
    numbers, capabilities = {pci for pci, _ in gpus}, {capability for _, capability in gpus}
    # Two ranks on parts of one GPU (MIG), or threads sharing a GPU, have no NVLink between them.
    return len(numbers) == len(gpus) and len(capabilities) == 1 and capabilities <= CAPABILITIES and joined(numbers)


def joined(numbers: Sequence[int] | set[int]) -> bool:
    """Return whether NVML reports NVLink, direct or by NVSwitch, between all pairs of the GPUs with these PCI ids."""
    try:
        import pynvml
    except ImportError:
        return False
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        handles = [pynvml.nvmlDeviceGetHandleByPciBusId(f"{one >> 16:08X}:{one >> 8 & 255:02X}:{one & 255:02X}.0")
                   for one in sorted(numbers)]
        return all(pynvml.nvmlDeviceGetP2PStatus(*pair, BY_NVLINK) == 0 for pair in itertools.permutations(handles, 2))
    # A container may hide the other GPUs from NVML.
    except pynvml.NVMLError:
        return False
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
