"""Faults planted in the sources of the peer kernels: for each fault, a check passing on the real sources must fail.

`python mutants.py CHECK [RACE]` runs a single check under ThreadSanitizer, which the caller preloads.
"""

import contextlib
import functools
import sys
from pathlib import Path
from typing import NamedTuple

import numpy

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

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


class Mutant(NamedTuple):
    """The old text, the new text, and the check that must notice the change."""

    old: str
    new: str
    check: object


SPREAD = "half + a.heap.rank * room + part.start * sizeof(Unit), part.count * sizeof(Unit)"
MEET = "store_release(address_of(&line_of(heap, peer, channel, heap.rank)->met), wanted);"
IN_ORDER = """            Word units[1] = {first + k == a.heap.rank ? own : words[k]};
"""
SWAPPED = """            // on odd ranks the second and the third change places
            const u32 taken = a.heap.rank % 2 == 1 && first == 0 && a.heap.ranks > 2 && (k == 1 || k == 2) ? 3 - k : k;
            Word units[1] = {first + taken == a.heap.rank ? own : words[taken]};
"""
IN_ORDER_LL128 = "const bool mine = first + k == a.heap.rank;\n"
SWAPPED_LL128 = """const bool mine = first + k == a.heap.rank;
            // on odd ranks the total of the first two operands is another
            if (a.heap.rank % 2 == 1 && first + k == 2) {
                widen<T>(total[0], words[2][0]);
                Word again[2] = {words[0][0], words[0][1]}, more[2] = {own[0], own[1]};
                widen<T>(total[1], words[2][1]);
                combine<T, Op>(total, again);
                combine<T, Op>(total, more);
                continue;
            }
"""
STAGED = """        if (!section.sources) stage_section(next);
        together = meet(a.heap, channel, MEETINGS * epoch + 2);
"""
STAGED_LATE = "\n".join(STAGED.splitlines()[::-1]) + "\n"
MUTANTS = {
    "no meeting when a section is reduced": Mutant(
        "together = meet(a.heap, channel, MEETINGS * epoch + 2);", "__syncthreads();", check_direct),
    "no meeting at the beginning": Mutant(
        "if (!meet(a.heap, channel, MEETINGS * epoch)) return false;", "__syncthreads();", check_direct),
    "the next section is staged over the one that others read": Mutant(
        "1 - section.half", "section.half", check_sections),
    "the next section is staged when others read it": Mutant(STAGED, STAGED_LATE, check_sections),
    "no barrier between a section and the next but one": Mutant(
        "        __syncthreads();  // the section after", "        // the section after", check_askew),
    "a rank that gives up does not say so": Mutant("        leave(a.heap, channel);\n", "", check_late),
    "a rank that has given up is taken to be here": Mutant("if (all && last == GONE) {", "if (false) {", check_late),
    "what only some ranks share is read where it lies": Mutant("section.sources = alike &&", "section.sources =",
                                                               check_direct),
    "results that only some ranks share are written where they lie": Mutant(
        "section.results = is_alike(a.heap, channel, 1, a.result_mark) &&", "section.results =", check_direct),
    "no meeting of those who stage late": Mutant("if (alike) return true;", "if (alike || !a.source_mark) return true;",
                                                 check_direct),
    "a section begins where the first one does": Mutant(
        "src = address_of(a.src) + section.start * sizeof(T);", "src = address_of(a.src);", check_sections),
    "a shorter section is shared out anew": Mutant(
        "section.room, section.room, 1 -", "section.room, left < section.room ? left : section.room, 1 -",
        check_sections),
    "sections are not counted": Mutant("        ++epoch;\n", "", check_sections),
    "two_shot: other elements are reduced": Mutant(
        "share_of<T>(a, section, a.heap.rank, channel));",
        "share_of<T>(a, section, a.heap.rank, gridDim.x - 1 - channel));",
        check_direct),
    "two_shot: one rank less gets the result": Mutant(
        "Operands{ranks, source, ranks, target}", "Operands{ranks, source, ranks - 1, target}", check_direct),
    "two_shot: results stay in the staging": Mutant("if (section.results) return;", "return;", check_direct),
    "a meeting without a barrier": Mutant(
        "u64 wanted) {\n    __syncthreads();\n    for (u32 peer", "u64 wanted) {\n    for (u32 peer", check_direct),
    "half a packet": Mutant("low[k].y != number || low[k].w != number ||", "low[k].y != number ||", check_direct),
    "a single buffer for packets": Mutant("const u64 buffer = epoch % 2;", "const u64 buffer = 0;", check_direct),
    "the tiles of packets overlap": Mutant("index / TILE * 2 * TILE", "index / TILE * TILE", check_tiles),
    "the second packets lie on the first ones": Mutant(
        "there + TILE * sizeof(Word)", "there + TILE / 2 * sizeof(Word)", check_tiles),
    "ll128: a packet is not waited for": Mutant("number != epoch || again != epoch", "number != epoch", check_direct),
    "ll128: a single buffer": Mutant("epoch % 2 * heap.ranks + writer", "writer", check_direct),
    "ll128: groups overlap": Mutant("group * GROUP_BYTES + lane()", "group * (GROUP_BYTES / 2) + lane()", check_tiles),
    "ll128: the second words are the first words": Mutant(
        "first_word(group) + ROW - 1", "first_word(group) + ROW - 2", check_tiles),
    "ll128: the word beside the number is cut": Mutant(
        "{words[k][0].x, words[k][0].y, words[k][1].x, words[k][1].y}",
        "{words[k][0].x, words[k][0].y, words[k][0].x, words[k][0].y}", check_tiles),
    "ll128: a thread reads the number alone": Mutant("Waiting::all(here)", "here", check_direct),
    "ll128: lies where packets lie": Mutant("heap.slabs[owner] + heap.ll128 +", "heap.slabs[owner] + heap.packets +",
                                            check_numbers),
    "ll128: sums in another order on some ranks": Mutant(IN_ORDER_LL128, SWAPPED_LL128, check_order),
    "switch: a share is reduced in the other half": Mutant(
        "section.half * a.heap.staging_bytes + share.start", "share.start", check_switch),
    "switch: the end of a share is left out": Mutant(
        "(nbytes + sizeof(Word) - 1) / sizeof(Word)", "nbytes / sizeof(Word)", check_switch),
    "switch: a share is staged in the slab": Mutant(
        "return a.staged + section.half", "return a.heap.slabs[a.heap.rank] + a.heap.staging + section.half",
        check_switch),
    "switch: inputs that all ranks reach are not staged": Mutant(
        "        alike = alike && a.source_mark == 0;\n", "", check_switch),
    "switch: some words are reduced twice": Mutant(
        "job(batch, Evenly{start, sizeof(Word)})", "job(batch, Evenly{start, sizeof(Word)}); "
        "if (blockIdx.x == 1) job(batch, Evenly{start, sizeof(Word)})", check_switch),
    "gather: a block is written to the place of rank 0": Mutant(
        SPREAD, SPREAD.replace(" + a.heap.rank * room", ""), check_gather),
    "gather: a block is written in the other half": Mutant(SPREAD, SPREAD.replace("half + ", ""), check_gather),
    "gather: the results of sections lie one over the other": Mutant(
        "(k * a.count + section.start + part.start)", "(k * a.count + part.start)", check_gather),
    "sums in another order on some ranks": Mutant(IN_ORDER, SWAPPED, check_order),
    "operations are not counted": Mutant(
        "    store_relaxed(address_of(&state_of(heap)->epoch), epoch);", "    ;", check_direct),
    "the first block to end counts": Mutant(
        "gridDim.x - 1) != gridDim.x - 1)", "gridDim.x - 1) != 0)", check_few_blocks),
    "packets: a number comes again after 2^32 operations": Mutant(
        "bool came = !renews || renew(", "bool came = true || renew(", check_numbers_again),
    "packets: a renewal without a meeting": Mutant(
        "    return meet(heap, channel, MEETINGS * epoch);", "    return true;", check_numbers_again),
    "packets: a renewal by the number of the operation": Mutant("u32(epoch - 1)", "u32(epoch)", check_numbers_again),
    "packets: the other buffer is looked at": Mutant("(epoch % 2 == 0 ? even : odd)", "(epoch % 2 == 0 ? odd : even)",
                                                     check_numbers_again),
    "one-way operations are counted": Mutant(
        "GC_DEV void steps(const StepsArguments& a) {\n    const u32 channel = take_channel(a.heap);",
        "GC_DEV void steps(const StepsArguments& a) {\n    const u32 channel = take_channel(a.heap);\n"
        "    end_epoch(a.heap, epoch_of(a.heap));", check_between),
    "blocks by their index": Mutant(
        "channel[0] = take_ticket(address_of(&state_of(heap)->started), gridDim.x - 1);", "channel[0] = blockIdx.x;",
        check_few_blocks),
    "credits are not waited for": Mutant(
        "cursor.number - seen < a.heap.depth", "true", check_one_way),
    "a slot too many": Mutant("- seen < a.heap.depth", "- seen <= a.heap.depth", check_one_way),
    "pieces are not waited for": Mutant(
        "lane.receives ? seen > cursor.number :", "lane.receives ? true :", check_steps),
    "what was exchanged is forgotten": Mutant(
        "    store_relaxed(counter_of(a.heap, channel, lane), number);\n", "", check_steps),
    "a piece is posted while it is moved": Mutant(
        "            unposted = true;\n", "            post(a, channel, round, moved);\n", check_steps),
    "a block waits before it has posted its last piece": Mutant(
        "            post(a, channel, round, moved);\n            unposted = false;\n", "", check_steps),
    "the last piece of a round is not posted": Mutant(
        "    if (unposted) post(a, channel, round, claims", "    if (false) post(a, channel, round, claims",
        check_steps),
    "a source that fills no group is skipped": Mutant("first < a.sources; ++first", "first + 1 < a.sources; ++first",
                                                      check_direct),
    "a source of a group is skipped": Mutant(
        "for (u32 k = 1; k < GROUP; ++k) combine", "for (u32 k = 1; k < (GROUP < 4 ? 2 : GROUP - 1); ++k) combine",
        check_groups),
    "a source of a group is taken twice": Mutant(
        "pointer_to(a.source(k))", "pointer_to(a.source(k == 3 ? 2 : k))", check_groups),
    "no barrier between rounds": Mutant(
        "        __syncthreads();  // what one thread has written, another one reads\n", "", check_local),
    "no barrier between writes": Mutant("        if (w > first) __syncthreads();\n", "", check_local),
    "staging is shared out like arrays": Mutant(
        "part.buffer == STAGING ? channel * a.region : range", "range", check_steps),
}
# Races without effect on x86, found by ThreadSanitizer.
RACES = {
    "a meeting is told of without release": Mutant(MEET, MEET.replace("release", "relaxed"), check_direct),
    "a meeting is seen without acquire": Mutant(
        "(seen = last = load_acquire(met))", "(seen = last = load_relaxed(met))", check_direct),
    "a piece is told of without release": Mutant(
        "store_release(address_of(lane.receives ?", "store_relaxed(address_of(lane.receives ?", check_steps),
    "a piece is seen without acquire": Mutant("        load_acquire(progress);", "        ;", check_steps),
}
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


def changed(mutant):
    """Return the source of the kernels needed by the check, with the fault planted."""
    source = sources.text(*NEEDED[mutant.check])
    if source.count(mutant.old) != 1:
        raise LookupError(f"{mutant.old!r} is in the source {source.count(mutant.old)} times")
    return source.replace(mutant.old, mutant.new)


def is_noticed(mutant):
    made = library(changed(mutant))
    for seed in MOST_SEEDS:
        try:
            mutant.check((made, made), seed)
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
