"""The `shared` executor: the ranks of one node read, and reduce, each other's memory in place.

It runs every schedule: a receive reads the sender's part where it is, once that rank shows that it has come so far;
no rank waits for others than those that it reads from, or that read from it. Inside a node nothing is sent. Across
nodes the same executor, then named `hybrid`, sends messages. Under the name `mpi` each rank is a node of its own.

    plans         the plans of the engine, by call
    instructions  a plan in bytes of the ranks' buffers: what waits for what, by their marks
    engine        C++ that carries it out, and digest, of the files that it is built from
    neighbours    the ranks of the node, and ways into their memory

Symmetric memory is mapped by all ranks. Small arrays are copied to memory that is mapped, and so is scratch; other
arrays are copied, block by block, by the system (process_vm_readv), or where it forbids that, or several ranks read
the same block, to mapped memory as a whole.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gpucoll.arrays import address
from gpucoll.arrays.segments import Heap, Slab, at
from gpucoll.core.signature import is_refusal
from gpucoll.device.messages import receiver
from gpucoll.errors import (
    BackendError,
    CollectiveTimeout,
    GpucollError,
    MismatchError,
    PeerError,
    RankFailedError,
    is_settled,
)
from gpucoll.executors import Called, Task, call_site, disagreement, shortened
from gpucoll.executors.shared.engine import library
from gpucoll.executors.shared.instructions import Messages
from gpucoll.executors.shared.neighbours import SMALL, Neighbours
from gpucoll.executors.shared.plans import Plans
from gpucoll.executors.shared.tables import ALL, FAILURE, MARK, OFF, PEERS, ROUNDS, TEXT
from gpucoll.progress.operations import Operation, Pending, Seen, keep_for_ever
from gpucoll.progress.waits import Waits
from gpucoll.transport.control import cancel
from gpucoll.transport.tags import BYTES, PIECE, tag_of_call

# Why a rank goes no further: its call has ended by its deadline, or as others are in another one, or, FAILED less a
# rank, by that one's error, or LATE_FOR less a rank, in vain for that one. What it had shown before stays.
LATE, ASTRAY, FAILED, LATE_FOR = -1, -2, -3, -1 << 32
# Seconds that ranks which differ wait for the others to tell what they call; the same where not all of them come to it
PATIENCE, SHORT, NAP = 5.0, 0.25, 1e-4
TOLD = (1 << ROUNDS) - 2  # the mark of one that has
MESSAGES = "mpi"  # the name of the executor that sends messages to all ranks
LEVELS = {"off": OFF, "deferred": PEERS, "full": ALL, None: ALL}


class _Message(NamedTuple):
    """A message to or from another node: the other rank, and the requests of its pieces."""

    peer: int
    sends: bool
    requests: list[Any]

    def has_ended(self) -> bool:
        return all([request.Test() for request in self.requests])


class _Comparing:
    """The comparison of one kind of call by messages, as an instruction of its plan."""

    def __init__(self, executor: SharedExecutor, words: str) -> None:
        self._executor, self._words = executor, words
        self._operation: Operation | None = None  # of the call under way
        self._pending: Pending | None = None

    def go_on(self) -> bool:
        """Return whether all ranks are known to make this call.

        Raises MismatchError or PeerError where they do not. The engine leaves the call then: nothing has been moved.
        """
        if self._operation is None:
            self._operation = self._executor.comparison.compare(self._words)
        try:
            while self._pending is None or self._pending():
                self._pending = next(self._operation, None)
                if self._pending is None:
                    self._operation = None
                    return True
        except BaseException as error:
            self._operation = self._pending = None
            if is_settled(error):
                self._executor.engine.settle()
            raise
        return False


class SharedExecutor:
    """Runs schedules by way of the node's shared memory; `heap` is the ranks' symmetric memory.

    The ranks `meet` before their first call, or in it, all of them in the same one, for at most `timeout` seconds.
    `check` says with whom they compare each call: "full" with all of the node before data move, "deferred" with those
    that they read from, "off" with nobody. Under the name "hybrid" it serves several nodes, and under the name "mpi"
    any: messages go between them, by which calls are compared, too. `on_engine` says whether its engine is the
    communicator's, which records the calls and has the table of those that come again.
    """

    def __init__(self, link: Any, heap: Heap, timeout: float, check: str | None, name: str = "shared", *,
                 on_engine: bool = True) -> None:
        self.name, self.on_engine = name, on_engine
        self._check = LEVELS[check] if name == "shared" else OFF
        self._link, self._heap, self._timeout = link, heap, timeout
        self._size, self._wire = link.place.size, link.wire
        self._receive = (link.wire if check in (None, "full") else receiver(link.wire)).Irecv
        found, place = library(), link.place
        if name == MESSAGES:
            place = place._replace(nodes=tuple(range(self._size)))
        self._near = Neighbours(place, found is not None, 0 if found is None else found.BOX)
        self._has_met = False
        self.engine: Any = None
        self._plans: Any = None
        self._flight: Any = None
        self.cause: Callable[[], GpucollError | None] = lambda: None  # of memory that is out of reach
        self.comparison: Any = None  # what compares calls by messages, where the engine does not
        self._asked: int | None = None  # the rank whose next call this one waits for
        self._under_way: dict[int, _Message] = {}  # by its number in the plan
        self._testing = threading.Lock()  # MPI forbids that two threads test one request
        self._awaited = set[int]()

    def serves(self, task: Task) -> str | None:
        """Every schedule on host arrays, where the ranks of a node can map each other's memory."""
        if self.name == "shared" and len(self._near.all) < self._size:
            return "the ranks are on several nodes"
        self.meet()
        if not self._near.maps:
            return "the system does not let these ranks map each other's memory"
        if self.engine is None:
            return "not every rank's gpucoll was installed with the engine"
        return None if task.plan is None or task.plan.schedules is not None else f"{task.algorithm} has no schedule"

    def finishes(self, task: Task) -> bool:
        """Return whether nothing is left to be done of a call: the engine divides sums, and fills what gets nothing."""
        return True

    def meet(self, *hooks: Callable[[], None]) -> None:
        """Find ways into each other's memory. A collective call; raises CollectiveTimeout, and what `hooks` raise."""
        if not self._has_met:
            waits = Waits(self._timeout, foreign=self._link.foreign)
            waits.hooks.extend(hooks)
            waits.run(self.meeting(), "the first call over shared memory")

    def meeting(self) -> Operation:
        """Do the same as an operation."""
        near = self._near
        yield from near.meet(self._wire)
        self._has_met = True
        if near.maps and near.all_able:
            has_core = self._link.place.local_size <= len(os.sched_getaffinity(0))
            heads, keys, processes = (
                tuple(of(rank) if rank in near.all else 0 for rank in range(self._size))
                for of in (lambda rank: address(near.controls[rank]), near.keys.get, near.processes.get))
            self.engine = library().Engine(self, GpucollError, near.rank, self._check, os.getpid(),
                                           has_core, near.copies, near.first,
                                           SMALL, near.boxes, heads, keys, processes)
            self._record()
            self._plans = Plans(near, self._heap, self.engine, Messages(self._begin, self._has_come, self._go_on),
                                self._comparing)

    def record(self, memory: Any, last: int, records: int, capacity: int) -> None:
        """Note every call in the flight recorder's memory: the last number and the records are at these places."""
        self._flight = memory, last, records, capacity
        self._record()

    def _record(self) -> None:
        if self.engine is not None and self._flight is not None:
            memory, *places = self._flight
            self.engine.record(address(memory), *places)

    def watch(self, error: BaseException | None = None, awaited: int | None = None) -> None:
        """Raise if another rank has failed in a call, or the awaited one; tell the others of an error of this rank's.
        """
        words = self._near.words
        if error is not None and not is_settled(error):
            named = error.ranks[:1] if isinstance(error, RankFailedError | CollectiveTimeout) else ()
            words[self._near.rank][FAILURE] = (
                ASTRAY if isinstance(error, MismatchError | PeerError) else
                FAILED - (*named, self._near.rank)[0] if not isinstance(error, CollectiveTimeout) else
                LATE_FOR - named[0] if named else LATE)
        looked_at = () if error is not None else self._near.all if awaited is None else (awaited,)
        for rank in looked_at:
            failure = words[rank][FAILURE]
            if failure == LATE or failure <= LATE_FOR:
                behind = (LATE_FOR - failure,) if failure <= LATE_FOR else tuple(
                    rank for rank, (number, _) in self.progress().items() if number < self.engine.walks)
                raise CollectiveTimeout("another rank of this node has waited until its deadline in this call; is "
                                        "every rank in the same call, with the same shape, dtype and algorithm?",
                                        ranks=behind)
            if failure == ASTRAY:
                self.differ(meet=False)
            if failure <= FAILED:
                raise RankFailedError(f"rank {FAILED - failure} has failed, or has left the communicator",
                                      ranks=(FAILED - failure,))

    def differ(self, meet: bool = True) -> None:
        """Raise MismatchError, or PeerError, which says what each rank of this node has called, and where.

        Where all compare before data move, all come here: once each has told where it is, and read where the others
        are, the call is as if it had not been. Ranks have failed where they compare only with the ranks that they read
        from, where one is ahead in eager calls, or where they do not `meet`. The error names no rank where all that is
        shown is alike: ranks have compared by messages, which explain it.
        """
        number, near, words = self.engine.walks, sorted(self._near.all), self._near.words
        settles = meet and self._check == ALL and not any(self.engine.is_eager(rank, number) for rank in near)
        if settles:
            self.engine.tell(call_site())
        else:
            words[self._near.rank][FAILURE] = ASTRAY
        mark = number << ROUNDS | (TOLD if settles else 0)
        deadline = time.monotonic() + min(self._timeout, PATIENCE if settles else SHORT)
        while any(words[rank][MARK] < mark for rank in near) and time.monotonic() < deadline:
            time.sleep(NAP)
        if settles and all(words[rank][MARK] >= mark for rank in near):
            calls = [self.engine.words(rank, number) for rank in near]
            self.engine.settle()
            raise disagreement(near, calls)
        for earlier in range(3):  # ranks that did not meet in a call find out in a later one
            shown = {rank: self.engine.words(rank, number - earlier) for rank in near
                     if self.engine.is_eager(rank, number - earlier)
                     or number - earlier <= words[rank][MARK] >> ROUNDS <= number - earlier + 1}
            if len(set(shown.values())) > 1:
                break
        if len(set(shown.values())) < 2 and self._check != OFF:  # ranks are calls apart, as where a root was ahead
            shown = {rank: last for rank, (_, last) in self.progress().items()}
        if len(set(shown.values())) < 2:
            raise MismatchError("another rank of this node has found out that ranks make different calls")
        raise disagreement([*shown], [*shown.values()], moved=True)

    def compare(self, words: str) -> Operation:
        """Meet the others in a call of which nothing else is done here; where it is refused, wait for nobody."""
        if self._check == OFF and self.comparison is None and not is_refusal(words):
            return iter(())
        if is_refusal(words) and self.comparison is None:
            words = shortened(f"{words}\n{call_site()}", TEXT - 1)
        return self.walk(lambda: self._plans.without_data(words), None, None)

    def _comparing(self, words: str) -> Callable[[], bool] | None:
        """Return an instruction of a plan that compares such calls by messages; None where the engine does so."""
        return None if self.comparison is None else _Comparing(self, words).go_on

    def awaited(self) -> set[int] | None:
        """Return the ranks that the call under way waits for, None where there is none."""
        is_walking = self.engine is not None and self.engine.is_walking()
        rank = self.engine.awaited() if is_walking else self._asked
        if rank not in (None, self._near.rank):
            return {rank}
        return self._peers_of_messages() or None if is_walking else None

    def _peers_of_messages(self) -> set[int]:
        """Return the ranks to or from which messages have not ended, as far as another thread looks."""
        if self._testing.acquire(blocking=False):
            try:
                self._awaited = {one.peer for one in list(self._under_way.values()) if not one.has_ended()}
            finally:
                self._testing.release()
        return self._awaited

    def under_way(self) -> str:
        """Return the call under way in words, "" where there is none."""
        return self.progress()[self._near.rank][1] if self.engine is not None and self.engine.is_walking() else ""

    def progress(self) -> dict[int, tuple[int, str]]:
        """Return the number and the words of the last call of each rank of this node."""
        if self.engine is None:
            return {}
        numbers = {rank: self._near.words[rank][MARK] >> ROUNDS for rank in self._near.all}
        return {rank: (number, self.engine.words(rank, number).partition("\n")[0] if number else "")
                for rank, number in numbers.items()}

    def next_call(self, rank: int) -> str | None:
        """Return in words which call a rank is in that comes next on this one; None where it is in none yet.

        "" stands for one in which it waits for another rank, too. Raises as `watch` does.
        """
        words: str | None = self.engine.next_call(rank)
        self._asked = None if words is not None else rank
        if words is None:
            self.watch(awaited=rank)
        return words

    def out_of_reach(self, number: int) -> None:
        """Raise what the system's error of that number stems from: BackendError where no rank is known to have ended.
        """
        raise self._unreachable(os.strerror(number))

    def _unreachable(self, why: object) -> GpucollError:
        return self.cause() or BackendError(f"another rank's memory is out of reach: {why}", code="GC-MEMORY")

    def reach(self, slab: Slab, keys: Sequence[int]) -> None:
        """Read symmetric memory where it is: this rank's new slab, and those of all ranks by their keys."""
        if self.engine is not None:
            for rank in self._near.all - {self._near.rank}:
                self.attach(rank, keys[rank])
            self.engine.symmetric(slab.key, slab.start, slab.nbytes)

    def attach(self, rank: int, key: int) -> None:
        """Map a segment of another rank's for the engine; raise BackendError where the system forbids it."""
        try:
            row = self._near.attached(rank, key)
        except OSError as error:
            raise self._unreachable(error) from error
        self.engine.attach(rank, key, address(row), row.nbytes)

    @property
    def carries(self) -> bool:
        """Whether messages between ranks of this node go by the engine; the same on all ranks, once they have met."""
        return self.engine is not None and self._near.copies and self.name != MESSAGES

    def Isend(self, buffer: list[Any], dest: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin to send ``[bytes, "B"]`` of a dtype of that code, as mpi4py does."""
        if dest in self._near.all:
            return self.engine.message(True, buffer[0], dest, tag, dtype)
        return self._link.points.Isend(buffer, dest, tag, dtype)

    def Irecv(self, buffer: list[Any], source: int, tag: int = 0, dtype: int = 0) -> Any:
        """Begin to receive ``[bytes, "B"]`` of a dtype of that code, as mpi4py does."""
        if source in self._near.all:
            return self.engine.message(False, buffer[0], source, tag, dtype)
        return self._link.points.Irecv(buffer, source, tag, dtype)

    def other(self, source: int, tag: int, dtype: int) -> Any:
        """Return what `links.TypedMessages.other` does, of ranks of other nodes."""
        return self._link.points.other(source, tag, dtype)

    def seen(self, source: int | None, tag: int | None) -> Seen | None:
        """Return a message that could be received now, from anybody and with any tag where they are None; or None."""
        if source is None or source in self._near.all:
            found = self.engine.probe(-1 if source is None else source, -1 if tag is None else tag)
            if found is not None or source is not None or len(self._near.all) == self._size:
                return None if found is None else Seen(*found)
        return self._link.seen(source, tag)

    @property
    def compares_calls(self) -> bool:
        """Whether all ranks' calls are compared by the engine."""
        return self.name == "shared" and self.engine is not None

    def plan(self, task: Task) -> Any:
        """Return what the engine does for calls like `task`."""
        return self._plans.of(task)

    def plan_by_calls(self, task: Task, key: Any, made: Callable[[], Called]) -> Any:
        """Return the same where the function that is `made` does all but comparing; see `Plans.by_calls`."""
        return self._plans.by_calls(task, key, made)

    def run(self, task: Task) -> Operation:
        """Carry out `task`; when that fails, no other rank begins to read or write its arrays any more."""
        return self.walk(lambda: self.plan(task), task.input, task.output)

    def walk(self, plan: Callable[[], Any], x: Any, out: Any) -> Operation:
        """Carry out a plan on these arrays."""
        try:
            self.engine.begin(plan(), x, out)
            if not self.engine.go_on():
                yield self.engine.go_on
        except BaseException as error:
            if is_settled(error):
                raise
            is_system = isinstance(error, OSError) and not isinstance(error, GpucollError)  # a time-out is one
            told = self._unreachable(error) if is_system else error
            self.cancel(told, x, out)
            if told is not error:
                raise told from error
            raise

    def cancel(self, error: BaseException, x: Any, out: Any) -> None:
        """Tell the others of an error, and let them, and MPI, go on with what they have begun on these arrays."""
        if not is_settled(error):
            self.watch(error)
            keep_for_ever((x, out, self._plans, self.engine))
            messages = [*self._under_way.values()]
            cancel([request for one in messages if not one.sends for request in one.requests], messages)

    def _begin(self, number: int, sends: bool, peer: int, place: int, nbytes: int) -> None:
        """Begin a message to or from memory at `place`, in pieces that MPI can count."""
        row, tag = at(place, nbytes), tag_of_call(self.engine.walks)
        begin = self._wire.Isend if sends else self._receive
        self._under_way[number] = _Message(peer, sends, [begin([row[start:start + PIECE], BYTES], peer, tag)
                                                         for start in range(0, nbytes, PIECE) or [0]])

    def _has_come(self, number: int) -> bool:
        if not self._testing.acquire(blocking=False):
            return False
        try:
            has_ended = self._under_way[number].has_ended()
        finally:
            self._testing.release()
        if has_ended:
            del self._under_way[number]
        return has_ended

    def _go_on(self) -> None:
        """Let messages go on: MPI moves them only when it is asked for them."""
        self._peers_of_messages()

    def close(self) -> None:
        """Let go of all memory."""
        if self.engine is not None and self.engine.is_walking():  # as where a signal's handler closes in a call
            self.engine.close()
            keep_for_ever(self)
            return
        if self.engine is not None:
            self.engine.close()
            self._plans.close()
        self.engine = self._plans = None  # they hold each other
        self._near.close()
