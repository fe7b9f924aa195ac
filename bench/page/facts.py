"""What a page says about its runs in words: was all well, on which machine, by which command."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from gpucoll.analysis.sizes import byte_text

from ..summary import geometric_mean
from .axes import BY, figure, time_text
from .curves import Curve, Panel, Point, Record, devices
from .tables import Column, run_letter, table

UNKNOWN: tuple[object, ...] = ("", None, 0, [], {})
READ_AS = {"memory_gib": "memory (GiB)", "cpu": "processor", "mpi": "MPI", "numpy": "NumPy", "cupy": "CuPy",
           "gpus": "GPUs", "nccl": "NCCL", "python": "Python"}


def ours(record: Record) -> dict[str, Any]:
    """Return what gpucoll adds to nccl-tests' schema; nothing for nccl-tests' own files."""
    return record.get("gpucoll") or {}


def tiles(records: Sequence[Record], letters: Sequence[str]) -> str:
    """Return what matters most of every file, a line of tiles each: data, bandwidth, machine, ratios."""
    groups: dict[str, list[Record]] = {}
    for record, letter in zip(records, letters, strict=True):
        groups.setdefault(letter, []).append(record)
    rows = ("".join(_tile(*tile, letter=letter) for tile in _tiles(found)) for letter, found in groups.items())
    return "".join(f'<ul class="tiles">{row}</ul>\n' for row in rows if row)


def _tiles(records: Sequence[Record]) -> Iterable[tuple[str, str, str]]:
    """Return for each tile what it says, the figure, and whether that is good, bad or neither."""
    outs = [record["out_of_bounds"] for record in records if record.get("out_of_bounds")]
    if outs:
        good, wrong = all(out.get("okay") == "true" for out in outs), sum(out.get("count") or 0 for out in outs)
        yield "data", "all correct" if good else f"{wrong} wrong", "good" if good else "bad"
    yield from _average(records[0]) if len(records) == 1 else ()
    copies = [copy["bandwidth"] for record in records if (copy := ours(record).get("copy") or {}).get("bandwidth")]
    if copies:
        yield "copy bandwidth of the machine", f"{_range(min(copies), max(copies))} GB/s", "any"
    for peer, (name, ratio) in best_ratios(records).items():
        yield f"{name} against {peer}, geometric mean", f"{ratio:.2f} {BY}", "any"


def _average(record: Record) -> Iterable[tuple[str, str, str]]:
    average = record.get("average_bus_bandwidth") or {}
    if record["results"] and average:
        low = average.get("okay") == "false"
        yield ("average bus bandwidth" + (", below the least that was asked for" if low else ""),
               f"{figure(average['bandwidth'])} GB/s", "bad" if low else "any")


def _range(low: float, high: float) -> str:
    first, last = figure(low), figure(high)
    return first if first == last else f"{first} to {last}"


def _tile(what: str, value: str, kind: str, letter: str) -> str:
    return f'<li class="{kind}"><strong>{escape(value)}</strong><span>{escape(what)}{run_letter(letter)}</span></li>'


def best_ratios(records: Sequence[Record]) -> dict[str, tuple[str, float]]:
    """Return for each peer our fastest algorithm and how many times as fast as the peer it is.

    Over several collectives that is the fastest of each, their geometric mean, and the name says so.
    """
    best: dict[str, list[tuple[float, str]]] = {}
    for record in records:
        for peer, collectives in (ours(record).get("ratios") or {}).items():
            found = [max((ratio, name) for name, ratio in row.items()) for row in collectives.values() if row]
            best.setdefault(peer, []).extend(found)
    return {peer: (found[0][1] if len(found) == 1 else f"the best for each of {len(found)} tests",
                   geometric_mean([ratio for ratio, _ in found])) for peer, found in best.items() if found}


def notes(records: Sequence[Record], letters: Sequence[str]) -> str:
    """Return what a reader has to know before believing the rest: errors, slow links, what could not be measured."""
    found: dict[tuple[str, str], list[str]] = {}
    for record, letter in zip(records, letters, strict=True):
        for note in _notes(record):
            found.setdefault(note, []).append(letter)
    items = "".join(f'<li class="{kind}">{escape(text)}{"".join(map(run_letter, dict.fromkeys(of)))}</li>'
                    for (kind, text), of in found.items())
    return f'<ul class="notes">{items}</ul>\n' if items else ""


def _notes(record: Record) -> Iterable[tuple[str, str]]:
    extra = ours(record)
    if extra.get("interrupted"):
        yield "bad", "The run was interrupted: what had been measured until then is here."
    yield from (("bad", str(text)) for text in (*(record.get("errors") or []), *(extra.get("findings") or [])))
    for one in extra.get("left_out") or []:
        yield "plain", f"Left out: {one.get('what')} ({one.get('reason')})"
    yield from (("plain", f"Nothing measured: {text}") for text in extra.get("smallest") or [])


def summary(panel: Panel, letters: Sequence[str]) -> str:
    """Return what a reader takes home from a panel: who is first on the least data, and who reaches most."""
    sides = [Side(point, curve) for curve in panel.curves for point in curve.points[(*panel.placements, "")[0]]
             ] if panel.placements else []
    if not sides:
        return ""
    least = min(side.point.size for side in sides)
    short = sorted((side for side in sides if side.point.size == least), key=lambda side: side.point.time)
    fast = sorted(sides, key=lambda side: -side.point.busbw)
    return (f"<p>Shortest time at {byte_text(least)}: {_leaders(short, letters, _time)}. "
            f"Highest bus bandwidth: {_leaders(fast, letters, functools.partial(_bandwidth, panel))}.</p>\n")


class Side(NamedTuple):
    """A measurement and whose it is."""

    point: Point
    curve: Curve


def _leaders(ordered: Sequence[Side], letters: Sequence[str], text: Callable[[Side], str]) -> str:
    """Return the first, and where that is a peer the first of ours as well."""
    first = ordered[0]
    mine = next((side for side in ordered if first.curve.peer and not side.curve.peer), None)
    said = [f"<b>{escape(side.curve.name)}</b>{run_letter(letters[side.curve.run])} {text(side)}"
            for side in (first, mine) if side]
    return "; of ours ".join(said)


def _time(side: Side) -> str:
    return time_text(side.point.time)


def _bandwidth(panel: Panel, side: Side) -> str:
    bound = panel.bounds.get(side.curve.run, {}).get(side.point.size)
    share = f" ({figure(100 * side.point.busbw / bound)}% of the copy bound)" if bound else ""
    return f"{figure(side.point.busbw)} GB/s at {byte_text(side.point.size)}{share}"


def machine(records: Sequence[Record], name: str) -> str:
    """Return what one file says about its machine and its commands."""
    facts = {**_first(records), **(ours(records[0]).get("machine") or {})}
    items = "".join(_fact(READ_AS.get(key, key.replace("_", " ")), value) for key, value in facts.items()
                    if value not in UNKNOWN)
    commands = "\n".join(" ".join(map(str, record.get("args") or [])) for record in records)
    heading = f"<h3>{escape(name)}</h3>" if name else ""
    return (f'{heading}<dl class="facts">{items}</dl>'
            f'<pre tabindex="0">{escape(commands)}</pre>{_environment(records[0])}{_ranks(records)}\n')


def _fact(name: str, value: Any) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd></div>"


def _first(records: Sequence[Record]) -> dict[str, Any]:
    """Return what there is to say of the runs of a file; what differs between them is left to the commands."""
    extra, copies = ours(records[0]), [ours(record).get("copy") or {} for record in records]
    program = [str(extra[key]) for key in ("program", "version", "revision") if extra.get(key)]
    repetitions = {f"{config['iterations']} timed after {config['warmup_iters']}" for record in records
                   if (config := record.get("config") or {}).keys() >= {"iterations", "warmup_iters"}}
    per_rank = [figure(each) for each in copies[0].get("per_rank") or []]
    return {"started": records[0].get("start_time"), "ended": records[-1].get("end_time"),
            "program": " ".join(program), "NCCL of nccl-tests": records[0].get("nccl_version"),
            "repetitions": repetitions.pop() if len(repetitions) == 1 else None,
            "copy bandwidth by rank (GB/s)": per_rank if len(records) == 1 else None}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items() if each not in UNKNOWN)
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _environment(record: Record) -> str:
    variables = record.get("env") or []
    text = escape("\n".join(map(str, variables)))
    return (f'<details><summary>Environment ({len(variables)})</summary><pre tabindex="0">{text}</pre></details>'
            if text else "")


def _ranks(records: Sequence[Record]) -> str:
    """Return who ran where, of the run with the most ranks."""
    rows = max((devices(record) for record in records), key=len)
    columns = [Column("rank", "", "", lambda row: escape(str(row.get("rank")))),
               *(Column(title, "", "", functools.partial(_entry, key), text=True) for title, key in (
                   ("host", "hostname"), ("process", "pid"), ("device", "device"), ("address", "device_hex"),
                   ("", "device_info")))]
    return f"<details><summary>Ranks ({len(rows)})</summary>{table('Ranks', columns, rows, [0] * len(rows))}</details>"


def _entry(key: str, row: Mapping[str, Any]) -> str:
    return escape(str(row.get(key, "")))
