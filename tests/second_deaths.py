"""Deaths while ranks regroup: every step of `shrink`, `grow` and `replace`, on every rank, and deaths at random moments.

    python tests/second_deaths.py [--call shrink] [--ranks 4] [--soak 40]

The processes are forked by this one, so that hundreds of jobs take minutes. A rank ends itself by SIGKILL before or
after the n-th call of a function of the regrouping. The others go on as docs/guide/elastic.md shows, until all of them
are one group with the right results.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time

import numpy

import gpucoll as gc
from gpucoll.communicator import elastic, links
from gpucoll.communicator.metadata import MetadataExchange
from gpucoll.executors.engine import EngineExecutor
from gpucoll.executors.engine.neighbours import NodeRanks
from gpucoll.launch import bootstrap, launchers, regroup
from gpucoll.transport import applicants, kvstore, mailbox
from pace import seconds

# The functions whose calls count as steps, each with a step before and one after it.
STEPS = [(elastic, "_give_up"), (regroup, "survivors"), (regroup, "grown"), (regroup, "ask"), (regroup, "_invite"),
         (regroup, "host_store"), (regroup, "reach_store"), (regroup, "_await_arrivals"), (regroup, "place_of"),
         (applicants.Applicant, "notify"), (links, "offer"), (links, "membership"), (mailbox.StoreRanks, "allgather"),
         (bootstrap, "check_alike"), (EngineExecutor, "meet"), (NodeRanks, "_try"), (MetadataExchange, "all_gather"),
         (mailbox.StoreMessages, "Isend"), (kvstore.MemoryStore, "set"), (kvstore.StoreClient, "set")]
FAILURES = gc.RankFailedError, gc.RevokedError


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Steps:
    """Counts the steps of this process while armed, and ends the process at step `last`."""

    def __init__(self, last):
        self.last, self.count, self.armed = last, 0, False
        for owner, name in STEPS:
            setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, call):
        def counted(*given, **more):
            self.next()
            result = call(*given, **more)
            self.next()
            return result

        return counted

    def next(self):
        if self.armed and threading.current_thread() is threading.main_thread():
            self.count += 1
            if self.count == self.last:
                die()

    @contextlib.contextmanager
    def here(self):
        self.armed = True
        try:
            yield
        finally:
            self.armed = False


def go_on(comm, steps, call, was):
    """Make calls until all ranks have made them in one group; return the group and what each call of `call` raised."""
    raised, failed = [], True
    while True:
        try:
            if failed:
                with steps.here():
                    comm = comm.shrink() if call == "shrink" else comm.replace(seconds(30))
                failed = False
            for turn in range(3):
                mine = numpy.arange(5) * (was + 1) + turn
                rows = comm.all_gather(mine)
                assert (comm.all_reduce(mine) == rows.sum(0)).all()
            everyone = comm.all_gather(numpy.array([was])).ravel().tolist()
            comm.barrier()
            return comm, everyone, raised
        except FAILURES as error:
            raised.append("call" if not failed else call)
            failed = True
            assert type(error) in FAILURES, repr(error)


def member(place, rank, size, first, steps, call, delay):
    comm = gc.init(store=place, rank=rank, size=size, timeout=seconds(20))
    with contextlib.suppress(*FAILURES):
        comm.all_reduce(numpy.arange(1000))
        if rank == first:
            die()
        while True:
            comm.all_reduce(numpy.arange(1000))
    if delay is not None:
        threading.Timer(delay, die).start()
    return go_on(comm, steps, call, rank)


def newcomer(place, number, steps):
    with steps.here():
        comm = gc.join(place, seconds(30))
    was = 100 + number
    try:
        return go_on_after(comm, steps, was)
    except FAILURES:
        return go_on(comm, steps, "replace", was)


def go_on_after(comm, steps, was):
    for turn in range(3):
        mine = numpy.arange(5) * (was + 1) + turn
        rows = comm.all_gather(mine)
        assert (comm.all_reduce(mine) == rows.sum(0)).all()
    everyone = comm.all_gather(numpy.array([was])).ravel().tolist()
    comm.barrier()
    return comm, everyone, []


def fork(run):
    """Run a function in a child; return its process number and the pipe with what it says in JSON."""
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(writes)
        return process, reads
    try:
        os.close(reads)
        said = run()
    except BaseException as error:
        import traceback
        said = {"error": traceback.format_exc()[-2000:]}
    os.write(writes, json.dumps(said).encode())
    os._exit(0)


def job(size, first, victim, last, call="shrink", delay=None, newcomers=0):
    """Return what the ranks of a job said, by rank or by name of newcomer; None of a rank that has died."""
    os.environ["GPUCOLL_SECRET"] = "s"
    place = f"tcp://127.0.0.1:{launchers.free_port()}"

    def run(who):
        steps = Steps(last if who == victim else 0)
        began = time.monotonic()
        comm, everyone, raised = newcomer(place, who - 100, steps) if who >= 100 else member(
            place, who, size, first, steps, call, delay if who == victim else None)
        took = time.monotonic() - began
        rank = comm.rank
        comm.close()  # not before the others have made their last call
        return {"rank": rank, "all": everyone, "raised": raised, "steps": steps.count, "seconds": took}

    who = [*range(size), *range(100, 100 + newcomers)]
    children = {one: fork(lambda one=one: run(one)) for one in who}
    said, late = {}, time.monotonic() + seconds(90)
    open_pipes = dict(children)
    needed = size - (first >= 0) - (victim is not None and last is not None or delay is not None)
    if newcomers:
        needed = size
    while open_pipes and time.monotonic() < late:
        import select
        ready, _, _ = select.select([pipe for _, pipe in open_pipes.values()], [], [], 1)
        for one, (process, pipe) in [*open_pipes.items()]:
            if pipe in ready:
                text = os.read(pipe, 1 << 16)
                said[one] = json.loads(text) if text else None
                del open_pipes[one]
        if newcomers and sum(one is not None for one in said.values()) >= needed:
            break
    for one, (process, pipe) in children.items():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(pipe)
    for one in open_pipes:
        if one < 100:
            said[one] = {"error": "late"}
    return said


def judged(said, size, first, call):
    """Return what is wrong with a job, "" if nothing is: the living ranks are one group with the right results."""
    living = {one: found for one, found in said.items() if found is not None}
    for one, found in living.items():
        if "error" in found:
            return f"rank {one}: {found['error']}"
    groups = {tuple(found["all"]) for found in living.values()}
    if len(groups) != 1:
        return f"groups {groups}"
    (group,) = groups
    if call == "shrink" and list(group) != sorted(living):
        return f"group {group} of {sorted(living)}"
    if call == "replace" and (len(group) != size or sorted(group) != sorted(living)
                              or any(one < 100 and group[one] != one for one in group)):
        return f"group {group} of {sorted(living)}"
    if [living[one]["rank"] for one in group] != [*range(len(group))]:
        return "numbers"
    return ""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--call", default="shrink")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--soak", type=int, default=0)
    parser.add_argument("--first", type=int, default=None)
    parser.add_argument("--victim", type=int, default=None)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--begin", type=int, default=1)
    parser.add_argument("--seed", type=int, default=7)
    given = parser.parse_args()
    bad = jobs = returned = 0
    slowest = 0.0
    newcomers = 3 if given.call == "replace" else 0
    draw = random.Random(given.seed)
    if given.soak:
        for number in range(given.soak):
            first, victim = draw.sample(range(given.ranks), 2)
            delay = draw.uniform(0, 0.25)
            said = job(given.ranks, first, victim, None, given.call, delay, newcomers)
            wrong = judged(said, given.ranks, first, given.call)
            bad += bool(wrong)
            print(number, first, victim, f"{delay:.3f}", wrong or "goes on",
                  {one: found and (found["raised"], round(found["seconds"], 2)) for one, found in said.items()
                   if found and "error" not in found}, flush=True)
        print(f"{given.soak - bad} of {given.soak}: the survivors go on")
        return bad
    last_rank = given.ranks - 1
    for first in [last_rank, 0] if given.first is None else [given.first]:
        victims = [one for one in range(given.ranks) if one != first] + ([100] if newcomers else [])
        for victim in victims if given.victim is None else [given.victim]:
            step = given.begin
            while True:
                began = time.monotonic()
                said = job(given.ranks, first, victim, step, given.call, None, newcomers)
                if said.get(victim) is not None and "error" not in said[victim]:
                    break  # the victim has fewer steps
                wrong = judged(said, given.ranks, first, given.call)
                jobs += 1
                bad += bool(wrong)
                took = time.monotonic() - began
                slowest = max(slowest, took)
                raised = [found["raised"] for found in said.values() if found and found.get("raised")]
                returned += bool(raised)
                if wrong or took > 5:
                    print(f"first {first} victim {victim} step {step} {took:.1f} s:", wrong or "ok", raised, flush=True)
                step += given.stride
            print(f"first {first} victim {victim}: {step} steps, so far {bad} of {jobs} bad, "
                  f"{returned} with an error of a call, slowest {slowest:.1f} s", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main() > 0)
