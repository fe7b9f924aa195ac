"""Faulty plans, in a process of their own: each plan is refused, or touches only the memory named by its sizes.

    python tests/engine/fuzzed.py SEED COUNT

Protected pages surround all memory of the engine. The program prints the outcomes of the plans.
"""

import collections
import ctypes
import mmap
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy

from engine import written
from gpucoll.errors import GpucollError
from gpucoll.executors.engine.extension import library
from gpucoll.executors.engine.neighbours import head_bytes
from gpucoll.executors.engine.tables import CALL

PAGE, NOTHING, UNTOUCHED = mmap.PAGESIZE, 0, 0x5a  # NOTHING: mprotect's rights of a protected page
NOBODY = (1 << 31) - 1  # no process has this number
RANKS, BUFFERS, MARK, SIGNATURES = 2, 3, 0, slice(1, 3)
LAST = 1 << 62  # a progress counter (`mark`) as far as any rank can come
STEPS = 9  # their place in a plan
FIRST, STRIDE = head_bytes(RANKS), written.WORKSPACE + PAGE
MOST, NEVER = 1 << 20, 1 << 63  # MOST bytes are made for a plan; no machine has NEVER bytes
WRONG = (0, 1, 2, 3, 5, 7, 64, 4095, -1, -8, 1 << 20, 1 << 31, 1 << 32, (1 << 32) + 1, (1 << 63) - 1, 1 << 63,
         (1 << 64) - 8, 1 << 64, 1.5, None, "", b"x", (), (0, 0, 0), [1], {}, True)
protect = ctypes.CDLL(None, use_errno=True).mprotect
protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Guarded:
    """`nbytes` bytes, ending just before a protected page, and the bytes before."""

    def __init__(self, nbytes, aligned=1):
        pages = -(-max(nbytes, 1) // PAGE) * PAGE
        self._row = numpy.frombuffer(mmap.mmap(-1, pages + 2 * PAGE), numpy.uint8)
        for first in (0, PAGE + pages):
            assert protect(self._row.ctypes.data + first, PAGE, NOTHING) == 0
        self.before, self.row = numpy.split(self._row[PAGE:PAGE + pages], [(pages - nbytes) // aligned * aligned])
        self.before[:] = UNTOUCHED
        self.start, self.nbytes = self.row.ctypes.data, nbytes

    def has(self, place):
        return self.start <= place <= self.start + self.nbytes


class Executor:
    """The executor, as far as asked by the engine."""

    def watch(self, error, awaited=None):
        pass

    def differ(self):
        raise GpucollError("differ")

    def out_of_reach(self, number):
        raise GpucollError("out of reach")


class World:
    """The engine of rank 0 of two; rank 1 has already shown all data and counters."""

    def __init__(self, module, staging, copies):
        self.staging = [Guarded(nbytes) for nbytes in staging]
        self.heads = [Guarded(FIRST + 2 * BUFFERS * STRIDE, PAGE) for _ in range(RANKS)]
        self._gaps = [self._gap(rank, FIRST) for rank in range(RANKS)]
        self._asked = Executor()
        self.engine = module.Engine(self._asked, GpucollError, 0, 2, os.getpid(), False, 1, copies, FIRST,
                                    written.WORKSPACE, 0, tuple(head.start for head in self.heads), (1, 2),
                                    (os.getpid(), NOBODY))
        for buffer, staged in enumerate(self.staging):
            self.engine.staging(buffer, 10 + buffer, staged.start, staged.nbytes)

    def _gap(self, rank, first):
        """Mark and return the bytes of a control segment outside the head and the workspaces."""
        row = self.heads[rank].row
        gap = numpy.arange(len(row)) >= first
        for which in range(2 * BUFFERS):
            place = first + which * STRIDE + (rank * BUFFERS + which % BUFFERS) % 8 * (PAGE // 8)
            gap[place:place + written.WORKSPACE] = False
        row[gap] = UNTOUCHED
        return gap

    def carry_out(self, plan, given, taken):
        """Carry out a plan and return the outcome: done, waits, or the name of an error."""
        x, out = Guarded(given), Guarded(taken)
        mine, words = (head.row[:FIRST].view(numpy.int64) for head in self.heads)
        descriptor = words[8:].reshape(-1)
        descriptor[:6] = descriptor[39:45] = (-1, 1 << 20) * BUFFERS  # memory of a process that does not exist
        self.reachable = [x, out, *self.staging, *self.heads]
        try:
            self.engine.begin(plan, x.row, out.row)
            words[MARK] = (self.engine.call_count << 20) - 1  # rank 1 has ended the call before
            self.engine.go_on()
            words[SIGNATURES], words[MARK] = mine[SIGNATURES], LAST  # rank 1 makes the same call
            return "done" if self.engine.go_on() else "waits"
        except (GpucollError, MemoryError, TypeError) as error:  # a plan may call a non-function
            return type(error).__name__
        finally:
            assert all((one.before == UNTOUCHED).all() for one in self.reachable)
            for head, gap in zip(self.heads, self._gaps, strict=True):
                assert (head.row[gap] == UNTOUCHED).all()

    def called(self, *places):
        """Take a call of a plan: the addresses are in memory of the plan, or below 1 MiB, thus in no memory."""
        assert all(place == 0 or place >> 20 == 0 or any(one.has(place) for one in self.reachable)
                   for place in places), places


def changed(chances, given, depth=0):
    """Return the tuple with one item replaced, removed or repeated, possibly deep inside."""
    if not given:
        return (chances.choice(WRONG),)
    place = chances.randrange(len(given)) if depth or chances.random() < 0.5 else STEPS % len(given)
    before, one, after = given[:place], given[place], given[place + 1:]
    if isinstance(one, tuple) and chances.random() < 0.85:
        return (*before, changed(chances, one, depth + 1), *after)
    how = chances.random()
    if how < 0.1 and depth:
        return before + after
    if how < 0.2 and depth:
        return (*before, one, one, *after)
    if how < 0.5 and isinstance(one, int):
        return (*before, one + chances.choice((-8, -1, 1, 8, 64, 4096)), *after)
    return (*before, chances.choice(WRONG), *after)


def larger(chances, given):
    """Return the plan for arrays longer than the staging buffers."""
    text, signature, sizes, *others = given
    sizes = [*sizes]
    sizes[chances.randrange(BUFFERS)] += MOST // 16
    return (text, signature, tuple(sizes), *others)


def calling(world, chances, given):
    """Return the plan, sometimes with a call into Python added."""
    *head, steps, _ = given
    parts = tuple(to for _, _, _, to, _, _, _ in steps if to is not None)
    if not parts or chances.random() < 0.7:
        return given
    call = (CALL, 0, 1, chances.choice(parts), 1, parts[:2], ())
    return (*head, (*steps, call), (world.called, world.called))


def main(module, seed, count):
    chances, came = random.Random(seed), collections.Counter()
    for number in range(count):
        if number % 50 == 0:
            copies = chances.random() < 0.5
            ranks = [written.Rank(rank, RANKS, copies) for rank in range(RANKS)]
            made = [written.drawn(chances, ranks)[0].plan for _ in range(50)]
            world = World(module, ranks[0].engine.staged, copies)
        given = plain = calling(world, chances, made[number % 50])
        given = larger(chances, given) if chances.random() < 0.1 else given
        for _ in range(chances.choice((0, 1, 1, 1, 2, 3))):
            given = changed(chances, given)
        print(given, file=sys.stderr, flush=True)  # the last printed plan has ended the process
        try:
            plan = world.engine.plan(*given)
        except (ValueError, TypeError, OverflowError) as error:
            if given is plain:
                raise
            came[type(error).__name__] += 1
            continue
        x, out, _, private_bytes, *_ = (size & (1 << 64) - 1 for size in map(int, given[2]))
        is_long = max(x, out) > MOST or MOST < private_bytes < NEVER
        came["too long" if is_long else world.carry_out(plan, x, out)] += 1
    print(dict(came))


if __name__ == "__main__":
    main(library(), sys.argv[1], int(sys.argv[2]))
