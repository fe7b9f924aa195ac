"""The last calls of all ranks, as the comparison of calls knows them: for error messages."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from gpucoll.core.signature import LastCall


def last_calls(number: int, before: str, text_of: Callable[[int], str], missing: Collection[int],
               arrivals: Sequence[Sequence[int]], near: Collection[int]) -> dict[int, LastCall]:
    """Return the last call of each rank: call `number`, with the text of `text_of`; of ranks `missing` the call before.

    `arrivals` are the times at which the ranks came to the call before and to this call, in nanoseconds since 1970 by
    the clock of each rank's host. Only the clock of the ranks `near` is known here.
    """
    ahead = time.time_ns() * 1e-9 - time.monotonic()
    found = {}
    for rank in range(len(arrivals[0])):
        is_here = rank not in missing
        its, text = (number, text_of(rank)) if is_here else (max(0, number - 1), before)
        came = arrivals[is_here][rank] if rank in near and its else 0
        found[rank] = LastCall(its, text, None, max(0.0, 1e-9 * came - ahead) if came else 0.0)
    return found
