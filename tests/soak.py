"""Random programs in separate jobs, each with a failure: every rank must end, and nothing may be left behind.

    python tests/soak.py --minutes 30 [--seed 7] [--ranks 2,3,4]
    python tests/soak.py --replay 7/12

Every rank ends by success or by a typed error, in time, and holds the same resources as before. A rank failing alone
may end the job. Prints the number of jobs, and the deviations.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from pathlib import Path

from harness import jobs
from harness.pace import seconds

FAULTS = ("none", "sigkill", "sigstop", "raise", "delay", "exception", "caught", "exit", "_exit", "close", "thread")
BY_VARIABLE = ("sigkill", "sigstop", "raise", "delay")
ENDS_JOB = ("exception", "exit", "_exit", "thread", "sigkill", "sigstop")
# Names in /dev/shm left by other software after bad ends.
NOT_OURS = ("mpich_", "ucx_", "sm_segment", "vader_", "psm", "ompi", "osc_rdma", "sem.mp-")
TIMEOUT, STEPS = 3.0, 12  # seconds of the reference, for every wait; steps of a program
START = 30.0  # seconds of the reference, for starting and ending processes


class Deliberate(Exception):
    """Raised by a program on purpose."""


def drawn(name):
    chances = random.Random(name)
    return {"fault": chances.choice(FAULTS), "executor": chances.choice(("", "mpi", "native")),
            "culprit": chances.random(), "at": chances.randrange(1, STEPS), "seed": chances.getrandbits(32),
            "phase": chances.choice(("before", "after_send", "after"))}


# A rank


def goes_wrong(fault, comm):
    """Do the culprit's fault between two steps."""
    match fault:
        case "exception" | "caught":
            raise Deliberate
        case "exit":
            sys.exit(0)
        case "_exit":
            os._exit(3)
        case "close":
            comm.close()
        case "thread":
            threading.Thread(target=goes_wrong, args=("exception", comm)).start()
            signal.pause()


def rank(folder, name):
    """Run the program, and write the outcome: a word, the leftovers, and the time of the last step."""
    import gpucoll as gc
    import mixture

    case = drawn(name)
    chances, names = random.Random(case["seed"]), None
    if case["executor"] == "native":
        names = lambda collective: ["native", "auto"]  # noqa: E731
    comm = gc.init(timeout=seconds(TIMEOUT), executor=case["executor"] or None)
    number, is_culprit = comm.rank, comm.rank == int(case["culprit"] * comm.size)
    announce_death(Path(folder, f"{number}.victim"))
    before, came, began = resources(), "success", time.monotonic()
    try:
        comm.split(0).close()  # resources of a first call are kept
        before = resources()
        with comm.split(0) as part:
            varied = mixture.Varied(part)
            for step in range(STEPS):
                began = time.monotonic()
                if is_culprit and step == case["at"] and case["fault"] not in BY_VARIABLE:
                    goes_wrong(case["fault"], part)
                varied.run([mixture.step(chances.getrandbits(32), part.size, algorithms=names)])
            began = time.monotonic()
    except gc.GpucollError as error:
        came = type(error).__name__
    except Deliberate:
        if case["fault"] != "caught":
            raise
        came = "Deliberate"
    except Exception:
        came = traceback.format_exc()
    lasted = time.monotonic() - began
    varied = part = None
    after = resources()
    left = {key: after[key] - before[key] for key in after if key != "MiB" and after[key] > before[key]}
    write(folder, number, came, left if came == "success" else {}, lasted)
    end = time.monotonic() + 4 * TIMEOUT
    while case["fault"] in ENDS_JOB and len(told(folder)) < comm.size - 1 and time.monotonic() < end:
        time.sleep(0.01)  # the launcher may end all ranks after the first end


def resources():
    """Return the resources held by this process, without the thread of its join port.

    A rank that closes a communicator with a failed rank starts the thread, at most one in a process: the port tells
    ranks about to regroup that this rank has left.
    """
    import mixture

    held = mixture.held()
    return held | {"threads": held["threads"] - any(one.name == "gpucoll hub" for one in threading.enumerate())}


def announce_death(path):
    """Leave a file before each signal to this process: a fault by rank may stop several ranks, of different groups."""
    send = os.kill

    def kill(process, number):
        if process == os.getpid():
            path.touch()
        send(process, number)

    os.kill = kill


def write(folder, number, came, left, lasted):
    draft = Path(folder, f"{number}.draft")
    draft.write_text(json.dumps([came, left, lasted]))
    draft.rename(draft.with_suffix(".json"))


# The parent


def litter(folder):
    """Return gpucoll's files in shared memory and in the temporary folder."""
    shared = {path for path in os.listdir("/dev/shm") if not path.startswith(NOT_OURS)}
    return shared | {path.name for path in Path(folder).glob("gpucoll*")}


def once(name, size):
    """Run one job; return the deviations from the promises, the outcomes of the ranks, the output and the time."""
    case, launcher, token = drawn(name), jobs.require_launcher(), uuid.uuid4().hex
    culprit = int(case["culprit"] * size)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        variables = {**jobs.same_gpucoll(), "TMPDIR": folder, "GPUCOLL_DUMP_DIR": None}
        if case["fault"] in BY_VARIABLE:
            variables["GPUCOLL_FAULT"] = \
                f"rank:{culprit},seq:{2 * case['at']},phase:{case['phase']},do:{case['fault']}"
        before, began = litter(folder), time.monotonic()
        argv = [sys.executable, __file__, "--rank", folder, name]
        process = jobs.start_job(launcher.command(size, argv, launcher.vendor.keep_survivors), token, output,
                                 environment=variables)
        end, found = time.monotonic() + seconds(START + 4 * TIMEOUT), {}
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(jobs.subprocess.TimeoutExpired):
                process.wait(0.2)
            found = told(folder)
            if case["fault"] == "sigstop" and len(found) >= size - max(1, len(victims(folder))):
                break  # the stopped ranks would stay
        in_time, found, dead = process.poll() is not None or case["fault"] == "sigstop", told(folder), victims(folder)
        jobs.end_job(process, token)
        lasted, left = time.monotonic() - began, litter(folder) - before
        output.seek(0)
        said = output.read().decode(errors="replace")
    wrong = [*judged(case, size, dead | {culprit}, found, in_time), *(f"left: {one}" for one in left)]
    return wrong, found, said, lasted


def victims(folder):
    return {int(path.stem) for path in Path(folder).glob("*.victim")}


def told(folder):
    return {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("*.json") if path.stem.isdigit()}


def judged(case, size, culprits, found, in_time):
    if not in_time:
        yield f"ranks {sorted(set(range(size)) - set(found))} did not end"
    for number, (came, left, lasted) in found.items():
        if not came.isidentifier():
            yield f"rank {number} raised {came}"
        if left:
            yield f"rank {number} holds {left} more"
        if lasted > seconds(TIMEOUT + 2) + (1 if case["fault"] == "delay" else 0):
            yield f"rank {number} was told after {lasted:.1f} s"
        if case["fault"] in ("none", "delay") and came != "success":
            yield f"rank {number} ended by {came}, and nothing was wrong"
    missing = set(range(size)) - set(found)
    if case["fault"] == "sigkill" and not found and jobs.require_launcher().vendor.mark == "HYDRA":
        return  # MPICH's launcher sometimes ends all ranks, despite its options
    if missing - culprits and case["fault"] not in ("exception", "exit", "_exit", "thread"):
        yield f"ranks {sorted(missing)} have told nothing"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", default=str(time.time_ns() % 1000000))
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument("--replay", metavar="SEED/NUMBER")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank(*options.rank)
        return
    end, number, bad, ends = time.monotonic() + 60 * options.minutes, 0, 0, collections.Counter()
    while time.monotonic() < end and (number == 0 or not options.replay):
        name = options.replay or f"{options.seed}/{number}"
        size = int(random.Random(f"{name} ranks").choice(options.ranks.split(",")))
        wrong, found, said, lasted = once(name, size)
        number, bad = number + 1, bad + bool(wrong)
        ends.update((drawn(name)["fault"], came if came.isidentifier() else "raw") for came, _, _ in found.values())
        if wrong or options.replay:
            print(f"{name}: {size} ranks, {drawn(name)}, {lasted:.1f} s: {wrong}\n{found}{jobs.section('said', said)}",
                  flush=True)
    print(f"seed {options.seed}: {number} jobs, {bad} not as promised")
    for (fault, came), count in sorted(ends.items()):
        print(f"{count:6} ranks after {fault}: {came}")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
