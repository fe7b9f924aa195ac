"""The `peer` executor: one kernel per rank does a whole collective, in GPU memory shared by the ranks of a node.

    binding      a task as kernel launches on memory
    step_tables  a plan as tables for the step kernel, which runs any schedule; and a check against deadlock
    handshake    how the ranks get access to each other's slabs (a slab is a rank's piece of shared memory)
    memory, ipc  slabs of the emulated device and of GPUs; arrays in symmetric memory

Some algorithms have a kernel of their own (`Traits.kernel`); short messages travel in packets. The host enqueues and
returns. The kernel waits for the other ranks, at most until the deadline; after a time-out the communicator has failed.
All counters lie in the slabs, so that kernels may be captured in a CUDA graph. Launches of such a graph and calls of
the communicator must take turns.
"""

from __future__ import annotations

from typing import Any

from gpucoll.device import Device
from gpucoll.device.peer import WAITS
from gpucoll.device.streams import StreamOrder
from gpucoll.errors import CollectiveTimeout, UsageError
from gpucoll.executors import Executor, Launcher, Task
from gpucoll.executors.peer.binding import PeerBinder
from gpucoll.executors.peer.handshake import Handshake
from gpucoll.executors.peer.memory import SymmetricMemory
from gpucoll.progress.operations import Operation

BLOCKING = ("kernels of ranks that share a GPU wait for each other, and on a blocking stream, or the null stream, they "
            "would not run side by side: pass stream=cupy.cuda.Stream(non_blocking=True), or be in one")


class PeerExecutor(Executor):
    """An executor of schedules on `device`, made by all ranks together in at most `timeout` seconds.

    `link` joins the ranks; `order` is the order of the communicator's operations over all streams. Arrays in
    `symmetric` memory are read in place; `symmetric` is None if the ranks cannot share memory.
    """

    name = "peer"

    def __init__(self, device: Device, order: StreamOrder, link: Any, timeout: float) -> None:
        self._device, self._order, self._timeout = device, order, timeout
        self._handshake = Handshake(device, link, timeout)
        self.symmetric = None if self.unavailable_reason else \
            SymmetricMemory(link.place.size, self._handshake.memory)
        self._binder = PeerBinder(device, order, self._handshake, self.symmetric)

    @property
    def minds_blocking(self) -> bool:
        """Whether calls on blocking streams are refused, because several ranks share a GPU."""
        return self._handshake.on_one_gpu

    @property
    def unavailable_reason(self) -> str | None:
        """The reason why the ranks cannot share memory; None if all ranks can."""
        return self._handshake.unavailable_reason

    def serves(self, task: Task) -> str | None:
        """Return None for ranks on one node, on a stream allowed there."""
        if self.unavailable_reason:
            return self.unavailable_reason
        if self._handshake.on_one_gpu and self._device.is_blocking(task.stream):
            return BLOCKING
        return None

    def prepare(self, task: Task) -> str | None:
        """Compile the kernels; refuse a plan without the schedules of all ranks."""
        assert task.plan is not None
        if task.plan.schedules is None:
            return f"{task.algorithm} has no schedule"
        self._binder.load(task)
        return None

    def run(self, task: Task) -> Operation:
        """Enqueue `task` on its stream.

        Loading code or allocating memory may block until the GPU is idle. If ranks share a GPU, a kernel waiting for
        another rank's kernel would then wait for ever. So all ranks finish loading and allocating, for this call too,
        and meet before the first kernel is enqueued.
        """
        self.check()
        if self._handshake.on_one_gpu and self._device.is_blocking(task.stream):
            raise UsageError(f"{task.collective}: {BLOCKING}", code="GC-STREAM")
        self._order.follow(task.stream)  # before `bind`, which lets go of memory when the stream has come to here
        calls = self._binder.bind(task)
        # No rank's kernel may wait before every rank has allocated: see above.
        if self._handshake.on_one_gpu and not task.stream.is_capturing():
            yield from self._handshake.meet()
        for call in calls:
            call(task.stream)
        # On a GPU the host looks at the control record later: see `Gpu.check`.
        if not self._device.asynchronous:
            task.stream.enqueue(self.check)

    def launcher(self, task: Task) -> Launcher | None:
        if self._handshake.on_one_gpu or not self._device.asynchronous:
            return None
        calls, tables = self._binder.bind(task), self._binder.tables

        def launch(stream: Any, keep: object = tables) -> None:
            self.check()
            for call in calls:
                call(stream)

        return launch

    def check(self) -> None:
        """Raise CollectiveTimeout if a kernel has given up waiting for another rank."""
        control = self._handshake.memory.control
        if control["where"]:
            what, peer = WAITS[int(control["where"])], int(control["peer"])
            raise CollectiveTimeout(f"a kernel waited {self._timeout:g} s for a {what} from rank {peer}; is every rank "
                                    "in the same call, with the same shape, dtype and algorithm? timeout= sets the "
                                    "deadline", ranks=(peer,))

    def abort(self) -> None:
        """End every wait of this rank's kernels, without the other ranks."""
        self._handshake.memory.control["aborted"] = 1

    def close(self) -> None:
        """Release all memory; idempotent. A collective call."""
        self._binder.clear()
        self._handshake.close()
        if self.symmetric is not None:
            self.symmetric.heap.close()
