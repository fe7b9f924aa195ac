"""`gpucoll report DIR --stragglers`: the rank that delays the others, its call site, and since when.

A rank's delay in a call is the time by which the rank came after most ranks: after the lower median of all arrivals, so
that a single early rank makes no other rank late. The delay is at most the time since the process left its last
recorded call: a call that ends late is no delay of the rank's own. The first call of each kind has no delay, since it
follows the start of a program or code that runs for the first time. Only calls recorded by all ranks count.
A delay within the error of the hosts' clocks is none.
"""

from __future__ import annotations

import bisect
import collections
import datetime
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gpucoll.health.flight import THREADS, RecordedCall, Story

# A rank stands out with this multiple of the delays of most ranks, and with this many seconds at least.
MULTIPLE, LEAST = 2, 1e-3


class RankDelay(NamedTuple):
    """The delay of a rank in a call, in nanoseconds."""

    rank: int
    nanoseconds: int
    call: RecordedCall


def delays(groups: Mapping[str, Sequence[Story]]) -> list[RankDelay]:
    """Return the delays of all ranks in all calls recorded by all ranks of a communicator, in order of time."""
    ends: dict[tuple[str, int, int], list[int]] = collections.defaultdict(list)
    for story in (story for ranks in groups.values() for story in ranks):
        # By the host's own clock: records of several communicators of a process may have unlike offsets.
        ends[_worker(story)] += [call.ended - story.clock_offset for call in story.calls if call.ended is not None]
    for known in ends.values():
        known.sort()
    found = []
    for ranks in groups.values():
        by_number: dict[int, list[tuple[Story, RecordedCall]]] = collections.defaultdict(list)
        for story in ranks:
            for call in story.calls:
                by_number[call.number].append((story, call))
        kinds = set[str]()
        for _, calls in sorted(by_number.items()):
            kind = calls[0][1].description
            if kind in kinds and 1 < len(calls) == ranks[0].size:  # not the first call of each kind
                most = statistics.median_low([call.began for _, call in calls]) + clock_error(ranks)
                found += [RankDelay(story.rank, _own(call, most, ends[_worker(story)], story.clock_offset), call)
                          for story, call in calls]
            kinds.add(kind)
    return sorted(found, key=lambda one: one.call.began)


def clock_error(ranks: Sequence[Story]) -> int:
    """Return the largest error in nanoseconds of a difference of two ranks' times."""
    return sum(sorted(story.clock_error for story in ranks)[-2:])


def _worker(story: Story) -> tuple[str, int, int]:
    """Return what makes the calls of a story in turn: the process, or for ranks that are threads the thread."""
    return story.host, story.process, story.rank if story.group.startswith(THREADS) else 0


def _own(call: RecordedCall, most: int, ends: Sequence[int], offset: int) -> int:
    """Return the delay of a call after most ranks, at most the time since the last of the process' `ends`.

    `ends` are by the clock of the host, the other times by the clock of rank 0, which is the host's plus `offset`.
    """
    here = call.began - offset
    before = bisect.bisect_right(ends, here)
    return min(max(0, call.began - most), here - ends[before - 1]) if before else 0


def ranked(groups: Mapping[str, Sequence[Story]]) -> list[dict[str, Any]]:
    """Return an entry for each rank with a delay, the largest first.

    `seconds` is the sum of the rank's delays, and `share` the part of the delays of all ranks. `calls` is the number of
    delayed calls. The delays are dense from `since` on, in seconds since 1970. `place` is the call site with the most
    seconds, "" if unknown.
    """
    by_rank: dict[int, list[RankDelay]] = collections.defaultdict(list)
    for one in delays(groups):
        by_rank[one.rank].append(one)
    total = sum(one.nanoseconds for found in by_rank.values() for one in found)
    rows = []
    for rank, found in by_rank.items():
        nanoseconds = sum(one.nanoseconds for one in found)
        if nanoseconds:
            first = _first(found)
            rows.append({"rank": rank, "place": _place(found), "seconds": nanoseconds / 1e9,
                         "share": nanoseconds / total, "since": (first.call.began - first.nanoseconds) / 1e9,
                         "calls": sum(one.nanoseconds > 0 for one in found)})
    return sorted(rows, key=lambda row: -row["seconds"])


def _place(found: Iterable[RankDelay]) -> str:
    """Return the call site with the most seconds, "" if unknown."""
    places = collections.Counter[str]()
    for one in found:
        places[one.call.site] += one.nanoseconds
    return places.most_common(1)[0][0]


def _first(found: Sequence[RankDelay]) -> RankDelay:
    """Return the first delay of the part in which delays are dense: more than half as long as on average.

    This is the part with the largest sum, after half the mean has been taken from each delay.
    """
    half = sum(one.nanoseconds for one in found) / len(found) / 2
    best, start, run, first = 0.0, found[0], 0.0, found[0]
    for one in found:
        if run <= 0:
            run, start = 0.0, one
        run += one.nanoseconds - half
        if run > best:
            best, first = run, start
    return first


def straggler(groups: Mapping[str, Sequence[Story]]) -> dict[str, Any]:
    """Return the entry (see `ranked`) of the rank that stands out, and the entries of all ranks as `ranks`.

    If no rank stands out, `rank` and `since` are None, `place` is "", and the numbers are 0.
    """
    rows = ranked(groups)
    size = max(story.size for ranks in groups.values() for story in ranks)
    usual = statistics.median_low([row["seconds"] for row in rows] + [0.0] * (size - len(rows)))
    stands_out = rows and rows[0]["seconds"] >= max(LEAST, MULTIPLE * usual)
    nobody = {"rank": None, "place": "", "seconds": 0.0, "share": 0.0, "since": None, "calls": 0}
    return {**(rows[0] if stands_out else nobody), "ranks": rows}


def lines(found: Mapping[str, Any]) -> Iterable[str]:
    if found["rank"] is None:
        yield "no rank stands out"
    else:
        yield (f"rank {found['rank']} delays the other ranks: {found['seconds']:.6f} s in {found['calls']} calls, "
               f"{found['share']:.0%} of all delays, since {_time(found['since'])}"
               + (f", most at {found['place']}" if found["place"] else ""))
    if found["ranks"]:
        yield f"{'rank':>6} {'seconds':>12} {'share':>6} {'calls':>6}  {'since':26}  place"
    for row in found["ranks"]:
        yield (f"{row['rank']:6} {row['seconds']:12.6f} {row['share']:6.1%} {row['calls']:6}  {_time(row['since'])}  "
               f"{row['place']}").rstrip()


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).isoformat(timespec="microseconds")
