"""Links between the ranks of a communicator: MPI or a key store between processes, memory between threads."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from gpucoll.communicator.thread_hub import ThreadHub
from gpucoll.communicator.transports import Transport
from gpucoll.core.dtypes import CODES
from gpucoll.device.messages import Found, MatchedReceives, receiver
from gpucoll.errors import ArgumentError, BackendError, UsageError, listed
from gpucoll.health.farewell import Farewell, Why, by_mpi
from gpucoll.health.processes import Processes, process_namespace, visible
from gpucoll.health.remote import Watch
from gpucoll.launch import bootstrap
from gpucoll.launch.bootstrap import RankTopology
from gpucoll.launch.regroup import Lineage, Place, first_lineage, membership, offer
from gpucoll.progress.operations import ProbeResult
from gpucoll.transport import ports, ucx
from gpucoll.transport.control import WireError
from gpucoll.transport.kvstore import KeyStore, MemoryStore, open_store
from gpucoll.transport.mailbox import StoreMessages, StoreRanks, ThreadMessages
from gpucoll.transport.rendezvous import by_first_rank
from gpucoll.transport.tags import TAGS
from gpucoll.transport.ucx import UcxMessages
from gpucoll.tuner import Table, built_in
from gpucoll.tuner.table import load

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class TypedMessages:
    """Messages over an mpi4py communicator. The tag carries the code of the dtype above the user's tag.

    A receive therefore takes the first message of its own dtype, at no cost, and `other` finds messages of other
    dtypes. A receive may take a message ahead of an earlier message of another dtype, but never misreads a message.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._comm, self._status, self._send, self._receiver = comm, MPI.Status(), comm.Isend, receiver(comm)
        self._receive = self._receiver.Irecv
        # MPI guarantees only the range of the user's tags. Without larger tags a message carries no dtype.
        self._step = TAGS if (comm.Get_attr(MPI.TAG_UB) or 0) >= TAGS * (max(CODES.values()) + 1) else 0

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> MPI.Request:
        """Start to send ``[bytes, "B"]`` of the dtype with code `dtype`; return the request."""
        return self._send(buffer, dest, tag + dtype * self._step)

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> MPI.Request:
        """Start to receive ``[bytes, "B"]`` of the dtype with code `dtype`; return the request."""
        return self._receive(buffer, source, tag + dtype * self._step)

    def _match(self) -> None:
        """Let posted receives take their messages first: such messages are not for a probe."""
        if isinstance(self._receiver, MatchedReceives):
            self._receiver.match()

    def other(self, source: int, tag: int, dtype: int) -> Found | None:
        """Return the code of a message of another dtype ready to be received, and a function to receive it, or None."""
        self._match()
        for code in CODES.values() if dtype and self._step else ():
            if code != dtype and self._comm.Iprobe(source, tag + code * self._step, self._status):
                row = numpy.empty(self._status.count, numpy.uint8)
                return code, lambda: (self.Irecv([row, "B"], source, tag, code), row)  # noqa: B023
        return None

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a user's message ready to be received, or None; messages of a sender in sending order."""
        from mpi4py import MPI

        anybody, status = MPI.ANY_SOURCE if source is None else source, self._status
        self._match()
        if not self._comm.Iprobe(anybody, MPI.ANY_TAG, status):
            return None
        code, its_tag = divmod(status.tag, TAGS)
        if code != 1 and tag in (None, its_tag):
            return ProbeResult(status.source, its_tag, status.count)
        if tag is None:  # code 1: a message of gpucoll.distributed, soon taken by that package
            return None
        # The first message may not be the wanted one: probe the tag with each dtype, as MPI has no wildcard for that.
        tags = [tag + code * self._step for code in (0, *CODES.values())] if self._step and tag < TAGS else [tag]
        is_here = any(self._comm.Iprobe(anybody, one, status) for one in tags)
        return ProbeResult(status.source, tag, status.count) if is_here else None


class MpiLink(Transport):
    """The link of ranks that are processes joined by MPI; made of two duplicates of the given communicator."""

    has_collectives = shares_memory = True

    def __init__(self, mpi: Any, timeout: float, table: Table | None = None, *, is_rest: bool = False) -> None:
        if not hasattr(mpi, "Is_inter") or not mpi or mpi.Is_inter():
            raise ArgumentError(f"from_mpi: {mpi!r} is not an mpi4py intracommunicator")
        from mpi4py import MPI

        self._timeout = timeout
        bootstrap.check_process()
        # A failed rank may wait for others that have completed this link: all shrink what they have in common.
        self.base = mpi if is_rest else None
        self.mpi = self.wire = None
        try:
            bootstrap.meet(mpi, timeout, lambda: self._meet(mpi, table))
        except BaseException:
            for made in (mpi, self.mpi, self.wire) if is_rest else ():
                if made:
                    made.Revoke()  # a rank has died: wake the ranks that still meet
            raise
        self.base = self.base or self.mpi
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.has_ended = MPI.Is_finalized
        self.foreign = (MPI.Exception, OverflowError, WireError)
        self._farewells = {}

    def _meet(self, mpi: MPI.Intracomm, table: Table | None) -> None:
        # Two duplicates: messages of users and of executors must never match.
        self.mpi = _made(mpi.Dup)
        self.points = TypedMessages(self.mpi)
        self.wire = _made(mpi.Dup)
        self.place = _made(lambda: bootstrap.place(self.mpi))
        self.gpu_index = bootstrap.gpu_index(self.place)
        everyone = self.mpi.allgather((os.getpid(), process_namespace(), secrets.token_hex(16)))
        # Processes on other hosts, or in other containers, have no descriptors here: `Watch` sees their end.
        seen = visible((process, namespace) for process, namespace, _ in everyone)
        watch = None if len(seen) == mpi.size else Watch(self.mpi, self.place.nodes)
        self.processes = Processes(seen, watch)
        # Without MPI, ranks of several hosts meet where they have met for the watch, if all of them have.
        host = "" if max(self.place.nodes) == 0 else watch.host if watch is not None else None
        if host is not None:
            lineage = first_lineage(everyone[0][2])
            self.members = membership(mpi.rank, self.mpi.allgather(offer(lineage, host)), lineage, host)
        # All ranks must choose alike, also on unlike hosts: the table of rank 0 decides.
        self.table = table or by_first_rank(self.mpi, load)

    def split(self, color: int | None, key: int) -> MpiLink | None:
        from mpi4py import MPI

        part = _made(lambda: self.mpi.Split(MPI.UNDEFINED if color is None else color, key))
        if color is None:
            return None
        # `MpiLink` makes duplicates of its own: `part` itself is freed.
        link = MpiLink(part, self._timeout, self.table)
        link.gpu_index = self.gpu_index
        part.Free()
        return link

    def farewells(self) -> Mapping[int, Farewell]:
        self._farewells |= by_mpi(self.wire)
        return self._farewells

    def free(self) -> None:
        super().free()
        self.wire.Free()
        self.mpi.Free()


def _made(make: Callable[[], T]) -> T:
    """Return the result of `make`; raise BackendError, on every rank, if MPI has no room for a communicator."""
    from mpi4py import MPI

    try:
        return make()
    except MPI.Exception as error:
        raise BackendError(f"MPI cannot make another communicator: {error}; close() unused communicators, because MPI "
                           "keeps the resources of communicators dropped without close()") from error


class StoreLink(Transport):
    """The link of ranks that are processes joined by a key store; only its own keys begin with `name`.

    Between hosts UCX carries the messages, and with `by_ucx` also inside a host. If a rank has no UCX, the store
    carries them, or with `needs_ucx` every rank raises UsageError.
    """

    threads = asks_store = shares_memory = True

    def __init__(self, store: KeyStore, name: str, rank: int, size: int, timeout: float,
                 lineage: Lineage | None = None, *, numbers: Sequence[int] | None = None,
                 needs_ucx: bool = False, by_ucx: bool = False) -> None:
        self._store, self._name, self._timeout, self._needs_ucx, self._by_ucx = store, name, timeout, needs_ucx, by_ucx
        self.foreign = (*store.foreign, WireError)
        self.mpi = self._ranks = StoreRanks(store, f"{name}/ranks", rank, size, timeout, numbers)
        with contextlib.ExitStack() as undo:  # if a rank dies while the ranks meet
            self._meet(rank, lineage or first_lineage(), undo)
            undo.pop_all()

    def _meet(self, rank: int, lineage: Lineage, undo: contextlib.ExitStack) -> None:
        """Exchange what each rank needs to know of the others; `undo` gets what takes it back. A collective call."""
        store, size = self._store, self._ranks.size
        mine = offer(lineage, store.host)
        forget = undo.enter_context(contextlib.ExitStack())
        forget.callback(ports.port, store.host, -1)
        everyone = self.mpi.allgather((os.getpid(), process_namespace(), socket.gethostname(), mine))
        self.place = RankTopology.of(rank, [namespace or host for _, namespace, host, _ in everyone])
        self.members = membership(rank, [one[3] for one in everyone], lineage, store.host)
        seen = visible((process, namespace) for process, namespace, *_ in everyone)
        self.processes = Processes(seen)
        forget.pop_all()
        undo.callback(self.forget)
        self.gpu_index = bootstrap.gpu_index(self.place)
        # Processes on other hosts, or in other containers, have no descriptors here: `Watch` sees their end.
        if len(seen) < size:
            self.processes.watch = Watch(self.mpi, self.place.nodes, store, self._name)
        self.table = built_in()  # a machine's own is measured under its MPI
        self._farewells = {}
        self.wire, self.points = self._carriers()

    def _carriers(self) -> tuple[StoreMessages, StoreMessages] | tuple[UcxMessages, UcxMessages]:
        """Return what carries the library's and the users' messages. A collective call."""
        if max(self.place.nodes) > 0 or self._by_ucx:
            carriers = ucx.messages(self.mpi, self._name)
            if not isinstance(carriers, dict):
                # A part of the ranks uses the same carrier, also on one host.
                self.carrier, self._by_ucx = "ucx", True
                self.foreign = (*self.foreign, ucx.library()[0].UcxError)
                return carriers
            if self._needs_ucx:
                (rank, reason), *_ = carriers.items()
                raise UsageError(f"init: these ranks need UCX for their messages; ranks {listed([*carriers])} "
                                 f"have none, rank {rank} for example: {reason}", code="GC-UCX", ranks=tuple(carriers))
        wire, points = (StoreMessages(self._store, f"{self._name}/{what}", self.place.rank, self.place.size)
                        for what in ("wire", "points"))
        return wire, points

    @classmethod
    def world(cls, place: bootstrap.StorePlace, timeout: float, *, by_ucx: bool = False) -> StoreLink:
        """Return the link of all ranks with the same token. A collective call."""
        rank, size, token, address = place
        lineage = first_lineage(token, address)  # before the store is open: a newcomer may be waiting
        store = open_store(rank, size, token, timeout, address) if size > 1 else MemoryStore()
        if rank == 0 and size > 1 and address is not None:
            ports.holds(address, is_open=True)
        store.worlds += 1
        return cls(store, f"world {store.worlds}", rank, size, timeout, lineage, needs_ucx=True,
                   by_ucx=by_ucx)

    @classmethod
    def regrouped(cls, place: Place, timeout: float, *, by_ucx: bool = False) -> StoreLink:
        """Return the link of a new group of ranks. A collective call."""
        return cls(place.store, f"regrouped {place.lineage.key}", place.rank, place.size, timeout, place.lineage,
                   needs_ucx=True, by_ucx=by_ucx)

    def part(self, name: str, ranks: Sequence[int]) -> StoreLink:
        assert self.members is not None
        return StoreLink(self._store, f"{self._name}/{name}", ranks.index(self.rank), len(ranks), self._timeout,
                         first_lineage(self.members.lineage.token), numbers=[self._ranks.numbers[one] for one in ranks],
                         needs_ucx=self._needs_ucx, by_ucx=self._by_ucx)

    def farewells(self) -> Mapping[int, Farewell]:
        # A rank that closes may fail afterwards, and says so.
        last = {rank for rank, one in self._farewells.items() if one.why > Why.CLOSES}
        heard = self.wire.farewells({*range(self.place.size)} - last - {self.place.rank})
        self._farewells |= {rank: Farewell.decode(row) for rank, row in heard.items()}
        return self._farewells


class LocalLink(Transport):
    """The link of ranks that are threads of one process; a message is copied once, from array to array."""

    threads = shares_memory = True
    meets_to_close = False

    def __init__(self, rank: int, hub: ThreadHub, timeout: float) -> None:
        ranks = StoreRanks(hub.store, "splits", rank, hub.size, timeout)
        super().__init__(rank, ["here"] * hub.size, ranks, *(ThreadMessages(rank, mail) for mail in hub.mail))
        self.mpi, self.processes = None, hub.processes
        self._hub, self._timeout = hub, timeout

    @classmethod
    def all(cls, size: int, timeout: float) -> list[LocalLink]:
        hub = ThreadHub(size)
        return [cls(rank, hub, timeout) for rank in range(size)]

    def farewells(self) -> Mapping[int, Farewell]:
        return self._hub.farewells

    def part(self, name: str, ranks: Sequence[int]) -> LocalLink:
        return self._in_part(name, ranks.index(self.rank), len(ranks))

    def _in_part(self, name: str, rank: int, size: int) -> LocalLink:
        return LocalLink(rank, self._hub.part(name, rank, size), self._timeout)

    def stay(self) -> None:
        """Announce `survivors`, before this rank closes the communicator."""
        self._hub.stay(self.place.rank)

    def go(self) -> None:
        """Take `stay` back: this rank is interrupted. Ranks that go on with it already learn of a failure."""
        if self._hub.stay(self.place.rank, stays=False):
            part = self.survivors(0.0)
            interrupted = Farewell(Why.FAILED, (part.place.rank,), words="was interrupted in shrink")
            part.close(lambda failed: None, interrupted, failed=True)

    def survivors(self, timeout: float) -> LocalLink:
        """Return the link of the ranks left, once each other rank has closed or has come here; a collective call."""
        return self._in_part(*self._hub.survivors(self.place.rank, timeout, self.processes.ended))

    def used_by(self, threads: Callable[[], set[int]]) -> None:
        """Set the function returning the system's numbers of the threads of this rank's last calls."""
        self._hub.used[self.place.rank] = threads

    def tell(self, others: Collection[int], farewell: Farewell) -> None:
        self._hub.tell(self.place.rank, farewell)

    def close(self, release: Callable[[bool], None], farewell: Farewell, *, failed: bool) -> None:
        self._hub.used.pop(self.place.rank, None)
        self._hub.close(self.place.rank, release, farewell, failed)
