"""The GPU of each rank: CUDA ordinal, check for GPUs shared by ranks, NVLink between GPUs, and ids for NCCL.

Also the packages of the device code in this process: CuPy, CuPy's binding of NCCL, and CUDA's libraries. By default the
installed packages serve. `use` replaces them, for example by the packages of emulated GPUs. The rest of gpucoll asks
whether there is a GPU, and imports the installed CuPy; only functions that need a GPU import CuPy.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from gpucoll.errors import ArgumentError, BackendError, GpucollError, UsageError, listed

if TYPE_CHECKING:
    from mpi4py import MPI


NCCL_ID = 128  # bytes
BY_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
VOLTA, HOPPER = 70, 90  # compute capabilities
MPS_ENABLED = 133  # cudaDevAttrMpsEnabled
# The module of each package, and the part that is meant.
_NAMES = {"cupy": ("cupy", ""), "nccl": ("cupy.cuda", "nccl"), "driver": ("cuda.bindings", "driver")}
APART = ("GPUCOLL_DEVICE=emulated emulates a GPU for NumPy arrays, and arrays of a real GPU need another process: pass "
         "arrays of one kind")
_given: dict[str, Any] = {}  # packages by the names above, and libraries by the names of their files
MIG = "MIG-"  # prefix of CUDA's names for parts of a GPU (multi-instance GPU)


class ClaimedGpu(NamedTuple):
    """The GPU of a rank: CUDA ordinal in the rank's process, PCI id, name, unique identity, compute capability.

    `by_mps` tells whether NVIDIA's MPS lets the kernels of several processes run side by side.
    """

    ordinal: int
    pci: str
    name: str
    identity: str = ""
    capability: int = 0  # 90 for 9.0
    by_mps: bool = False


def device_of(index: int | None, ordinal: int | None = None) -> int | None:
    """Return the CUDA ordinal of a rank's GPU; None if the process has no GPU.

    The result is `ordinal` if given, else `index` (the rank's number on the host) modulo the number of GPUs, else the
    current device of the calling thread. Raises ArgumentError if the process has no GPU `ordinal`.
    """
    count = gpu_count()
    if ordinal is not None and ordinal >= count:
        raise ArgumentError(f"device {ordinal} was requested, but this process has {count} GPUs, numbered from 0; "
                            "CUDA_VISIBLE_DEVICES names the GPUs of a process", code="GC-DEVICE")
    if not count or ordinal is not None:
        return ordinal
    if index is None:
        import cupy

        return int(cupy.cuda.runtime.getDevice())
    return index % count


def gpu_count() -> int:
    """Return the number of CUDA devices of this process; 0 without CuPy or without a driver."""
    return _gpus()[0]


def no_gpu() -> str:
    """Return the reason why this process has no GPU, for example CUDA's error for an old driver."""
    return _gpus()[1]


def _gpus() -> tuple[int, str]:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()), "CUDA_VISIBLE_DEVICES hides all"
    except ImportError as error:
        return 0, f"CuPy cannot be imported: {error}"
    except RuntimeError as error:  # CuPy's CUDA errors are RuntimeErrors
        return 0, str(error)


def claim_gpu(comm: MPI.Intracomm, mine: ClaimedGpu | None,
              environment: Mapping[str, str] = os.environ) -> tuple[ClaimedGpu, ...]:
    """Return the GPUs of all ranks after checking that no two ranks share a GPU; a collective call.

    Raises on every rank: BackendError if a rank has no GPU, UsageError naming the ranks sharing a GPU, unless
    GPUCOLL_SHARE_GPU=1.
    """
    gpu = None if mine is None else tuple(mine)
    everyone = [(host, one and ClaimedGpu(*one)) for host, one in comm.allgather((socket.gethostname(), gpu))]
    try:
        check_gpus(everyone, share=environment.get("GPUCOLL_SHARE_GPU") == "1")
    except GpucollError as error:
        error.settled = True  # raised by all ranks in the same exchange
        raise
    # For the type checker: `check_gpus` has raised if a rank has no GPU.
    return tuple(gpu for _, gpu in everyone if gpu is not None)


def check_gpus(everyone: Sequence[tuple[str, ClaimedGpu | None]], *, share: bool) -> None:
    """Raise if a rank has no GPU or, without `share`, if two ranks have the same GPU.

    `everyone` has one pair (host name, GPU) per rank. Containers on different hosts may have the same host name, so a
    GPU's `identity` decides. MIG parts of one GPU have the same PCI id. NCCL compares PCI ids and refuses the parts.

    >>> check_gpus(  # doctest: +ELLIPSIS
    ...     [("a", ClaimedGpu(0, "01:00.0", "H200"))] * 2, share=False)
    Traceback (most recent call last):
    gpucoll.errors.UsageError: [GC-SHARED-GPU] ranks 0, 1 share the H200 at 01:00.0 of a; set GPUCOLL_SHARE_GPU=1 ...
    """
    without = tuple(rank for rank, (_, gpu) in enumerate(everyone) if gpu is None)
    if without:
        raise BackendError(f"ranks {listed(without)} have no CUDA device; every rank needs CuPy and a driver",
                           code="GC-NO-GPU", ranks=without)
    owners: dict[tuple[str, str], list[int]] = {}
    in_parts: dict[tuple[str, str], list[int]] = {}
    for rank, (host, gpu) in enumerate(everyone):
        assert gpu is not None
        owners.setdefault(("", gpu.identity) if gpu.identity else (host, gpu.pci), []).append(rank)
        if gpu.identity.startswith(MIG):
            in_parts.setdefault((host, gpu.pci), []).append(rank)
    for ranks in owners.values():
        if len(ranks) > 1 and not share:
            raise _shared(ranks, everyone[ranks[0]], "share the", "set GPUCOLL_SHARE_GPU=1 to allow sharing, or start "
                          "at most as many ranks as GPUs")
    for ranks in in_parts.values():
        if not share and len(ranks) > 1:
            raise _shared(ranks, everyone[ranks[0]], "have parts (MIG) of the", "NCCL takes one rank for each GPU; "
                          "NCCL 2.30 takes several with NCCL_MULTI_RANK_GPU_ENABLE=1 and GPUCOLL_SHARE_GPU=1")


def _shared(ranks: Sequence[int], where: tuple[str, ClaimedGpu | None], how: str, advice: str) -> UsageError:
    host, gpu = where
    assert gpu is not None
    return UsageError(f"ranks {listed(ranks)} {how} {gpu.name} at {gpu.pci} of {host}; {advice}",
                      code="GC-SHARED-GPU", ranks=tuple(ranks))


def describe_gpu(ordinal: int) -> ClaimedGpu:
    """Return the description of a CUDA device."""
    runtime = package("cupy").cuda.runtime
    pci, facts = runtime.deviceGetPCIBusId(ordinal), runtime.getDeviceProperties(ordinal)
    try:
        by_mps = bool(runtime.deviceGetAttribute(MPS_ENABLED, ordinal))
    except RuntimeError:  # an older driver does not know the attribute
        by_mps = False
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    part = chosen[ordinal] if ordinal < len(chosen) and chosen[ordinal].startswith(MIG) else ""
    identity = part or bytes(facts["uuid"]).hex()
    return ClaimedGpu(ordinal, pci, facts["name"].decode(), identity, 10 * facts["major"] + facts["minor"], by_mps)


def nccl_id(comm: MPI.Intracomm) -> Any:
    """Return a new NCCL id, in CuPy's form, the same on every rank; a collective call.

    If rank 0 gets no id, every rank raises BackendError.
    """
    found, fault = None, ""
    if comm.rank == 0:
        try:
            found = package("nccl").get_unique_id()
        # CuPy raises KeyError for an unknown error code, and AttributeError if the NCCL library is missing.
        except (ImportError, RuntimeError, KeyError, AttributeError) as error:
            fault = f"NCCL gives no id on rank 0: {error}"
    found, fault = comm.bcast((found, fault))
    if fault:
        raise BackendError(fault, code="GC-NCCL", ranks=(0,), settled=True)  # on all ranks in the same exchange
    return found


def check_nccl() -> None:
    """Raise BackendError if CuPy lacks NCCL's library."""
    if not package("nccl").available:
        raise BackendError("CuPy finds no library of NCCL", code="GC-NCCL")


def pair_id(rank: int, peer: int, exchange: Callable[[list[int]], Generator[Any, None, list[list[int]]]]) -> \
        Generator[Any, None, Any]:
    """Return a new NCCL id, in CuPy's form: of the lower rank, which tells the higher rank by `exchange`."""
    made = package("nccl").get_unique_id() if rank <= peer else b""
    if rank == peer:
        return made
    told, _ = yield from exchange(numpy.frombuffer(made, numpy.int64).tolist())
    return numpy.array(told).tobytes()[:NCCL_ID]


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
    LL128 protocol: NVLink between all pairs, and one compute capability from 7.0 on, or several from 9.0 on. False also
    without NVML or pynvml. Source: `isLL128Enabled` in NCCL's tuning.cc.
    """
    numbers, capabilities = {pci for pci, _ in gpus}, {capability for _, capability in gpus}
    oldest = VOLTA if len(capabilities) == 1 else HOPPER
    # Two ranks on parts of one GPU (MIG), or threads sharing a GPU, have no NVLink between them.
    return len(numbers) == len(gpus) and min(capabilities) >= oldest and joined(numbers)


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


def use(given: Mapping[str, Any]) -> None:
    """Replace packages, by the names in `_NAMES`, and libraries, by the names of their files.

    Raises UsageError if the device code has used another CuPy.
    """
    cupy = given.get("cupy")
    used = getattr(sys.modules.get(f"{__package__}.cuda"), "cupy", cupy)
    # A program that `precheck` runs imports a CuPy for itself, for a while: its calls do not use the device code.
    if cupy is not None and used is not cupy and cupy.__name__ != "cupy":
        raise UsageError(APART, code="GC-EMULATION")
    _given.update(given)


def check_installed() -> None:
    """Raise UsageError if the program's CuPy is not the CuPy of the device code."""
    cupy = _given.get("cupy")
    if cupy is not None and sys.modules.get("cupy", cupy) is not cupy:
        raise UsageError(APART, code="GC-EMULATION")


def library(name: str) -> Any:
    return _given.get(name) or ctypes.CDLL(name)


def package(name: str) -> Any:
    """Return a package, imported when it is first used: most programs need none."""
    if name in _given:
        return _given[name]
    module, part = _NAMES[name]
    if name == "nccl" and "cupy" in _given:
        module = f"{_given['cupy'].__name__}.cuda"
    found = __import__(module, fromlist=[part] if part else [])
    return getattr(found, part) if part else found


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return package(name)
