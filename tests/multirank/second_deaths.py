"""Deaths while ranks regroup: at each step of `shrink`, `grow` and `replace`, on each rank, and at random moments.

    python tests/multirank/second_deaths.py [--call shrink] [--ranks 4] [--at notify:2,meet:1] [--soak 40]

The processes are forks of this one, so that hundreds of jobs take minutes. One rank ends by SIGKILL at a step, before
or after a call of a function of the regrouping. The steps are numbered, or numbered by function with `--at`. The other
ranks go on as in docs/guide/elastic.md, until all of them are one group with the right results.
"""

import argparse
import collections
import contextlib
import itertools
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy

import gpucoll as gc
from gpucoll.communicator import elastic, links
from gpucoll.communicator.metadata import MetadataExchange
from gpucoll.executors.engine import NodeEngine
from gpucoll.executors.engine.neighbours import NodeRanks
from gpucoll.launch import bootstrap, launchers, regroup
from gpucoll.transport import kvstore, mailbox, ports

sys.path.insert(0, str(Path(__file__).parents[1]))  # the rooms of the tests

from harness.pace import seconds

# The functions whose calls count as steps, with a step before and a step after the call.
STEPS = [(elastic, "_give_up"), (regroup, "survivors"), (regroup, "grown"), (ports, "apply"),
         (regroup, "_invite"), (regroup, "_place_of"), (kvstore.StoreServer, "take"), (links, "offer"),
         (links, "membership"), (mailbox.StoreRanks, "allgather"), (bootstrap, "check_alike"), (NodeEngine, "meet"),
         (NodeRanks, "_try"), (MetadataExchange, "all_gather"), (mailbox.StoreMessages, "Isend"),
         (kvstore.MemoryStore, "set"), (kvstore.StoreClient, "set")]
FAILURES = gc.RankFailedError, gc.RevokedError


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Counts the steps of this process while armed, and ends the process at step `last`."""

    def __init__(self, last):
        self.last, self.count, self.armed = last, collections.Counter(), False
        for owner, name in STEPS:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call):
        def counted(*given, **more):
            self.next(call.__name__)
            result = call(*given, **more)
            self.next(call.__name__)
            return result

        return counted

    def next(self, name):
        if self.armed and threading.current_thread() is threading.main_thread():
            for one in ("", name):
                self.count[one] += 1
                if self.last == f"{one}:{self.count[one]}":
                    die()

    @contextlib.contextmanager
    def here(self):
        self.armed = True
        try:
            yield
        finally:
            self.armed = False


def checked(comm, was, dies):
    """Make calls with known results, in a group without the rank `dies`; return its ranks by their first numbers."""
    while True:
        for turn in range(3):
            mine = numpy.arange(5) * (was + 1) + turn
            rows = comm.all_gather(mine)
            assert (rows[comm.rank] == mine).all()
            assert (comm.all_reduce(mine) == rows.sum(0)).all()
        everyone = comm.all_gather(numpy.array([was])).ravel().tolist()
        comm.barrier()
        if dies not in everyone:
            return everyone


def go_on(comm, regroup, steps, was, dies=None):
    """Regroup until all ranks have made their calls in one group, without the rank `dies`.

    Returns the communicator of the group, its ranks, and where errors were raised.
    """
    raised = []
    while True:
        here = regroup.__name__
        try:
            # Of newcomers that died before the leader counted them, none is left: the old group goes on.
            with steps.here(), contextlib.suppress(*[gc.CollectiveTimeout] * (here == "grow")):
                comm = regroup(comm)
            here = "call"
            return comm, checked(comm, was, dies), raised
        except FAILURES as error:
            if type(error) not in FAILURES:
                raise
            raised.append(here)
            if here == "grow":
                regroup = shrink


def shrink(comm):
    return comm.shrink()


def replace(comm):
    return comm.replace(seconds(30))


def grow(comm):
    return comm.grow(comm.size + 1, seconds(10))


CALLS = {"shrink": shrink, "replace": replace, "grow": grow}


def member(place, rank, size, first, steps, call, dies, delay):
    comm = gc.init(store=place, rank=rank, size=size, timeout=seconds(20))
    with contextlib.suppress(*FAILURES):
        comm.all_reduce(numpy.arange(1000))
        if rank == first:
            die()
        while first >= 0:
            comm.all_reduce(numpy.arange(1000))
    if rank == dies:
        threading.Timer(delay, die).start()
    return go_on(comm, CALLS[call], steps, rank, dies)


def newcomer(place, was, steps, call, dies):
    with steps.here():
        comm = gc.join(place, seconds(60))
    try:
        return comm, checked(comm, was, dies), []
    except FAILURES:
        return go_on(comm, shrink if call == "grow" else replace, steps, was, dies)


def fork(run):
    """Run a function in a child; return its process number and the pipe with the result in JSON."""
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(writes)
        return process, reads
    try:
        os.close(reads)
        said = run()
    except BaseException:
        said = {"error": traceback.format_exc()[-2000:]}
    os.write(writes, json.dumps(said).encode())
    os._exit(0)


def job(size, first, victim, last, call="shrink", delay=None, newcomers=0):
    """Return the results of a job's ranks, by rank or by name of newcomer; None of a dead rank."""
    os.environ["GPUCOLL_SECRET"] = "s"
    place = f"tcp://127.0.0.1:{launchers.free_port()}"

    def run(who):
        steps = Steps(last if who == victim else 0)
        began = time.monotonic()
        dies = None if delay is None else victim
        comm, everyone, raised = newcomer(place, who, steps, call, dies) if who >= 100 else member(
            place, who, size, first, steps, call, dies, delay)
        took = time.monotonic() - began
        rank = comm.rank
        comm.close()  # not before the others have made their last call
        return {"rank": rank, "all": everyone, "raised": raised, "steps": steps.count[""], "seconds": took}

    who = [*range(size), *range(100, 100 + newcomers)]
    children = {one: fork(lambda one=one: run(one)) for one in who}
    said, late = {}, time.monotonic() + seconds(90)
    open_pipes = dict(children)
    while open_pipes and time.monotonic() < late and not is_over(said, size, call):
        ready, _, _ = select.select([pipe for _, pipe in open_pipes.values()], [], [], 1)
        for one, (_, pipe) in [*open_pipes.items()]:
            if pipe in ready:
                text = os.read(pipe, 1 << 16)
                said[one] = json.loads(text) if text else None
                del open_pipes[one]
    for process, pipe in children.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(pipe)
    for one in open_pipes:
        if not is_over(said, size, call):
            said[one] = {"error": "late"}
    return said


def is_over(said, size, call):
    """Return whether all members have ended, and all ranks of their last group; other newcomers may wait for ever."""
    if not said.keys() >= {*range(size)}:
        return False
    living = [found for found in said.values() if found is not None and "error" not in found]
    return {one for found in living for one in found["all"]} <= said.keys() and (
        call != "replace" or len(living) >= size)


def judged(said, size, call):
    """Return the fault of a job, "" for none: the living ranks are one group with the right results."""
    living = {one: found for one, found in said.items() if found is not None}
    for one, found in living.items():
        if "error" in found:
            return f"rank {one}: {found['error']}"
    groups = {tuple(found["all"]) for found in living.values()}
    if len(groups) != 1:
        return f"groups {groups}"
    (group,) = groups
    if call == "grow" and sorted(one for one in living if one < 100) != sorted(one for one in group if one < 100):
        return f"group {group} of {sorted(living)}"
    if call == "shrink" and list(group) != sorted(living):
        return f"group {group} of {sorted(living)}"
    if call == "replace" and (len(group) != size or sorted(group) != sorted(living)
                              or any(one < 100 and group[one] != one for one in group)):
        return f"group {group} of {sorted(living)}"
    if [living[one]["rank"] for one in group] != [*range(len(group))]:
        return "numbers"
    return ""


def found(given, first, victim, last=None, delay=None):
    """Return the fault of a job, and whether the victim has died; print a line."""
    began = time.monotonic()
    said = job(given.ranks, first, victim, last, given.call, delay, {"replace": 3, "grow": 1, "shrink": 0}[given.call])
    has_died = said.get(victim) is None
    wrong = judged(said, given.ranks, given.call)
    raised = {one: told["raised"] for one, told in said.items() if told and told.get("raised")}
    print(f"{given.call}, rank {first} dead, rank {victim} at {last or delay}, {time.monotonic() - began:.1f} s:",
          wrong or "goes on", raised or "", flush=True)
    return wrong, has_died


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--call", default="shrink", choices=CALLS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--first", type=int, help="the rank that is dead before; -1 for none")
    parser.add_argument("--victim", type=int)
    parser.add_argument("--at", type=lambda text: text.split(","), default=[])
    parser.add_argument("--soak", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    draw, outcomes = random.Random(given.seed), []
    firsts = [-1] if given.call == "grow" else [given.ranks - 1, 0]
    for _ in range(given.soak):
        first, victim = draw.sample(range(given.ranks), 2)
        outcomes.append(found(given, -1 if given.call == "grow" else first, victim, delay=draw.uniform(0, 0.25)))
    for first in [] if given.soak else firsts if given.first is None else [given.first]:
        victims = [one for one in range(given.ranks) if one != first] + [100] * (given.call != "shrink")
        for victim in victims if given.victim is None else [given.victim]:
            for step in given.at or (f":{number}" for number in itertools.count(1)):
                outcomes.append(found(given, first, victim, step))
                if not outcomes[-1][1]:
                    break  # this rank has fewer steps
    wrong = sum(bool(wrong) for wrong, _ in outcomes)
    died = sum(has_died for _, has_died in outcomes)
    print(f"{len(outcomes)} jobs, {died} second deaths: the survivors go on in {len(outcomes) - wrong}")
    return wrong > 0 or (bool(given.at) and died < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
