"""`python -m gpucoll.bench TEST ...` and `gpucoll bench`: measure collectives, under mpiexec.

`regret` in place of a test judges what `auto` chooses; `report` makes a page.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import gpucoll
from gpucoll.launch.arguments import refuse

from .arguments import PROGRAM, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return its exit code.

    0, or 1 where data were wrong, the bandwidth was below --min-bw, or something became slower than --compare has it.
    Wrong arguments end the process with 2, Ctrl-C with 130.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["report"], ["regret"]):
        return int(importlib.import_module(f".{given[0]}", __package__).main(given[1:]))
    flags = (options := parse(given)).flags
    if flags.device == "emulated":
        os.environ["GPUCOLL_DEVICE"] = "emulated"  # read by the communicator that is made next
    try:
        with gpucoll.init(executor=flags.executor, timeout=flags.timeout or None) as comm:
            from .interrupt import watched
            from .run import Run  # starts MPI, which wrong arguments should not

            run = Run(comm, options, given)
            with watched(comm.rank, lambda: run.finish(interrupted=True)):
                run.measure()
                return run.finish()
    except (gpucoll.ArgumentError, gpucoll.DtypeError, gpucoll.UsageError, gpucoll.BackendError) as error:
        refuse(PROGRAM, str(error))  # alike on every rank


if __name__ == "__main__":
    sys.exit(main())
