"""The `peer` executor: one kernel per rank carries out a whole collective, in GPU memory shared by the ranks of a node.

    binding      a call as kernel launches on memory
    step_tables  a plan as tables for the step kernel, which runs any schedule; and a check against deadlock
    handshake    how the ranks get access to each other's slabs (a slab is a rank's piece of shared memory); one
                 communicator at a time on a GPU that ranks share
    memory, ipc  slabs, a GPU's; arrays in symmetric memory
    multicast    GPU memory that the NVLink switch reduces and writes; descriptors: how the ranks get access to it

Some algorithms have special kernels (`Traits.kernel`), and short messages are sent in packets. The host enqueues the
kernel and returns. The kernel waits for the other ranks until the deadline; after a timeout the communicator has
failed. All counters are in the slabs, so kernels can be captured in a CUDA graph. Launches of such a graph and calls of
the communicator must not overlap.
"""

from __future__ import annotations

from typing import Any

from gpucoll.device import Device
from gpucoll.device.peer import WAITS
from gpucoll.device.streams import StreamOrder, Workspace
from gpucoll.errors import CollectiveTimeout, UsageError
from gpucoll.executors import Call, CallRequest, Executor, Launcher, Refusal
from gpucoll.executors.peer.binding import Binding
from gpucoll.executors.peer.handshake import Handshake
from gpucoll.executors.peer.memory import SymmetricMemory
from gpucoll.progress.operations import Operation
from gpucoll.progress.waits import Progress

BLOCKING = ("kernels of ranks that share a GPU wait for each other, and on a blocking stream, or the null stream, they "
            "would not run side by side: pass stream=cupy.cuda.Stream(non_blocking=True), or be in one")


class PeerCall(Call):
    """A request as kernel launches."""

    def __init__(self, executor: PeerExecutor, request: CallRequest, binding: Binding) -> None:
        super().__init__(executor, request)
        self.binding = binding


class PeerExecutor(Executor):
    """An executor of schedules on `device`, made by all ranks together.

    `link` joins the ranks, `waits` are those of their communicator; `order` is the order of the communicator's
    operations over all streams. Arrays in `symmetric` memory are read in place; `symmetric` is None if the ranks cannot
    share memory. If ranks share a GPU with the peer executor of another communicator, all ranks raise UsageError, or
    without `required` have no peer memory.
    """

    name = "peer"

    def __init__(self, device: Device, order: StreamOrder, link: Any, waits: Progress, *, required: bool) -> None:
        self._device, self._order, self._timeout = device, order, waits.timeout
        self._handshake = Handshake(device, link, waits, required=required)
        self.minds_blocking = self._handshake.shares_context
        self.symmetric = None if self.unavailable_reason else \
            SymmetricMemory(link.place.size, self._handshake.memory, order)
        self._workspace = Workspace(device)

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why the ranks cannot share memory; None if all ranks can."""
        return self._handshake.unavailable_reason

    @property
    def links(self) -> dict[str, bool]:
        """What the links between the GPUs allow."""
        return {"packets_of_128_bytes": self._handshake.moves_rows,
                "reductions_by_switch": self._handshake.multicast is not None}

    def serves(self, request: CallRequest) -> str | None:
        """Return None for ranks on one node, on a stream allowed there."""
        if self.unavailable_reason:
            return self.unavailable_reason
        return BLOCKING if self.minds_blocking and request.blocking else None

    def compile(self, request: CallRequest) -> Call | Refusal:
        """Compile the kernels; refuse a plan without the schedules of all ranks."""
        assert request.plan is not None
        if request.plan.schedules is None:
            return Refusal(f"{request.algorithm} has no schedule")
        return PeerCall(self, request, Binding(request, request.plan, self._device, self._handshake, self.symmetric,
                                               self._workspace))

    def run(self, call: PeerCall, source: Any, target: Any, stream: Any, *, repeated: bool) -> Operation:
        """Enqueue a call on a stream.

        Loading code or allocating memory may block until the GPU is idle. If ranks share a GPU, a kernel waiting for
        another rank's kernel would then wait for ever. So all ranks finish loading and allocating, for this call too,
        and meet before the first kernel is enqueued.
        """
        self.check()
        if self.minds_blocking and self._device.is_blocking(stream):
            raise UsageError(f"{call.request.collective}: {BLOCKING}", code="GC-STREAM")
        self._order.follow(stream)
        launches = call.binding.launches(source, target, stream)
        # No rank's kernel may wait before every rank has allocated: see above.
        if self._handshake.on_one_gpu and not stream.is_capturing():
            yield from self._handshake.meet()
        for launch in launches:
            launch(stream)
        # On a GPU the host looks at the control record later: see `Gpu.check`.
        if not self._device.asynchronous:
            yield from self._device.settle(stream)
            self.check()

    def launcher(self, call: PeerCall, source: Any, target: Any) -> Launcher | None:
        """Return a function that enqueues a call on the same arrays, and keeps the call's tables."""
        launches = None if self._handshake.on_one_gpu else call.binding.known(source, target)
        if launches is None or not self._device.asynchronous:
            return None

        def launch(stream: Any, keep: object = call) -> None:
            self.check()
            for one in launches:
                one(stream)

        return launch

    def check(self) -> None:
        """Raise CollectiveTimeout if a kernel has given up waiting for another rank."""
        control = self._handshake.control
        if control["where"]:
            what, peer = WAITS[int(control["where"])], int(control["peer"])
            raise CollectiveTimeout(f"a kernel waited {self._timeout:g} s for a {what} from rank {peer}; is every rank "
                                    "in the same call, with the same shape, dtype and algorithm? timeout= sets the "
                                    "deadline", ranks=(peer,))

    def abort(self) -> None:
        """End every wait of this rank's kernels, without the other ranks."""
        self._handshake.control["aborted"] = 1
        self._handshake.leave()

    def close(self) -> None:
        """Release all memory; idempotent. A collective call."""
        self._workspace.clear()
        self._handshake.close()
        if self.symmetric is not None:
            self.symmetric.heap.close()
