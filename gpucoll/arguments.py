"""Command lines under mpiexec: help and errors once, from rank 0; the exit code from every rank."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

# The launchers' names for a rank, known before MPI starts.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")


def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the rank that the launcher gave this process; 0 without a launcher.

    >>> launched_rank({"PMI_RANK": "3"})
    3
    """
    return next((int(environment[name]) for name in RANKS if environment.get(name, "").isdigit()), 0)


def refuse(program: str, message: str) -> NoReturn:
    """End with exit code 2; rank 0 says why, in one line."""
    if launched_rank() == 0:
        sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
    raise SystemExit(2)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, and whose help is printed by rank 0 only."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2 and one line."""
        refuse(self.prog, message)

    def print_help(self, file: object = None) -> None:
        """Print the help, once."""
        if launched_rank() == 0:
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
