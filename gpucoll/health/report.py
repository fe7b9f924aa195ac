"""`gpucoll report DIR`: the last state of every rank, from the files of the flight recorder.

Calls of a communicator are compared by number: ranks in the same call have recorded the same description. The report
names the first call in which ranks differ, the last call of each rank, the missing ranks, and the latest ranks.
Times are by the clock of rank 0's host, with an error measured at the start for the ranks of other hosts.

The table of shares has the kinds of recorded calls that took most time on all ranks. The summary at the end of a
process (GPUCOLL_SUMMARY) is the same table, of all calls of rank 0.

`--stragglers` names the rank that delays the others, its call site, and since when.
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
import json
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpucoll.errors import ArgumentError, with_noun
from gpucoll.health.flight import CLOSED, NAMES, CallRecord, RecordedCall, Story, kind_of, read

# A rank stands out with this multiple of the delays of most ranks, and with this many seconds at least.
MULTIPLE, LEAST = 2, 1e-3
MOST, MOST_SITES = 10, 5  # kinds of calls in the table, and call sites before which ranks came late
TITLES: tuple[str, ...] = ("collective", "bytes from", "calls", "seconds", "own %", "waiting %", "moving %", "GB/s")


def stories(folder: Path) -> tuple[dict[str, list[Story]], list[str]]:
    """Return the stories (contents of files) by communicator, in rank order, and the errors of unreadable files."""
    groups: dict[str, list[Story]] = collections.defaultdict(list)
    damaged = []
    for path in sorted(folder.glob("*.flight")):
        try:
            story = read(path)
        except ArgumentError as error:
            damaged.append(str(error.args[0]))
            continue
        groups[story.group].append(story)
    return {name: sorted(found, key=lambda story: story.rank) for name, found in sorted(groups.items())}, damaged


def summary(group: str, ranks: Sequence[Story]) -> dict[str, Any]:
    """Return the report on a communicator as a dict; a rank without calls counts as in call 0."""
    size = ranks[0].size
    ends = {story.rank: story.calls[-1] if story.calls else None for story in ranks}
    furthest = max((call.number for call in ends.values() if call is not None), default=0)
    return {"communicator": group, "ranks": size, "unheard": sorted(set(range(size)) - set(ends)),
            "calls": furthest, "divergence": divergence(ranks),
            "last": {rank: {"call": call.number, "words": call.description,
                            "state": "is under way" if call.ended is None else "has ended"} if call else
                     {"call": 0, "words": "", "state": "has made no call"} for rank, call in ends.items()},
            # Behind the furthest call, except ranks that have closed the communicator.
            "missing": sorted(rank for rank, call in ends.items()
                              if call is None or (call.number < furthest and call.signature.collective != CLOSED)),
            "clock_error": clock_error(ranks) / 1e9, "delays": delays_by_rank({group: ranks})}


def added(groups: Mapping[str, Sequence[Story]]) -> CallRecord:
    """Return the sums of the recorded calls of all ranks."""
    record = CallRecord()
    for call in (call for ranks in groups.values() for story in ranks for call in story.calls):
        if call.ended is not None and call.signature.collective != CLOSED:
            sums = record.python[kind_of(call.signature)]
            record.enqueued(sums, call.signature.nbytes)
            record.shared(sums, call.own, call.waited, call.ended - call.began - call.waited, call.site)
    return record


def shares_table(record: CallRecord) -> list[str]:
    """Return the lines of the table of shares: a row for each kind of call.

    The kinds that took most time come first. The bandwidth is algbw: bytes over the seconds of moving. The call sites
    with most seconds of own delay follow.

    >>> record = CallRecord()
    >>> record.python["all_reduce", 23] = [4, 32000000, 0.0, 0.03, 0.01]
    >>> record.delays["a.py:7"] = 0.5
    >>> for line in shares_table(record):
    ...     print(line)
    collective  bytes from  calls  seconds  own %  waiting %  moving %  GB/s
    all_reduce     4194304      4    0.040    0.0       75.0      25.0  3.20
    late by 0.500 s before a.py:7
    """
    stats = record.stats()
    kinds = sorted(((sum(one[share] for share in NAMES[2:]), kind, one) for kind, one in stats.items()), reverse=True)
    rows = [TITLES]
    for taken, (collective, size), one in kinds[:MOST]:
        moving = one["moving_seconds"]
        shares = [f"{100 * one[name] / taken if taken else 0.0:.1f}" for name in NAMES[2:]]
        speed = f"{1e-9 * one['bytes'] / moving:.2f}" if moving and one["bytes"] else "-"
        rows.append((collective, str(size), str(int(one["calls"])), f"{taken:.3f}", *shares, speed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    table += [f"{len(kinds) - MOST} more kinds of calls took less time"] if len(kinds) > MOST else []
    sites = sorted(record.delays.items(), key=lambda one: -one[1])[:MOST_SITES]
    late = [f"late by {taken:.3f} s before {site or 'asynchronous calls'}" for site, taken in sites]
    return [*table, *late] if kinds else ["no call"]


def divergence(ranks: Sequence[Story]) -> dict[str, Any] | None:
    """Return the first recorded call in which ranks differ, with the ranks by description; None without such a call."""
    by_number: dict[int, dict[str, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for story in ranks:
        for call in story.calls:
            by_number[call.number][call.description].append(story.rank)
    for number in sorted(by_number):
        if len(by_number[number]) > 1:
            return {"call": number, "who": dict(by_number[number])}
    return None


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
    return story.host, story.process, story.rank if story.threads else 0


def _own(call: RecordedCall, most: int, ends: Sequence[int], offset: int) -> int:
    """Return the delay of a call after most ranks, at most the time since the last of the process' `ends`.

    `ends` are by the clock of the host, the other times by the clock of rank 0, which is the host's plus `offset`.
    """
    here = call.began - offset
    before = bisect.bisect_right(ends, here)
    return min(max(0, call.began - most), here - ends[before - 1]) if before else 0


def delays_by_rank(groups: Mapping[str, Sequence[Story]]) -> list[dict[str, Any]]:
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
        places = collections.Counter[str]()
        for one in found:
            places[one.call.site] += one.nanoseconds
        if nanoseconds := places.total():
            first = _first(found)
            rows.append({"rank": rank, "place": places.most_common(1)[0][0], "seconds": nanoseconds / 1e9,
                         "share": nanoseconds / total, "since": (first.call.began - first.nanoseconds) / 1e9,
                         "calls": sum(one.nanoseconds > 0 for one in found)})
    return sorted(rows, key=lambda row: -row["seconds"])


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
    """Return the entry (see `delays_by_rank`) of the rank that stands out, and the entries of all ranks as `ranks`.

    If no rank stands out, `rank` and `since` are None, `place` is "", and the numbers are 0.
    """
    rows = delays_by_rank(groups)
    size = max(story.size for ranks in groups.values() for story in ranks)
    usual = statistics.median_low([row["seconds"] for row in rows] + [0.0] * (size - len(rows)))
    stands_out = rows and rows[0]["seconds"] >= max(LEAST, MULTIPLE * usual)
    nobody = {"rank": None, "place": "", "seconds": 0.0, "share": 0.0, "since": None, "calls": 0}
    return {**(rows[0] if stands_out else nobody), "ranks": rows}


def lines_by_rank(found: Mapping[str, Any]) -> Iterable[str]:
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


def timeline(groups: dict[str, list[Story]]) -> dict[str, Any]:
    """Return all calls in Chrome's trace format (chrome://tracing, ui.perfetto.dev), with a process per rank."""
    events: list[dict[str, Any]] = []
    for group, ranks in groups.items():
        for story in ranks:
            events.append({"ph": "M", "name": "process_name", "pid": story.rank,
                           "args": {"name": f"rank {story.rank} on {story.host}"}})
            for call in story.calls:
                words = {"call": call.number, "words": call.description, "place": call.site}
                shared = {"name": call.signature.collective, "cat": group, "pid": story.rank, "tid": group,
                          "ts": call.began / 1e3, "args": words}
                events.append(shared | ({"ph": "B"} if call.ended is None else
                                        {"ph": "X", "dur": (call.ended - call.began) / 1e3}))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def lines(found: dict[str, Any]) -> Iterable[str]:
    yield f"{found['communicator']}: {found['ranks']} ranks, {found['calls']} calls"
    for rank, last in found["last"].items():
        yield f"  rank {rank}: call {last['call']} {last['state']}" + (f": {last['words']}" if last["words"] else "")
    if found["unheard"]:
        yield f"  no file of {with_noun(found['unheard'])}"
    if found["divergence"]:
        who = "; ".join(f"{with_noun(ranks)}: {call}" for call, ranks in found["divergence"]["who"].items())
        yield f"  first divergence in call {found['divergence']['call']}: {who}"
    if found["missing"]:
        yield f"  missing in call {found['calls']}: {with_noun(found['missing'])}"
    if found["clock_error"]:
        yield f"  clocks of the hosts: times of two ranks compare to within {1e6 * found['clock_error']:.0f} us"
    for one in found["delays"][:3]:
        yield f"  rank {one['rank']} was late for {one['calls']} calls: {one['seconds']:.6f} s"


def written(folder: Path, trace: Path | None, as_json: bool, *, by_rank: bool = False) -> str:
    """Return the report on a folder; ArgumentError without any file.

    The timeline is written to `trace`, if given. The report is on the rank that delays the others if `by_rank`,
    otherwise on the last calls.
    """
    groups, damaged = stories(folder)
    if not groups:
        raise ArgumentError(f"{folder} has no file of the flight recorder{': ' if damaged else ''}"
                            f"{'; '.join(damaged)}; GPUCOLL_DUMP_DIR sets their folder", code="GC-FILE")
    if trace is not None:
        trace.write_text(json.dumps(timeline(groups)))
    if by_rank:
        named = straggler(groups)
        found, text = named, [*lines_by_rank(named)]
    else:
        parts, record = [summary(group, ranks) for group, ranks in groups.items()], added(groups)
        found = {"communicators": parts, "shares": [{"collective": name, "size_class": size, **figures}
                                                    for (name, size), figures in record.stats().items()]}
        text = [*(line for one in parts for line in lines(one)), *shares_table(record)]
    return json.dumps(found | {"damaged": damaged}, indent=1) if as_json else \
        "\n".join(text + [f"damaged: {one}" for one in damaged])


def main(options: Any) -> int:
    """Run `gpucoll report`: print the report and return 0, or print an error and return 2."""
    try:
        print(written(Path(options.folder), options.trace and Path(options.trace), options.json,
                      by_rank=options.stragglers))
    except ArgumentError as error:
        print(f"gpucoll report: {error.args[0]}", file=sys.stderr)
        return 2
    return 0
