"""One run: every size in turn, a line for each contestant, and what comes of them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Sequence

import mpi4py
import numpy
from mpi4py import MPI

import gpucoll
from gpucoll import Communicator

from . import table
from .arguments import Options
from .cases import Case, Contestant
from .contestants import contestants
from .data import Data
from .measure import measure


def run(comm: Communicator, options: Options) -> int:
    """Measure what `options` say; return 1 where a result was wrong, else 0. A collective call; rank 0 prints.

    Raises ArgumentError or DtypeError, alike on every rank and before anything is printed, where it cannot be done.
    """
    case = options.case(comm.size)
    found = contestants(comm, case, options)
    places = comm.mpi.allgather(table.Place(os.getpid(), socket.gethostname()))
    _say(comm, table.header(options, _versions(), places))
    by_size = [_measure_size(comm, case, options, found, nbytes) for nbytes in options.sizes]
    rows = [row for rows in by_size for row in rows]
    _say(comm, table.comparison("geomean", table.means([table.ratios(rows) for rows in by_size])))
    _say(comm, table.footer(rows))
    return 1 if any(row.wrong for row in rows) else 0


def _measure_size(comm: Communicator, case: Case, options: Options, found: Sequence[Contestant],
                  nbytes: int) -> list[table.Row]:
    count = case.count(nbytes)
    results = measure(comm, found, Data(case, comm.rank, count), options)
    rows = [table.row(case, count, contestant, result.median, result.wrong)
            for contestant, result in zip(found, results, strict=True)]
    _say(comm, [*map(table.line, rows), *table.comparison(rows[0].size, table.ratios(rows))])
    return rows


def _say(comm: Communicator, lines: Iterable[str]) -> None:
    """Print whole lines at once, on rank 0."""
    if comm.rank == 0:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def _versions() -> dict[str, str]:
    library = MPI.Get_library_version().splitlines()[0].partition(",")[0]
    name, _, version = " ".join(library.replace("Version:", "").split()).rpartition(" ")
    return {"gpucoll": gpucoll.__version__, name: version, "mpi4py": mpi4py.__version__, "NumPy": numpy.__version__}
