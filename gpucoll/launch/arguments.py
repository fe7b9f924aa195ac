"""Command lines under mpiexec: help and errors once, from rank 0; the exit code from every rank."""

from __future__ import annotations

import argparse
import os
import sys
from typing import NoReturn

from gpucoll.launch.launchers import launched
from gpucoll.transport.rendezvous import wait_for_all

PATIENCE = 10.0  # seconds that a rank which refuses waits for the others to refuse as well


def refuse(program: str, message: str) -> NoReturn:
    """End with exit code 2; rank 0 says why, in one line."""
    size, rank = launched()
    if rank == 0:
        sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
        sys.stderr.flush()
    if size > 1:  # a launcher that sees one rank leave with an error ends those that have not spoken yet
        from mpi4py import MPI

        if not wait_for_all(MPI.COMM_WORLD, PATIENCE):
            os._exit(2)  # the others go on: leaving by way of MPI would wait for them
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and whose help is printed by rank 0 only."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line."""
        refuse(self.prog, message)

    def print_help(self, file: object = None) -> None:
        """Print the help, once."""
        if launched()[1] == 0:
            super().print_help()


def size_range(text: str) -> list[int]:
    """Return the numbers of a list of numbers and ranges; ArgumentTypeError for anything else.

    >>> size_range("1..4,8")
    [1, 2, 3, 4, 8]
    """
    try:
        parts = [[int(end) for end in part.split("..")] for part in text.split(",")]
        sizes = [size for part in parts for size in range(part[0], part[-1] + 1)]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or any(len(part) > 2 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of sizes such as 1..64 or 2,4,8")
    return sizes
