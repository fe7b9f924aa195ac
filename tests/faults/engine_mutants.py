"""Faults planted in the engine, in tables by the tests to find them; `TABLES` names all tables."""

from typing import NamedTuple

from harness import extension


class Mutant(NamedTuple):
    """The changes, and the program of multirank, with arguments, that must fail on this number of ranks.

    multirank/test_engine_mutants.py runs the programs.
    """

    changes: tuple[tuple[str, str], ...]
    body: str = ""
    arguments: tuple[object, ...] = ()
    ranks: int = 3


# A rank fails to wait for another rank: found by a driver holding ranks back by a seed (engine/test_threads.py).
ORDERS = {
    "who still reads the workspace is not waited for": Mutant(
        (("std::max(node.unread[half][rank], node.was_eager", "std::max(int64_t{0}, node.was_eager"),)),
    "who has read is forgotten": Mutant((("last = std::max(last, base + one.counter);", "(void)last;"),)),
    "who reads the caller's memory is not waited for": Mutant(
        (("if (!is_control(node, one.buffer) && !sees(", "if (false && !sees("),)),
    "an eager call takes a slot that is still read": Mutant(
        (("base - ((SLOTS - 1) << ROUNDS)", "base - ((2 * SLOTS) << ROUNDS)"),)),
    "all ranks are taken to be as far as the first": Mutant(
        (("least = std::min(least, node.heads[rank]->counter",
          "least = std::max(int64_t{0}, node.heads[rank]->counter"),)),
    "nobody is awaited": Mutant((("return sees(node, one.peer, base + one.counter, patient) ? DONE : WAITING;",
                                  "return DONE;"),)),
    "shown a round too early": Mutant((("show(node.heads[node.rank], base + one.counter);",
                                        "show(node.heads[node.rank], base + one.counter + 2);"),)),
}
# In the same driver a rank gets wrong results, or reports a mismatch of equal calls, without a race.
BEHIND = {
    "the inputs of eager calls are looked for in workspaces": Mutant(
        (("const bool in_slot = buffer", "const bool in_slot = false && buffer"),)),
    "boards are overwritten while a rank is behind in eager calls": Mutant(
        (("node.was_eager ? base - (1 << ROUNDS) : 0)", "int64_t{0})"),)),
}
# ThreadSanitizer finds these in the same driver; x86 would hide these races.
RACES = {
    "what is shown does not carry what was written": Mutant(
        (("head->counter.store(counter, std::memory_order_seq_cst)",
          "head->counter.store(counter, std::memory_order_relaxed)"),)),
    "what is seen does not bring it": Mutant(
        (("if (head->counter.load(std::memory_order_acquire) >= counter) return true;\n    if (!patient)",
          "if (head->counter.load(std::memory_order_relaxed) >= counter) return true;\n    if (!patient)"),)),
    "segments are mapped beside a search": Mutant((("        const std::lock_guard<std::mutex> guard(lock);\n"
                                                    "        if (all.size() == MOST)",
                                                    "        if (all.size() == MOST)"),)),
}
# AddressSanitizer finds these in the same driver.
BEYOND = {
    "half of the private memory": Mutant((("resize(walked->private_bytes)", "resize(walked->private_bytes / 2)"),)),
    "a result of a byte too many": Mutant((("0}, 0, plan->taken);", "0}, 0, plan->taken + 1);"),)),
}
CALLS = {
    "other calls are not told": Mutant((("is_alike &= agrees(node, met(node, i));", ";"),),
                                       "every_way", (None, ("all_reduce",), 0.1)),
    "only who is read from is met": Mutant((("return node.check == ALL && !eager;", "return false;"),),
                                           "every_way", (None, ("broadcast",), 1)),
    "a call that was none is remembered": Mutant((("        node.history = history;\n", ""),),
                                                 "every_way", (None, ("all_reduce",), 0.1)),
    "a sum for a mean": Mutant((("if (plan->finish != nullptr) plan->finish(", "if (false) plan->finish("),),
                               "every_op_and_dtype", ("one_shot",)),
    "what the root calls is not looked at": Mutant((("!agrees(node, plan->root))", "false)"),),
                                                   "scattered"),
    "what ranks called before is forgotten": Mutant((("static_cast<int64_t>(mix ^ mix >> 29);", "0 * mix;"),),
                                                    "another_root_is_told_later"),
    "another order": Mutant((("rows[rank] + start, here", "rows[ranks - rank] + start, here"),),
                            "the_bits_of_messages"),
    "what others read stays with the caller": Mutant((("&& !plan->read[buffer] &&", "&&"),),
                                                     "memory_changes_at_once"),
    "others' copies are left out": Mutant((("i < one.copies; i++", "i < 0 * one.copies; i++"),), "long_arrays",
                                          ("two_shot",)),
    "what comes before the first whole line is left out": Mutant(
        (("std::memmove(to, from, head);", "(void)head;"),), "movements"),
    "the input is not laid out": Mutant(
        (("for (size_t i = 0; i < plan->lead; i++) form(node, plan->instructions[i]);", ""),), "movements"),
    "results are copied from where they are not": Mutant((("        places_result |= one.to.buffer == RESULT;\n", ""),),
                                                         "long_arrays", ("two_shot",)),
    "another rank's block": Mutant((("uint64_t offset = part.offset;", "uint64_t offset = 0;"),), "movements"),
    "boards are not shown": Mutant((("        descriptor.places[buffer][1] = offset;\n", ""),), "long_arrays",
                                   ("two_shot",)),
}

MAIL = {
    "the ring is overrun": Mutant((("return one.written - one.known == MAIL_SLOTS ? nullptr :",
                                    "return false ? nullptr :"),), "not_taken", ranks=2),
    "a long message has ended at once": Mutant(
        (("if (ticket != 0 && !done) done = out->ends", "if (ticket != 0 && !done) done = true || out->ends"),),
        "around", ranks=2),
    "the last is the first": Mutant((("        one.unexpected.push_back(std::move(copy));",
                                      "        one.unexpected.push_front(std::move(copy));"),), "same_tag", ranks=2),
    "what is dropped beside a message stays expected": Mutant(
        (("dropped.emplace_back(transfer, std::move(kept));  // has", "kept = nullptr;  // has"),),
        "dropped", ranks=2),
    "the collector does not know what requests hold": Mutant(
        (("        each(engine);\n        each(array);\n", "        each(engine);\n"),), "collected", ranks=2),
    "any tag": Mutant((("if ((*found)->tag != header.tag) continue;", ""),), "backwards"),
    "of any length": Mutant((("const bool fits = transfer.fits();",
                              "const bool fits = header.nbytes <= transfer.nbytes;"),), "lengths", ranks=2),
}
# Incomplete plans (engine/test_plans.py) crash the process with these faults.
PLANS = {
    "buffers without memory": Mutant((("whole(reading.has_staging() && ", "whole("),)),
    "parts beyond the end": Mutant((("offset <= there && nbytes <= there - offset", "true"),)),
    "parts beyond others' workspaces": Mutant((("(offset <= most && nbytes <= most - offset)", "true"),)),
    "memory that there is not": Mutant((("    } catch (...) {\n        set_error();\n        return nullptr;",
                                         "    } catch (const int&) {\n        return nullptr;"),)),
}
# An allocation fails in a call or a message (engine/test_allocations.py): the process crashes, or a message is lost.
MEMORY = {
    "what is thrown crosses C": Mutant(
        (("    } catch (...) {\n        set_error();\n        return nullptr;",
          "    } catch (const int&) {\n        return nullptr;"),), "placed"),
    "a letter without memory is lost": Mutant(
        (("take(node, one, place);\n            one.in->pulled.store(++one.pulled",
          "++one.pulled;\n            take(node, one, place);\n            one.in->pulled.store(one.pulled"),),
        "unexpected"),
}
# Random programs under sanitizers (contract/test_sanitized.py) report these faults by these words.
SANITIZED = {
    "AddressSanitizer": Mutant((("char sum[BLOCK]", "char sum[64]"),)),
    "division by zero": Mutant(tuple((old, old.replace("sizeof(T)", "(sizeof(T) - sizeof(T))")) for old in (
        "ranks, to, nbytes / sizeof(T)", "i < nbytes / sizeof(T); i++) write<T>(row, i, divide"))),
}
EAGER = {
    "no call is eager": Mutant((("plan->in_row |= node.repeats == EAGER_AFTER;", ""),), "broadcasts_go_on"),
    "an eager call meets all ranks": Mutant(
        (("return node.check == ALL && !eager;", "return node.check == ALL;"),), "broadcasts_go_on"),
    "an eager call is not compared": Mutant(
        (("&& node.slot(rank, number)->signature.load(std::memory_order_relaxed) == signature);", ");"),),
        "differ_after", ("op", 1)),
    "the words of eager calls are those of the boards": Mutant(
        (("return is_eager(of, number) ? slot(of, number)->text :", "return false ? slot(of, number)->text :"),),
        "other_shapes"),
    "long inputs are eager": Mutant((("given <= SLOT && taken <= SLOT && ", ""),), "long_inputs"),
}
TABLES = {"engine": CALLS, "eager": EAGER, "order": ORDERS, "behind": BEHIND, "mail": MAIL, "plan": PLANS,
          "thread": RACES, "address": BEYOND, "memory": MEMORY, "sanitizer": SANITIZED}


def changed(changes):
    """Return the engine's source with the changes."""
    source = extension.text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def planted(changes):
    """Return a context: communicators created inside use an engine with the changes."""
    return extension.serving(extension.built(changed(changes)))
