"""The life of a communicator: its guards, refusals and aborts; its end by `close`, at exit, or in a fork's child."""

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
from gpucoll.health.flight import CLOSED, THREADS, Flight
from gpucoll.health.guard import ENDS, FAILED, FAILED_BY, LATE, Guard, late_for
from gpucoll.health.metrics import export
from gpucoll.health.observed import Comparison, Recorded, observers_of
from gpucoll.health.preflight import EXPLAINS, Deferred, HostCall, Preflight
from gpucoll.launch.bootstrap import DEATH, FINALIZE, finalize_within, gpu_index
from gpucoll.progress.operations import drain_all, kind_of
from gpucoll.transport.control import abort, shutdown
from gpucoll.transport.kvstore import linger_at_most

GRACE = 1.0  # seconds for work on a GPU to end by itself, after a failure not yet known on the GPU


class Lifecycle(Core):
    """Methods of `Communicator`: guards, refusal, abort, close."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        link, mpi = self._link, self._link.mpi
        guard = Guard(self.rank, link.processes, self._awaited, self._progress, link.aborted,
                      lambda: self._waits.waits_since)
        self._guard = guard
        # Called between polls: the death of a rank ends a wait at once, long before the deadline.
        self._waits.hooks.append(guard.check)
        self._waits.blame, self._waits.explain = guard.blame, self._explain
        self._host.explain_by(guard.cause)
        # Ranks that are processes learn of a failure here by messages only.
        if mpi is not None:
            self._waits.on_failure = self._abort
        if isinstance(link, LocalLink):
            # Weak: the links' shared state must not keep a dropped communicator alive.
            link.used_by(functools.partial(_threads_of, weakref.ref(self)))
        self._has_aborted = False
        self._regroups = False  # whether this rank goes on in another communicator after a failure
        self._watches: list[DeviceWatch] = []
        self._unfinished: GpucollError | None = None  # of a call on a GPU, found by `close`
        self._flight = None
        folder = os.environ.get("GPUCOLL_DUMP_DIR")
        if folder:
            # The files of all ranks of a communicator need one group name.
            name = f"{THREADS}{os.getpid()}" if mpi is None else mpi.bcast(secrets.token_hex(6))
            self._flight = Flight(Path(folder), name, self.rank, self.size)
        self._observers = observers_of(self.rank, os.environ)
        self._exporter = None
        metrics = os.environ.get("GPUCOLL_METRICS")
        if metrics:
            threads = isinstance(link, LocalLink)
            self._exporter = export(metrics, self.rank, 0 if threads else gpu_index(link.place))
            self._exporter.add(self._clock.sums, self.rank, threads=threads)
        preflight = None
        if self.size > 1 and self.options.compares != "off":
            preflight = Preflight(link, self._waits, self._elsewhere, self._clock)
        self._preflight = preflight if link.has_collectives else None
        # The engine compares the calls of a single node in shared memory: no messages then.
        comparison = None if self._host.compares_calls or preflight is None else \
            Deferred(preflight) if self.options.compares == "deferred" else preflight
        self._host.observe(self._flight, self._observers, comparison)
        _alive.add(self)

    def _awaited(self) -> set[int] | None:
        """Return the ranks awaited by this rank, None if unknown."""
        if self._preflight is not None and self._preflight.is_comparing:
            return self._preflight.missing()
        return self._host.awaited()

    def _elsewhere(self) -> HostCall:
        """Return the call on the host."""
        call = Signature.decode(self._host.under_way() or self._waits.name)
        return HostCall(self._host.call_count, self._host.awaited() or set(),
                        call._replace(where="on the host").encode())

    def _explain(self, error: BaseException) -> GpucollError | None:
        """Return the cause of an error of the transport or of another rank: calls that differ, or a dead rank."""
        is_late, is_known = isinstance(error, CollectiveTimeout), isinstance(error, MismatchError | RankFailedError)
        # A named rank has really ended: no other cause is behind the error.
        if isinstance(error, RankFailedError) and {*error.ranks} & {*self._link.processes.ended()}:
            return None
        found: GpucollError | None = None
        if self._preflight is not None:
            differ = isinstance(error, MismatchError)
            # A wait until the deadline was long enough: give the comparison no more time.
            found = self._preflight.explain(0 if is_late else EXPLAINS, differ=differ)
            if found is None and isinstance(error, CollectiveTimeout) and self._preflight.missing() \
                    and self._preflight.missing().isdisjoint(error.ranks):  # a named rank waits for the missing ones
                return self._waits.late(self._waits.name)
        return found if found is not None or is_late or is_known else self._guard.cause()

    def _progress(self) -> dict[int, tuple[int, str]]:
        """Return number and descriptor of the last call of each rank, as far as known."""
        preflight = self._preflight
        if preflight is None or (self._host.compares_calls and not preflight.missing()):
            return self._host.progress()
        return preflight.progress()

    def _by_messages(self, usual: str) -> Comparison | None:
        """Return the comparison of calls by messages, as `check` says, or by default as `usual` says."""
        if self._preflight is None:
            return None
        return self._preflight if (self.options.compares or usual) == "full" else Deferred(self._preflight)

    def _of_devices(self) -> Comparison | None:
        """Return the comparison for calls on devices: the host's own with "full", else one by messages."""
        return self._host if self.options.compares == "full" else self._by_messages("deferred")

    def _refuse(self, error: BaseException, call: Signature | None = None, *, on_device: bool = False) -> None:
        """Tell the other ranks, once for each error, that this rank refuses a call; `call` has its known fields."""
        if hasattr(error, "is_reported"):
            return
        error.is_reported = True  # type: ignore[attr-defined] # a mark of ours
        comparison = self._of_devices() if on_device else self._host
        refused = (call or Signature(""))._replace(refusal=str(error))
        # The caller raises the refusal itself: an error in telling others must not replace it.
        with contextlib.suppress(GpucollError):
            if comparison is not None:
                self._waits.run(comparison.compare(refused.encode()), "a call that was refused")

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Report a refusal raised in the block to the ranks waiting for this rank, and raise it."""
        try:
            yield
        except REFUSALS as error:
            self._refuse(error)
            raise

    def _abort(self) -> None:
        """Tell the other ranks, once, that this rank goes no further, and why."""
        if not self._has_aborted and not self._link.has_ended():
            self._has_aborted = True
            with contextlib.suppress(*self._link.foreign):
                failure = self._waits.failure
                # MPI's end waits for all ranks, and a dead rank never comes: set a deadline for `_at_exit`.
                if failure is not None:
                    finalize_within.append(DEATH if self._link.processes.ended() else
                                           self.timeout if isinstance(failure, CollectiveTimeout) else FINALIZE)
                # Pass on the rank behind the failure, so that other ranks blame that rank and not this one.
                why = ENDS if failure is None else LATE if isinstance(failure, CollectiveTimeout) else FAILED
                if isinstance(failure, RankFailedError) and failure.ranks:
                    why = FAILED_BY + failure.ranks[0]
                if isinstance(failure, CollectiveTimeout) and failure.ranks:
                    why = late_for(failure.ranks[0])
                abort(self._link.wire, self._living(), why)

    def _living(self) -> list[int]:
        """Return the other ranks, after a failure without the dead ones: MPI may crash in a send to a dead rank."""
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
        """Complete the operations under way and release all resources; idempotent.

        A collective call unless the communicator has failed. If another rank has failed, or does not come within the
        timeout (seconds), MPI's communicators are not freed: after a free on some ranks only, late messages could reach
        the next communicators. Ranks that are threads do not wait for each other: the last `close` frees the memory of
        all.

        Raises the error of an incomplete call on a GPU, unless a call or a wait has raised the error before.
        """
        if self.closed or self._is_forked:
            return
        self.closed = True
        self._forget_calls()
        if self._exporter is not None:
            self._exporter.retire(self._clock.sums)
        # No watchdog may look at streams and transports during their release.
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
            if not together and not self._regroups:
                self._link.leave()
            self._release(not together)
            if self._preflight is not None:
                self._preflight.close()
        unreported = unreported or (self._unfinished if was_well else None)
        # Another thread may have raised the same failure already: report it once.
        if unreported is not None and kind_of(unreported) != reported:
            raise unreported

    def _forget_calls(self) -> None:
        """Close the engine: all later calls take the path through Python, with its checks."""
        self._fast_path = not_known
        if self._engine is not None:
            self._engine.close()

    def _has_ended(self) -> bool:
        """Return whether all operations of this rank have ended without error, on its devices too."""
        try:
            self._waits.run(iter(()), "close")
        except GpucollError:
            return False
        return self._devices_have_ended()

    def _devices_have_ended(self, *, awaited: bool = True) -> bool:
        """Return whether all work on devices ends well: within the timeout if `awaited`, else within GRACE."""
        errors = [gpu.unfinished(self.timeout if awaited else GRACE) for gpu in self._gpus.values()]
        error = next(filter(None, errors), None)
        self._unfinished = error and (self._explain(error) or error)
        return error is None

    def _release(self, failed: bool) -> None:
        """Release all memory. If a rank has `failed`, keep the link and the devices' memory: ranks may use both."""
        self._host.close()
        for gpu in self._gpus.values():
            gpu.close(failed=failed)
        self._calls.close(failed=failed)
        if not failed:
            self._link.free()

    def _shutdown(self) -> bool:
        """Return whether all ranks have come to `close` without failure; a failed rank tells, and does not wait."""
        if self._link.has_ended():
            return False
        # A dead rank never comes to `close`: fail now, not at the deadline.
        if self._waits.failure is None and self._link.processes.ended():
            self._waits.failure = self._guard.cause()
        failure = self._waits.failure
        leaving = shutdown(self._link.wire, self._living(), failed=failure is not None)
        if failure is not None:
            self._host.fail(failure)
            self._abort()
            with contextlib.suppress(*self._link.foreign):
                all(done() for done in leaving)  # sends the message, and does not wait for answers
            return False
        # A deferred comparison may still be under way: judge it first, since no later call will.
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
            self._waits.failure = UsageError(f"its `with` block was left by {kind.__name__}")
        self.close()


def _threads_of(reference: weakref.ref[Lifecycle]) -> set[int]:
    """Return the system's numbers of the threads of a communicator's last calls; none if it was dropped."""
    comm = reference()
    return set() if comm is None else {comm._waits.thread, comm._host.thread()} - {0}


_alive: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def _after_fork() -> None:
    """Disable the parent's communicators in a fork's child: no call, no wait at exit, no shutdown."""
    finalize_within.clear()
    devices.forget()
    for comm in _alive:
        # Transports, threads and locks belong to the parent: touch none of these.
        comm._is_forked = True
        comm._forget_calls()
        comm._watches.clear()
        comm._waits.forget()
        if comm._link.processes.watch is not None:
            comm._link.processes.watch.drop()  # other hosts see the parent's end by its closed connection
        comm._waits.hooks.append(comm._check_usable)  # ends a wait for the parent's `Work`


def _at_exit() -> None:
    """Tell waiting ranks that this rank leaves without `close`; then end MPI.

    MPI's end waits for all ranks, for ever if a rank has died. A deadline therefore limits MPI's end after a failure of
    a communicator, a short one if a process is known to have ended. At the deadline the interpreter's watchdog, which
    is no thread of Python's, prints the stack of this process and ends the process with status 1.
    """
    # Other ranks may wait for a dropped work: complete it first.
    drain_all()
    # CUDA may end next: the watchdog thread must not call it any more.
    devices.stop()
    for comm in list(_alive):
        if not (comm.closed or comm._is_forked or comm._link.mpi is None or comm._link.has_ended()):
            try:
                # ENDS is a rank that left without `close`. Any other reason is a failure, and MPI's end may then hang.
                is_lost = not {ENDS}.issuperset(comm._link.aborted().values())
            except comm._link.foreign:  # MPI raises if it knows of a dead rank
                is_lost = True
            if is_lost:
                finalize_within.append(FINALIZE)
            if comm._link.processes.ended():
                finalize_within.append(DEATH)
            comm._host.fail(RankFailedError("the process has ended", ranks=(comm.rank,)))
            comm._abort()
            comm.closed = True  # MPI's end frees communicators, and so would close this one again
    if finalize_within:
        linger_at_most(max(finalize_within))
        limit = DEATH if DEATH in finalize_within else max(finalize_within)
        MPI = sys.modules.get("mpi4py.MPI")  # None for ranks joined by a store
        if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
            faulthandler.dump_traceback_later(limit, exit=True, file=2)
            MPI.Finalize()
            faulthandler.cancel_dump_traceback_later()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
