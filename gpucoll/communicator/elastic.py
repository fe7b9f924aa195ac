"""Communicators that change: survivors after a failure, members with newcomers, lost ranks replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any, Self

from gpucoll.communicator.links import Link, LocalLink, MpiLink, StoreLink
from gpucoll.communicator.metadata import check_alike
from gpucoll.communicator.points import PointToPoint
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, GpucollError, RankFailedError, UsageError
from gpucoll.launch import bootstrap, regroup
from gpucoll.progress.operations import in_thread
from gpucoll.progress.waits import Progress

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


class Elastic(PointToPoint):
    """Methods of `Communicator`: shrink, grow, replace."""

    _survivors: Self | None = None  # the survivors' communicator, once this one has been shrunk

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        members = self._link.members
        self.address = None if members is None else regroup.text_of(members.address)

    def shrink(self) -> Self:
        """Return a communicator of the surviving ranks, in the order of their old ranks; this one fails and is closed.

        A collective call of all surviving ranks; a rank waiting in another call is woken. A rank does not survive if
        its process has ended, or if the rank has closed this communicator after the failure. Under MPI on one node, and
        without MPI, survivors go on without MPI: ``mpi`` is then None. The launcher must let survivors live:
        ``gpucoll run --standalone --survive`` does, and Open MPI's ``mpiexec --with-ft ulfm``, where MPI shrinks.

        Repeated after a `replace` without newcomers, the call returns the survivors' communicator. Raises
        CollectiveTimeout if a living rank does not come within ``timeout`` seconds, and UsageError if ranks of several
        hosts have an MPI that ends with its first process. Source: MPI forum's User Level Failure Mitigation.
        """
        rest = self._survivors
        if rest is not None and not rest.closed:
            # The survivors' group may have lost a rank since.
            if rest._waits.failure is not None or rest._link.processes.ended():
                self._survivors = rest.shrink()
            return self._survivors or rest
        if self.closed or self._is_forked:
            self._check_usable()
        link = self._link_of_survivors()
        self._survivors = self._over(link if isinstance(link, LocalLink) else same_options(link, self.options))
        self._is_succeeded_by(self._survivors)
        return self._survivors

    def grow(self, size: int, timeout: float = TIMEOUT) -> Self:
        """Return a communicator of `size` ranks: members keep their ranks, newcomers of `gpucoll.join` come after.

        A collective call of all members. Newcomers come to `address` and prove themselves by GPUCOLL_SECRET. They take
        over the options of the members. This communicator stays usable. Raises CollectiveTimeout after `timeout`
        seconds without enough newcomers, RankFailedError if a member dies, ArgumentError (on the other ranks PeerError)
        for a wrong `size`, MismatchError if sizes differ, UsageError for ranks that are threads and without a secret.
        """
        return self._grown(size, range(self.size), timeout, "grow")

    def replace(self, timeout: float = TIMEOUT) -> Self:
        """Return a communicator of as many ranks as before: survivors keep their ranks, newcomers take the lost ones.

        A collective call of all surviving ranks: `shrink`, then `grow`; this communicator fails and is closed. Raises
        the errors of both; ranks that die meanwhile are replaced, too. After a CollectiveTimeout without newcomers,
        `replace` can be called again, and `shrink` returns the communicator of the survivors.
        """
        deadline = time.monotonic()
        with contextlib.suppress(ArgumentError):  # `_grown` refuses a wrong timeout, on every rank
            deadline += bootstrap.seconds_of(timeout)
        while True:
            rest = self.shrink()
            try:
                # Survivors that wait for newcomers are one group: each names its old rank.
                everyone = rest._all_gather_metadata({"rank": self.rank, "size": self.size}, "replace")
                check_alike("replace", everyone, "size", "GC-GROW")
                grown = rest._grown(self.size, [one["rank"] for one in everyone], timeout, "replace")
            except RankFailedError:
                if time.monotonic() > deadline:
                    raise
            else:
                rest._is_succeeded_by(grown)
                rest.close()
                return grown

    def _confirm(self) -> None:
        """Return once all ranks have made a new communicator; give it up if a rank has died meanwhile."""
        try:
            self._all_gather_metadata({}, "grow")
        except GpucollError:
            with contextlib.suppress(GpucollError):
                self.close()
            raise

    def _is_succeeded_by(self, other: Self) -> None:
        """Note that the program goes on with `other`."""
        raise NotImplementedError

    # ---------------------------------------------------------------- shrink

    def _link_of_survivors(self) -> Link:
        """Return the link of the surviving ranks, and close this communicator."""
        link = self._link
        part: Link | None
        if isinstance(link, LocalLink):
            link.stay()
            self._give_up()
            part = link.survivors(self.timeout)
        else:
            part = (self._shrunk_by_mpi() if isinstance(link, MpiLink) else None) or self._regrouped()
        part.gpu_index, part.device = link.gpu_index, link.device
        return part

    def _give_up(self) -> None:
        """Fail and close this communicator; ranks waiting for this rank are woken."""
        self._regroups = True
        self._waits.failure = self._waits.failure or RankFailedError("shrink() has replaced this communicator")
        self._host.fail(self._waits.failure)
        with contextlib.suppress(GpucollError):  # a call on a GPU may have no complete result
            self.close()

    def _shrunk_by_mpi(self) -> Link | None:
        """Return the link made by an MPI that outlives dead processes; None if this MPI does not."""
        def shrunk() -> Any:
            self.mpi.Revoke()
            return self.mpi.Shrink()

        try:
            rest = in_thread(Progress(self.timeout).run, shrunk, "shrink")
        except GpucollError:
            raise
        except Exception as error:  # of MPI, or an mpi4py without these calls
            if self._link.members is None or self.options.executor == "native":
                raise UsageError("shrink: this MPI does not go on after a process has failed, and ranks of several "
                                 "hosts, or with executor='native', need MPI; Open MPI goes on under mpiexec "
                                 f"--with-ft ulfm, and ranks started with a store do ({error!r})",
                                 code="GC-SHRINK") from error
            return None
        self._give_up()
        return MpiLink(rest, self.timeout)  # never free `rest`: MPI_Finalize of Open MPI would hang

    def _regrouped(self) -> Link:
        """Return the link of survivors that meet without MPI, at the port of the lowest of them."""
        members = self._link.members
        assert members is not None
        ended = self._link.processes.ended
        self._give_up()
        place = regroup.survivors(members, ended, self.timeout, self.options)
        members.free()
        return StoreLink.regrouped(place, self.timeout, by_ucx=self.options.executor == "ucx")

    # ---------------------------------------------------------------- grow

    def _grown(self, size: Any, seats: Sequence[int], timeout: Any, call: str) -> Self:
        """Return a communicator of `size` ranks, with member i as rank ``seats[i]``; see `grow`."""
        self._check_usable()
        members, mine = self._link.members, None
        if members is None or self.options.executor == "native":
            raise UsageError(f"{call}: newcomers come to ranks that are processes of one node, or were started with a "
                             "store; these ranks are threads, or need MPI", code="GC-GROW")
        patience = 0.0
        try:
            patience = bootstrap.seconds_of(timeout)
            if not is_whole(size) or size < self.size:
                raise ArgumentError(f"{call}: size={size!r} is no number of ranks from {self.size} on; shrink() is for "
                                    "fewer", code="GC-GROW")
        except ArgumentError as error:
            mine = error
        facts: Any = {"error": str(mine)} if mine else {
            "size": int(size), "secret": regroup.fingerprint(members.secret)}
        everyone = self._all_gather_metadata(facts, call, mine)
        check_alike(call, everyone, "size", "GC-GROW")
        if size > self.size:
            regroup.check_secrets(everyone)
        place = regroup.grown(members, int(size), seats, self._link.processes.ended, patience, self.options)
        link = StoreLink.regrouped(place, self.timeout, by_ucx=self.options.executor == "ucx")
        link.gpu_index, link.device = self._link.gpu_index, self._link.device
        grown: Self = self._over(same_options(link, self.options))
        grown._confirm()
        return grown


def joined(store: str, timeout: float) -> tuple[Link, bootstrap.Options]:
    """Return the link and the options of a newcomer; see `gpucoll.join`."""
    place = regroup.newcomer(store, bootstrap.seconds_of(timeout))
    options = newcomer_options(place.options)
    bootstrap.end_together()
    link = StoreLink.regrouped(place, options.timeout, by_ucx=options.executor == "ucx")
    return same_options(link, options), options

