"""Checks of the peer kernels: for each fault of planted.diff, the check that it names must fail.

`python mutants.py CHECK [RACE]` runs a single check under ThreadSanitizer, which the caller preloads.
"""

import contextlib
import functools
import sys
from pathlib import Path

import numpy

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from faults import tables
from gpucoll.core.dtypes import DTYPES
from gpucoll.core.ops import OPS
from gpucoll.device import sources
from gpucoll.executors.peer.tables import Places, Room
from peer import direct, schedules
from peer.schedules import Case, Swap, Turn
from peer.world import Fault, World, library, placed, watched

OP, NAME = "sum", "int32"
NOTICED = (AssertionError, Fault)
SEEDS = range(3)  # orders of the threads
MOST_SEEDS = range(9)  # the fourth order is the first to notice the single buffer of ll128
# One-way traffic between two operations in packets: the sender does not wait for the receiver.
ONE_WAY = Case("broadcast", "chain", 3, 20, segments=2)
ONE_WAY_RANKS = schedules.ranks_of(ONE_WAY, 2)
DIRECT = direct.instances(OP, NAME)
SWITCH = (*DIRECT, *direct.instances(OP, NAME, ["multimem_share"]))
GATHER = (sources.instance("multimem_gather", 4),)
FLOATS = direct.instances(OP, "float32")
STEPS = sources.reducing("steps", OPS[OP], DTYPES[NAME]), sources.reducing("steps", None, DTYPES[NAME])
IN_PACKETS = [row for row in direct.SCRIPT if row[0] in sources.IN_PACKETS]  # rows of the script


def check_direct(libraries, seed=0, **options):
    """Small all-reduces back to back, in memory shared by all, some or no ranks."""
    direct.run(libraries, OP, NAME, ranks=3, seed=seed, **options)


def check_sections(libraries, seed=0):
    """Arrays longer than the staging buffer, staged in sections."""
    check_direct(libraries, seed, count=100, sections=3)


def check_askew(libraries, seed=0):
    """Sections of misaligned arrays: a thread stages an element, and another thread takes the result."""
    direct.run(libraries, OP, NAME, ranks=2, count=200, sections=5, misaligned=4, threads=8, seed=seed)


def check_groups(libraries, seed=0):
    """Four and eight sources, in whole groups, and a further source outside of the groups."""
    for ranks in (4, 5, 8, 9):
        direct.run(libraries, OP, NAME, ranks=ranks, seed=seed)


def check_order(libraries, seed=0):
    """Sums with last bits depending on the order of summation."""
    direct.run(libraries, OP, "float32", ranks=3, count=300, seed=seed, script=IN_PACKETS)


def check_few_blocks(libraries, seed=0):
    """Not all blocks of a rank under way at once, in an unknown order: the last begin after the end of the first."""
    for blocks, residency in ((3, 1), (5, 2), (16, 14)):
        check_direct(libraries, seed, blocks=blocks, residency=residency)


def check_steps(libraries, seed=0, **options):
    """Reductions and copies in many pieces, operations back to back, on few slots."""
    schedules.run(libraries, Case("all_reduce", "ring", 3, 67, segments=2), ONE_WAY,
                       Case("all_reduce", "recursive_doubling", 3, 50), Case("all_gather", "bruck", 3, 33),
                       Case("all_reduce", "one_shot", 3, 30), seed=seed, **options)


def check_one_way(libraries, seed=0):
    """Gathers with many senders and a root slower than the senders."""
    schedules.run(libraries, Case("gather", "linear", 5, 90), Case("gather", "linear", 5, 40, root=2), seed=seed)


def check_local(libraries, seed=0):
    """Chunks with lengths of partial words, copied inside a rank and exchanged between two ranks."""
    schedules.run(libraries, Swap(2, 58), Turn(2, 58), seed=seed, threads=8)


def check_between(libraries, seed=0):
    """All-reduces in packets, with broadcasts in between."""
    direct.run(libraries, OP, NAME, ranks=3, count=20, seed=seed, script=IN_PACKETS,
               between=lambda world, rank: ONE_WAY_RANKS[rank].launch(world, ONE_WAY, rank, 2, 4))


def check_tiles(libraries, seed=0):
    """All-reduces in packets of more words than a tile, or a group, holds, by one group of threads and by several."""
    direct.run(libraries, OP, NAME, ranks=3, count=300, seed=seed, script=IN_PACKETS)
    direct.run(libraries, OP, NAME, ranks=6, count=127, seed=seed, script=IN_PACKETS, threads=16, blocks=1)


def check_numbers(libraries, seed=0):
    """Data equal to the number of a later operation, in the buffer of this operation."""
    script = [("ll128", "a", "d", False), ("packets", "b", "e", False), ("packets", "c", "f", False)]
    direct.run(libraries, OP, NAME, ranks=3, count=300, seed=seed, script=script, filled={"a": 3})


def check_numbers_again(libraries, seed=0):
    """All-reduces around the number 2^32, where packets have come with the same 32 bits, or memory is unwritten."""
    for epoch in (2**32 - 2, 2**33 + 4):
        check_direct(libraries, seed, epoch=epoch, count=300, blocks=1 + seed % 3, script=IN_PACKETS)


def check_switch(libraries, seed=0):
    """All-reduces by the switch among other all-reduces, in one or several sections."""
    run = functools.partial(direct.run, libraries, OP, NAME, seed=seed, script=direct.SWITCHED)
    run(ranks=3)
    run(ranks=4, count=131, sections=3, threads=8)
    run(ranks=2, count=70, sections=2, misaligned=4)


def check_gather(libraries, seed=0):
    """All-gathers by the switch, in one or several sections."""
    for ranks, count, sections in ((2, 7, 1), (3, 100, 3), (5, 33, 2)):
        direct.gather(libraries, ranks=ranks, count=count, sections=sections, seed=seed)
    direct.gather(libraries, ranks=3, count=50, sections=2, misaligned=4, threads=8, seed=seed)


GONE = 2**64 - 1


def check_late(libraries, seed=0):
    """A rank giving up leaves GONE for its peers; a late rank then writes nothing into the result of the first rank."""
    for late in (False, True):
        world = World(Room(2, 1, packets=64, ll128=64, slot=32, staging=64), libraries, seed=seed, patience=1e-3)
        rows = [placed(numpy.arange(16, dtype=NAME)) for _ in range(4)]
        sources, results = (Places(7, [row.ctypes.data for row in rows[first::2]]) for first in (0, 1))
        lines = [slab[world.room.offsets["lines"]:].view(numpy.uint64) for slab in world.slabs]
        if late:
            lines[1][0] = GONE  # of rank 0
        ends = sources.addresses[late], results.addresses[late]
        world.launch(int(late), DIRECT[3].entry, world.heaps[late].shots(*ends, 16, sources, results), 1, 4)
        with contextlib.suppress(Fault):
            world.run()
            raise AssertionError("nobody was missing")
        assert (rows[1] == numpy.arange(16)).all()
        assert int(world.controls[late]["peer"]) == 1 - late
        assert lines[1][0] == GONE


MUTANTS = tables.of_kinds("peer")
RACES = tables.of_kinds("race")  # without effect on x86, found by ThreadSanitizer
# SPIN models, with macros planting faults, and whether the model must hold.
MODELS = [("packets.pml", True), ("packets.pml -DBUFFERS=1", False), ("packets.pml -DONE_WAY", False),
          ("packets.pml -DONE_WAY -DBUFFERS=3", False), ("credits.pml", True), ("credits.pml -DDEPTH=1", True),
          ("credits.pml -DONE_WAY", True), ("credits.pml -DONE_WAY -DNO_CREDIT", False),
          ("credits.pml -DIN_ORDER", False), ("tickets.pml", True), ("tickets.pml -DBY_INDEX", False),
          ("tickets.pml -DSTALE", False)]
NEEDED = {check_direct: DIRECT, check_tiles: DIRECT, check_numbers: DIRECT,
          check_numbers_again: DIRECT, check_late: DIRECT, check_sections: DIRECT,
          check_askew: DIRECT, check_groups: DIRECT, check_few_blocks: DIRECT, check_order: FLOATS,
          check_switch: SWITCH, check_gather: GATHER,
          check_between: (*DIRECT, *STEPS), check_steps: STEPS, check_one_way: STEPS, check_local: STEPS}


def check_of(fault):
    return globals()[fault.caught]


def changed(fault):
    """Return the source of the kernels needed by the check, with the fault planted."""
    return tables.changed(sources.text(*NEEDED[check_of(fault)]), fault.changes)


def is_noticed(fault):
    made = library(changed(fault))
    for seed in MOST_SEEDS:
        try:
            check_of(fault)((made, made), seed)
        except NOTICED:
            return True
    return False


def watch(check, race=None):
    """Run a check on sources with or without a race; a report of the sanitizer ends the process with its own code."""
    made = watched(changed(RACES[race]) if race else sources.text(*NEEDED[check]))
    for seed in SEEDS:
        try:
            check(made, seed)
        except NOTICED:
            if race is None:
                raise
    print("ended")


if __name__ == "__main__":
    watch(globals()[sys.argv[1]], *sys.argv[2:])
