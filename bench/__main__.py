"""`python -m gpucoll.bench COLLECTIVE ...` and `gpucoll bench`: measure a collective, under mpiexec."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import gpucoll
from gpucoll.arguments import refuse

from .arguments import PROGRAM, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the bench; return its exit code: 0, or 1 for wrong results. Wrong arguments end the process with 2."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        with gpucoll.init(executor=options.executor) as comm:
            from .run import run  # starts MPI, which wrong arguments should not

            return run(comm, options)
    except (gpucoll.ArgumentError, gpucoll.DtypeError, gpucoll.UsageError) as error:  # alike on every rank
        refuse(PROGRAM, str(error))


if __name__ == "__main__":
    sys.exit(main())
