"""Faults planted in the engine, each of which a test of it must find; late ranks make the races certain."""

from typing import NamedTuple

import extension

# Rank 1 is late where it reads: alone that must be harmless.
LATE = (("        char* to_row = place(node, one.to).start;\n",
         "        if (node.rank == 1) usleep(200);\n"
         "        char* to_row = place(node, one.to).start;\n"),)


class Mutant(NamedTuple):
    """What is changed, and the function of test_engine, with its arguments, that must fail on it."""

    changes: tuple[tuple[str, str], ...]
    body: str = "memory_changes_at_once"
    arguments: tuple[object, ...] = ()


MUTANTS = {
    "who still reads the workspace is not waited for": Mutant(
        (("!sees(node, at, node.unread[half][at], patient)) return WAITING;", "false) return WAITING;"), *LATE),
        "fresh_data"),
    "who has read is forgotten": Mutant(
        (("last = std::max(last, base + one.mark);", "(void)last;"), *LATE), "fresh_data"),
    "who reads the caller's memory is not waited for": Mutant(
        (("if (!is_control(node, one.buffer) && !sees(", "if (false && !sees("), *LATE)),
    "nobody is awaited": Mutant((("return sees(node, one.peer, base + one.mark, patient) ? DONE : WAITING;",
                                  "return DONE;"), *LATE), "fresh_data"),
    "shown a round too early": Mutant((("show(node.heads[node.rank], base + one.mark);",
                                        "show(node.heads[node.rank], base + one.mark + 2);"), *LATE), "fresh_data"),
    "other calls are not told": Mutant((("if (signature_of(node, met(node, i)) != signature) return DIFFERS;", ""),),
                                       "every_way", (None, ("all_reduce",), 0.1)),
    "only who is read from is met": Mutant((("node.check == ALL ? node.near.size()", "false ? node.near.size()"),
                                            ("node.check == ALL ? node.near[i]", "false ? node.near[i]")),
                                           "every_way", (None, ("broadcast",), 1)),
    "a call that was none is remembered": Mutant((("        node.history = history;\n", ""),),
                                                 "every_way", (None, ("all_reduce",), 0.1)),
    "a sum for a mean": Mutant((("if (plan->finish != nullptr) plan->finish(", "if (false) plan->finish("),),
                               "every_kind"),
    "what the root calls is not looked at": Mutant((("signature_of(node, plan->root) != signature)", "false)"),),
                                                   "scattered"),
    "what ranks called before is forgotten": Mutant((("static_cast<int64_t>(mix ^ mix >> 29);", "0 * mix;"),),
                                                    "roots_return"),
    "another order": Mutant((("rows[rank] + start, here", "rows[ranks - rank] + start, here"),),
                            "the_bits_of_messages"),
    "what others read stays with the caller": Mutant((("&& !plan->read[buffer] &&", "&&"),), "fresh_data"),
    "others' copies are left out": Mutant((("i < one.copies; i++", "i < 0 * one.copies; i++"),), "long_arrays",
                                          ("two_shot",)),
    "what comes before the first whole line is left out": Mutant(
        (("std::memmove(to, from, head);", "(void)head;"),), "movements"),
    "the input is not laid out": Mutant(
        (("for (size_t i = 0; i < plan->lead; i++) form(node, plan->instructions[i]);", ""),), "movements"),
    "results are copied from where they are not": Mutant((("        places_result |= one.to.buffer == RESULT;\n", ""),),
                                                         "long_arrays", ("two_shot",)),
    "another rank's block": Mutant((("uint64_t offset = part.offset;", "uint64_t offset = 0;"),), "movements"),
    "boards are not shown": Mutant((("        board.places[buffer][1] = offset;\n", ""),), "long_arrays",
                                   ("two_shot",)),
}


def changed(changes):
    """The engine's source with these changes."""
    source = extension.text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def planted(changes):
    """Let communicators that are made in the block use an engine with these changes."""
    return extension.serving(extension.built(changed(changes)))
