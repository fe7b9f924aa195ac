"""`python -m gpucoll.bench TEST ...` and `gpucoll bench`: measure collectives, under mpiexec.

With `report` instead of a test, make a page.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import gpucoll
from gpucoll.cli.arguments import refuse

from .arguments import BENCH_COMMAND, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code.

    The code is 0, or 1 if data were wrong, if the bandwidth was below --min-bw, or if a figure became slower than in
    the file of --compare. Wrong arguments end the process with code 2, Ctrl-C with 130.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["report"]:
        from .report import main as report

        return report(given[1:])
    flags = (options := parse(given)).flags
    if flags.device == "emulated":
        os.environ["GPUCOLL_DEVICE"] = "emulated"  # read by the next communicator
    try:
        with gpucoll.init(executor=flags.executor, timeout=flags.timeout or None) as comm:
            from .interrupt import watched
            from .run import Run  # the import starts MPI: wrong arguments have ended the process before

            run = Run(comm, options, given)
            with watched(comm.rank, lambda: run.finish(interrupted=True)):
                run.measure()
                return run.finish()
    except (gpucoll.ArgumentError, gpucoll.DtypeError, gpucoll.UsageError, gpucoll.BackendError) as error:
        refuse(BENCH_COMMAND, str(error))  # the same error on every rank


if __name__ == "__main__":
    sys.exit(main())
