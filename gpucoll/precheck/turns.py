"""Turns: all ranks of a precheck are threads of one process, and exactly one thread runs at a time.

A rank keeps its turn until the rank has to wait. The turn then goes to a rank that can go on. If no rank can go on, the
program has stopped for ever: the deadlock is known exactly, and no clock is needed.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any

from gpucoll.errors import UsageError
from gpucoll.internal import call_site
from gpucoll.precheck.records import Records

STACK = 1 << 20  # bytes of stack of a rank's thread: the system provides only the pages used
# Polls without any event in the whole program, over all ranks, before a polling rank counts as waiting.
IDLE = 20_000
UNWINDINGS = 1000  # refused waits after the end of a precheck, before a rank that catches every exception is left


refusals: list[tuple[str, str]] = []  # of this precheck: what was refused, and the line


def refusal(text: str) -> UsageError:
    """Return the error for what a precheck does not support, and note it: the program may drop the error."""
    refusals.append((text, call_site()))
    return UsageError(text, code="GC-PRECHECK")


class Unwound(BaseException):
    """Ends the code of a rank that can never go on."""


class VirtualRank:
    """A rank of a precheck: its thread running ``body(rank)``, and what the thread waits for.

    A further thread of the rank is a `VirtualRank` of the same number, listed in `helpers`.
    """

    def __init__(self, number: int, body: Callable[[VirtualRank], None]) -> None:
        self.number: int = number
        self.body: Callable[[VirtualRank], None] = body
        self.groups: dict[Any, int] = {}  # the groups of its communicators, numbered in the order of their making
        self.helpers: list[VirtualRank] = []
        self.line = ""  # of a helper at work: the line of the rank's own thread that asked for the work
        self.exits: list[Callable[[], object]] = []  # called at the end of the rank's program, the last first
        self.turn: threading.Lock = threading.Lock()  # released when the rank gets its turn
        self.turn.acquire()
        self.thread: threading.Thread | None = None
        self.done: Callable[[], bool] | None = None  # of a waiting rank: whether the rank can go on
        self.error: BaseException | None = None  # raised by `done`
        self.call: str = ""
        self.place: str = ""  # the call that waits, and its line
        self.last = ""  # the line of the last call
        self.is_ready = False  # whether the rank is in the queue of ranks to be looked at
        self.has_ended = False
        self.waits: set[Any] = set()  # the `VirtualWaits` with operations under way
        self.transports: list[Any] = []  # the `VirtualTransport` of each communicator
        self.worlds = 0
        self.polls: int = 0
        self.seen: int = 0  # polls in vain, and the count of events at the last poll
        self.unwindings = 0
        self.failure: BaseException | None = None  # the uncaught exception of the rank's program

    @property
    def in_call(self) -> VirtualRank:
        """Return the thread in the call that the rank waits for."""
        return next((one for one in self.helpers if one.line), self) if self.call == "wait" else self


class Turns:
    """The threads of `size` ranks, each running ``body(rank)``; `on_stop` is called once no rank can go on.

    `switched(old, new)` is called between two turns.
    """

    def __init__(self, size: int, body: Callable[[VirtualRank], None], on_stop: Callable[[], None],
                 switched: Callable[[VirtualRank, VirtualRank], None]) -> None:
        self.ranks: list[VirtualRank] = [VirtualRank(number, body) for number in range(size)]
        self._threads = [*self.ranks]  # with the helpers
        self.current: VirtualRank = self.ranks[0]
        self.records: Records = Records(size)
        self.events: int = 0  # calls, messages and ends of ranks so far: polling ranks look again after one
        self.fault: BaseException | None = None  # an error of the precheck itself
        self.is_over: bool = False  # whether the ranks are only unwound
        self.place = ""  # the line of the operation now advanced for a rank, "" if the rank itself runs
        self._on_stop, self._switched = on_stop, switched
        self._polls = max(100, IDLE // size)
        self._ready = collections.deque(self.ranks)
        for rank in self.ranks:
            rank.is_ready = True
        self.is_looking: bool = False  # whether operations of a waiting rank are advanced
        self._finished = threading.Event()

    def run(self) -> None:
        """Run all ranks to the end, in rank order at first."""
        before = threading.stack_size(STACK)
        try:
            self._give(self._next())
            self._finished.wait()
        finally:
            threading.stack_size(before)
        for rank in self._threads:
            if rank.thread is not None and rank.unwindings < UNWINDINGS:
                rank.thread.join()
        if self.fault is not None:
            raise UsageError(f"precheck: the check has failed: {type(self.fault).__name__}: {self.fault}",
                             code="GC-PRECHECK") from self.fault

    def add(self, body: Callable[[], None]) -> VirtualRank:
        """Add a thread to the rank whose turn it is, with turns of its own."""
        rank = self.ranks[self.current.number]
        made = VirtualRank(rank.number, lambda _: body())
        made.done, made.is_ready, made.line = _always, True, self.site()
        rank.helpers.append(made)
        self._threads.append(made)
        self._ready.append(made)
        return made

    def site(self) -> str:
        """Return the line of the call under way."""
        return self.place or self.current.line or call_site()

    def wake(self, rank: VirtualRank) -> None:
        """Note that a waiting rank may be able to go on."""
        for one in (rank, *rank.helpers):
            if one.done is not None and not one.is_ready:
                one.is_ready = True
                self._ready.append(one)

    def wait(self, done: Callable[[], bool], call: str) -> None:
        """Give up the turn until ``done()`` is true; raise Unwound if that never happens."""
        rank = self.own(call)
        rank.done = done
        if not self._can_go_on(rank):
            rank.call, rank.place = call, self.site() or rank.last
            self._switch(rank)
        rank.done = None
        error, rank.error = rank.error, None
        if error is not None:
            raise error
        if self.is_over:
            raise Unwound

    def settle(self) -> None:
        """Wait until all helpers of this rank have ended, or wait for work."""
        helpers = self.ranks[self.current.number].helpers
        self.wait(lambda: not any(one.line or (one.done is not None and one.done()) for one in helpers), "wait")

    def pause(self, call: str) -> None:
        """Let all ranks that can go on take a turn first; called by every poll."""
        if self.is_looking:
            return
        rank = self.own(call)
        if rank.seen != self.events:
            rank.seen, rank.polls = self.events, 0
        rank.polls += 1
        if rank.polls > self._polls:
            seen = self.events
            self.wait(lambda: self.events != seen, call)
        else:
            rank.done = _always
            self.wake(rank)
            self._switch(rank)
            rank.done = None

    def own(self, call: str) -> VirtualRank:
        """Return the rank of this thread.

        Raises Unwound if the ranks are only unwound, and UsageError in a thread that is not the rank's own.
        """
        rank = self.current
        if rank.thread is not threading.current_thread():
            raise refusal(f"{call}: precheck supports only the main thread of each rank, before its end; this call is "
                          "made by another thread, or by a function called at the exit of the process")
        if self.is_over:
            rank.unwindings += 1
            if rank.unwindings >= UNWINDINGS:
                self._end(rank)
                threading.Event().wait()  # a daemon thread, left behind
            raise Unwound
        return rank

    def _can_go_on(self, rank: VirtualRank) -> bool:
        """Advance the operations of a waiting rank; return whether the rank can go on."""
        self.is_looking = True
        try:
            for one in tuple(rank.waits):
                one.poke()
            return rank.done is None or rank.done()
        except BaseException as error:
            rank.error = error
            return True
        finally:
            self.is_looking = False

    def _switch(self, rank: VirtualRank) -> None:
        """Give the turn to a rank that can go on, and return with the turn."""
        following = self._next()
        if following is not rank:
            self._give(following)
            rank.turn.acquire()

    def _give(self, rank: VirtualRank) -> None:
        old, self.current = self.current, rank
        # An error here must not end the turns, or all threads would wait for ever: `run` raises the error at the end.
        try:
            self._switched(old, rank)
            if rank.thread is None:
                rank.thread = threading.Thread(target=self._live, args=(rank,), name=f"rank {rank.number}", daemon=True)
                rank.thread.start()
                return
        except Exception as error:
            self._fault(error)
            if rank.thread is None or rank.thread.ident is None:  # the system may have no room for another thread
                rank.thread, rank.has_ended = None, True
                self._pass_on()
                return
        rank.turn.release()

    def _fault(self, error: BaseException) -> None:
        self.fault, self.is_over = self.fault or error, True

    def _pass_on(self) -> None:
        """Give the turn of an ended rank to another rank; after the last rank, end `run`."""
        if self.is_over:
            for one in self._threads:
                one.has_ended |= one.thread is None
        if all(one.has_ended for one in self._threads):
            self._finished.set()
        else:
            self._give(self._next())

    def _next(self) -> VirtualRank:
        while True:
            while self._ready and not self.is_over:
                rank = self._ready.popleft()
                rank.is_ready = False
                if not rank.has_ended and self._can_go_on(rank):
                    return rank
            left = [rank for rank in self._threads if not rank.has_ended]
            if self.is_over:
                return left[0]
            # The queue holds only ranks whose call or message has completed. Look at all ranks before the verdict.
            found = next((rank for rank in left if self._can_go_on(rank)), None)
            if found is not None:
                return found
            if not self._ready:
                try:
                    self._on_stop()
                except Exception as error:
                    self._fault(error)
                self.is_over = True

    def _live(self, rank: VirtualRank) -> None:
        # The rank may be left behind, but the process waits for the rank's threads, as for those of a main thread.
        rank.thread._daemonic = False  # type: ignore[union-attr]
        try:
            rank.body(rank)
        except Unwound:
            pass
        except BaseException as error:
            rank.failure = error
        finally:
            self._end(rank)

    def _end(self, rank: VirtualRank) -> None:
        rank.has_ended = True
        self.events += 1
        owner = self.ranks[rank.number]
        if rank is not owner:
            owner.helpers.remove(rank)
            self.wake(owner)
        self._pass_on()


def _always() -> bool:
    return True
