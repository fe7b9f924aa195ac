"""Faults planted in kernels/slots.h, each of which a test of slots must find; late ranks make the races certain."""

import contextlib
import functools
import sysconfig
from typing import NamedTuple

import numpy

from gpucoll.device.gxx import compile_shared, recipe
from gpucoll.device.sources import inlined
from gpucoll.device.store import user_store
from gpucoll.executors import shared
from gpucoll.executors.shared import slots

# Rank 1 is late where it takes what the others have shown, and so are their next steps: alone that must be harmless.
LATE = tuple((f"    void {name}(const View& view) {{\n", f"    void {name}(const View& view) {{\n"
              "        if (view.rank == 1) usleep(1500);\n") for name in ("take", "collect"))


class Mutant(NamedTuple):
    """What is changed, and the function of test_slots, with its arguments, that must fail on it."""

    changes: tuple[tuple[str, str], ...]
    body: str = "memory_changes_at_once"
    arguments: tuple[object, ...] = ()


MUTANTS = {
    "no meeting at the end": Mutant((("} else if (read) {", "} else if (false) {"), ("nbytes && !read;", "nbytes;"),
                                     *LATE)),
    "no meeting after reading in place": Mutant(
        (("read = read || (found", "read = false && (found"),
         ("read = read || in_place;", "read = in_place && what == TWO_SHOT;"), *LATE)),
    "one slot for all calls": Mutant((("(turn & 1) * slot", "0 * turn"), *LATE)),
    "a meeting of all but one": Mutant((("+ 1 != view.ranks * meeting) return;", "+ 2 < view.ranks * meeting) return;"),
                                        *LATE)),
    "another order": Mutant((("sources[rank] + start, here", "sources[ranks - rank] + start, here"),),
                            "the_bits_of_messages"),
    "parts that leave something out": Mutant((("(nbytes / ranks + LINE) / LINE", "(nbytes / ranks) / LINE"),),
                                             "long_arrays", ("two_shot",)),
    "the first segment again": Mutant(((" place) + block * nbytes + start;", " place) + block * nbytes;"),),
                                      "long_arrays", ("two_shot",)),
    "shown once for all": Mutant((("        *view.sign(view.rank, turn) = sign;\n",
                                   "        if (turn < 2) *view.sign(view.rank, turn) = sign;\n"),),
                                 "long_arrays", ("two_shot",)),
    "another rank's block": Mutant((("block = has_blocks() ? view.rank : 0;", "block = 0;"),), "movements"),
}

# Of the engine, the same: rank 1 is late where it reads.
LATE_WALKS = (("        const char* const* sources = program.sources.data() + one.first;\n",
               "        if (node.rank == 1) usleep(200);\n"
               "        const char* const* sources = program.sources.data() + one.first;\n"),)
WALKS = {
    "who still reads the workspace is not waited for": Mutant(
        (("if (!sees(node, static_cast<uint32_t>(at), node.unread(half)[at])) return WAITING;", ""), *LATE_WALKS),
        "fresh_data"),
    "who has read is forgotten": Mutant(
        (("node.unread(half)[reader.first] = base + reader.second;", "(void)reader;"), *LATE_WALKS), "fresh_data"),
    "nobody is awaited": Mutant((("return sees(node, one.peer, base + one.mark);", "return true;"),
                                 *LATE_WALKS), "fresh_data"),
    "shown a round too early": Mutant((("show(node.heads[node.rank], base + one.mark);",
                                        "show(node.heads[node.rank], base + one.mark + 2);"), *LATE_WALKS),
                                      "fresh_data"),
    "other calls are not told": Mutant((("!= plan->signature + refusals) return DIFFERS;", "== 0) return DIFFERS;"),),
                                       "differing", ("op",)),
    "a sum for a mean": Mutant((("if (plan->divide != nullptr) plan->divide(", "if (false) plan->divide("),),
                               "every_kind"),
    "any rank's failure ends a walk": Mutant((("has_failed(self, self->walker.awaited)", "has_failed(self, -1)"),),
                                             "one_fails_later"),
    "what the root tells is not compared": Mutant((("return is_root || std::memcmp(", "return true || std::memcmp("),),
                                                  "scattered"),
    "boards are not changed back": Mutant((("if (board[0] != program.board[0])", "if (false)"),), "beside_python"),
}


def changed(changes):
    """The source of slots with these changes."""
    source = inlined("slots.cc", set())
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@contextlib.contextmanager
def planted(changes):
    """Let communicators that are made in the block use slots with these changes."""
    source = changed(changes)
    options = [f"-I{folder}" for folder in (sysconfig.get_paths()["include"], numpy.get_include())]
    path = user_store().path(source, ".so", functools.partial(compile_shared, source, *options), flags=recipe())
    found = slots.imported(str(path))
    before = slots.library, shared.library
    slots.library = shared.library = lambda: found
    try:
        yield
    finally:
        slots.library, shared.library = before
