"""What joins the ranks of a communicator: MPI between processes, memory between threads."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy

from gpucoll import bootstrap
from gpucoll.bootstrap import RankTopology
from gpucoll.errors import ArgumentError, BackendError
from gpucoll.executors import ABORTED, TAGS
from gpucoll.executors.mpi import came
from gpucoll.guard.network import Watch
from gpucoll.guard.processes import Processes, process_namespace, visible
from gpucoll.rendezvous import by_first_rank
from gpucoll.tuner import Table, built_in
from gpucoll.tuner.table import load
from gpucoll.work import Seen

if TYPE_CHECKING:
    from mpi4py import MPI


T = TypeVar("T")


class Link(Protocol):
    """What a communicator needs of the world below it.

    `wire` and `points` send and receive as mpi4py's communicators do: `wire` is the executors', so that no message of
    a user's can meet one of ours; `points` carries the user's. `mpi` is the mpi4py communicator, if it is one.
    """

    place: RankTopology
    mpi: Any
    wire: Any
    points: Any
    threads: bool  # whether several threads may call it
    has_collectives: bool  # whether `wire` does MPI's own collectives
    foreign: tuple[type[Exception], ...]  # what it raises
    processes: Processes  # of the ranks of this host, this one's included
    table: Table  # what "auto" chooses by, the same on every rank

    def seen(self, source: int | None, tag: int | None) -> Seen | None:
        """Return a message of `points` that could be received now, from anybody and with any tag where they are None.

        None where there is none. Of one sender's it is the first that was sent.
        """

    def split(self, color: int | None, key: int) -> Link | None:
        """Return the link of the ranks of `color`, ordered by `key`; None where it is None. A collective call."""

    def aborted(self) -> Mapping[int, int]:
        """Return the ranks that have told that they go no further, and why (see `executors.mpi.abort`)."""

    def has_ended(self) -> bool:
        """Return whether nothing can be sent any more."""

    def free(self) -> None:
        """Give back what it holds. A collective call."""


class MpiLink:
    """Ranks are processes, joined by MPI; two duplicates of the communicator that it is made of."""

    has_collectives = True

    def __init__(self, mpi: MPI.Intracomm, timeout: float, table: Table | None = None) -> None:
        from mpi4py import MPI

        self._timeout = timeout
        bootstrap.check_process()
        bootstrap.gather_ranks(mpi, timeout)
        bootstrap.by_deadline(mpi, timeout, lambda: self._meet(mpi, table))
        self.threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self.has_ended = MPI.Is_finalized
        self.foreign: tuple[type[Exception], ...] = (MPI.Exception, OverflowError)
        self._aborted: dict[int, int] = {}

    def _meet(self, mpi: MPI.Intracomm, table: Table | None) -> None:
        self.mpi = self.points = _made(mpi.Dup)
        self.wire = _made(mpi.Dup)
        self.place = _made(lambda: bootstrap.place(self.mpi))
        everyone = self.mpi.allgather((os.getpid(), process_namespace()))
        seen = visible(everyone)
        self.processes = Processes(seen, None if len(seen) == mpi.size else Watch(self.mpi, self.place.nodes))
        self.table = table or by_first_rank(self.mpi, load)

    @classmethod
    def of(cls, mpi: Any, timeout: float, table: Table | None = None) -> MpiLink:
        """Return the link of an mpi4py intracommunicator; ArgumentError for anything else."""
        if not hasattr(mpi, "Is_inter") or not mpi or mpi.Is_inter():
            raise ArgumentError(f"from_mpi: {mpi!r} is no mpi4py intracommunicator", code="GC-COMM")
        return cls(mpi, timeout, table)

    def split(self, color: int | None, key: int) -> MpiLink | None:
        from mpi4py import MPI

        part = _made(lambda: self.mpi.Split(MPI.UNDEFINED if color is None else color, key))
        if color is None:
            return None
        link = MpiLink.of(part, self._timeout, self.table)
        part.Free()
        return link

    def aborted(self) -> Mapping[int, int]:
        self._aborted.update(came(self.wire, ABORTED))
        return self._aborted

    def seen(self, source: int | None, tag: int | None) -> Seen | None:
        from mpi4py import MPI

        status, anybody, anything = MPI.Status(), MPI.ANY_SOURCE, MPI.ANY_TAG
        here = self.points.Iprobe(anybody if source is None else source, anything if tag is None else tag, status)
        # A tag beyond those of users' is gpucoll.distributed's own, which takes it soon
        is_ours = here and (tag is not None or status.tag < TAGS)
        return Seen(status.source, status.tag, status.count) if is_ours else None

    def free(self) -> None:
        if self.processes.watch is not None:
            self.processes.watch.close()
        self.wire.Free()
        self.mpi.Free()


def _made(make: Callable[[], T]) -> T:
    """Return what MPI makes; BackendError, on every rank, where it has no room for another communicator."""
    from mpi4py import MPI

    try:
        return make()
    except MPI.Exception as error:
        raise BackendError(f"MPI makes no further communicator: {error}; close() those that are no longer used, to "
                           "drop them frees nothing", code="GC-COMM") from error


class LocalLink:
    """Ranks are threads of one process; a message is copied once, from the sender's array into the receiver's."""

    has_collectives = False

    def __init__(self, rank: int, hub: _Hub) -> None:
        self.place = RankTopology(rank, hub.size, rank, hub.size, (0,) * hub.size)
        self.mpi = None
        self.wire, self.points = (_Endpoint(rank, mail) for mail in hub.mail)
        self.threads = True
        self.foreign: tuple[type[Exception], ...] = ()
        self.processes = Processes({})
        self.table = built_in()  # a machine's own is measured between processes
        self._hub = hub
        self._splits = 0

    @classmethod
    def all(cls, size: int) -> list[LocalLink]:
        """Return the links of `size` ranks."""
        hub = _Hub(size)
        return [cls(rank, hub) for rank in range(size)]

    def seen(self, source: int | None, tag: int | None) -> Seen | None:
        return self.points.seen(source, tag)

    def split(self, color: int | None, key: int) -> LocalLink | None:
        self._splits += 1
        everyone, hubs = self._hub.gather(self._splits, self.place.rank, (color, key))
        if color is None:
            return None
        ranks = [rank for _, rank in sorted((other, rank) for rank, (shade, other) in everyone.items()
                                            if shade == color)]
        return LocalLink(ranks.index(self.place.rank), hubs.setdefault(color, _Hub(len(ranks))))

    def aborted(self) -> Mapping[int, int]:
        return {}

    def has_ended(self) -> bool:
        return False

    def free(self) -> None:
        """Nothing to give back."""

    def close(self, release: Callable[[bool], None], *, failed: bool) -> None:
        """Leave without waiting; who leaves last calls every rank's `release` with whether any of them has failed."""
        self._hub.close(release, failed)


class _Hub:
    """What the threads of one `init_local` share: mail, what they pass each other in a split, and who has left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail = (_Mail(), _Mail())
        self._changed = threading.Condition()
        self._splits_open: dict[int, tuple[dict[int, Any], dict[int, _Hub]]] = {}  # by number of a split under way
        self._releases: list[Callable[[bool], None]] = []  # of those who have left
        self._has_failed = False

    def close(self, release: Callable[[bool], None], failed: bool) -> None:
        """See `LocalLink.close`."""
        with self._changed:
            self._releases.append(release)
            self._has_failed |= failed
            if len(self._releases) < self.size:
                return
        while self._releases:
            self._releases.pop(0)(self._has_failed)

    def gather(self, number: int, rank: int, value: Any, timeout: float = 300.0) -> \
            tuple[Mapping[int, Any], dict[int, _Hub]]:
        """Return the values of all ranks for the `number`-th split, and the hubs by color that they make."""
        with self._changed:
            values, hubs = self._splits_open.setdefault(number, ({}, {}))
            values[rank] = value
            if len(values) == self.size:
                del self._splits_open[number]  # all of them hold it
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(values) == self.size, timeout):
                raise BackendError(f"split: only ranks {sorted(values)} of {self.size} came within {timeout:g} s")
            return values, hubs


class _Message:
    """One end of a message that waits for the other; also the request that its owner tests."""

    def __init__(self, row: numpy.ndarray[Any, Any]) -> None:
        self.row = row
        self.number = 0  # counted from the first that had to wait
        self.length: int | None = None  # of what came, once it has

    def Test(self, status: Any = None) -> bool:
        """Return whether the message has been copied; as mpi4py's requests do."""
        return self.length is not None

    def Cancel(self) -> None:
        """Let go of the memory: what comes later goes nowhere."""
        self.row = self.row[:0].copy()


class _Mail:
    """The messages under way between the threads: the k-th send from a to b with a tag meets the k-th receive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._posted = 0
        self._waiting: dict[Any, collections.deque[_Message]] = {}

    def post(self, mine: _Message, key: tuple[int, int, int], *, sends: bool) -> _Message:
        """Return `mine`: copied if the other end waits already, as much as both have room for; else it waits."""
        with self._lock:
            others = self._waiting.get((key, not sends))
            if others is None:
                self._posted += 1
                mine.number = self._posted
                self._waiting.setdefault((key, sends), collections.deque()).append(mine)
                return mine
            other = others.popleft()
            if not others:
                del self._waiting[key, not sends]
        sent, received = (mine, other) if sends else (other, mine)
        count = min(len(sent.row), len(received.row))
        numpy.copyto(received.row[:count], sent.row[:count])
        received.length = sent.length = len(sent.row)  # which tells each whether that was all
        return mine

    def seen(self, source: int | None, target: int, tag: int | None) -> Seen | None:
        """Return the first message to `target` that waits, from anybody and with any tag where they are None."""
        with self._lock:
            found = [(messages[0].number, key, len(messages[0].row))
                     for (key, sends), messages in self._waiting.items() if sends and key[1] == target
                     and source in (None, key[0]) and tag in (None, key[2])]
        if not found:
            return None
        _, (sender, _, its_tag), nbytes = min(found)
        return Seen(sender, its_tag, nbytes)


class _Endpoint:
    """One rank's side of the mail, with the two calls of mpi4py's communicators that executors use."""

    def __init__(self, rank: int, mail: _Mail) -> None:
        self._rank, self._mail = rank, mail

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0) -> _Message:
        """Begin to send ``[bytes, "B"]`` to rank `dest`."""
        return self._mail.post(_Message(buffer[0]), (self._rank, dest, tag), sends=True)

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0) -> _Message:
        """Begin to receive from rank `source` into ``[bytes, "B"]``."""
        return self._mail.post(_Message(buffer[0]), (source, self._rank, tag), sends=False)

    def seen(self, source: int | None, tag: int | None) -> Seen | None:
        """Return a message that could be received now; see `Link.seen`."""
        return self._mail.seen(source, self._rank, tag)
