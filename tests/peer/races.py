"""One check of the peer kernels below ThreadSanitizer, which the process has: `python races.py CHECK [RACE]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpucoll.device import sources
from peer import mutants
from peer.world import watched

SEEDS = (0, 1, 2)


def main(check, race=None):
    run = getattr(mutants, check)
    needed = sources.text(*mutants.NEEDED[run])
    made = watched(needed if race is None else mutants.changed(mutants.RACES[race]))
    for seed in SEEDS:
        try:
            run(made, seed)
        except mutants.NOTICED:
            if race is None:
                raise
    print("ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
