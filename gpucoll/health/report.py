"""`gpucoll report DIR`: the last state of every rank, from the files of the flight recorder.

Calls of a communicator are compared by number: ranks in the same call have recorded the same description. The report
names the first call in which ranks differ, the last call of each rank, the missing ranks, and the latest ranks.
Times are by the clock of rank 0's host, with an error measured at the start for the ranks of other hosts.
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gpucoll.errors import ArgumentError, with_noun
from gpucoll.health.flight import CLOSED, Story, read
from gpucoll.health.stragglers import clock_error, ranked, straggler
from gpucoll.health.stragglers import lines as lines_by_rank


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
                              if call is None or (call.number < furthest and call.description != CLOSED)),
            "clock_error": clock_error(ranks) / 1e9, "delays": ranked({group: ranks})}


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


def timeline(groups: dict[str, list[Story]]) -> dict[str, Any]:
    """Return all calls in Chrome's trace format (chrome://tracing, ui.perfetto.dev), with a process per rank."""
    events: list[dict[str, Any]] = []
    for group, ranks in groups.items():
        for story in ranks:
            events.append({"ph": "M", "name": "process_name", "pid": story.rank,
                           "args": {"name": f"rank {story.rank} on {story.host}"}})
            for call in story.calls:
                shared = {"name": call.description.partition(",")[0], "cat": group, "pid": story.rank, "tid": group,
                          "ts": call.began / 1e3,
                          "args": {"call": call.number, "words": call.description, "place": call.site}}
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
                            f"{'; '.join(damaged)}; GPUCOLL_DUMP_DIR sets the folder for these files",
                            code="GC-FILE")
    if trace is not None:
        trace.write_text(json.dumps(timeline(groups)))
    if by_rank:
        named = straggler(groups)
        found, text = named, [*lines_by_rank(named)]
    else:
        parts = [summary(group, ranks) for group, ranks in groups.items()]
        found, text = {"communicators": parts}, [line for one in parts for line in lines(one)]
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
