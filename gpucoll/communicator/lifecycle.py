"""A communicator's life: its guards are made with it; it ends with the others, without them, or in a fork's child."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import secrets
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpucoll.communicator.backends import not_known
from gpucoll.communicator.core import REFUSALS, Core
from gpucoll.communicator.gpu import Gpu
from gpucoll.communicator.links import LocalLink
from gpucoll.core.signature import Signature
from gpucoll.errors import CollectiveTimeout, GpucollError, MismatchError, RankFailedError, UsageError
from gpucoll.health import devices
from gpucoll.health.devices import DeviceWatch
from gpucoll.health.flight import CLOSED, Flight
from gpucoll.health.guard import ENDS, FAILED, FAILED_BY, LATE, Guard, late_for
from gpucoll.health.observed import Comparison, Recorded, observers_of
from gpucoll.health.preflight import EXPLAINS, Deferred, Preflight
from gpucoll.launch.bootstrap import DEATH, FINALIZE, finalize_within
from gpucoll.progress.operations import drain_all, kind_of
from gpucoll.transport.control import abort, shutdown
from gpucoll.transport.kvstore import linger_at_most

GRACE = 1.0  # seconds for what is under way on a GPU, after a failure of which nothing is known there


class Lifecycle(Core):
    """Methods of `Communicator`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        link, mpi = self._link, self._link.mpi
        guard = Guard(self.rank, link.processes, self._awaited, self._progress, link.aborted,
                      lambda: self._waits.waits_since)
        self._guard = guard
        self._waits.hooks.append(guard.check)
        self._waits.blame, self._waits.explain = guard.blame, self._explain
        self._host.explain_by(guard.cause)
        if mpi is not None:
            self._waits.on_failure = self._abort
        if isinstance(link, LocalLink):
            link.used_by(functools.partial(_threads_of, weakref.ref(self)))
        self._has_aborted = False
        self._watches: list[DeviceWatch] = []
        self._unfinished: GpucollError | None = None  # of a call on a GPU, as closing has found
        self._flight = None
        folder = os.environ.get("GPUCOLL_DUMP_DIR")
        if folder:
            name = f"threads-{os.getpid()}" if mpi is None else mpi.bcast(secrets.token_hex(6))
            self._flight = Flight(Path(folder), name, self.rank, self.size)
        self._observers = observers_of(self.rank, os.environ)
        preflight = Preflight(link, self._waits, self._elsewhere) if self.size > 1 and self.check != "off" else None
        self._preflight = preflight if link.has_collectives else None
        comparison = None if self._host.compares_calls or preflight is None else \
            Deferred(preflight) if self.check == "deferred" else preflight
        self._host.observe(self._flight, self._observers, comparison)
        _alive.add(self)

    def _awaited(self) -> set[int] | None:
        """Return the ranks that are waited for, None where nobody knows."""
        if self._preflight is not None and self._preflight.is_comparing:
            return self._preflight.missing()
        return self._host.awaited()

    def _elsewhere(self) -> tuple[set[int], str]:
        """Return the ranks that a call on the host waits for, and what tells the call apart."""
        call = Signature.decode(self._host.under_way() or self._waits.name)
        return self._host.awaited() or set(), call._replace(where="on the host").encode()

    def _explain(self, error: BaseException) -> GpucollError | None:
        """Return what is behind an error of the transport or of another rank: unlike calls, or a rank that has ended.
        """
        is_late, is_known = isinstance(error, CollectiveTimeout), isinstance(error, MismatchError | RankFailedError)
        if isinstance(error, RankFailedError) and {*error.ranks} & {*self._link.processes.ended()}:
            return None
        found: GpucollError | None = None
        if self._preflight is not None:
            differ = isinstance(error, MismatchError)
            found = self._preflight.explain(0 if is_late else EXPLAINS, differ=differ)
            if found is None and isinstance(error, CollectiveTimeout) and self._preflight.missing() \
                    and self._preflight.missing().isdisjoint(error.ranks):  # a named rank itself waits for another one
                return self._waits.late(self._waits.name)
        return found if found is not None or is_late or is_known else self._guard.cause()

    def _progress(self) -> dict[int, tuple[int, str]]:
        """Return the number and the words of the last call of ranks, as far as they are known."""
        preflight = self._preflight
        if preflight is None or (self._host.compares_calls and not preflight.missing()):
            return self._host.progress()
        return preflight.progress()

    def _by_messages(self, usual: str) -> Comparison | None:
        """Return what compares calls by messages, as `check` says, or else as is `usual`."""
        if self._preflight is None:
            return None
        return self._preflight if (self.check or usual) == "full" else Deferred(self._preflight)

    def _of_devices(self) -> Comparison | None:
        """Return what compares calls on devices: who waits for it does so as in calls on the host."""
        return self._host if self.check == "full" else self._by_messages("deferred")

    def _refuse(self, error: BaseException, call: Signature | None = None, *, on_device: bool = False) -> None:
        """Tell the other ranks, which may wait in that call, once that it is refused here; `call` is what is known."""
        if hasattr(error, "is_told"):
            return
        error.is_told = True  # type: ignore[attr-defined] # a mark of ours
        comparison = self._of_devices() if on_device else self._host
        refused = (call or Signature(""))._replace(refusal=str(error))
        with contextlib.suppress(GpucollError):
            if comparison is not None:
                self._waits.run(comparison.compare(refused.encode()), "a call that was refused")

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise the error inside, which the ranks that wait for this one are told of."""
        try:
            yield
        except REFUSALS as error:
            self._refuse(error)
            raise

    def _abort(self) -> None:
        """Tell the other ranks, once, that this one goes no further."""
        if not self._has_aborted and not self._link.has_ended():
            self._has_aborted = True
            with contextlib.suppress(*self._link.foreign):
                failure = self._waits.failure
                if failure is not None:
                    finalize_within.append(DEATH if self._link.processes.ended() else
                                           self.timeout if isinstance(failure, CollectiveTimeout) else FINALIZE)
                why = ENDS if failure is None else LATE if isinstance(failure, CollectiveTimeout) else FAILED
                if isinstance(failure, RankFailedError) and failure.ranks:
                    why = FAILED_BY + failure.ranks[0]
                if isinstance(failure, CollectiveTimeout) and failure.ranks:
                    why = late_for(failure.ranks[0])
                abort(self._link.wire, self._living(), why)

    def _living(self) -> list[int]:
        """Return the other ranks; after a failure not those that have died, to which MPI may crash where it sends."""
        failure = self._waits.failure
        if failure is None:
            return sorted({*range(self.size)} - {self.rank})
        named = failure.ranks if isinstance(failure, RankFailedError) else ()
        dead = {self.rank, *named, *self._link.processes.ended()}
        return sorted({*range(self.size)} - dead)

    def _gpu(self, name: str) -> Gpu:
        if name in self._gpus:
            return self._gpus[name]
        gpu = super()._gpu(name)
        recorded = [] if self._flight is None else [Recorded(self._flight)]
        gpu.observers, gpu.comparison = [*recorded, *self._observers], self._of_devices()
        if gpu.device.asynchronous and self.size > 1:
            self._watches.append(DeviceWatch(gpu, self._waits, may_call=self._link.threads))
        return gpu

    def close(self) -> None:
        """Give back what the communicator holds; idempotent. A collective call unless it has failed.

        What is still under way is completed first. Where another rank has failed or does not come within the timeout,
        MPI's communicators stay: to free them on some ranks only would let late messages reach the next ones.
        Of ranks that are threads none waits for another: the last one to close frees the memory of all.

        Raises the error of a call on a GPU whose result is not complete, unless a call or a wait has raised it before.
        """
        if self.closed or self._is_forked:
            return
        self.closed = True
        self._forget_calls()
        for watch in self._watches:
            watch.close()
        was_well, reported = self._waits.failure is None, self._waits.reported
        unreported, self._waits.unreported = self._waits.unreported, None
        if isinstance(self._link, LocalLink):
            ended = self._has_ended()
            self._waits.close()
            self._link.close(self._release, failed=not ended)
        else:
            together = self._shutdown()
            if together and self._flight is not None:
                self._flight.began(CLOSED)
                self._flight.ended()
            self._waits.close()
            self._release(not together)
        unreported = unreported or (self._unfinished if was_well else None)
        if unreported is not None and kind_of(unreported) != reported:
            raise unreported

    def _forget_calls(self) -> None:
        """Let every call come through here from now on."""
        self._express = not_known
        if self._engine is not None:
            self._engine.close()

    def _has_ended(self) -> bool:
        """Return whether all that this rank has under way has come to a good end, on its devices too."""
        try:
            self._waits.run(iter(()), "close")
        except GpucollError:
            return False
        return self._devices_have_ended()

    def _devices_have_ended(self, *, awaited: bool = True) -> bool:
        """Return whether all that was enqueued on devices comes to a good end; it is `awaited` until the deadline."""
        errors = [gpu.unfinished(self.timeout if awaited else GRACE) for gpu in self._gpus.values()]
        error = next(filter(None, errors), None)
        self._unfinished = error and (self._explain(error) or error)
        return error is None

    def _release(self, failed: bool) -> None:
        """Give all memory back, or of devices' what no other rank can still be using where one has `failed`."""
        self._host.close()
        for gpu in self._gpus.values():
            gpu.close(failed=failed)
        if not failed:
            self._link.free()

    def _shutdown(self) -> bool:
        """Return whether every rank has come to close, none having failed; a failed one tells, and does not wait."""
        if self._link.has_ended():
            return False
        if self._waits.failure is None and self._link.processes.ended():
            self._waits.failure = self._guard.cause()
        failure = self._waits.failure
        leaving = shutdown(self._link.wire, self._living(), failed=failure is not None)
        if failure is not None:
            self._host.fail(failure)
            self._abort()
            with contextlib.suppress(*self._link.foreign):
                all(done() for done in leaving)  # tells, and hears nobody
            return False
        try:
            if self._preflight is not None:
                self._waits.run(self._preflight.settled(), "close")
            self._waits.run(leaving, "close")
        except GpucollError:
            self._devices_have_ended(awaited=False)
            return False
        return self._devices_have_ended()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None and self._waits.failure is None:  # the other ranks may be elsewhere: do not wait for them
            self._waits.failure = UsageError(f"the block that used it was left by {kind.__name__}")
        self.close()


def _threads_of(reference: weakref.ref[Lifecycle]) -> set[int]:
    """Return the system's numbers of the threads that made a communicator's last calls; none where it was dropped."""
    comm = reference()
    return set() if comm is None else {comm._waits.thread, comm._host.thread()} - {0}


_alive: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def _after_fork() -> None:
    """In a fork's child: no call, no wait at exit, no shutdown of the parent's communicators."""
    finalize_within.clear()
    devices.forget()
    for comm in _alive:
        comm._is_forked = True
        comm._forget_calls()
        comm._watches.clear()
        comm._waits.forget()
        if comm._link.processes.watch is not None:
            comm._link.processes.watch.drop()  # the parent's connection would outlive it
        comm._waits.hooks.append(comm._check_usable)  # who waits for a `Work` of the parent's waits for ever


def _at_exit() -> None:
    """Who leaves without closing tells the others, which may be waiting for it; then MPI ends.

    MPI's end waits for all ranks: for ever, where one has died. So it has a deadline once a communicator has failed, a
    short one where a process is known to have ended: a watchdog of the interpreter's, no thread of Python's, shows
    where this process is then, and ends it with status 1.
    """
    drain_all()
    devices.stop()
    for comm in list(_alive):
        if not (comm.closed or comm._is_forked or comm._link.mpi is None or comm._link.has_ended()):
            try:
                is_lost = not {ENDS}.issuperset(comm._link.aborted().values())
            except comm._link.foreign:  # as MPI raises where it knows of a rank that has died
                is_lost = True
            if is_lost:
                finalize_within.append(FINALIZE)
            if comm._link.processes.ended():
                finalize_within.append(DEATH)
            comm._host.fail(RankFailedError("the process has ended", ranks=(comm.rank,)))
            comm._abort()
            comm.closed = True  # MPI's end frees communicators, and who frees one closes what it keeps
    if finalize_within:
        linger_at_most(max(finalize_within))
        limit = DEATH if DEATH in finalize_within else max(finalize_within)
        MPI = sys.modules.get("mpi4py.MPI")  # ranks that a store joins do without
        if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
            faulthandler.dump_traceback_later(limit, exit=True, file=2)
            MPI.Finalize()
            faulthandler.cancel_dump_traceback_later()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
