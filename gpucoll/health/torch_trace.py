"""`gpucoll report DIR --torch OUT`: the flight recorder's calls in the form of PyTorch's flight recorder.

PyTorch's analyser, ``torchfrtrace OUT``, reads a pickled dict for each rank: the calls ("entries") and the groups of
the rank ("pg_config"). The analyser knows PyTorch's collectives only; the frame of an entry has the call in gpucoll's
words, with file and line. Source: `torch.distributed.flight_recorder.components` of PyTorch 2.13.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpucoll.core.signature import Signature
from gpucoll.health.flight import CLOSED, RecordedCall, Story

VERSION = "2.10"  # of the format
PREFIX = "trace_rank_"
NO_NAME = "undefined"  # PyTorch's description of a group without a name
# Names of PyTorch's for collectives that the analyser does not know.
NAMES = {"gather_v": "gather", "scatter_v": "scatter", "all_to_all_v": "all_to_all_v_single",
         "scan": "all_gather_single", "exscan": "reduce_scatter_single"}
GATHERS = ("all_gather", "gather", "all_to_all")  # the output has a block for each rank
SCATTERS = ("reduce_scatter", "scatter", "all_to_all")  # the input has a block for each rank


def dumps(groups: Mapping[str, Sequence[Story]]) -> list[dict[str, Any]]:
    """Return PyTorch's dict for each rank of the largest communicator, in rank order; the latest of equal size.

    A rank without a file has no calls. Communicators of other processes than these ranks, and parts of ranks that are
    threads, are left out.
    """
    world = max(groups.values(), key=lambda stories: (stories[0].size, _latest(stories)))
    processes = Counter((story.host, story.process) for story in world)
    ranks = {(story.host, story.process): story.rank for story in world if processes[story.host, story.process] == 1}
    found: list[dict[str, Any]] = [{"version": VERSION, "pg_config": {}, "entries": []} for _ in range(world[0].size)]
    for name, stories in groups.items():
        places = [story.rank if stories is world else ranks.get((story.host, story.process), -1) for story in stories]
        if -1 in places:
            continue
        # The ring of a rank keeps its last calls: the analyser compares the calls kept by all ranks.
        first = max((story.calls[0].number for story in stories if story.calls), default=0)
        for story, place in zip(stories, places, strict=True):
            dump: dict[str, Any] = found[place]
            # A rank without a file is a member too, as far as it is known: the analyser names the missing rank.
            members = range(story.size) if stories is world else sorted(places)
            dump["pg_config"][name] = {"name": name, "desc": NO_NAME, "ranks": str([*members])}
            dump["entries"] += [_entry(story, call) for call in story.calls
                                if call.number >= first and call.signature.collective != CLOSED]
    for dump in found:
        dump["entries"].sort(key=lambda entry: entry["time_created_ns"])
    return found


def _latest(stories: Sequence[Story]) -> int:
    return max((call.began for story in stories for call in story.calls), default=0)


def _entry(story: Story, call: RecordedCall) -> dict[str, Any]:
    collective, dtype = call.signature.collective, call.signature.dtype
    file, _, line = call.site.rpartition(":")
    given, result = _shapes(call.signature, story.size)
    return {"record_id": 0, "collective_seq_id": call.number, "p2p_seq_id": 0, "op_id": call.number, "is_p2p": False,
            "process_group": (story.group, NO_NAME), "pg_id": 0,
            # The analyser takes only names of PyTorch's backends.
            "profiling_name": f"gloo:{NAMES.get(collective, collective)}",
            "input_sizes": [given], "output_sizes": [result], "input_dtypes": [dtype], "output_dtypes": [dtype],
            "state": "started" if call.ended is None else "completed", "retired": call.ended is not None,
            "time_created_ns": call.began, "time_discovered_started_ns": call.began,
            "time_discovered_completed_ns": call.ended, "timeout_ms": 0,
            "frames": [{"name": call.description, "filename": file, "line": line}]}


def _shapes(call: Signature, size: int) -> tuple[list[int], list[int]]:
    """Return the shapes of input and output; a signature has the shape of a block, or none if lengths differ."""
    block, stacked = [*call.shape], [size, *call.shape]
    return stacked if call.collective in SCATTERS else block, stacked if call.collective in GATHERS else block


def write(folder: Path, groups: Mapping[str, Sequence[Story]]) -> None:
    """Write a file for each rank into `folder`, made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, dump in enumerate(dumps(groups)):
        (folder / f"{PREFIX}{rank}").write_bytes(pickle.dumps(dump))
