"""One check of the peer kernels below ThreadSanitizer, which the process has: `python peer_races.py CHECK [RACE]`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import peer_mutants
from gpucoll.device import sources
from peer_world import watched

SEEDS = (0, 1, 2)


def main(check, race=None):
    run = getattr(peer_mutants, check)
    needed = sources.text(*peer_mutants.NEEDED[run])
    made = watched(needed if race is None else peer_mutants.changed(peer_mutants.RACES[race]))
    for seed in SEEDS:
        try:
            run(made, seed)
        except peer_mutants.NOTICED:
            if race is None:
                raise
    print("ended")


if __name__ == "__main__":
    main(*sys.argv[1:])
