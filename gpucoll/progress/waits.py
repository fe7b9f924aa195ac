"""Every wait of the library: each has a deadline, an abort and progress hooks.

An operation is a generator that yields a predicate, "can I go on?", whenever the operation would have to wait.
`Progress` drives an operation to the end: in the caller's thread, or step by step behind a `Work`, in a progress thread
while the user's code computes.
"""

from __future__ import annotations

import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, MutableSequence, Sequence, Sized
from typing import Any

from gpucoll.errors import (
    BackendError,
    ClosedError,
    CollectiveTimeout,
    GpucollError,
    RevokedError,
    UsageError,
    is_known,
    is_settled,
)
from gpucoll.progress.operations import Operation, Pending, Work, keep_for_ever, kind_of, start_serving, throw
from gpucoll.progress.partners import End, MessageWait, timed_out

# Seconds of polling that only yields the core; longer waits also sleep. A yield reacts fastest, a sleep frees the core.
SPIN = 5e-3
CROWDED_SPIN = 1e-3  # SPIN on a host with more ranks than cores: a waiting rank must leave the core to a computing rank
# Seconds: a predicate that takes longer, as the engine's does, has itself waited, so no sleep follows.
WAITED = 100e-6
# Seconds of polling a message between two ranks in the caller's thread, before the progress thread takes over: most
# messages end sooner, and a `Work` and a thread switch cost more.
SOON = 1e-3
# Seconds of a wait before it looks at the other ranks, which costs as much as many polls: most waits end sooner.
FIRST_LOOK = 5e-3
SHORTEST_SLEEP = 20e-6  # seconds; less would gain nothing, as Linux adds a timer slack of some 50 us
DEAR = 500e-6  # seconds: a yield that takes longer has given the core to a computing process
# Polling steals CPU from the user's thread, so sleep 1/16 of the time since the last progress: an operation is late by
# at most 1/16 of its wait, and by at most 200 us for each rank on a core.
SLEEP_SHARE, LONGEST_SLEEP = 1 / 16, 200e-6
NO_STORE = contextlib.nullcontext()


class CallingThread(threading.local):
    """The calling thread: its `number` in the system, and the deadline of its wait under way.

    The number is asked for once: the system call is as dear as a short call.
    """

    deadline: float = math.inf

    def __init__(self) -> None:
        self.number: int = threading.get_native_id()


CALLING_THREAD = CallingThread()


@contextlib.contextmanager
def limited(deadline: float) -> Iterator[None]:
    """Limit all requests of this thread in the block to `deadline`, of `time.monotonic`."""
    before = CALLING_THREAD.deadline
    CALLING_THREAD.deadline = min(before, deadline)
    try:
        yield
    finally:
        CALLING_THREAD.deadline = before


def deadline_of(patience: float) -> float:
    """Return the deadline of a request that begins now: after `patience` seconds, or earlier with the wait around it.

    >>> with limited(time.monotonic() + 1.0):
    ...     deadline_of(60.0) <= time.monotonic() + 1.0
    True
    """
    return min(time.monotonic() + patience, CALLING_THREAD.deadline)


def yields_at_once() -> bool:
    """Yield the core; return whether this thread ran again at once.

    If another process computes on this core, a yield gives that process a slice of milliseconds. The caller then sleeps
    instead of yielding: a sleep costs only tens of microseconds.
    """
    began = time.monotonic()
    os.sched_yield()
    return time.monotonic() - began < DEAR


def nap_after(waited: float, crowd: float = 1.0) -> float:
    """Return the seconds to sleep before the next poll, after `waited` seconds without progress.

    `crowd` is the number of ranks per core: all may poll, and so share the core.
    """
    return min(max(1.0, crowd) * LONGEST_SLEEP, max(SHORTEST_SLEEP, SLEEP_SHARE * waited))


class Progress:
    """Deadline, abort and hooks of one communicator's waits; also the order of the operations.

    `timeout` is in seconds, for each operation from its start. `hooks` are called between polls; a hook ends the wait
    by raising. `foreign` are the exceptions of the transport, reported as BackendError. `threads` says whether several
    threads may call the transport, `crowd` the ranks per core, `asks_store` whether waits send requests to a store.

    Invariant: only the holder of `_stepping` advances operations. Queued operations run in the order of submission;
    messages between two ranks (`_alone`) run in no order. After a failure, every call raises.
    """

    def __init__(self, timeout: float, *, foreign: tuple[type[Exception], ...] = (), threads: bool = True,
                 crowd: float = 1.0, asks_store: bool = True) -> None:
        self.timeout: float = timeout
        self._foreign, self._threads, self._asks_store = foreign, threads, asks_store
        self.hooks: list[Callable[[], object]] = []
        self.failure: GpucollError | None = None
        self.unreported: GpucollError | None = None  # the failure, until a call or a wait has raised it
        self.reported: object = None  # the kind (`kind_of`) of the last error raised by a call or a wait
        self._owner: int | None = None  # the thread inside a blocking call; None while the progress thread steps
        self._spin, self._crowd = CROWDED_SPIN if crowd > 1 else SPIN, crowd
        self._queue: collections.deque[Work[Any]] = collections.deque()  # collectives, in order
        self._alone: list[Work[Any]] = []  # messages between two ranks, in no order
        # Held by the one thread that advances operations: a generator cannot run in two threads, and a single-threaded
        # MPI must not be called by two. Taken only without blocking: the holder may itself wait for a long time.
        self._stepping, self._more = threading.Lock(), threading.Event()  # `_more` wakes the progress thread
        self._thread: threading.Thread | None = None
        self.name: str = ""  # the operation of the last wait
        self.waits_since: float = 0.0  # its start (`time.monotonic`)
        # The system's number of the thread that made the last call; the time of the last progress of any operation.
        self.thread: int = 0
        self.went_on: float = 0.0
        self.on_failure: Callable[[], None] = lambda: None  # tells the other ranks, once
        # Notes the nanoseconds by which this rank came late to a call of the engine that has just ended.
        self.on_delay: Callable[[int], None] = lambda nanoseconds: None
        # Returns the ranks to blame for a late wait: a sentence, and the numbers of the ranks.
        self.blame: Callable[[], tuple[str, tuple[int, ...]]] = lambda: ("", ())
        self.rank: int | None = None  # in the communicator
        # Returns what is known of a rank, for an error about a message.
        self.describe: Callable[[int], str] = lambda rank: f"rank {rank}"
        self.has_left: Callable[[int], bool] = lambda rank: False  # whether a rank receives no message any more
        # Returns the cause of an error of the transport or of another rank, if more is known than the error says.
        self.explain: Callable[[BaseException], GpucollError | None] = lambda error: None
        self.message_wait: MessageWait = MessageWait()
        # Returns the error of all calls, once the communicator was closed, or in a fork's child.
        self.ended: Callable[[], GpucollError] | None = None
        # Of a link: called before each call, or None; whether MPI has ended.
        self.enter: Callable[[], None] | None = None
        self.has_ended: Callable[[], bool] = lambda: False
        self.is_busy: Callable[[], bool] = lambda: False  # whether a call that bypasses `run` is in progress
        # Entered around operations, to restore thread state changed by an operation, such as the current GPU.
        self.context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def new_group(self) -> list[Work[Any]]:
        """Return the list for the works of a group of calls, in the order of the calls."""
        return []

    def run(self, operation: Operation, name: str) -> None:
        """Drive `operation` to the end in this thread, after all submitted before; UsageError inside another call."""
        if self.blocks():
            raise UsageError(f"{name}: called inside another call of this communicator, as by a signal handler")
        self.thread = CALLING_THREAD.number
        # The common case: nothing is queued, so drive the operation here, without a `Work` and the progress thread.
        if self._stepping.acquire(False):
            try:
                if not self._queue:
                    self._drive(operation, name)
                    return
            finally:
                self._stepping.release()
        else:
            self._refuse_second_thread(name)
        self.submit(Work(self, operation, name, None)).synchronize()

    def at_once(self, call: Callable[..., None], name: str, *arguments: Any) -> bool:
        """Make a call that never waits, such as a GPU launch, unless work is queued or failed; return whether made."""
        if self._queue or self.failure is not None or not self._stepping.acquire(False):
            return False
        try:
            self._owner, self.thread = threading.get_ident(), CALLING_THREAD.number
            call(*arguments)
        except BaseException as error:
            self._failed(error, iter(()), name)
            raise
        finally:
            self._owner = None
            self._stepping.release()
        return True

    def blocks(self) -> bool:
        return self._owner == threading.get_ident()

    def _refuse_second_thread(self, name: str) -> None:
        """Raise UsageError and revoke the communicator if another thread is inside a call.

        The order of the two calls may differ between ranks, so neither can be trusted to match.
        """
        if self._owner is None and not self.is_busy():
            return  # only the progress thread is at work, on operations in the order of submission
        error = UsageError(f"{name}: another thread is in a call of this communicator; give each thread its "
                           "own communicator (split, from_mpi), or make all calls in one thread", code="GC-THREAD")

        def hook() -> None:
            raise error

        self.hooks.append(hook)  # ends the other thread's wait as well
        self.failure = self.failure or error
        raise error

    def _drive(self, operation: Operation, name: str) -> None:
        if self.failure is not None:
            self.check()
        deadline = 0.0  # set at the first wait: an operation that never waits reads no clock
        self._owner = threading.get_ident()
        try:
            with self.context:
                for done in operation:
                    deadline = deadline or time.monotonic() + self.timeout
                    self.until(getattr(done, "patient", done), name, deadline)
            self.reported = None
        except BaseException as error:
            self.note_reported(error)
            self._failed(error, operation, name)
            raise
        finally:
            self._owner = None

    def gate(self) -> tuple[Callable[..., bool], Callable[[], None], Sized, Sized]:
        """Return what code that bypasses `run` (the engine) must honour: a lock and two queues.

        These are the lock's `acquire`, to be called without blocking, and `release`; a queue that must be empty before
        a collective; and a queue that must be empty before a message between two ranks. `failure` must be None.
        """
        return self._stepping.acquire, self._stepping.release, self._queue, self._alone

    def slow_wait(self, engine: Any, name: str) -> None:
        """Wait for a call that bypassed `run` (see `gate`) and takes long; raise CollectiveTimeout at the deadline."""
        self.until(engine.ends, name, time.monotonic() + self.timeout)

    def broken(self, error: BaseException, name: str) -> None:
        """Record the failure of a call that bypassed `run`, unless a failure is recorded already."""
        if self.failure is None:
            self._failed(error, iter(()), name)

    def until(self, done: Pending, name: str, deadline: float, ends: Sequence[End] = ()) -> None:
        """Poll until `done()` is true; raise CollectiveTimeout at `deadline` (of `time.monotonic`); see `late`."""
        # The deadline holds also for requests to a store, of `done` and of the hooks.
        with limited(deadline) if self._asks_store else NO_STORE:
            self._poll(done, name, deadline, ends)

    def _poll(self, done: Pending, name: str, deadline: float, ends: Sequence[End]) -> None:
        began = self.waits_since = time.monotonic()
        self.name = name
        patience = began + self._spin
        # Poll, because no single event covers shared memory, MPI, sockets and GPU events together. Between polls: after
        # a while run the hooks, advance messages between two ranks, then yield the core or sleep.
        while True:
            looked = time.monotonic()
            if done():
                return
            now = time.monotonic()
            has_waited = now - looked > WAITED
            if now > began + FIRST_LOOK:
                self.look(name)
            # A blocking call holds `_stepping` for its whole length, so only its own thread can advance messages
            # between two ranks. The peer may need them before it comes to this collective.
            if self._alone and self.blocks():
                self._advance_alone()
            if now > deadline:
                raise self.late(name, ends)
            if has_waited:
                continue
            # After `patience`, or as soon as a yield turns out to give the core to a computing process, sleep. The time
            # since the last progress of any operation sets the length: a busy communicator polls often.
            if now >= patience:
                time.sleep(nap_after(now - max(began, self.went_on), self._crowd))
            elif not yields_at_once():
                patience = now

    def look(self, name: str) -> None:
        """Run the hooks once, as between two polls of a wait; raise the error that ends the wait."""
        try:
            # A failure found by another thread, such as the GPU watchdog, ends this wait.
            if self.unreported is not None:
                raise self.unreported
            for hook in self.hooks:
                hook()
        except GpucollError as error:
            self.note_reported(error)
            raise
        except self._foreign as error:
            # An MPI that goes on after a death refuses probes of all ranks from then on.
            raised = self._explained(error, name)
            self.note_reported(raised)
            raise raised from error

    def finish(self, done: Pending, name: str, deadline: float | None, ends: Sequence[End] = ()) -> None:
        """Wait until the stream has completed an operation; a timeout, a transport error or a lost rank revokes it."""
        try:
            self.until(done, name, float("inf") if deadline is None else deadline, ends)
            if self.failure is not None:  # after an abort the stream completes, but with incomplete results
                self.check()
        except GpucollError as error:
            self.note_reported(error)
            if isinstance(error, CollectiveTimeout | BackendError) or error.code == "GC-RANK":
                self.failure = error
            raise

    def deadline(self) -> float:
        """Return the deadline of a wait that begins now, of `time.monotonic`."""
        return time.monotonic() + self.timeout

    def fail(self, error: GpucollError, *, may_call: bool) -> None:
        """Record an error found outside a call, by a watchdog: the next wait, call or `close` raises the error.

        `may_call` says whether this thread may call the transport, to explain the error and to tell the other ranks.
        Does nothing after an earlier failure.
        """
        if self.failure is not None:
            return
        self.failure = found = (self.explain(error) if may_call else None) or error
        # A call may have raised the same failure just before: do not raise it twice.
        if kind_of(found) != self.reported:
            self.unreported = found
        if may_call:
            self.on_failure()

    def note_reported(self, error: BaseException) -> None:
        """Record that a call or a wait is raising this error."""
        self.unreported, self.reported = None, kind_of(error)

    def late(self, name: str, ends: Sequence[End] = ()) -> CollectiveTimeout:
        """Return the CollectiveTimeout of a wait at its deadline, naming the ranks to blame.

        `ends` are the messages between two ranks that the operation has waited for: their partners are to blame.
        """
        return timed_out(name, self.timeout, [end for end in ends if end.is_left()], self.blame, self.describe)

    def check_usable(self) -> None:
        """Raise UsageError in a fork's child, ClosedError after the end, and RevokedError after a failure."""
        if self.enter is not None:
            self.enter()
        if self.ended is not None:
            raise self.ended()
        if self.has_ended():
            raise ClosedError("MPI has been finalized, so no call is possible; do not finalize MPI before the end of "
                              "the process, or close communicators first")
        self.check()

    def check(self) -> None:
        """Raise RevokedError after a failure: messages of the failed call may still be under way.

        Raises the failure itself, once, if no call or wait has raised it yet.
        """
        unreported, self.unreported = self.unreported, None
        if unreported is not None:
            raise unreported
        if self.failure is not None:
            raise RevokedError(f"this communicator failed earlier ({self.failure}); close it and make a new one",
                               ranks=self.failure.ranks)

    def _failed(self, error: BaseException, operation: Operation, name: str) -> None:
        """Revoke the communicator after an error or an interrupt in the middle of an operation.

        Raises the cause instead of `error` if a transport error, or another rank's error, can be explained. Other
        exceptions of the transport become a BackendError. A settled error leaves nothing under way and does not revoke.
        """
        if is_settled(error):
            throw(operation, error)
            return
        is_first, raised = self.failure is None, error
        if isinstance(error, self._foreign) or not is_known(error):
            raised = self._explained(error, name)
        self.failure = raised if isinstance(raised, GpucollError) else BackendError(f"{name}: ended by {error!r}")
        throw(operation, raised)
        if is_first:
            self.on_failure()
        if raised is not error:
            raise raised from error

    def _explained(self, error: BaseException, name: str) -> BaseException:
        """Return the cause of an error; without a cause the error itself, as a BackendError if of the transport."""
        found = self.explain(error)
        if found is None and isinstance(error, self._foreign):
            return BackendError(f"{name}: {error}", ranks=getattr(error, "ranks", ()))
        return found or error

    @property
    def has_messages(self) -> bool:
        """Whether messages between two ranks are under way: later messages must not overtake them."""
        return bool(self._alone)

    def soon(self, operation: Operation, name: str, result: Any) -> Work[Any] | None:
        """Carry out a message between two ranks; return None if done within SOON seconds, else the `Work` left."""
        if not self._stepping.acquire(False):
            return self.start(Work(self, operation, name, result))
        self.thread = CALLING_THREAD.number
        try:
            pending, patience = next(operation, None), 0.0
            while pending is not None:
                if pending():
                    pending = next(operation, None)
                    continue
                now = time.monotonic()
                patience = patience or now + SOON
                if now > patience or not yields_at_once():
                    break
            else:
                return None
            work = Work(self, operation, name, result, pending=pending)
            self._alone.append(work)
        except BaseException as error:
            self._failed(error, operation, name)
            raise
        finally:
            self._stepping.release()
        if self._threads:
            self._start_thread()
        return work

    def submit(self, work: Work[Any]) -> Work[Any]:
        """Run `work` after all work submitted before, while the caller goes on."""
        return self._begin(work, self._queue)

    def start(self, work: Work[Any]) -> Work[Any]:
        """Run `work` concurrently with all other work, in no order: for messages between two ranks."""
        return self._begin(work, self._alone)

    def _begin(self, work: Work[Any], works: MutableSequence[Work[Any]]) -> Work[Any]:
        self.check()
        self.thread = CALLING_THREAD.number
        works.append(work)
        # Take the first steps here: the messages leave at once, and short operations end without the progress thread.
        self.advance()
        if self._threads and works:
            self._start_thread()
        return work

    def advance(self) -> None:
        """Advance every operation as far as possible without waiting; return at once while another thread does so."""
        if not self._stepping.acquire(False):
            return
        try:
            with self.context:
                self._advance_alone()
                # Only the head of the queue runs: all ranks execute collectives in the same order.
                while self._queue and self._step(self._queue[0]):
                    self._queue.popleft()
        finally:
            self._stepping.release()

    def _advance_alone(self) -> None:
        # Step all first, then remove: `_alone` must not change during the loop over it.
        for work in [work for work in self._alone if self._step(work)]:
            self.drop(work)

    def drop(self, work: Work[Any]) -> None:
        """Take a message between two ranks off the work under way; the caller holds the lock of `gate`."""
        self._alone.remove(work)

    def messages(self) -> list[Work[Any]]:
        """Return the messages between two ranks under way."""
        return [*self._alone]

    def _step(self, work: Work[Any]) -> bool:
        try:
            self.check()
            try:
                return work.step(self.late)
            except BaseException as error:
                self._failed(error, work.operation, work.name)
                raise
        except GpucollError as error:
            work.error = error
        except Exception:
            # An error of another kind, such as MemoryError, must not end the progress thread: `_failed` has made it a
            # BackendError, raised by the thread that waits for the work.
            work.error = self.failure
        return True

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = start_serving(self, self._more)
        self._more.set()

    def serve(self) -> bool:
        """Advance all work until none is left; return False once `close` was called. Run by the progress thread."""
        # Sleeping releases the interpreter's lock: the user's thread computes meanwhile.
        while (self._queue or self._alone) and self._thread is not None:
            self.advance()
            time.sleep(nap_after(time.monotonic() - self.went_on, self._crowd))
        return self._thread is not None

    @property
    def is_served(self) -> bool:
        """Whether the progress thread advances the work under way."""
        return self._thread is not None

    def forget(self) -> None:
        """Reset in the child of a fork: the work under way and the progress thread belong to the parent.

        The operations are kept for ever: closing a generator would cancel messages and tell other ranks of a failure.
        """
        keep_for_ever([*self._queue, *self._alone])
        self._queue.clear()
        self._alone.clear()
        self._thread = None
        self._stepping = threading.Lock()  # the parent's may have been held at the moment of the fork

    def close(self) -> None:
        """End the progress thread, waiting `timeout` seconds at most; work still queued stays undone."""
        thread, self._thread = self._thread, None
        self._more.set()
        if thread is not None:
            thread.join(min(self.timeout, threading.TIMEOUT_MAX))
