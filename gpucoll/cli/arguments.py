"""Command lines under mpiexec: rank 0 prints help and errors once, every rank ends with the exit code."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable
from typing import NoReturn

from gpucoll.core.output import say
from gpucoll.launch.launchers import RUN, launched
from gpucoll.transport.rendezvous import wait_for_all

CEILING = 1 << 20  # the most ranks, processes or repetitions that an option accepts
ALONE = 1.0  # seconds for rank 0 to print, and to end a job without MPI
REFUSAL_TIMEOUT = 10.0  # seconds for which a refusing rank waits for the other ranks to refuse as well


def refuse(program: str, message: str) -> NoReturn:
    """End this process with exit code 2, after rank 0 has printed the message in a line. A collective call."""
    size, rank = launched()
    if rank == 0:
        say(f"{program}: {' '.join(message.split())}\n")
    # Leave together: a launcher that sees a rank end with an error kills the others, perhaps before rank 0 has printed.
    if size > 1 and RUN in os.environ:
        time.sleep(ALONE if rank else 0.0)
    elif size > 1:
        from mpi4py import MPI

        if not wait_for_all(MPI.COMM_WORLD, REFUSAL_TIMEOUT):
            os._exit(2)  # the other ranks go on, and MPI's end, run by a normal exit, would wait for them
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with errors of one line, and with errors and help printed by rank 0 only."""

    def error(self, message: str) -> NoReturn:
        refuse(self.prog, message)

    def print_help(self, file: object = None) -> None:
        if launched()[1] == 0:
            super().print_help()


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers in `least`..`CEILING`; the parser raises ArgumentTypeError otherwise."""

    def number(text: str) -> int:
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII) or not least <= int(text) <= CEILING:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}, at most {CEILING}")
        return int(text)

    return number


def size_range(text: str) -> list[int]:
    """Return the numbers, from 1 to `CEILING`, in a list of numbers and ranges; ArgumentTypeError otherwise.

    >>> size_range("1..4,8")
    [1, 2, 3, 4, 8]
    """
    try:
        parts = [[at_least(1)(end) for end in part.split("..")] for part in text.split(",")]
    except argparse.ArgumentTypeError:
        parts = [[]]
    if not all(len(part) in (1, 2) and part[0] <= part[-1] for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes such as 1..64 or 2,4,8, at most {CEILING}")
    return [size for part in parts for size in range(part[0], part[-1] + 1)]
