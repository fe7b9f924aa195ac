"""`GPUCOLL_SUMMARY=1`: the figures of `stats` as a table on standard error, at the end of rank 0's process."""

from __future__ import annotations

from collections.abc import Mapping

from gpucoll.health.shares import Stats

MOST, MOST_SITES = 10, 5  # kinds of calls in the table, and call sites before which the rank came late
SHARES = ("own_seconds", "waiting_seconds", "moving_seconds")
NO_DELAYS: Mapping[str, float] = {}
HEAD: tuple[str, ...] = ("collective", "bytes from", "calls", "seconds", "own %", "waiting %", "moving %", "GB/s")


def summary_of(stats: Stats, rank: int, seconds: float, delays: Mapping[str, float] = NO_DELAYS) -> str:
    """Return the summary of a process that ran for `seconds`: a row for each kind of call.

    The kinds that took most time come first. The bandwidth is algbw: bytes over the seconds of moving. `delays` are the
    seconds of own delays by call site; the sites with most of them are listed.

    >>> figures = {"calls": 4, "bytes": 32000000, "own_seconds": 0.0, "waiting_seconds": 0.03, "moving_seconds": 0.01}
    >>> print(summary_of({("all_reduce", 1 << 22): figures}, 0, 0.5), end="")
    gpucoll: rank 0 ran for 0.50 s and was 8.0 % of the time in calls of gpucoll
    collective  bytes from  calls  seconds  own %  waiting %  moving %  GB/s
    all_reduce     4194304      4    0.040    0.0       75.0      25.0  3.20
    """
    kinds = sorted(((sum(one[share] for share in SHARES), kind, one) for kind, one in stats.items()), reverse=True)
    total = sum(taken for taken, *_ in kinds)
    rows = [HEAD]
    for taken, (collective, size), one in kinds[:MOST]:
        moving = one["moving_seconds"]
        shares = [f"{100 * one[name] / taken if taken else 0.0:.1f}" for name in SHARES]
        speed = f"{1e-9 * one['bytes'] / moving:.2f}" if moving and one["bytes"] else "-"
        rows.append((collective, str(size), str(int(one["calls"])), f"{taken:.3f}", *shares, speed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines += [f"{len(kinds) - MOST} more kinds of calls took less time"] if len(kinds) > MOST else []
    share = 100 * total / seconds if seconds else 0.0
    head = f"gpucoll: rank {rank} ran for {seconds:.2f} s and was {share:.1f} % of the time in calls of gpucoll"
    sites = sorted(delays.items(), key=lambda one: -one[1])[:MOST_SITES]
    late = [f"late by {taken:.3f} s before {site or 'asynchronous calls'}" for site, taken in sites]
    return "".join(f"{line}\n" for line in (head, *(lines + late if kinds else ["no call"])))
