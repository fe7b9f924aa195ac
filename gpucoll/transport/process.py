"""What this process keeps for all communicators: ports, stores, UCX; closed at its end, given up in a fork's child."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from gpucoll.progress.operations import keep_for_ever

LEAVES = 1.0  # seconds at exit for the last messages of UCX to leave


class Process:
    """The state of this process that outlives communicators, see `PROCESS`."""

    def __init__(self) -> None:
        # Guards the hubs and groups of this process; notified at every change. Reentrant.
        self.changed: threading.Condition = threading.Condition()
        self.sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # all sockets of the connections and hubs
        self.applicants: dict[str, Any] = {}  # the groups of applicants that this process lets in, by key, see `ports`
        self.ports: dict[str, Any] = {}  # by the name of the host
        # Addresses given by users where this process lets newcomers in; None is the port of a store.
        self.held: dict[tuple[str, int], Any] = {}
        self.stores: dict[object, Any] = {}  # by token and address, or by object
        self.ucx: Any = None  # UCX's worker of this process
        self.limits: list[float] = []  # on the end of MPI, and on rank 0's wait, set by failed communicators
        # Whether MPI or UCX is the parent's: its threads are missing here.
        self.lost_mpi: bool = False
        self.lost_ucx: bool = False
        self.exporter: Any = None  # of metrics, and of a summary at the end
        self.forks: list[Callable[[], object]] = []  # called in the child of a fork
        # The steps at the end of the process, the last one first.
        self.ends: contextlib.ExitStack[bool | None] = contextlib.ExitStack()
        self.ends.callback(self.close)  # after the communicators' last messages, whose step is added later

    def forked(self) -> None:
        """Give up all state in the child of a fork: connections and threads belong to the parent."""
        self.changed.__init__()  # type: ignore[misc] # another thread of the parent may have held the lock
        # Without a shutdown: the parent goes on with the connections, which must end with the parent.
        for one in [*self.sockets]:
            one.close()
        # Never closed in the child: UCX would shut down the connections of the parent.
        keep_for_ever(self.ucx)
        self.lost_ucx |= self.ucx is not None and self.ucx.worker is not None
        MPI = sys.modules.get("mpi4py.MPI")
        self.lost_mpi |= MPI is not None and getattr(MPI, "Is_initialized", bool)()
        self.ucx = self.exporter = None
        for table in (self.applicants, self.ports, self.held, self.stores, self.limits):
            table.clear()
        for call in self.forks:
            call()

    def close(self) -> None:
        """Close all that is open, whatever a step raises."""
        with contextlib.ExitStack() as steps:  # from the last to the first
            steps.callback(self.close_ucx)
            steps.callback(self.close_stores)  # rank 0 waits for the ranks still connected, and UCX goes on meanwhile
            steps.callback(self.close_ports)

    def end_as_child(self) -> None:
        """Let a child of `multiprocessing` end as other processes do: after a fork it runs no functions of `atexit`."""
        if (process := sys.modules.get("multiprocessing.process")) is not None and process.parent_process() is not None:
            from multiprocessing.util import Finalize

            Finalize(None, self.ends.close, exitpriority=0)  # a second time, it does nothing

    def close_ports(self) -> None:
        """Close all ports of this process; the process then counts as gone."""
        for one in (*self.ports.values(), *filter(None, self.held.values())):
            one.close()
        for group in self.applicants.values():
            group.end()
        self.ports.clear()
        self.held.clear()

    def close_stores(self) -> None:
        """Close all stores of this process; rank 0 waits for the ranks still connected."""
        while self.stores:
            self.stores.popitem()[1].close()

    def close_ucx(self) -> None:
        """End UCX, once the last messages have left."""
        if self.ucx is not None and self.ucx.worker is not None:
            self.ucx.worker.close(LEAVES)


PROCESS = Process()
os.register_at_fork(after_in_child=PROCESS.forked)
atexit.register(PROCESS.ends.close)
