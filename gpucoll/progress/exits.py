"""The operations under way at the end of the process: what is still waited for, how long, and what is said."""

from __future__ import annotations

import logging
import time
from typing import Any

from gpucoll.errors import UsageError
from gpucoll.progress.operations import Work, all_served, throw
from gpucoll.progress.waits import Progress, nap_after

# Seconds for the partners of unfinished sends, as long as they are at work; and seconds before a word about the wait.
LINGER, SILENT = 3.0, 1.0
PARTNER_INTERVAL = 0.05  # seconds between two questions whether the partners are at work: these cost system calls

log: logging.Logger = logging.getLogger("gpucoll")


def drain_all() -> bool:
    """Complete the operations under way before MPI ends: other ranks await even those with a dropped handle.

    Return whether all have ended. Messages between two ranks may not: see `drain`.
    """
    return all([drain(waits) for waits in all_served()])


def drain(waits: Progress) -> bool:
    """Complete the operations of a communicator at the end of the process; return whether all have ended.

    Collectives have their deadlines. A send lasts LINGER seconds at most, and ends as soon as its partner has left.
    Nobody can use the result of a receive any more: a message that has not come is given up at once.
    """
    acquire, release, queue, alone = waits.gate()
    began, looked, is_silent, have_ended = time.monotonic(), 0.0, True, True
    # This thread and the progress thread take turns: `advance` returns at once while the other thread steps.
    while (queue or alone) and waits.failure is None and waits.is_served:
        waits.advance()
        waited = time.monotonic() - began
        if not queue and waited >= looked and acquire(blocking=False):
            try:
                looked = waited + PARTNER_INTERVAL
                lost = [work for work in waits.messages() if waited > LINGER or not is_useful(work, waits)]
                for work in lost:
                    give_up(work, waits)
                have_ended = have_ended and not lost
                if alone and is_silent and waited > SILENT:
                    is_silent = False
                    log.warning("%s ends, and waits %g s at most for its messages: %s", name_of(waits), LINGER,
                                pending(waits))
            finally:
                release()
        time.sleep(nap_after(waited))
    return have_ended


def is_useful(work: Work[Any], waits: Progress) -> bool:
    """Return whether a message under way still has a partner that may receive it."""
    return any(end.sends and end.partner is not None and end.is_left() and not waits.has_left(end.partner)
               for end in work.ends)


def give_up(work: Work[Any], waits: Progress) -> None:
    """Give up a message under way, and say so."""
    words = " and ".join(str(end) for end in work.ends if end.is_left())
    work.error = UsageError(f"the process ends with {words or work.name} under way; wait() for every message, or close "
                            "the communicator, before the end of the program")
    log.warning("%s: %s", name_of(waits), work.error)
    throw(work.operation, work.error)
    waits.drop(work)


def name_of(waits: Progress) -> str:
    return "a rank" if waits.rank is None else f"rank {waits.rank}"


def pending(waits: Progress) -> str:
    """Return the messages under way in words, with what is known of their partners. The caller holds the gate."""
    return "; ".join(f"{end} ({'any rank' if end.partner is None else waits.describe(end.partner)})"
                     for work in waits.messages() for end in work.ends if end.is_left())
