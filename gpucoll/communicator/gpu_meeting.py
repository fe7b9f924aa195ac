"""The meeting of all ranks that makes the GPU of each rank: at the first call on a GPU, or at a split."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpucoll.communicator.gpu import Gpu
from gpucoll.communicator.transports import Transport
from gpucoll.device import Device, gpus
from gpucoll.device.messages import MessageTransport
from gpucoll.device.nccl_settings import WINDOWS
from gpucoll.errors import BackendError, UsageError
from gpucoll.launch import bootstrap
from gpucoll.progress.operations import Operation
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import exchange
from gpucoll.transport.tags import TAGS, Tag

if TYPE_CHECKING:
    from gpucoll.device.nccl import Nccl

FIRST = "the first call on a GPU"  # in which all ranks meet


def make_gpu(name: str, link: Transport, waits: Progress, ordinal: int | None, settings: Mapping[str, Any]) -> Gpu:
    """Return the device of a communicator: "emulated", or "cuda" with its ordinal; `link` joins the ranks.

    `waits` are those of the communicator; `settings` are those of NCCL. A collective call on "cuda". Raises
    BackendError if a rank has no GPU. Raises UsageError if processes share a GPU (without GPUCOLL_SHARE_GPU=1), or if
    threads use different GPUs.
    """
    if name == "emulated":
        return _emulated(link)
    if ordinal is None:
        raise BackendError(f"CuPy finds no GPU in this process: {gpus.no_gpu()}", code="GC-NO-GPU")
    return _between_threads(link, waits, ordinal) if link.mpi is None else \
        _between_processes(link, waits, ordinal, settings)


def _emulated(link: Transport) -> Gpu:
    from gpucoll.device.emulated import EmulatedDevice

    # Collectives do not buffer: a schedule that would hang on NCCL must hang here. Users' messages may be buffered.
    transport, points = MessageTransport(link.wire, Tag.DEVICE), MessageTransport(link.points, 0, buffered=True)
    gpu = Gpu(EmulatedDevice(), transport, points)
    if link.has_collectives:
        from gpucoll.executors.native import NativeExecutor

        # MPI reads the memory on the host: kernels enqueued before must have written it.
        gpu.made.append(NativeExecutor(link.wire, before=gpu.device.settle))
    return gpu


def _same_ordinal(link: Transport, ordinal: int) -> Operation:
    """Exchange the GPU ordinals of the threads; raise UsageError on all threads if they differ."""
    place = link.place
    ordinals = [row[0] for row in (yield from exchange(link.wire, place.rank, range(place.size), [ordinal]))]
    if len(set(ordinals)) > 1:
        error = UsageError(f"threads are on GPUs {', '.join(map(str, ordinals))}, but can access each other's memory "
                           "only on a single GPU; in each thread call cupy.cuda.Device(n).use(), or use mpiexec",
                           code="GC-DEVICE")
        error.settled = True  # raised by all ranks in the same exchange
        raise error


def _between_threads(link: Transport, waits: Progress, ordinal: int) -> Gpu:
    from gpucoll.device.cuda import CudaDevice
    from gpucoll.device.local import LocalTransport

    waits.run(_same_ordinal(link, ordinal), FIRST)
    device = CudaDevice(ordinal)
    # Threads' tags have no limit. Tags above MPI's keep device messages apart from those of the host.
    return Gpu(device, LocalTransport(link.wire, TAGS, device), LocalTransport(link.points, TAGS, device))


def _between_processes(link: Transport, waits: Progress, ordinal: int, settings: Mapping[str, Any]) -> Gpu:
    # Before the meeting: a GPU that fails here fails on this rank alone.
    mine = gpus.describe_gpu(ordinal)
    # Messages get an NCCL communicator of their own: on one communicator a message would wait for collectives.
    claimed, *ids = bootstrap.meet(link.mpi, waits.timeout, lambda: (
        gpus.claim_gpu(link.mpi, mine), *(gpus.nccl_id(link.mpi) for _ in range(2))), waits)
    # All ranks must choose alike: the oldest GPU decides on NCCL's float8.
    lowest = min(gpu.capability for gpu in claimed)
    from gpucoll.device.cuda import CudaDevice
    from gpucoll.device.nccl import joined

    device = CudaDevice(ordinal)
    transport = joined(link.place.rank, link.place.size, ids[0], device, waits, settings)
    with _aborting(transport):
        points = joined(link.place.rank, link.place.size, ids[1], device, waits, settings, shares=False)
        return _on_nccl(device, transport, points, lowest, settings)


@contextlib.contextmanager
def _aborting(transport: Nccl) -> Iterator[None]:
    """Abort a transport made before if the rest of its GPU cannot be made: no GPU closes it later."""
    try:
        yield
    except BaseException:
        transport.abort()
        raise


def _on_nccl(device: Device, transport: Nccl, points: Nccl, capability: int, settings: Mapping[str, Any]) -> Gpu:
    """Return the GPU of a rank; `capability` is the lowest compute capability of all ranks."""
    from gpucoll.communicator.windows import Windows
    from gpucoll.executors.nccl.nccl_collectives import NcclNative

    gpu = Gpu(device, transport, points)
    gpu.made.append(NcclNative(device, transport, gpu.order, capability=capability))
    gpu.windows = Windows.promised(device, transport, gpu.order) if settings.get(WINDOWS) else None
    if settings.get("split_share"):
        gpu.split = functools.partial(_split, device, transport, capability, settings)
    return gpu


def _split(device: Device, transport: Nccl, capability: int, settings: Mapping[str, Any], color: int | None, key: int,
           link: Transport | None, waits: Progress | None) -> Gpu | None:
    """Return the GPU of a part: the ranks of the same `color`, ordered by `key`, joined by `link`; None for both.

    `waits` are those of the part's communicator. A collective call of all ranks. The part's collectives share the
    resources of `transport`. Messages do not: a message that waits for its receiver would hold up the collectives of
    the parent.
    """
    from gpucoll.device.nccl import joined

    part = transport.split(color, key, 0 if link is None else link.place.size, waits)
    if part is None or link is None or waits is None:
        return None
    with _aborting(part):
        one = bootstrap.meet(link.mpi, waits.timeout, lambda: gpus.nccl_id(link.mpi), waits)
        points = joined(link.place.rank, link.place.size, one, device, waits, settings, shares=False)
        return _on_nccl(device, part, points, capability, settings)
