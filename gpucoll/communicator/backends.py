"""What runs the calls of a communicator: a backend for arrays on the host, one for each device (`gpu`)."""

from __future__ import annotations

import functools
from typing import Any, Protocol

from gpucoll.errors import ArgumentError
from gpucoll.executors import Executor, Task
from gpucoll.links import Link

NATIVE = "native"


class Backend(Protocol):
    """Executors, the usual one of those that run schedules first; the native one, if there is one, last."""

    @property
    def executors(self) -> tuple[Executor, ...]: ...


def able(backend: Backend, task: Task, allowed: str | None) -> tuple[str, ...]:
    """Return the executors that can serve `task`, whose algorithm may be "auto"; `allowed` is the one asked for.

    Raises ArgumentError where there is none. On the emulated device "auto" leaves MPI's own aside: it is there to
    test what runs on GPUs.
    """
    there = [one for one in backend.executors if task.algorithm == "auto" or (one.name == NATIVE)
             == (task.algorithm == NATIVE)]
    asked = [one for one in there if allowed in (None, one.name)]
    if not asked:
        raise _refused(task, there, allowed)
    reasons = {one.name: one.serves(task) for one in asked}
    served = tuple(name for name, reason in reasons.items() if reason is None)
    if not served:
        name, reason = next(iter(reasons.items()))
        raise ArgumentError(f"{task.collective}: executor {name} cannot serve: {reason}", code="GC-ALGO")
    if task.device == "emulated" and task.algorithm == "auto" and allowed is None and len(served) > 1:
        return tuple(name for name in served if name != NATIVE)
    return served


def _refused(task: Task, there: list[Executor], allowed: str | None) -> ArgumentError:
    if not there:
        return ArgumentError(f"{task.collective}: there are no native collectives here; name an algorithm, or 'auto'",
                             code="GC-EXECUTOR")
    names = " or ".join(one.name for one in there)
    return ArgumentError(f"{task.collective}: algorithm {task.algorithm!r} on {task.device} arrays runs on executor "
                         f"{names}, but this communicator has executor={allowed!r}", code="GC-EXECUTOR")


def chosen(backend: Backend, task: Task, name: str) -> Executor:
    """Return the executor `name` once it has what it needs for `task`; ArgumentError says what it lacks."""
    executor = next(one for one in backend.executors if one.name == name)
    reason = executor.serves(task)
    if reason is not None:
        raise ArgumentError(f"{task.collective}: executor {name} cannot serve: {reason}", code="GC-ALGO")
    return executor


class HostBackend:
    """MPI's messages and collectives on host arrays; threads have no collectives of their own."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @functools.cached_property
    def executors(self) -> tuple[Executor, ...]:
        from gpucoll.executors.mpi import MpiExecutor

        messages = MpiExecutor(self._link.wire)
        if self._link.mpi is None:
            return (messages,)
        from gpucoll.executors.native import NativeExecutor

        return (messages, NativeExecutor(self._link.wire))

    def close(self) -> None:
        """Give back what the executors hold."""
        made: dict[str, Any] = self.__dict__
        for executor in made.get("executors", ()):
            executor.close()
