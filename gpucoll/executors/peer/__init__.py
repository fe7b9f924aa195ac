"""The `peer` executor: one kernel on every rank does a whole collective, in memory that the ranks of a node share.

    binding      a task as launches on memory
    step_tables  a plan as tables for the step kernel, which walks any schedule; whether all ranks' come to their ends
    handshake    how the ranks come to share their slabs
    memory, ipc  slabs of the emulated device and of GPUs, arrays in memory that all ranks share

Some algorithms have kernels of their own (`Traits.kernel`), short messages go in packets. The host enqueues and
returns: what waits is the kernel, at most until the deadline, and then the communicator has failed. All counters live
in the slabs, so that kernels may be captured in a graph; who launches it takes turns with the communicator's calls.
"""

from __future__ import annotations

from typing import Any

from gpucoll.device import Device
from gpucoll.device.peer import WAITS
from gpucoll.device.streams import StreamOrder
from gpucoll.errors import CollectiveTimeout, UsageError
from gpucoll.executors import Launcher, Task
from gpucoll.executors.peer.binding import PeerBinder
from gpucoll.executors.peer.handshake import Meeting
from gpucoll.executors.peer.memory import SymmetricMemory
from gpucoll.progress.operations import Operation

BLOCKING = ("kernels of ranks that share a GPU wait for each other, and on a blocking stream, or the null stream, they "
            "would not run side by side: pass stream=cupy.cuda.Stream(non_blocking=True), or be in one")


class PeerExecutor:
    """Runs schedules on `device`; made by all ranks together, in at most `timeout` seconds.

    `link` joins the ranks, `order` is that of the communicator's operations on any streams. Arrays of
    `symmetric`, None where the ranks cannot share memory, are read where they lie.
    """

    name = "peer"

    def __init__(self, device: Device, order: StreamOrder, link: Any, timeout: float) -> None:
        self._device, self._order, self._timeout = device, order, timeout
        self._meeting = Meeting(device, link, timeout)
        self.symmetric = None if self._meeting.trouble else SymmetricMemory(link.place.size, self._meeting.memory)
        self._binder = PeerBinder(device, order, self._meeting, self.symmetric)

    @property
    def minds_blocking(self) -> bool:
        """Whether it serves no call on a blocking stream: ranks share a GPU."""
        return self._meeting.on_one_gpu

    def serves(self, task: Task) -> str | None:
        """Every schedule whose ranks are on one node. Once there is a plan, its kernels are compiled."""
        if self._meeting.trouble:
            return self._meeting.trouble
        if self._meeting.on_one_gpu and self._device.is_blocking(task.stream):
            return BLOCKING
        if task.plan is None:
            return None
        if task.plan.schedules is None:
            return f"{task.algorithm} has no schedule"
        self._binder.load(task)
        return None

    def run(self, task: Task) -> Operation:
        """Enqueue `task` on its stream.

        To load code or to allocate memory may take until the GPU has nothing to do: where ranks share one, all have
        done so, for this call and before, when the first of its kernels begins to wait for another rank's.
        """
        self.check()
        if self._meeting.on_one_gpu and self._device.is_blocking(task.stream):
            raise UsageError(f"{task.collective}: {BLOCKING}", code="GC-STREAM")
        self._order.follow(task.stream)  # before `bind`, which lets go of memory when the stream has come to here
        calls = self._binder.bind(task)
        if self._meeting.on_one_gpu and not task.stream.is_capturing():
            yield from self._meeting.meet()
        for call in calls:
            call(task.stream)
        if not self._device.asynchronous:
            task.stream.enqueue(self.check)

    def launcher(self, task: Task) -> Launcher | None:
        if self._meeting.on_one_gpu or not self._device.asynchronous:
            return None
        calls, tables = self._binder.bind(task), self._binder.tables

        def launch(stream: Any, keep: object = tables) -> None:
            self.check()
            for call in calls:
                call(stream)

        return launch

    def check(self) -> None:
        """Raise CollectiveTimeout where a kernel has given up waiting for another rank."""
        control = self._meeting.memory.control
        if control["where"]:
            what, peer = WAITS[int(control["where"])], int(control["peer"])
            raise CollectiveTimeout(f"a kernel waited {self._timeout:g} s for a {what} from rank {peer}; is every rank "
                                    "in the same call, with the same shape, dtype and algorithm? timeout= sets the "
                                    "deadline", ranks=(peer,))

    def abort(self) -> None:
        """End what is under way: every wait of this rank's kernels, without the other ranks."""
        self._meeting.memory.control["aborted"] = 1

    def close(self) -> None:
        """Give back all memory; idempotent. A collective call."""
        self._binder.clear()
        self._meeting.close()
        if self.symmetric is not None:
            self.symmetric.heap.close()
