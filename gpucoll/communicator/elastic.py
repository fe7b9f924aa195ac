"""Communicators that change: survivors after a failure, members with newcomers, lost ranks replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpucoll.communicator.links import Link, LocalLink, MpiLink, StoreLink
from gpucoll.communicator.metadata import check_alike
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, GpucollError, RankFailedError, UsageError
from gpucoll.launch import bootstrap, launchers, regroup
from gpucoll.progress.operations import in_thread
from gpucoll.progress.waits import Progress

if TYPE_CHECKING:
    from gpucoll.communicator.methods import Communicator

TIMEOUT = 60.0  # seconds for newcomers to come, by default


def same_options(link: Link, wanted: bootstrap.Options) -> Link:
    """Return `link` if all ranks want the same options; otherwise free the link and raise UsageError."""
    try:
        bootstrap.meet(link.mpi, wanted.timeout, lambda: bootstrap.check_alike(link.mpi, wanted))
    except UsageError:
        link.free()  # a collective call: all ranks raise this error
        raise
    return link


def newcomer_options(given: Sequence[Any]) -> bootstrap.Options:
    """Return the options of a newcomer, as the members have them; the newcomer's GPU is its own."""
    options = bootstrap.Options(*given)
    return options._replace(device="emulated" if options.emulated else None)


def shrink(comm: Communicator) -> Communicator:
    """Return a communicator of the surviving ranks; see `Communicator.shrink`."""
    rest, life = comm._survivors, comm._core.life
    if rest is not None and not rest.closed:
        # The survivors' group may have lost a rank since.
        if rest._core.waits.failure is not None or rest._core.link.processes.ended():
            comm._survivors = shrink(rest)
        return comm._survivors or rest
    if life.closed or life.is_forked:
        life.check_usable()
    link = _link_of_survivors(comm)
    comm._survivors = comm._over(link if isinstance(link, LocalLink) else same_options(link, comm.options))
    _let_init_return(comm._survivors, comm)
    return comm._survivors


def replace(comm: Communicator, timeout: Any) -> Communicator:
    """Return a communicator with newcomers in the place of lost ranks; see `Communicator.replace`."""
    deadline = time.monotonic()
    with contextlib.suppress(ArgumentError):  # `grow` refuses a wrong timeout, on every rank
        deadline += bootstrap.seconds_of(timeout)
    while True:
        rest = shrink(comm)
        try:
            # Survivors that wait for newcomers are one group: each names its old rank.
            everyone = rest._core.metadata.all_gather({"rank": comm.rank, "size": comm.size}, "replace")
            check_alike("replace", everyone, "size", "GC-GROW")
            grown = grow(rest, comm.size, [one["rank"] for one in everyone], timeout, "replace")
        except RankFailedError:
            if time.monotonic() > deadline:
                raise
        else:
            _let_init_return(grown, rest)
            rest.close()
            return grown


def _let_init_return(comm: Communicator, before: Communicator) -> None:
    """Let `gpucoll.init` return `comm` if it returned `before`: the program goes on with `comm`."""
    from gpucoll.communicator import internal

    if internal.world() is before:
        internal.set_world(comm)


def confirm(comm: Communicator) -> None:
    """Return once all ranks have made a new communicator; give it up if a rank has died meanwhile."""
    try:
        comm._core.metadata.all_gather({}, "grow")
    except GpucollError:
        with contextlib.suppress(GpucollError):
            comm.close()
        raise


def _link_of_survivors(comm: Communicator) -> Link:
    """Return the link of the surviving ranks, and close `comm`."""
    link = comm._core.link
    part: Link | None
    if isinstance(link, LocalLink):
        link.stay()
        _give_up(comm)
        part = link.survivors(comm.timeout)
    else:
        part = (_shrunk_by_mpi(comm) if isinstance(link, MpiLink) else None) or _regrouped(comm)
    part.gpu_index, part.device = link.gpu_index, link.device
    return part


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


def _shrunk_by_mpi(comm: Communicator) -> Link | None:
    """Return the link made by an MPI that outlives dead processes; None if this MPI does not."""
    from mpi4py import MPI

    def shrunk() -> Any:
        if not launchers.may_shrink(MPI.Get_library_version()):
            raise NotImplementedError("MPI was started without --with-ft ulfm")
        comm.mpi.Revoke()
        return comm.mpi.Shrink()

    try:
        rest = in_thread(Progress(comm.timeout).run, shrunk, "shrink")
    except GpucollError:
        raise
    except Exception as error:  # of MPI, or an mpi4py without these calls
        reason = _why_bound(comm)
        if reason:
            raise UsageError(f"shrink: this MPI does not go on after a process has failed, and these ranks do not go "
                             f"on without MPI: {reason}; start them by Open MPI's mpiexec --with-ft ulfm, or with a "
                             f"store ({error!r})", code="GC-SHRINK") from error
        return None
    _give_up(comm)
    return MpiLink(rest, comm.timeout)  # never free `rest`: MPI_Finalize of Open MPI would hang


def _regrouped(comm: Communicator) -> Link:
    """Return the link of survivors that meet without MPI, at the port of the lowest of them."""
    members, options = comm._core.link.members, comm.options
    assert members is not None
    ended = comm._core.link.processes.ended
    _give_up(comm)
    place = regroup.survivors(members, ended, comm.timeout, options)
    try:
        return StoreLink.regrouped(place, comm.timeout, by_ucx=options.executor == "ucx")
    finally:
        members.free()  # last: the new members take over the open port, where newcomers may be waiting


def grow(comm: Communicator, size: Any, seats: Sequence[int], timeout: Any, call: str) -> Communicator:
    """Return a communicator of `size` ranks, with member i as rank ``seats[i]``; see `Communicator.grow`."""
    core, link, mine = comm._core, comm._core.link, None
    core.life.check_usable()
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
    facts: Any = {"error": str(mine)} if mine else {
        "size": int(size), "secret": regroup.fingerprint(link.members.secret)}
    everyone = core.metadata.all_gather(facts, call, mine)
    check_alike(call, everyone, "size", "GC-GROW")
    if size > comm.size:
        regroup.check_secrets(everyone)
    place = regroup.grown(link.members, int(size), seats, link.processes.ended, patience, comm.options)
    new = StoreLink.regrouped(place, comm.timeout, by_ucx=comm.executor == "ucx")
    new.gpu_index, new.device = link.gpu_index, link.device
    grown = comm._over(same_options(new, comm.options))
    confirm(grown)
    return grown


def joined(store: str, timeout: float) -> tuple[Link, bootstrap.Options]:
    """Return the link and the options of a newcomer; see `gpucoll.join`."""
    place = regroup.newcomer(store, bootstrap.seconds_of(timeout))
    options = newcomer_options(place.options)
    bootstrap.end_together()
    link = StoreLink.regrouped(place, options.timeout, by_ucx=options.executor == "ucx")
    return same_options(link, options), options

