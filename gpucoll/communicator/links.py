"""Links between the ranks of a communicator: MPI or a key store between processes, memory between threads."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpucoll.communicator.transports import Transport
from gpucoll.errors import ArgumentError, BackendError, CollectiveTimeout, UsageError, listed
from gpucoll.executors.messages import TypedMessages
from gpucoll.health.farewell import Farewell, Why, by_mpi
from gpucoll.health.processes import Processes, RankThreads, process_namespace, visible
from gpucoll.health.remote import Watch
from gpucoll.launch import bootstrap
from gpucoll.launch.bootstrap import RankTopology
from gpucoll.launch.regroup import Lineage, Place, first_lineage, membership, offer
from gpucoll.transport import ports, ucx
from gpucoll.transport.control import WireError
from gpucoll.transport.kvstore import KeyStore, MemoryStore, open_store
from gpucoll.transport.mailbox import Mailbox, StoreMessages, StoreRanks, ThreadMessages
from gpucoll.transport.rendezvous import by_first_rank
from gpucoll.transport.ucx import UcxMessages
from gpucoll.tuner import Table, built_in
from gpucoll.tuner.table import as_json, load, parse

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
THREAD_INTERVAL = 0.05  # seconds between two looks for ranks without a thread


class MpiLink(Transport):
    """The link of ranks that are processes joined by MPI; made of two duplicates of the given communicator."""

    has_collectives = shares_memory = True

    def __init__(self, mpi: Any, timeout: float, table: Table | None = None, *, is_rest: bool = False) -> None:
        if not hasattr(mpi, "Is_inter") or not mpi or mpi.Is_inter():
            raise ArgumentError(f"from_mpi: {mpi!r} is not an mpi4py intracommunicator")
        from mpi4py import MPI

        if isinstance(mpi, MPI.Intracomm):
            mpi = MPI.Intracomm(mpi)  # without the methods of a subclass, such as `gpucoll.mpi.Comm`
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
        self.threads: bool = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.has_ended: Callable[[], bool] = MPI.Is_finalized
        self.foreign: tuple[type[Exception], ...] = (MPI.Exception, OverflowError, WireError)
        self._farewells = {}

    def _meet(self, mpi: MPI.Intracomm, table: Table | None) -> None:
        # Two duplicates: messages of users and of executors must never match.
        self.mpi: Any = _by_mpi(mpi.Dup)
        self.points: TypedMessages = TypedMessages(self.mpi)
        self.wire = _by_mpi(mpi.Dup)
        self.place: RankTopology = _by_mpi(lambda: bootstrap.place(self.mpi))
        self.gpu_index: int = bootstrap.gpu_index(self.place)
        everyone = self.mpi.allgather((os.getpid(), process_namespace(), secrets.token_hex(16)))
        # Processes on other hosts, or in other containers, have no descriptors here: `Watch` sees their end.
        seen = visible((process, namespace) for process, namespace, _ in everyone)
        watch = None if len(seen) == mpi.size else Watch(self.mpi, self.place.nodes)
        self.processes: Processes = Processes(seen, watch)
        # Without MPI, ranks of several hosts meet where they have met for the watch, if all of them have.
        host = "" if max(self.place.nodes) == 0 else watch.host if watch is not None else None
        if host is not None:
            lineage = first_lineage(everyone[0][2])
            self.members = membership(mpi.rank, self.mpi.allgather(offer(lineage, host)), lineage, host)
        # All ranks must choose alike, also on unlike hosts: the table of rank 0 decides.
        self.table: Table = table or by_first_rank(self.mpi, load)

    def split(self, color: int | None, key: int) -> MpiLink | None:
        from mpi4py import MPI

        part = _by_mpi(lambda: self.mpi.Split(MPI.UNDEFINED if color is None else color, key))
        return None if color is None else self._of(part)

    def part(self, name: str, ranks: Sequence[int]) -> MpiLink:
        group = self.mpi.group.Incl(ranks)
        # The tag separates parts being made at the same time.
        made = _by_mpi(lambda: self.mpi.Create_group(group, zlib.crc32(name.encode()) % (1 << 15)))
        group.Free()
        return self._of(made)

    def _of(self, part: MPI.Intracomm) -> MpiLink:
        """Return the link of some of the ranks, with duplicates of its own: `part` itself is freed."""
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


def _by_mpi(make: Callable[[], T]) -> T:
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
        self.mpi: Any = StoreRanks(store, f"{name}/ranks", rank, size, timeout, numbers)
        self._ranks = self.mpi
        with contextlib.ExitStack() as undo:  # if a rank dies while the ranks meet
            self._meet(rank, lineage or first_lineage(), undo)
            undo.pop_all()

    def _meet(self, rank: int, lineage: Lineage, undo: contextlib.ExitStack) -> None:
        """Exchange what each rank needs to know of the others; `undo` gets what takes it back. A collective call."""
        store, size = self._store, self._ranks.size
        mine = offer(lineage, store.host)
        forget = undo.enter_context(contextlib.ExitStack())
        forget.callback(ports.port, store.host, -1)
        table = load(by_mpi=False) if rank == 0 else built_in()
        told = None if table is built_in() else (table.source, as_json(table).decode())
        everyone = self.mpi.allgather((os.getpid(), process_namespace(), socket.gethostname(), mine, told))
        self.place: RankTopology = RankTopology.of(rank, [namespace or host for _, namespace, host, *_ in everyone])
        self.members = membership(rank, [one[3] for one in everyone], lineage, store.host)
        seen = visible((process, namespace) for process, namespace, *_ in everyone)
        self.processes: Processes = Processes(seen)
        forget.pop_all()
        undo.callback(self.forget)
        self.gpu_index: int = bootstrap.gpu_index(self.place)
        # Processes on other hosts, or in other containers, have no descriptors here: `Watch` sees their end.
        if len(seen) < size:
            self.processes.watch = Watch(self.mpi, self.place.nodes, store, self._name)
        # All ranks must choose alike, also on unlike hosts: the table of rank 0 decides.
        source, text = everyone[0][4] or ("", "")
        self.table: Table = parse(source, text.encode()) if text else built_in()
        self._farewells = {}
        self.wire, self.points = self._carriers()

    def _carriers(self) -> tuple[StoreMessages, StoreMessages] | tuple[UcxMessages, UcxMessages]:
        """Return what carries the library's and the users' messages. A collective call."""
        if max(self.place.nodes) > 0 or self._by_ucx:
            carriers = ucx.messages(self.mpi, self._name)
            if not isinstance(carriers, dict):
                # A part of the ranks uses the same carrier, also on one host.
                self.carrier: str = "ucx"
                self._by_ucx = True
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
        return cls(store, f"world {store.worlds}", rank, size, timeout, lineage, needs_ucx=True, by_ucx=by_ucx)

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


class ThreadHub:
    """State shared by the threads of one `init_local`: mail, a store, parts, and the ranks that have left."""

    def __init__(self, size: int) -> None:
        self.size: int = size
        self.mail: tuple[Mailbox, Mailbox] = (Mailbox(), Mailbox())
        self.offers: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}  # see `Transport`
        self.store: MemoryStore = MemoryStore()
        self.used: dict[int, Callable[[], set[int]]] = {}  # by rank, see `LocalLink.used_by`
        self.processes: RankThreads = RankThreads(self.used)
        # Guards the fields below; notified when a rank leaves or survives.
        self.changed: threading.Condition = threading.Condition()
        self.parts: dict[str, tuple[ThreadHub, set[int]]] = {}  # by name, with the ranks still to come
        # The parts to which all ranks have come.
        self.complete: weakref.WeakValueDictionary[str, ThreadHub] = weakref.WeakValueDictionary()
        self.releases: list[Callable[[bool], None]] = []  # of the ranks that have left
        self.has_failed = False
        self.left: set[int] = set()
        self.farewells: dict[int, Farewell] = {}  # of the ranks that have left; replaced whole
        self.survivors: set[int] = set()
        self.rest: list[int] | None = None  # the survivors, once all have come


class LocalLink(Transport):
    """The link of ranks that are threads of one process; a message is copied once, from array to array."""

    threads = shares_memory = True
    meets_to_close = False

    def __init__(self, rank: int, hub: ThreadHub, timeout: float) -> None:
        ranks = StoreRanks(hub.store, "splits", rank, hub.size, timeout)
        super().__init__(rank, ["here"] * hub.size, ranks, *(ThreadMessages(rank, mail) for mail in hub.mail))
        self.mpi: Any = None
        self.processes: RankThreads = hub.processes
        self._hub, self._timeout, self.offers = hub, timeout, hub.offers

    @classmethod
    def all(cls, size: int, timeout: float) -> list[LocalLink]:
        hub = ThreadHub(size)
        return [cls(rank, hub, timeout) for rank in range(size)]

    def farewells(self) -> Mapping[int, Farewell]:
        return self._hub.farewells

    def part(self, name: str, ranks: Sequence[int]) -> LocalLink:
        hub, rank, size = self._hub, ranks.index(self.rank), len(ranks)
        with hub.changed:
            known = hub.complete.get(name)
            if known is None:
                # The first rank makes the hub. Once the last one has come, the hub lives as long as its links.
                known, left = hub.parts.setdefault(name, (ThreadHub(size), {*range(size)}))
                left.discard(rank)
                if not left:
                    del hub.parts[name]
                    hub.complete[name] = known
        return LocalLink(rank, known, self._timeout)

    def stay(self, *, stays: bool = True) -> None:
        """Announce `survivors`, before this rank closes the communicator.

        Without `stays` take this back: this rank is interrupted. Ranks that go on with it already learn of a failure.
        """
        hub, rank = self._hub, self.rank
        with hub.changed:
            if stays:
                hub.survivors.add(rank)
            elif hub.rest is None:
                hub.survivors.discard(rank)
                hub.left.add(rank)
            hub.changed.notify_all()
        if not stays and hub.rest is not None and rank in hub.rest:
            part = self.survivors(0.0)
            interrupted = Farewell(Why.FAILED, (part.place.rank,), words="was interrupted in shrink")
            part.close(lambda failed: None, interrupted, failed=True)

    def survivors(self, timeout: float) -> LocalLink:
        """Return the link of the ranks left, once each other rank has closed or has come here; a collective call."""
        hub, rank, deadline = self._hub, self.rank, time.monotonic() + timeout
        with hub.changed:
            while hub.rest is None:
                late = {*range(hub.size)} - hub.survivors - hub.left - {*self.processes.ended()}
                if not late:
                    hub.rest = sorted(hub.survivors)
                elif time.monotonic() > deadline:
                    hub.survivors.discard(rank)
                    raise CollectiveTimeout(f"shrink: waited {timeout:g} s for ranks {listed(sorted(late))}, which "
                                            "are alive but do not join", ranks=tuple(sorted(late)))
                else:
                    hub.changed.wait(THREAD_INTERVAL)
            hub.changed.notify_all()
            if rank not in hub.rest:
                raise CollectiveTimeout("shrink: the other ranks went on without this late rank", ranks=(rank,))
        return self.part(f"survivors {hub.rest}", hub.rest)

    def used_by(self, threads: Callable[[], set[int]]) -> None:
        """Set the function returning the system's numbers of the threads of this rank's last calls."""
        self._hub.used[self.rank] = threads

    def tell(self, others: Collection[int], farewell: Farewell) -> None:
        with self._hub.changed:
            known = self._hub.farewells.get(self.rank)
            if known is None or known.why < Why.FAILED:  # a failure told before stays
                self._hub.farewells = {**self._hub.farewells, self.rank: farewell}

    def close(self, release: Callable[[bool], None], farewell: Farewell, *, failed: bool) -> None:
        hub = self._hub
        hub.used.pop(self.rank, None)
        self.tell((), farewell)
        # Threads may close at the same time: exactly one must see that all ranks have left.
        with hub.changed:
            hub.left.add(self.rank)
            hub.changed.notify_all()
            hub.releases.append(release)
            hub.has_failed |= failed
            if len(hub.releases) < hub.size:
                return
        # Only the last rank comes here, so no lock: a release may take long.
        while hub.releases:
            hub.releases.pop(0)(hub.has_failed)
