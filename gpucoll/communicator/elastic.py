"""Communicators that change: survivors after a failure, members with newcomers, lost ranks replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpucoll.communicator.links import LocalLink, MpiLink, StoreLink
from gpucoll.communicator.metadata import check_alike
from gpucoll.communicator.transports import Transport
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, BackendError, GpucollError, RankFailedError, RevokedError, UsageError
from gpucoll.health.guard import REPORT_TIMEOUT
from gpucoll.launch import bootstrap, launchers, regroup
from gpucoll.progress.operations import in_thread
from gpucoll.progress.waits import Progress
from gpucoll.transport import ports
from gpucoll.transport.connections import StoreError

if TYPE_CHECKING:
    from gpucoll.communicator.methods import Communicator

AnyLink = TypeVar("AnyLink", bound=Transport)
NEWCOMER_TIMEOUT = 60.0  # seconds for newcomers to come, by default


def same_options(link: Transport, wanted: bootstrap.Options) -> Transport:
    """Return `link` if all ranks want the same options; otherwise free the link and raise UsageError."""
    try:
        bootstrap.meet(link.mpi, wanted.timeout, lambda: bootstrap.check_alike(link.mpi, wanted))
    except UsageError:
        link.free()  # a collective call: all ranks raise this error
        raise
    return link


def shrink(comm: Communicator) -> Communicator:
    """Return a communicator of the surviving ranks; see `Communicator.shrink`."""
    rest, life = comm._survivors, comm._core.life
    if rest is not None and (not rest.closed or rest._core.life.regroups):
        # The survivors' group may have lost a rank since.
        if rest.closed or rest._core.waits.failure is not None or rest._core.link.processes.ended():
            comm._survivors = shrink(rest)
        return comm._survivors or rest
    # A rank that gave the communicator up, and found no survivors then, may try again.
    if life.is_forked or (life.closed and (rest is not None or not life.regroups)):
        life.waits.check_usable()
    comm._survivors = _group_of_survivors(comm)
    _let_init_return(comm._survivors, comm)
    return comm._survivors


def replace(comm: Communicator, timeout: Any) -> Communicator:
    """Return a communicator with newcomers in the place of lost ranks; see `Communicator.replace`."""
    late = time.monotonic() + comm.timeout
    while True:
        rest = shrink(comm)
        try:
            # Survivors that wait for newcomers are one group: each names its old rank.
            everyone = rest._core.metadata.all_gather({"rank": comm.rank, "size": comm.size}, "replace")
            check_alike("replace", everyone, "size", "GC-GROW")
            grown = grow(rest, comm.size, [one["rank"] for one in everyone], timeout, "replace")
        except GpucollError as error:
            if not _is_death(error, rest._core.link):
                raise
            if time.monotonic() > late:
                raise _lost("replace", error, comm._core.link) from error
            _give_up(rest)  # wakes the ranks that have not seen the death, and those that have grown
        else:
            _let_init_return(grown, rest)
            rest.close()
            return grown


def _let_init_return(comm: Communicator, before: Communicator) -> None:
    """Let `gpucoll.init` return `comm` if it returned `before`: the program goes on with `comm`."""
    from gpucoll import communicator

    if communicator._world is before:
        communicator._world = comm


def _group_of_survivors(comm: Communicator) -> Communicator:
    """Return the communicator of the surviving ranks, and close `comm`."""
    link = comm._core.link
    if isinstance(link, LocalLink):
        link.stay()
        try:
            _give_up(comm)
            return comm._over(_inherits(link.survivors(comm.timeout), link))
        except BaseException:
            link.stay(stays=False)
            raise
    return (_shrunk_by_mpi(comm, link) if isinstance(link, MpiLink) else None) or _regrouped(comm)


def _inherits(link: AnyLink, before: Transport) -> AnyLink:
    """Return `link` with the GPU of the link `before`."""
    link.gpu_index, link.device = before.gpu_index, before.device
    return link


def _is_death(error: BaseException | None, link: Transport | None) -> bool:
    """Return whether an error in making a group comes from the death of a rank, or of the store's host."""
    if isinstance(error, RankFailedError | RevokedError | StoreError) or isinstance(
            getattr(error, "__cause__", None), StoreError):
        return True
    # The memory of a dying process is out of reach before its end is visible.
    return isinstance(error, BackendError) and link is not None and bool(link.processes.ended(REPORT_TIMEOUT))


def _lost(call: str, error: Exception, link: Transport | None) -> RankFailedError:
    """Return the error of ranks that cannot regroup because of deaths, with the numbers of the ranks in `link`."""
    # An error of a group under way has that group's numbers: its text is left to the cause.
    why = "" if isinstance(error, RankFailedError) else f" ({error})"
    return RankFailedError(f"{call}: a rank has died while the ranks regroup{why}",
                           ranks=link.processes.ended() if link else ())


def _open_group(place: regroup.Place, make: Callable[[Transport, bootstrap.Options], Communicator],
                options: bootstrap.Options, call: str, before: Transport | None = None
                ) -> tuple[Communicator | None, Transport | None, GpucollError | None]:
    """Make the communicator of a new group; return it once all ranks have made it.

    After a death of a rank the communicator is given up: it is None, with the link, if there is one, and the error. A
    rank that has come to the end cannot know whether all others have. Those meet this rank again when they shrink.
    """
    link: StoreLink | None = None
    made: Communicator | None = None
    try:
        link = StoreLink.regrouped(place, options.timeout, by_ucx=options.executor == "ucx")
        made = make(same_options(_inherits(link, before or link), options), options)
        made._core.metadata.all_gather({}, call)
    except GpucollError as error:
        if not _is_death(error, link):
            if made is not None:
                with contextlib.suppress(GpucollError):
                    made.close()
            elif link is not None and not isinstance(error, UsageError):  # `same_options` has freed it
                link.forget()
            raise
        if made is not None:
            _give_up(made)
        if link is not None:
            link.forget()
        if made is None:  # no rank has the group: end it for those that are making it
            place.store.abandon()
        return None, link, error
    return made, link, None


def _give_up(comm: Communicator) -> None:
    """Fail and close a communicator; ranks waiting for this rank are woken."""
    core = comm._core
    core.life.regroups = True
    core.waits.failure = core.waits.failure or RankFailedError("shrink() has replaced this communicator")
    core.host.fail(core.waits.failure)
    with contextlib.suppress(GpucollError):  # a call on a GPU may have no complete result
        comm.close()


def _why_bound(comm: Communicator) -> str:
    """Return the reason why these ranks cannot form a group without MPI, the same on every rank; "" if they can."""
    link = comm._core.link
    if comm.executor == "native":
        return "executor='native' is MPI's own collectives"
    if link.members is None:
        return "they are on several hosts, and not every rank reaches rank 0 by TCP" if isinstance(link, MpiLink) \
            else "they are threads of one process"
    return ""


def _shrunk_by_mpi(comm: Communicator, link: MpiLink) -> Communicator | None:
    """Return the communicator made by an MPI that outlives dead processes; None if this MPI does not.

    If a rank dies meanwhile, the others shrink what is left. So does a rank that has completed, at its next `shrink`.
    """
    late = time.monotonic() + comm.timeout
    failures: tuple[type[Exception], ...] = (GpucollError, *link.foreign)
    while True:
        rest = _rest_by_mpi(comm, link.base)
        if rest is None:
            return None
        _give_up(comm)
        made: Communicator | None = None
        try:
            made = comm._over(same_options(_inherits(MpiLink(rest, comm.timeout, is_rest=True), link), comm.options))
            made._core.metadata.all_gather({}, "shrink")
        except failures as error:
            if made is not None:
                _give_up(made)
            is_lost = _is_death(error, None) or isinstance(error.__cause__ or error, link.foreign)
            if not is_lost or time.monotonic() > late:
                raise _lost("shrink", error, link) if is_lost else error from error.__cause__
            link.base = rest
        else:
            return made


def _rest_by_mpi(comm: Communicator, base: Any) -> Any:
    """Return MPI's communicator of the ranks of `base` that live; None if this MPI does not go on after a death."""
    from mpi4py import MPI

    def shrunk() -> Any:
        if not launchers.may_shrink(MPI.Get_library_version()):
            raise NotImplementedError("MPI was started without --with-ft ulfm")
        comm.mpi.Revoke()
        base.Revoke()
        return base.Shrink()  # never to be freed: MPI_Finalize of Open MPI would hang

    try:
        return in_thread(Progress(comm.timeout).run, shrunk, "shrink")
    except GpucollError:
        raise
    except Exception as error:  # of MPI, or an mpi4py without these calls
        reason = _why_bound(comm)
        if reason:
            raise UsageError(f"shrink: this MPI does not go on after a process has failed, and these ranks do not go "
                             f"on without MPI: {reason}; start them by Open MPI's mpiexec --with-ft ulfm, or with a "
                             f"store ({error!r})", code="GC-GROW") from error
        return None


def _regrouped(comm: Communicator) -> Communicator:
    """Return the communicator of survivors that meet without MPI, at the port of the eldest of them.

    If a rank dies meanwhile, the others meet again.
    """
    link, late = comm._heir or comm._core.link, time.monotonic() + comm.timeout
    members, ended = link.members, link.processes.ended
    assert members is not None
    _give_up(comm)
    while True:
        try:
            place = regroup.survivors(members, ended, comm.timeout, comm.options)
            made, _, error = _open_group(place, type(comm), comm.options, "shrink", link)
        except StoreError as lost:
            made, error = None, lost
        if made is not None:
            # Last: the new members take over the open port, where newcomers may be waiting.
            comm._core.link.forget()
            return made
        if error is not None and time.monotonic() > late:
            raise _lost("shrink", error, comm._core.link) from error


def grow(comm: Communicator, size: Any, seats: Sequence[int], timeout: Any, call: str) -> Communicator:
    """Return a communicator of `size` ranks, with member i as rank ``seats[i]``; see `Communicator.grow`."""
    core, link, mine = comm._core, comm._core.link, None
    core.waits.check_usable()
    reason = _why_bound(comm)
    if reason or link.members is None:
        raise UsageError(f"{call}: no newcomer can come to these ranks: {reason}; newcomers come to processes started "
                         "with a store, and to those of an MPI whose hosts reach each other by TCP", code="GC-GROW")
    patience = 0.0
    try:
        patience = bootstrap.seconds_of(timeout)
        if not is_whole(size) or size < comm.size:
            raise ArgumentError(f"{call}: size={size!r} is not a number of ranks of at least {comm.size}; use "
                                "shrink() for fewer", code="GC-GROW")
    except ArgumentError as error:
        mine = error
    facts: Any = {"error": str(mine)} if mine else {"size": int(size), "secret": regroup.proves(link.members.lineage)}
    everyone = core.metadata.all_gather(facts, call, mine)
    check_alike(call, everyone, "size", "GC-GROW")
    if size > comm.size:
        regroup.check_secrets(everyone)
    made, new, lost = None, None, None
    try:
        place = regroup.grown(link.members, int(size), seats, lambda facts: core.metadata.all_gather({**facts}, call),
                              lambda: any(map(link.has_left, range(comm.size))), patience, comm.timeout / 2,
                              comm.options, awaits_another=call == "replace")
        made, new, lost = _open_group(place, type(comm), comm.options, "grow", link)
    except StoreError as error:
        lost = error
    if made is None and lost is not None:
        comm._heir = new or comm._heir
        # The members have the numbers of the new group.
        raise lost if isinstance(lost, RankFailedError) else _lost(call, lost, link) from lost
    assert made is not None
    comm._heir = None
    return made


def joined(store: str, timeout: float, make: Callable[[Transport, bootstrap.Options], Communicator]) -> Communicator:
    """Return the communicator of a newcomer, by `make`; see `gpucoll.join`.

    If a rank dies before all have the communicator, the newcomer waits for a place again.
    """
    patience = bootstrap.seconds_of(timeout)
    deadline = time.monotonic() + patience
    while True:
        place = regroup.newcomer(store, patience, deadline)
        options = bootstrap.Options(*place.options)  # as the members have them, but the newcomer's GPU is its own
        options = options._replace(device="emulated" if options.emulated else None)
        bootstrap.end_together()
        made, link, lost = _open_group(place, make, options, "grow")
        if made is not None:
            return made
        if place.lineage.entry is not None:
            ports.let_go(place.lineage.entry)  # the members are to take the address over
        if lost is not None and time.monotonic() > deadline:
            raise lost if isinstance(lost, RankFailedError) else _lost("join", lost, link) from lost
