"""A program in the processes of equal ranks: its turns, groups and state, and the proof that all ranks agree."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

import numpy

from gpucoll.executors import ReadyCall
from gpucoll.launch.launchers import torchrun_variables
from gpucoll.rehearsal.coordinator import Coordinator, Given
from gpucoll.rehearsal.effects import NOT_FOLLOWED
from gpucoll.rehearsal.equal_ranks import EqualRanks, everyone_of, pickled, pickled_request
from gpucoll.rehearsal.matching import MatchedCall, VirtualGroup
from gpucoll.rehearsal.per_rank import follow_json, lift, per_rank
from gpucoll.rehearsal.program import Rehearsal
from gpucoll.rehearsal.state import ProcessState
from gpucoll.rehearsal.turns import Turns, VirtualRank
from gpucoll.rehearsal.values import compute, is_computed, leave_out

FEWEST = 64  # ranks; the threads of fewer ranks are as quick
MOST_POLLS = 2000  # polls in vain, each of a millisecond, until a process waits


class ProcessTurns(Turns):
    """The turns of a process' ranks, as if they were one rank: the other ranks are in other processes."""

    def __init__(self, process: EqualRanks, body: Callable[[VirtualRank], None],
                 switched: Callable[[VirtualRank, VirtualRank], None]) -> None:
        super().__init__(1, body, lambda: None, switched)
        self.process = process
        self.current.number = per_rank(process, {number: number for number in process.numbers})

    @property
    def forks_ranks(self) -> bool:  # type: ignore[override]
        return self.process.effects.is_library

    def run(self) -> None:
        """Run the program."""
        rank = self.current
        self._switched(rank, rank)
        rank.thread = threading.current_thread()
        rank.body(rank)
        if rank.failure is not None:
            self.process.give_up(f"{type(rank.failure).__name__}: {rank.failure}")

    def add(self, body: Callable[[], None]) -> VirtualRank:
        self.process.give_up("a further thread")

    def wait(self, done: Callable[[], bool], call: str) -> None:
        """Use answers until ``done()`` is true."""
        rank = self._own(call)
        rank.done = done
        while not self._can_go_on(rank):
            self.process.advance()
        rank.done = None
        error, rank.error = rank.error, None
        if error is not None:
            raise error

    def pause(self, call: str) -> None:
        """Use an answer if any arrives within a millisecond; after many polls in vain wait for an answer."""
        if self._is_looking:
            return
        rank = self._own(call)
        rank.polls += 1
        if rank.polls > MOST_POLLS or self.process.has_answer(1e-3):
            rank.polls = 0
            self.process.advance()


class SharedGroup(VirtualGroup):
    """A group of ranks in several processes; `key` is the name of the group in all processes."""

    turns: ProcessTurns

    def __init__(self, turns: Turns, members: Sequence[int], groups: list[VirtualGroup], key: Any) -> None:
        super().__init__(turns, members, groups)
        self.key, self._count, self._answered = key, 0, 0
        self.mail = _Refused(self.turns.process, "a message between two ranks")  # type: ignore[assignment]
        self.probes = self.mail  # type: ignore[assignment]

    def rank_of(self, number: int) -> VirtualRank:
        return self.turns.current

    def place_of(self, number: Any) -> Any:
        return lift(self.members.index, number)

    def part(self, color: int, members: Sequence[int]) -> VirtualGroup:
        return SharedGroup(self.turns, members, self.groups, (self.key, self._answered, color))

    def arrive(self, rank: int, signature: str, place: str, given: Any = None,
               combine: Callable[[list[Any]], Any] | None = None, *, is_end: bool = False) -> MatchedCall:
        """Note the next call of this process' ranks; the coordinator's answer completes the call."""
        process, call = self.turns.process, MatchedCall()
        self._count += 1
        number = self._count

        def use(answer: Any) -> None:
            if combine is compute and answer is not None:
                self._write(given, answer)
            elif combine is not None and combine is not compute:
                self._answered = number
                call.result = combine(everyone_of(answer, self.members))
            call.is_complete = True

        if combine is None:
            message = Given()
        elif combine is not compute:
            message = Given(objects=pickled(process, given))
        elif is_computed(given.request, self.size):
            message = Given(request=pickled_request(given.request), source=_plain(given.source),
                            has_output=given.target is not None)
        else:
            leave_out(given)
            message = Given()
        process.call(self.key, self.members, number, signature, message, use)
        return call

    def _write(self, given: ReadyCall, answer: Any) -> None:
        if given.target is not None:
            result = answer
            if isinstance(answer, dict):
                process = self.turns.process
                process.choose({number: None if row is None else row.tobytes() for number, row in answer.items()})
                result = answer[process.numbers[0]]
            if result is not None:
                given.target[...] = result


class _Refused:
    """A part of a program without a counterpart in these processes: any use gives up."""

    def __init__(self, process: EqualRanks, what: str) -> None:
        self.__dict__.update(_process=process, _what=what)

    def __getattr__(self, name: str) -> NoReturn:
        self._process.give_up(self._what)

    def __setitem__(self, *_: Any) -> None:
        self._process.give_up(self._what)


def _plain(row: Any) -> Any:
    return None if row is None else numpy.asarray(row)


class SharedRehearsal(Rehearsal):
    """A program run by the processes of equal ranks."""

    def __init__(self, process: EqualRanks, size: int) -> None:
        super().__init__(size, is_program=True)
        self._process = process

    def _new_turns(self, body: Callable[[VirtualRank], None]) -> Turns:
        return ProcessTurns(self._process, body, self._switched)

    def _new_group(self) -> VirtualGroup:
        return SharedGroup(self._turns, range(self._size), self._groups, len(self._worlds))

    def _new_state(self) -> ProcessState:
        number = self._turns.current.number
        variables = torchrun_variables(0, self._size, 0, self._size)
        own = {name: lift(str, number) for name in ("RANK", "LOCAL_RANK")}
        return ProcessState([variables | own], is_program=True)

    def _switched(self, old: VirtualRank, new: VirtualRank) -> None:
        self.state.switch(None, 0)

    def main_of(self, rank: VirtualRank) -> ModuleType:
        return self.state.mains[0]

    def _stopped(self) -> None:
        """Find nothing: the coordinator sees whether the ranks agree."""

    def _follow_torch(self) -> None:
        self._process.give_up("torch")


def reason_against(run: Callable[[Rehearsal], object], size: int) -> str | None:
    """Return None if the calls of all ranks of a program agree, else the reason against a proof.

    ``run(rehearsal)`` runs the program, in a forked process.
    """
    if NOT_FOLLOWED & {*sys.modules} or threading.active_count() > 1:
        return "a package that is not followed"
    here, there = socket.socketpair()
    leader = os.fork()
    if leader == 0:
        here.close()
        _live(EqualRanks(there, size), run, size)
    there.close()
    with contextlib.suppress(OSError):  # the process does the same; the first of both counts
        os.setpgid(leader, leader)
    with _guarded(leader):
        return Coordinator(here, size, leader).run()


@contextlib.contextmanager
def _guarded(leader: int) -> Iterator[None]:
    """Let a further process end the processes of the group `leader` if this process is killed.

    A program in an endless loop would not notice the end of this process.
    """
    reading, writing = os.pipe()
    guard = os.fork()
    if guard == 0:
        os.setpgid(0, 0)  # the terminal interrupts the other process alone
        os.close(writing)
        os.read(reading, 1)  # returns at the end of the other process
        os.killpg(leader, signal.SIGKILL)
        os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.kill(guard, signal.SIGKILL)
        os.waitpid(guard, 0)
        os.close(writing)


def _live(process: EqualRanks, run: Callable[[Rehearsal], object], size: int) -> NoReturn:
    """Run the program in this process, and end the process."""
    try:
        os.setpgid(0, 0)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):  # the ranks run again, one by one, if there is anything to report
            os.dup2(nowhere, standard)
        process.effects.watch()
        follow_json()
        run(SharedRehearsal(process, size))
    except BaseException as error:
        process.give_up(f"{type(error).__name__}: {error}")
    process.end()
