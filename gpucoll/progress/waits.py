"""Every wait of the library: with a deadline, an abort and a progress hook.

An operation is a generator that yields a predicate whenever it cannot go on: "may I?".
`Waits` drives it to its end: at once in the caller's thread, or piece by piece behind a
`Work`, by a thread of its own while Python computes.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, MutableSequence, Sized
from typing import Any, Protocol

from gpucoll.errors import (
    BackendError,
    CollectiveTimeout,
    GpucollError,
    MismatchError,
    RankFailedError,
    RevokedError,
    UsageError,
    is_settled,
)
from gpucoll.progress.operations import (
    Operation,
    Pending,
    UnderWay,
    Work,
    keep_for_ever,
    kind_of,
    raising,
    start_serving,
    throw,
)
from gpucoll.progress.pauses import nap_after, yields_at_once

SPIN = 5e-3  # seconds of polling that only yields the processor; a wait that lasts longer also sleeps
CROWDED_SPIN = 1e-3  # the same where ranks outnumber processors: who waits must leave them to who computes
WAITED = 100e-6  # seconds: a look that takes longer, as the engine's, has waited and needs no nap after it
SOON = 1e-3  # seconds of looking after a message between two ranks, before it is left to whoever goes on with such


class Lasting(Protocol):
    """A call that is under way."""

    def ends(self) -> bool:
        """Wait a little; return whether it has ended."""


class Waits:
    """Deadline, abort and hooks of one communicator; also the order of its operations.

    `timeout` is in seconds and counts for each operation from its start. `hooks` are called
    between polls and may raise, which ends the wait. `foreign` are the exceptions of the
    transport below, reported as BackendError; `threads` is whether it may be called by several;
    `crowded` whether the host has fewer processors than ranks.
    """

    def __init__(self, timeout: float, *, foreign: tuple[type[Exception], ...] = (), threads: bool = True,
                 crowded: bool = False) -> None:
        self.timeout = timeout
        self.hooks: list[Callable[[], object]] = []
        self.failure: GpucollError | None = None
        self.unreported: GpucollError | None = None  # the same, as long as no call or wait has raised it
        self.reported: object = None  # the kind of the last error that a call or a wait has raised
        self._owner: int | None = None  # the thread that drives an operation now
        self._foreign = foreign
        self._threads = threads
        self._spin = CROWDED_SPIN if crowded else SPIN
        self._queue: collections.deque[Work] = collections.deque()
        self._alone: list[Work] = []
        self.under_way = UnderWay()  # what is in either of them
        self._stepping = threading.Lock()
        self._more = threading.Event()
        self._thread: threading.Thread | None = None
        self.thread = 0  # the system's number of the thread that asked for the last operation
        self.name, self.waits_since = "", 0.0  # of the last wait, and when it began, of `time.monotonic`
        self.went_on = 0.0  # when an operation last did, of `time.monotonic`
        self.on_failure: Callable[[], None] = lambda: None  # tells the other ranks, once
        # Who is waited for, in words, and their ranks
        self.blame: Callable[[], tuple[str, tuple[int, ...]]] = lambda: ("", ())
        # What an error of the transport, or of another rank, stems from, where more is known than it says
        self.explain: Callable[[BaseException], GpucollError | None] = lambda error: None
        self.is_busy: Callable[[], bool] = lambda: False  # whether a call goes on that does not come through `run`
        # Operations run inside: what they change of the thread that drives them, as its current GPU, is as before then
        self.context: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def run(self, operation: Operation, name: str) -> None:
        """Drive `operation` to its end in this thread, after those submitted before it."""
        if self._owner == threading.get_ident():
            raise UsageError(f"{name}: called inside another call of this communicator, as by a signal handler")
        self.thread = threading.get_native_id()
        if self._stepping.acquire(blocking=False):
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
        """Make a call that waits for nothing, if it is its turn; return whether it was made."""
        owner = threading.get_ident()
        if self._queue or self.failure is not None or not self._stepping.acquire(blocking=False):
            return False
        try:
            self._owner, self.thread = owner, threading.get_native_id()
            call(*arguments)
        except BaseException as error:
            self._failed(error, iter(()), name)
            raise
        finally:
            self._owner = None
            self._stepping.release()
        return True

    def _refuse_second_thread(self, name: str) -> None:
        """Raise UsageError while another thread is in a call; the communicator is revoked.

        Nobody knows which of the two calls the other ranks are in.
        """
        if self._owner is None and not self.is_busy():
            return  # the progress thread is at work, for calls that have been put in order
        error = UsageError(f"{name}: another thread is in a call of this communicator; give each thread one of its "
                           "own (split, from_mpi), or let one thread make all calls", code="GC-THREAD")
        self.hooks.append(raising(error))
        self.failure = self.failure or error
        raise error

    def _drive(self, operation: Operation, name: str) -> None:
        if self.failure is not None:
            self.check()
        deadline = 0.0
        self._owner = threading.get_ident()
        try:
            with self.context:
                for done in operation:
                    deadline = deadline or time.monotonic() + self.timeout
                    self.until(done, name, deadline)
            self.reported = None
        except BaseException as error:
            self.note_reported(error)
            self._failed(error, operation, name)
            raise
        finally:
            self._owner = None

    def gate(self) -> tuple[Callable[..., bool], Callable[[], None], Sized, Sized]:
        """Return what who does a call without `run` must keep to.

        What to acquire, without blocking, and to release; and two queues: the first must be empty for a collective, the
        second for a message between two ranks. `failure` must be None.
        """
        return self._stepping.acquire, self._stepping.release, self._queue, self._alone

    def linger(self, call: Lasting, name: str) -> None:
        """Wait for the end of such a call that takes longer; raise CollectiveTimeout at its deadline."""
        self.until(call.ends, name, time.monotonic() + self.timeout)

    def broken(self, error: BaseException, name: str) -> None:
        """Note that such a call has broken down, unless it is known."""
        if self.failure is None:
            self._failed(error, iter(()), name)

    def until(self, done: Pending, name: str, deadline: float) -> None:
        """Return when `done()`; raise CollectiveTimeout at `deadline` (of `time.monotonic`)."""
        began = self.waits_since = time.monotonic()
        self.name = name
        patience = began + self._spin
        while True:
            looked = time.monotonic()
            if done():
                return
            has_waited = time.monotonic() - looked > WAITED
            try:
                if self.unreported is not None:
                    raise self.unreported
                for hook in self.hooks:
                    hook()
            except GpucollError as error:
                self.note_reported(error)
                raise
            if self._alone and self._owner == threading.get_ident():
                self._advance_alone()
            now = time.monotonic()
            if now > deadline:
                raise self.late(name)
            if has_waited:
                continue
            if now >= patience:
                time.sleep(nap_after(now - max(began, self.went_on)))
            elif not yields_at_once():
                patience = now

    def finish(self, done: Pending, name: str, deadline: float | None) -> None:
        """Return when the stream has come to the end of an operation; without one the communicator has failed."""
        try:
            self.until(done, name, float("inf") if deadline is None else deadline)
            if self.failure is not None:  # after an abort a stream comes to its end, with results that are not complete
                self.check()
        except GpucollError as error:
            self.note_reported(error)
            if isinstance(error, CollectiveTimeout | BackendError):
                self.failure = error
            raise

    def deadline(self) -> float:
        """Return when a wait that begins now must have ended, of `time.monotonic`."""
        return time.monotonic() + self.timeout

    def fail(self, error: GpucollError, *, may_call: bool) -> None:
        """Note an error that no thread has raised: the next wait or call raises it, or `close`.

        `may_call` says whether this thread may call the ranks' transport: to explain the error, and tell other ranks.
        """
        if self.failure is not None:
            return
        self.failure = found = (self.explain(error) if may_call else None) or error
        if kind_of(found) != self.reported:
            self.unreported = found
        if may_call:
            self.on_failure()

    def note_reported(self, error: BaseException) -> None:
        """Note that a call or a wait raises this error."""
        self.unreported, self.reported = None, kind_of(error)

    def late(self, name: str) -> CollectiveTimeout:
        """Return the error of a wait that reached its deadline."""
        words, ranks = self.blame()
        late = f"the other ranks: {words}" if words else "the other ranks"
        return CollectiveTimeout(f"{name}: waited {self.timeout:g} s for {late}; is every rank in the same call, with "
                                 "the same shape, dtype and algorithm? timeout= sets the deadline", ranks=ranks)

    def check(self) -> None:
        """Raise RevokedError after a failure: messages may still be under way, nothing can be trusted.

        The first time it is the failure itself, where no thread has raised that so far.
        """
        unreported, self.unreported = self.unreported, None
        if unreported is not None:
            raise unreported
        if self.failure is not None:
            raise RevokedError(f"this communicator failed earlier ({self.failure}); close it and make a new one",
                               ranks=self.failure.ranks)

    def _failed(self, error: BaseException, operation: Operation, name: str) -> None:
        """An error or an interrupt in the middle of an operation revokes the communicator.

        Raises what is behind the error of another rank or of the transport, at least a BackendError for the latter.
        """
        if is_settled(error):
            throw(operation, error)
            return
        is_first, raised = self.failure is None, error
        if isinstance(error, (*self._foreign, BackendError, RankFailedError, CollectiveTimeout)) \
                or (isinstance(error, MismatchError) and not error.ranks):
            raised = self.explain(error) or (BackendError(f"{name}: {error}") if isinstance(error, self._foreign)
                                             else error)
        self.failure = raised if isinstance(raised, GpucollError) else BackendError(f"{name}: ended by {error!r}")
        throw(operation, raised)
        if is_first:
            self.on_failure()
        if raised is not error:
            raise raised from error

    @property
    def has_messages(self) -> bool:
        """Whether messages between two ranks are under way, which later ones must not overtake."""
        return bool(self._alone)

    def soon(self, operation: Operation, name: str, result: Any) -> Work | None:
        """Do a message between two ranks; return the work that is left of it after a while, None where nothing is."""
        if not self._stepping.acquire(blocking=False):
            return self.start(Work(self, operation, name, result))
        self.thread = threading.get_native_id()
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
            self.under_way.began()
            self._alone.append(work)
        except BaseException as error:
            self._failed(error, operation, name)
            raise
        finally:
            self._stepping.release()
        if self._threads:
            self._start_thread()
        return work

    def submit(self, work: Work) -> Work:
        """Run `work` after those submitted before it, while the caller goes on."""
        return self._begin(work, self._queue)

    def start(self, work: Work) -> Work:
        """Run `work` beside those submitted, in no order with them: messages between two ranks."""
        return self._begin(work, self._alone)

    def _begin(self, work: Work, beside: MutableSequence[Work]) -> Work:
        self.check()
        self.thread = threading.get_native_id()
        self.under_way.began()
        beside.append(work)
        self.advance()
        if self._threads and beside:
            self._start_thread()
        return work

    def advance(self) -> None:
        """Take every operation as far as it goes now; of several threads one does it."""
        if not self._stepping.acquire(blocking=False):
            return
        try:
            with self.context:
                self._advance_alone()
                while self._queue and self._step(self._queue[0]):
                    self._queue.popleft()
                    self.under_way.ended()
        finally:
            self._stepping.release()

    def _advance_alone(self) -> None:
        for work in [work for work in self._alone if self._step(work)]:
            self._alone.remove(work)
            self.under_way.ended()

    def _step(self, work: Work) -> bool:
        try:
            self.check()
            try:
                return work.step(self.late)
            except BaseException as error:
                self._failed(error, work.operation, work.name)
                raise
        except GpucollError as error:
            work.error = error
            return True

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = start_serving(self, self._more)
        self._more.set()

    def serve(self) -> bool:
        """Advance the queue while there is one; return whether more may come. Sleeping leaves Python's lock to others.
        """
        while (self._queue or self._alone) and self._thread is not None:
            self.advance()
            time.sleep(nap_after(time.monotonic() - self.went_on))
        return self._thread is not None

    def drain(self) -> None:
        """Complete what is under way, each operation by its deadline."""
        while (self._queue or self._alone) and self.failure is None and self._thread is not None:
            self.advance()
            time.sleep(nap_after(0.0))

    def forget(self) -> None:
        """In a fork's child: what is under way is the parent's, and so is the thread.

        An operation that is closed would tell the other ranks that it has failed: none ever is.
        """
        keep_for_ever([*self._queue, *self._alone])
        self._queue.clear()
        self._alone.clear()
        self.under_way = UnderWay()
        self._thread = None
        self._stepping = threading.Lock()

    def close(self) -> None:
        """Let the progress thread end; what is still queued stays undone."""
        thread, self._thread = self._thread, None
        self._more.set()
        if thread is not None:
            thread.join(min(self.timeout, threading.TIMEOUT_MAX))
