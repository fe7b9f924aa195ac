"""What a communicator's calls run on: its link, its GPUs and streams, its life; `gpucoll.call` has the calls."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from gpucoll.algorithms import registry
from gpucoll.arrays import HOST, Space, is_borrowed, on_gpu, torch_stream
from gpucoll.call.compile import HostBackend
from gpucoll.call.table import Calls
from gpucoll.communicator.gpu import FIRST_GPU_CALL, Gpu, make_gpu, offered
from gpucoll.communicator.lifecycle import Lifecycle, assemble
from gpucoll.communicator.metadata import MetadataExchange
from gpucoll.communicator.transports import Transport
from gpucoll.core.signature import Signature
from gpucoll.device import gpus
from gpucoll.errors import ArgumentError, RevokedError, UsageError
from gpucoll.health.flight import CallRecord
from gpucoll.launch.bootstrap import Options
from gpucoll.progress.waits import Progress
from gpucoll.tuner import Tuner, rules

T = TypeVar("T")
NOWHERE = contextlib.nullcontext()


class Core:
    """The parts of a communicator: its link, life, GPUs and calls.

    `life` has connections, executors and guards; some of its parts stand here too, under the same names. `calls` has
    the compiled calls, and `metadata` exchanges host messages.
    """

    def __init__(self, link: Transport, options: Options) -> None:
        registry()  # import now: a call by a signal handler must not meet a half imported module
        if options.emulated:
            import gpucoll.executors.nccl  # noqa: F401

            offered("emulated")
        self.tuner: Tuner = Tuner(link.place.nodes, link.table, options.prefer)
        rules(options.prefer)  # raise for a wrong GPUCOLL_ALGO here, not at the first call
        if link.executor is not None and options.emulated:  # the transport's executor takes host arrays as they are
            options = options._replace(device=None)
        self.link: Transport = link
        self.options: Options = options
        self.emulated: bool = options.emulated
        self._ordinal = options.ordinal
        self.rank: int = link.place.rank
        self.size: int = link.place.size
        life = assemble(link, options)
        self.life: Lifecycle = life
        self.waits: Progress = life.waits
        self.host: HostBackend = life.host
        self.gpus: dict[str, Gpu] = life.gpus
        self.record: CallRecord = life.record
        self.calls: Calls = Calls(self)
        self.metadata: MetadataExchange = MetadataExchange(self)
        life.stop_calls = self.calls.stop
        life.releases.append(self.calls.close)

    @functools.cached_property
    def device(self) -> int | None:
        link = self.link
        if link.own_gpu is not None:
            return link.own_gpu(self._ordinal)
        if link.device is None:
            link.device = gpus.device_of(link.gpu_index, self._ordinal)
        return link.device

    def space(self, name: str, *arrays: Any, stream: Any = None, meets: bool = True) -> Space:
        """Return the space of a call: the GPU for GPU arrays, else the host or, if chosen, the emulated device.

        `meets` is False for a message between two ranks, in which the other ranks have no part.
        """
        if any(on_gpu(array) for array in arrays):
            if self.link.gpu is not None:
                own: Space = self.link.gpu("cuda").space(stream)
                return own
            if self.device is None:
                raise ArgumentError(f"{name}: x is a GPU array, but CuPy finds no GPU in this process "
                                    f"({gpus.no_gpu()}); pass a copy on the host", code="GC-ARRAY")
            of_torch = torch_stream(arrays)
            space = self.gpu("cuda", meets=meets).space(of_torch() if stream is None else stream)
            space.current_stream = of_torch
            space.borrows = space.borrows or any(map(is_borrowed, arrays))
            return space
        return self.gpu("emulated").space(stream) if self.emulated else HOST

    def current(self, stream: Any, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
        """Return the context for opening a call's arrays before its space exists: device and stream of GPU arrays."""
        # `device` searches for GPUs: ask last.
        if not any(map(on_gpu, arrays)) or (self.link.gpu and self.link.gpu("cuda")) or self.device is None:
            return NOWHERE
        stream = torch_stream(arrays)() if stream is None else stream
        from gpucoll.device.cuda import CurrentDevice, CurrentStream, as_stream

        device = CurrentDevice(self.device)
        return device if stream is None else CurrentStream(device, as_stream(stream))

    def gpu(self, name: str, *, meets: bool = True) -> Gpu:
        """Return the device "cuda" or "emulated" of this rank, made when first used; with `meets` for collectives."""
        if self.link.gpu is not None:
            own: Gpu = self.link.gpu(name)
            return own
        known = self.gpus.get(name)
        if known is None or (meets and known.meet is not None):
            self._together(functools.partial(self._make_gpu, name, meets=meets), FIRST_GPU_CALL, meets=meets)
        return self.gpus[name]

    def _make_gpu(self, name: str, *, meets: bool) -> None:
        if name not in self.gpus:
            self.use_gpu(name, make_gpu(name, self.link, self.waits, self.device, self.options.nccl or {}))
        gpu = self.gpus[name]
        if meets and gpu.meet is not None:
            gpu.meet(gpu)
            gpu.meet = None
            self.tuner.follow(gpu.claimed)
            self._offer_peer(name, gpu)

    def _together(self, make: Callable[[], T], what: str, *, meets: bool = True) -> T:
        """Return what `make` makes together with the other ranks, once all ranks are known to come to this meeting.

        A rank in another call would never come, and the wait is inside NCCL. A failure of this rank alone, in `make`,
        revokes the communicator: the other ranks wait for this rank.
        """
        preflight = self.life.preflight
        if meets and preflight is not None:
            self.waits.run(preflight.meet(Signature(what).encode()), what)
        self.life.meets = meets  # a rank that has closed never comes
        try:
            return make()
        except (UsageError, RevokedError):  # raised by all ranks, or before the meeting
            raise
        except BaseException as error:
            self.waits.broken(error, what)
            raise
        finally:
            self.life.meets = False

    def use_gpu(self, name: str, gpu: Gpu) -> None:
        """Use `gpu` as the device "cuda" or "emulated" of this rank."""
        self._offer_peer(name, gpu)
        self.gpus[name] = gpu
        if self.life.exporter is not None:
            self.life.exporter.advice = self.tuner.untried(name)
        # A failed transport must end every wait.
        self.waits.hooks.append(gpu.check)
        # The progress thread drives operations too: each thread must get its own current GPU back.
        self.waits.context = gpu.device.current
        gpu.watch(self.life)

    def _offer_peer(self, name: str, gpu: Gpu) -> None:
        """Let the first collective make the peer executor, by a handshake: if asked for, or measured for "auto"."""
        if self.options.executor == "peer" or "peer" in self.tuner.measured(name):
            from gpucoll.executors.peer import PeerExecutor

            gpu.make_peer = lambda: self._together(
                lambda: PeerExecutor(gpu.device, gpu.order, self.link, self.waits,
                                     required=self.options.executor == "peer"), "the first call by peer memory")

    def shared_gpu(self) -> Gpu | None:
        """Return the GPU of this rank if the parts of this communicator are to share its resources, else None."""
        gpu = self.gpus.get("cuda")
        return None if gpu is None or gpu.split is None else gpu
