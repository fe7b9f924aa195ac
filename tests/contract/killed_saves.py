"""Saves of a checkpoint, each in a process killed after a number of lines: `python -m contract.killed_saves`.

A line of standard input asks for a save: JSON of lines, folder and functions. The answer is a line: whether the save
ended before. For seconds in place of lines, and a number in place of functions, see `killed_at`. A process of its own
forks the saving processes, because it has a single thread: a process forked from a test's process inherits the locks
held there by other threads, and could wait for ever.
"""

import itertools
import json
import os
import signal
import sys
import threading
import time

import numpy

from gpucoll import training
from gpucoll.training import checkpoint
from harness.thread_ranks import on_threads

RANKS = 2


def saved(comm, folder, value, watch=None):
    """Save parameters with all elements equal to `value`."""
    trainer = training.ZeRO({"w": numpy.full((30, 7), value), "b": numpy.full(11, value)}, comm, training.Adam(), 2)
    comm.barrier()
    if watch is not None:
        watch()
    trainer.save(folder)


def killed_after(lines, folder, functions):
    """Save in a forked process, killed after `lines` lines of checkpoint.py; return whether the save ended before.

    Only lines of `functions` count, or all lines for no functions.
    """
    child = os.fork()
    if child == 0:
        left, lock = [lines], threading.Lock()

        def trace(frame, event, argument):
            if event == "line" and (not functions or frame.f_code.co_name in functions):
                with lock:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            return trace if frame.f_code.co_filename == checkpoint.__file__ else None

        def watch():
            threading.settrace(trace)  # for the writing threads
            sys.settrace(trace)

        try:
            on_threads(RANKS, saved, folder, 2.0, watch)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFEXITED(status)


def killed_at(seconds, folder, value):
    """Save larger and larger numbers than `value` in a forked process, killed after some time; return the last saved.
    """
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for more in itertools.count(value + 1):
                on_threads(RANKS, saved, folder, more)
                os.write(here, b".")
        finally:
            os._exit(1)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.close(here)
    with open(there, "rb") as file:
        value += len(file.read())
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    return value


def main():
    for line in sys.stdin:
        place, *rest = json.loads(line)
        print(json.dumps((killed_at if isinstance(place, float) else killed_after)(place, *rest)), flush=True)


if __name__ == "__main__":
    main()
