"""What runs the calls of a communicator: a backend for arrays on the host, one for each device (`gpu`)."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from gpucoll.executors import Executor, Task
from gpucoll.links import Link


class Backend(Protocol):
    """Two executors: one runs schedules, the other native collectives, where there are any."""

    @property
    def schedules(self) -> Executor: ...
    @property
    def native(self) -> Executor | None: ...


def limit(backend: Backend, task: Task, allowed: str | None) -> str | None:
    """Return the executor that "auto" must keep to for `task`: what was asked for, or the only one that serves."""
    if allowed is None and (backend.native is None or task.device == "emulated" or backend.native.serves(task)):
        return backend.schedules.name
    return allowed


class HostBackend:
    """MPI's messages and collectives on host arrays; threads have no collectives of their own."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @functools.cached_property
    def schedules(self) -> Executor:
        from gpucoll.executors.mpi import MpiExecutor

        return MpiExecutor(self._link.wire)

    @functools.cached_property
    def native(self) -> Executor | None:
        if self._link.mpi is None:
            return None
        from gpucoll.executors.native import NativeExecutor

        return NativeExecutor(self._link.wire)

    def close(self) -> None:
        """Give back what the executors hold."""
        made: dict[str, Any] = self.__dict__
        for executor in (made.get("schedules"), made.get("native")):
            if executor is not None:
                executor.close()
