"""The GPU of each rank, and the meeting of all ranks for collectives: at the first of them, or at a split."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gpucoll.communicator.gpu import Gpu
from gpucoll.communicator.transports import Transport
from gpucoll.device import Device, gpus, packages
from gpucoll.device.nccl_settings import WINDOWS
from gpucoll.errors import BackendError, UsageError
from gpucoll.launch import bootstrap
from gpucoll.progress.operations import Operation
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import exchange
from gpucoll.transport.tags import TAGS, Tag

if TYPE_CHECKING:
    from gpucoll.device.nccl import Nccl
    from gpucoll.device.pairs import Pairs

FIRST = "the first call on a GPU"  # in which all ranks meet, unless it is a message


def make_gpu(name: str, link: Transport, waits: Progress, ordinal: int | None, settings: Mapping[str, Any]) -> Gpu:
    """Return the device of a communicator, "cuda" with its ordinal or another device by name; `link` joins the ranks.

    `waits` are those of the communicator; `settings` are those of NCCL. Raises BackendError if the rank has no GPU. All
    ranks meet in `Gpu.meet`. It raises BackendError if a rank has no GPU, and UsageError if processes share a GPU
    (without GPUCOLL_SHARE_GPU=1), or if threads use different GPUs.
    """
    device = _cuda(ordinal) if name == "cuda" else offered(name)(ordinal)
    if link.mpi is None:
        from gpucoll.device.local import LocalTransport

        # Threads' tags have no limit. Tags above MPI's keep device messages apart from those of the host.
        points = LocalTransport(link.points, TAGS, device, are_users=True)
        return Gpu(device, points, functools.partial(_threads_meet, link, waits))
    return Gpu(device, _pairs(device, link, waits, settings),
               functools.partial(_processes_meet, link, waits, settings))


def _cuda(ordinal: int | None) -> Any:
    if ordinal is None:
        raise BackendError(f"CuPy finds no GPU in this process: {gpus.no_gpu()}", code="GC-NO-GPU")
    packages.check_installed()
    from gpucoll.device.cuda import CudaDevice

    return CudaDevice(ordinal)


@functools.cache
def offered(name: str) -> Callable[[int | None], Any]:
    """Return the function that makes the device `name` for NumPy arrays, given a CUDA ordinal or None.

    A package offers the device under its name in the group "gpucoll.devices" of entry points.
    """
    from importlib.metadata import entry_points

    for found in entry_points(group="gpucoll.devices", name=name):
        make: Callable[[int | None], Any] = found.load()
        return make
    raise BackendError(f"no installed package offers the device {name!r}; install gpucoll anew", code="GC-DEVICE")


def _same_ordinal(link: Transport, ordinal: int) -> Operation:
    """Exchange the GPU ordinals of the threads; raise UsageError on all threads if they differ."""
    place = link.place
    ordinals = [row[0] for row in (yield from exchange(link.wire, place.rank, range(place.size), [ordinal]))]
    if len(set(ordinals)) > 1:
        raise UsageError(f"threads are on GPUs {', '.join(map(str, ordinals))}, but can access each other's memory "
                         "only on a single GPU; in each thread call cupy.cuda.Device(n).use(), or use mpiexec",
                         code="GC-DEVICE", settled=True)  # on all ranks in the same exchange


def _threads_meet(link: Transport, waits: Progress, gpu: Gpu) -> None:
    from gpucoll.device.local import LocalTransport

    waits.run(_same_ordinal(link, gpu.device.ordinal), FIRST)
    gpu.add(LocalTransport(link.wire, TAGS, gpu.device))


def _processes_meet(link: Transport, waits: Progress, settings: Mapping[str, Any], gpu: Gpu) -> None:
    # Before the meeting: a GPU that fails here fails on this rank alone.
    mine = gpus.describe_gpu(gpu.device.ordinal)
    claimed, one = bootstrap.meet(link.mpi, waits.timeout, lambda: (
        gpus.claim_gpu(link.mpi, mine), gpus.nccl_id(link.mpi)), waits)
    from gpucoll.device.nccl import joined

    transport = joined(link.place.rank, link.place.size, one, gpu.device, waits, settings)
    # All ranks must choose alike: the oldest GPU decides on NCCL's float8.
    _on_nccl(gpu, transport, min(one.capability for one in claimed), settings)


def _pairs(device: Any, link: Transport, waits: Progress, settings: Mapping[str, Any]) -> Pairs:
    """Return the carrier of messages: on the communicator of collectives, a message would wait for collectives."""
    from gpucoll.device.pairs import Pairs

    rank = link.place.rank

    def join(peer: int) -> Nccl:
        gpus.check_nccl()
        from gpucoll.device.nccl import joined

        both = sorted({rank, peer})
        return joined(both.index(rank), len(both), lambda: gpus.pair_id(rank, peer, lambda words: exchange(
            link.wire, rank, both, words, Tag.PAIR)), device, waits, settings)

    return Pairs(rank, device, join)


def _on_nccl(gpu: Gpu, transport: Nccl, capability: int, settings: Mapping[str, Any]) -> Gpu:
    """Let a GPU run collectives by NCCL; `capability` is the lowest compute capability of all ranks."""
    from gpucoll.communicator.windows import Windows
    from gpucoll.executors.nccl.nccl_collectives import NcclNative

    gpu.add(transport, NcclNative(gpu.device, transport, gpu.order, capability=capability))
    gpu.windows = Windows(gpu.device, transport, gpu.order) if settings.get(WINDOWS) else None
    if settings.get("split_share"):
        gpu.split = functools.partial(_split, gpu.device, transport, capability, settings)
    return gpu


def _split(device: Device, transport: Nccl, capability: int, settings: Mapping[str, Any], color: int | None, key: int,
           link: Transport | None, waits: Progress | None) -> Gpu | None:
    """Return the GPU of a part: the ranks of the same `color`, ordered by `key`, joined by `link`; None for both.

    `waits` are those of the part's communicator. A collective call of all ranks. The part's collectives share the
    resources of `transport`. Messages do not: a message that waits for its receiver would hold up the collectives of
    the parent.
    """
    part = transport.split(color, key, 0 if link is None else link.place.size, waits)
    if part is None or link is None or waits is None:
        return None
    return _on_nccl(Gpu(device, _pairs(device, link, waits, settings)), part, capability, settings)
