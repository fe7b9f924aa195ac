"""The life of a communicator: its guards, refusals and aborts; its end by `close`, at exit, or in a fork's child."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpucoll.call.compile import HostBackend
from gpucoll.communicator.gpu import Gpu
from gpucoll.communicator.leaving import Leaving, end_process, log
from gpucoll.communicator.links import LocalLink, MpiLink
from gpucoll.communicator.transports import Transport
from gpucoll.core.signature import LastCall, Signature
from gpucoll.errors import (
    REFUSALS,
    BackendError,
    ClosedError,
    CollectiveTimeout,
    GpucollError,
    MismatchError,
    RankFailedError,
    UsageError,
)
from gpucoll.executors import call_site
from gpucoll.health.clocks import align
from gpucoll.health.devices import DeviceWatch
from gpucoll.health.flight import CLOSED, CallRecord, Flight
from gpucoll.health.guard import Guard
from gpucoll.health.metrics import Exporter, exporter_of
from gpucoll.health.observed import CallObserver, observers_of
from gpucoll.health.preflight import EXPLAINS, DeferredOnNode, Deferring, Preflight
from gpucoll.launch.bootstrap import DEATH, FINALIZE, Options, gpu_index
from gpucoll.progress.operations import kind_of
from gpucoll.progress.waits import CALLING_THREAD, Progress
from gpucoll.transport.process import PROCESS

GRACE = 1.0  # seconds for work on a GPU to end by itself, after a failure not yet known on the GPU


class Lifecycle:
    """The connections, executors, waits and guards of a communicator, from its start to its end; see `assemble`.

    `waits` has the deadline and the failure of the communicator. `host` and `gpus` have the executors. `preflight` is
    the comparison of calls, if the engine or messages compare. At the end `stop_calls` is called first, and each of
    `releases` later, with whether a rank has failed.
    """

    closed: bool = False
    has_aborted: bool = False
    is_released: bool = False
    is_forked: bool = False  # this is a fork's child, and the links belong to the parent
    regroups: bool = False  # this rank goes on in another communicator after a failure
    meets: bool = False  # this rank waits for all others to make something together
    # The numbers of calls at the last refusal, and the number of refusals in a row.
    refused: tuple[tuple[int, int], int] = (0, 0), 0
    preflight: Preflight | DeferredOnNode | None = None  # read by the guard in every wait
    # Of the calls on devices: the host's own with check="full", else a deferred one.
    device_comparison: HostBackend | Deferring | None = None
    observers: Sequence[CallObserver] = ()  # that the user asked for
    exporter: Exporter | None = None
    records_calls = False  # in files; alike on all ranks: also true on a rank that can write no file
    _unfinished: GpucollError | None = None  # of a call on a GPU, found by `close`

    def __init__(self, link: Transport, options: Options, waits: Progress, host: HostBackend) -> None:
        self.link: Transport = link
        self.options: Options = options
        self.waits: Progress = waits
        self.host: HostBackend = host
        self.gpus: dict[str, Gpu] = {}
        self.watches: list[DeviceWatch] = []
        self.record: CallRecord = CallRecord(host.counters)
        self.stop_calls: Callable[[], None] = lambda: None
        self.releases: list[Callable[[bool], None]] = []
        # Returns in words the messages that a rank waits for.
        self.waits_for_messages: Callable[[int], str] = lambda rank: ""
        # Ends waits for ranks that go no further.
        self.guard: Guard = Guard(link.place.rank, link.processes, self._awaited, self._progress, link.farewells,
                           lambda: waits.waits_since, position=self.position, last=self.last_call,
                           needs_all=lambda: waits.message_wait.work is None,
                           messages=lambda rank: self.waits_for_messages(rank), shown=host.shown_culprit)
        self.leaving: Leaving = Leaving(self)
        waits.enter, waits.has_ended = link.enter, link.has_ended
        waits.on_delay, waits.on_failure = self.record.delayed, self.abort
        waits.blame, waits.describe, waits.explain = self.guard.blame, self.guard.describe, self._explain
        # Called between polls: the death of a rank ends a wait at once, long before the deadline.
        waits.hooks.append(self.guard.check)

    def forked(self) -> None:
        """Disable the parent's communicator in a fork's child: no call, no wait at exit, no shutdown."""
        # Transports, threads and locks belong to the parent: touch none of these.
        self.is_forked = True
        self.waits.ended = lambda: UsageError(
            "this communicator belongs to the parent process; a forked child cannot use it: start ranks by mpiexec, or "
            "children by spawn, before making a communicator", code="GC-FORK")
        self.stop_calls()
        self.watches.clear()
        self.waits.forget()
        self.waits.hooks.append(self.waits.check_usable)  # ends a wait for the parent's `Work`

    def end_calls(self) -> None:
        """Refuse all calls from now on: the communicator counts as closed."""
        self.closed = True
        self.waits.ended = lambda: ClosedError("this communicator was closed; gpucoll.init() makes a new communicator")

    def _awaited(self) -> set[int] | None:
        others = {*range(self.link.place.size)} - {self.link.place.rank}
        if self.leaving.awaited is not None:
            return self.leaving.awaited()
        if self.meets:
            return others
        if self.waits.message_wait.work is not None:
            left = {*self.guard.left, *self.link.processes.ended()}
            # A receive from any rank awaits all of them: it is in vain once all have left.
            return self.waits.message_wait.partners() or (others if others <= left else None)
        if self.preflight is not None and self.preflight.is_comparing:
            return self.preflight.missing()
        return self.host.awaited()

    def _explain(self, error: BaseException) -> GpucollError | None:
        """Return the cause of an error of the transport or of another rank: calls that differ, or a dead rank."""
        is_late, is_known = isinstance(error, CollectiveTimeout), isinstance(error, MismatchError | RankFailedError)
        # A named rank has really ended: no other cause is behind the error.
        if isinstance(error, RankFailedError) and {*error.ranks} & {*self.link.processes.ended()}:
            return None
        found: GpucollError | None = None
        if self.preflight is not None:
            # A wait until the deadline was long enough: give the comparison no more time.
            found = self.preflight.explain(0 if is_late else EXPLAINS)
            if found is None and isinstance(error, CollectiveTimeout) and self.preflight.missing() \
                    and self.preflight.missing().isdisjoint(error.ranks):  # a named rank waits for the missing ones
                return self.waits.late(self.waits.name)
        return found if found is not None or is_late or is_known else self.guard.cause()

    def check_others(self) -> None:
        """Raise if another rank has failed or died: a hook for the waits of other communicators of this rank."""
        if not self.is_released:
            self.guard.check()

    def _progress(self) -> dict[int, LastCall]:
        """Return the last call of each rank, as far as known, counted as this rank counts the call that it is in."""
        preflight = self.preflight
        if preflight is None or not preflight.number or (self.host.compares_calls and not preflight.missing()):
            return self.host.progress()
        return preflight.progress()

    def last_call(self, rank: int) -> LastCall | None:
        """Return the last call of a rank, on the host or on a device; None if unknown."""
        known = [self.host.progress(common=True).get(rank)]
        # Where the engine compares calls by greetings, no call on the host is counted here.
        if self.preflight is not None and (self.preflight.number or not self.host.call_count):
            known.append(self.preflight.progress().get(rank))
        return max(filter(None, known), key=lambda call: (call.number > 0, call.when), default=None)

    def position(self) -> tuple[int, int]:
        """Return how many calls this rank has begun on the host, and on devices or by messages."""
        compared = 0 if self.preflight is None else self.preflight.number
        on_host = self.host.call_count if self.host.counts_calls else 0
        return on_host, compared or sum(gpu.call_count for gpu in self.gpus.values())

    def refuse(self, error: BaseException, call: Signature | None = None, *, on_device: bool = False) -> None:
        """Tell the other ranks, once for each error, that this rank refuses a call; `call` has its known fields."""
        if hasattr(error, "is_reported"):
            return
        error.is_reported = True  # type: ignore[attr-defined] # a mark of ours
        comparison = self.device_comparison if on_device else self.host
        refused = (call or Signature(""))._replace(refusal=str(error))
        before, streak = self.refused
        streak = streak + 1 if before == self.position() else 1
        # The caller raises the refusal itself: an error in telling others must not replace it.
        with contextlib.suppress(GpucollError):
            if comparison is not None:
                compare = comparison.deferred if isinstance(comparison, Deferring) else comparison.compare
                self.waits.run(compare(refused.encode()), "a call that was refused")
        self.refused = self.position(), streak

    @contextlib.contextmanager
    def refusing(self) -> Iterator[None]:
        """Report a refusal raised in the block to the ranks waiting for this rank, and raise it."""
        try:
            yield
        except REFUSALS as error:
            self.refuse(error)
            raise

    def abort(self) -> None:
        """Tell the other ranks, once, that this rank goes no further, and why."""
        if not self.has_aborted and not self.link.has_ended():
            self.has_aborted = True
            failure = self.waits.failure
            with contextlib.suppress(*self.link.foreign, GpucollError):
                # MPI's end waits for all ranks, and a dead rank never comes: set a deadline for `end_process`.
                if failure is not None and self.link.mpi is not None:
                    PROCESS.limits.append(DEATH if self.link.processes.ended() else
                                           self.options.timeout if isinstance(failure, CollectiveTimeout) else FINALIZE)
                self.leaving.tell(failure)

    def stop_watches(self) -> None:
        """Stop the watchdogs of calls on GPUs, and wait for their looks under way."""
        for watch in self.watches:
            watch.close()

    def close(self) -> None:
        """Complete the operations under way and release all resources; see `Communicator.close`."""
        if self.closed or self.is_forked:
            return
        self.end_calls()
        self.leaving.place = self.leaving.place or call_site()
        # A call may begin on another thread while this one closes: from here on each call checks `closed`.
        self.stop_calls()
        if self.exporter is not None:
            self.exporter.retire(self.record)
        self.stop_watches()  # no watchdog may look at streams and transports during their release
        was_well, reported = self.waits.failure is None, self.waits.reported
        unreported, self.waits.unreported = self.waits.unreported, None
        if not self.link.meets_to_close:
            ended = self._has_ended()
            self.waits.close()
            self.leaving.tell_parts(self.leaving.place)
            farewell = self.leaving.farewell(self.waits.failure, closes=True)
            self.guard.hear()
            told = self.leaving.told_by_closed(farewell) if ended else None
            self.link.close(self._release, farewell, failed=not ended)
        else:
            together, told = self.leaving.leave()
            if together and self.record.file is not None:
                self.record.file.began(CLOSED)
                self.record.file.ended()
            self.waits.close()
            if not together and not self.regroups:
                self.link.leave()
            self._release(not together)
        unreported = unreported or (self._unfinished if was_well else None)
        # Another thread may have raised the same failure already: report it once.
        if unreported is not None and kind_of(unreported) != reported:
            raise unreported
        # An exception on its way, as in `finally: comm.close()`, tells more than the error of `close`.
        if told is not None and sys.exception() is None:
            raise told

    def _has_ended(self) -> bool:
        """Return whether all operations of this rank have ended without error, on its devices too."""
        try:
            self.waits.run(iter(()), "close")
        except GpucollError:
            return False
        return self.devices_have_ended()

    def devices_have_ended(self, *, awaited: bool = True) -> bool:
        """Return whether all work on devices ends well: within the timeout if `awaited`, else within GRACE."""
        errors = [gpu.unfinished(self.options.timeout if awaited else GRACE) for gpu in self.gpus.values()]
        error = next(filter(None, errors), None)
        self._unfinished = error and (self._explain(error) or error)
        return error is None

    def _release(self, failed: bool) -> None:
        """Release all memory. If a rank has `failed`, keep the link and the devices' memory: ranks may use both."""
        self.is_released = not failed  # the link of a failed communicator stays
        self.host.close()
        for gpu in self.gpus.values():
            gpu.close(failed=failed)
        # After the devices: kernels may read the memory of compiled calls until their GPU has closed.
        try:
            for release in self.releases:
                release(failed)
        finally:
            if not failed:
                self.link.free()


def assemble(link: Transport, options: Options) -> Lifecycle:
    """Return the life of a new communicator. A collective call; each part is made of the parts before it."""
    waits = link.new_waits(options.timeout)
    host = HostBackend(link, options.timeout, options.executor, options.check)
    # From here on the guard watches the other ranks: a rank may die in the exchanges below.
    life = Lifecycle(link, options, waits, host)
    host.explain_by(life.guard)
    if isinstance(link, LocalLink):
        # Weak: the links' shared state must not keep a dropped communicator alive.
        reference = weakref.ref(life)
        link.used_by(lambda: set() if (one := reference()) is None else {one.waits.thread, one.host.thread()} - {0})
    _begin_records(life)
    by_messages: Preflight | None = None  # compares the host's calls if the engine does not
    # The engine compares the calls of a single node in shared memory: no messages then.
    if link.place.size > 1 and options.check != "off" and link.executor is None:
        if host.compares_calls:
            life.preflight = DeferredOnNode(host.shows_calls, waits)
        else:
            by_messages = Preflight(link, waits, defers=options.check == "deferred")
            life.preflight = by_messages if link.has_collectives or not link.shares_memory else None
    life.device_comparison = host if link.executor is not None or options.check == "full" else life.preflight
    host.observe(life.record.file, life.observers, by_messages)
    _alive.add(life)
    return life


def _begin_records(life: Lifecycle) -> None:
    """Record, observe and export the calls of this rank as the environment asks. A collective call."""
    link, folder = life.link, os.environ.get("GPUCOLL_DUMP_DIR")
    rank, threads = link.place.rank, isinstance(link, LocalLink)
    if folder:
        life.record.file, life.records_calls = _flight_in(Path(folder), link, life.waits), True
    life.observers = observers_of(rank, os.environ)
    life.exporter = exporter_of(os.environ, rank, lambda: 0 if threads else gpu_index(link.place))
    if life.exporter is not None:
        life.exporter.add(life.record, rank, threads=threads)


def _flight_in(folder: Path, link: Transport, waits: Progress) -> Flight | None:
    # The files of all ranks of a communicator need one group name.
    name = f"threads-{os.getpid()}" if link.mpi is None else link.mpi.bcast(secrets.token_hex(6))
    clock = align(link, waits.run)
    try:
        return Flight(folder, name, link.place.rank, link.place.size, clock, threads=link.mpi is None)
    except BackendError as error:  # evidence for a failure must not be the failure; the other ranks record
        log.warning("rank %d goes on without a record of its calls: %s", link.place.rank, error)
        return None


_alive: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


def tell_meeting(mpi: Any) -> None:
    """Tell the ranks of all open communicators within `mpi` that this rank is about to wait for them in `from_mpi`.

    They may be in a call, and this rank makes none before they have come.
    """
    lives = [life for life in [*_alive] if isinstance(life.link, MpiLink) and not life.closed and not life.is_forked
             and not life.link.has_ended()]
    if not lives or not mpi or not hasattr(mpi, "Get_group"):  # nobody to tell, or an argument that is refused later
        return
    everyone, place = mpi.Get_group(), call_site()
    # In MPICH, the group of a grid of some ranks has all ranks of the parent: then nobody is told.
    for life in lives if everyone.Get_size() == mpi.Get_size() else ():
        ranks = life.link.mpi.Get_group()
        inside = ranks.Intersection(ranks, everyone)
        # All ranks of such a communicator make this call: they count their meetings alike.
        if inside.Get_size() == ranks.Get_size():
            life.leaving.meet(place)
        inside.Free()
        ranks.Free()
    everyone.Free()


# The thread of a fork's child has another number.
PROCESS.forks += [CALLING_THREAD.__init__, lambda: [*map(Lifecycle.forked, _alive)]]  # type: ignore[misc]
PROCESS.ends.callback(end_process, _alive)
