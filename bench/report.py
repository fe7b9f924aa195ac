"""`gpucoll bench report F.json ...`: one HTML page from the files of runs, without server and network."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gpucoll.cli.arguments import Parser, refuse
from gpucoll.errors import ArgumentError, GpucollError, UsageError
from gpucoll.lab.document import DARK, LIGHT, LINES, asset, page_file, palettes
from gpucoll.lab.sizes import byte_text

from . import records, tables
from .curves import Panel, Record, devices, figure, numbers, panels, time_text
from .summary import geometric_mean
from .tables import BY, named, table

PAGE_COMMAND, PAGE_NAME = "gpucoll bench report", "report.html"
# Additional colours for charts: lines on dark paper keep their hues, with enough contrast.
DARK_LINES = ("#509bf1", "#ff8a47", "#33cf9f", "#f0a1e4", "#f3dd6a", "#7d6bf0", "#bfeaff", "#b8563c")
DAY = {**LIGHT, "bound": "#3c4650", "peer": "#6a737c", "good": "#0a7a4b", "bad": "#c02f1d",
       **{f"line-{number}": colour for number, colour in enumerate(LINES)}}
NIGHT = {**DARK, "bound": "#c3ccd5", "peer": "#98a3ae", "good": "#4fd19a", "bad": "#ff8b7a",
         **{f"line-{number}": colour for number, colour in enumerate(DARK_LINES)}}
READ_AS = {"memory_gib": "memory (GiB)", "cpu": "processor", "mpi": "MPI", "numpy": "NumPy", "cupy": "CuPy",
           "gpus": "GPUs", "nccl": "NCCL", "python": "Python"}
NO_FACT: tuple[object, ...] = ("", None, 0, [], {})
Files = Mapping[str, Sequence[Record]]  # the records of each file, by the name on the page


def main(arguments: Sequence[str]) -> int:
    """Write the page of the files named by `arguments` (after the word `report`); return the exit code 0.

    Files impossible to read or write end the process with exit code 2 and one line.
    """
    parser = Parser(PAGE_COMMAND, allow_abbrev=False, description="Make one page of results; it needs no network.",
                    epilog="Several files are compared, the first being what the others are held against. Files of "
                           "nccl-tests' -J are read as well. Needs plotly: pip install gpucoll[report].")
    parser.add_argument("files", nargs="+", metavar="F.json", help="results written by -J or by scripts/bench")
    parser.add_argument("-o", "--output", metavar="PAGE.html", default=PAGE_NAME,
                        help=f"the file ({PAGE_NAME}); - is standard output")
    given = parser.parse_args(arguments)
    try:
        text = page_text(given.files)
        if given.output == "-":
            sys.stdout.write(text)
            return 0
        Path(given.output).write_text(text, encoding="utf-8")
    except OSError as error:
        refuse(PAGE_COMMAND, f"[GC-FILE] cannot write {given.output}: {error.strerror}")
    except GpucollError as error:
        refuse(PAGE_COMMAND, str(error))
    print(given.output)
    return 0


def page_text(files: Sequence[str]) -> str:
    """Return the page of the files; raise ArgumentError if a file holds no results."""
    try:
        return page({file: records.read(file) for file in files})
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, GpucollError):
            raise
        raise ArgumentError(f"results of another shape than nccl-tests' JSON: {error!r}", code="GC-FILE") from None


def page(files: Files) -> str:
    """Return a page with the contents of the files; several files are compared. Raise UsageError without plotly."""
    try:
        from plotly.offline import get_plotlyjs

        from .figures import over_sizes
    except ImportError as error:
        raise UsageError(f"it needs plotly ({error}): pip install gpucoll[report]", code="GC-DRAW") from None
    letters = [*string.ascii_uppercase[:len(files)]] if len(files) > 1 else [""]
    found = panels([*files.values()])
    styles, sections = numbers(found), []
    for place, panel in enumerate(found):
        pictures, measured = "", tables.results(panel, letters)
        if len({row.size for row in panel.rows if row.size > 0}) > 1:  # a single size gives no line
            for placement in panel.placements:
                sides = "".join(_figure(over_sizes(panel, styles, letters, placement, time=time))
                                for time in (False, True))
                pictures += _details(placement.replace("_", " ").capitalize(), f'<div class="side">{sides}</div>',
                                     opened=placement == panel.placements[0])
            measured = _details("Every measurement", measured, opened=len(found) < 3)
        title, _, details = panel.title.partition(" · ")
        compared = "".join(tables.differences(panel, later, letters) for later in range(1, len(files)))
        sections.append(f'<section class="panel" id="panel-{place}"><h2>{escape(title)} <small>{escape(details)}'
                        f"</small></h2>\n{_lead(panel, letters)}{pictures}{measured}{compared}</section>\n")
    machines = "".join(_machine(group, name if len(files) > 1 else "") for name, group in files.items())
    tests = ", ".join(dict.fromkeys(panel.title.partition(" · ")[0] for panel in found))
    body = [_head(files, letters, tests), _notes(files, letters),
            *(_tiles(group, letter) for group, letter in zip(files.values(), letters, strict=True)), _contents(found),
            *sections, _section("Machine and commands", machines), asset(__package__, "glossary.html"), "</main>\n"]
    return page_file(f"gpucoll bench: {tests}", asset(__package__, "report.css") + palettes(DAY, NIGHT), "".join(body),
                     get_plotlyjs() + asset(__package__, "report.js"))


def _figure(chart: Any) -> str:
    """Return a figure, drawn by the page's script when scrolled into view."""
    data = chart.to_json().replace("<", "\\u003c")  # no text can end the script element
    return (f'<figure style="height:{chart.layout.height}px"><script type="application/json">{data}</script>'
            "</figure>\n")


def _section(heading: str, content: str) -> str:
    """Return a section, or "" if the section would be empty."""
    return f'<section class="panel"><h2>{heading}</h2>{content}</section>\n' if content else ""


def _details(summary: str, content: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{summary}</summary>{content}</details>\n"


def _own(record: Record) -> dict[str, Any]:
    """Return gpucoll's additions to nccl-tests' schema; {} for nccl-tests' own files."""
    return record.get("gpucoll") or {}


def _head(files: Files, letters: Sequence[str], tests: str) -> str:
    every = [record for group in files.values() for record in group]
    hosts = dict.fromkeys(str(_own(record).get("machine", {}).get("host") or "") for record in every)
    said = filter(None, [tests, ", ".join(filter(None, hosts)), str(every[0].get("start_time") or "")])
    runs = "".join(f"<li>{named('', letter)} {escape(name)}</li>" for name, letter in zip(files, letters, strict=True))
    return ('<a class="skip" href="#main">Skip to the results</a><header><div><h1>gpucoll bench</h1>'
            f"<p>{escape(' · '.join(said))}</p>{f'<ol class=runs>{runs}</ol>' if len(files) > 1 else ''}</div>"
            '<button id="theme" type="button" hidden>Light or dark</button></header>\n<main id="main">\n')


def _notes(files: Files, letters: Sequence[str]) -> str:
    """Return the warnings for the reader: errors, and cases left out."""
    items = []
    for group, letter in zip(files.values(), letters, strict=True):
        said: list[tuple[str, str]] = []
        for record in group:
            own = _own(record)
            if own.get("interrupted"):
                said.append(("bad", "The run was interrupted: what had been measured until then is here."))
            said += [("bad", str(text)) for text in record.get("errors") or []]
            said += [("", f"Left out: {one.get('what')} ({one.get('reason')})") for one in own.get("left_out") or []]
        items += [f'<li class="{kind}">{named(text, letter)}</li>' for kind, text in dict.fromkeys(said)]
    return f'<ul class="notes">{"".join(items)}</ul>\n' if items else ""


def _tiles(group: Sequence[Record], letter: str) -> str:
    """Return the main facts about a file: correctness, bandwidth, the machine, ratios to peers."""
    tiles = []
    outs = [record["out_of_bounds"] for record in group if record.get("out_of_bounds")]
    if outs:
        good, wrong = all(out.get("okay") == "true" for out in outs), sum(out.get("count") or 0 for out in outs)
        tiles.append(("good" if good else "bad", "all correct" if good else f"{wrong:g} wrong", "data"))
    average = group[0].get("average_bus_bandwidth") or {}
    if len(group) == 1 and group[0]["results"] and average:
        low = average.get("okay") == "false"
        tiles.append(("bad" if low else "", f"{figure(average['bandwidth'])} GB/s",
                      "average bus bandwidth" + ", below the least that was asked for" * low))
    copies = [copy["bandwidth"] for record in group if (copy := _own(record).get("copy") or {}).get("bandwidth")]
    if copies:
        ends = dict.fromkeys([figure(min(copies)), figure(max(copies))])
        tiles.append(("", f"{' to '.join(ends)} GB/s", "copy bandwidth of the machine"))
    best: dict[str, list[tuple[float, str]]] = {}  # for each peer: the best algorithm of each collective of each run
    for record in group:
        for peer, tests in (_own(record).get("ratios") or {}).items():
            for row in filter(None, tests.values()):
                best.setdefault(peer, []).append(max((ratio, name) for name, ratio in row.items()))
    for peer, row in best.items():
        name = row[0][1] if len(row) == 1 else f"the best for each of {len(row)} tests"
        tiles.append(("", f"{geometric_mean(ratio for ratio, _ in row):.2f} {BY}",
                      f"{name} against {peer}, geometric mean"))
    items = "".join(f'<li class="{kind}"><strong>{escape(value)}</strong><span>{named(what, letter)}</span></li>'
                    for kind, value, what in tiles)
    return f'<ul class="tiles">{items}</ul>\n' if items else ""


def _contents(found: Sequence[Panel]) -> str:
    links = "".join(f'<li><a href="#panel-{place}">{escape(panel.title)}</a></li>' for place, panel in enumerate(found))
    return f'<nav aria-label="Results"><ul>{links}</ul></nav>\n' if len(found) > 1 else ""


def _lead(panel: Panel, letters: Sequence[str]) -> str:
    """Return the summary of a panel: the fastest for the smallest size, and the highest bandwidth."""
    placement = (*panel.placements, "")[0]
    rows = [row for row in panel.rows if placement in row.sides]
    if not rows:
        return ""
    least = min(row.size for row in rows)
    said = []
    for title, ordered, words in (
            (f"Shortest time at {byte_text(least)}",
             sorted((row for row in rows if row.size == least), key=lambda row: row.sides[placement].time),
             lambda row: time_text(row.sides[placement].time)),
            ("Highest bus bandwidth", sorted(rows, key=lambda row: -row.sides[placement].busbw),
             lambda row: f"{figure(row.sides[placement].busbw)} GB/s at {byte_text(row.size)}")):
        # The first; if the first is a peer, also the first of gpucoll's algorithms.
        first = [ordered[0], *[row for row in ordered if not row.peer][:ordered[0].peer]]
        said.append(f"{title}: " + "; of ours ".join(
            f"<b>{escape(row.name)}</b>{named('', letters[row.file])} {words(row)}" for row in first))
    return f"<p>{'. '.join(said)}.</p>\n"


def _machine(group: Sequence[Record], name: str) -> str:
    """Return the facts about machine and commands in a file."""
    first, own = group[0], _own(group[0])
    facts = {"started": first.get("start_time"), "ended": group[-1].get("end_time"),
             "program": " ".join(str(own[key]) for key in ("program", "version", "revision") if own.get(key)),
             "NCCL of nccl-tests": first.get("nccl_version"), **(own.get("machine") or {})}
    items = "".join(f"<div><dt>{escape(READ_AS.get(key, key.replace('_', ' ')))}</dt><dd>{escape(_text(value))}</dd>"
                    "</div>" for key, value in facts.items() if value not in NO_FACT)
    commands = "\n".join(" ".join(map(str, record.get("args") or [])) for record in group)
    variables = "\n".join(map(str, first.get("env") or []))
    ranks = max((devices(record) for record in group), key=len)
    columns = {"rank": "rank", "hostname": "host", "pid": "process", "device": "device", "device_hex": "address",
               "device_info": "processor or GPU"}
    rows = table("Ranks", [*columns.values()], [[escape(str(rank.get(key, ""))) for key in columns] for rank in ranks])
    environment = f"<pre tabindex=0>{escape(variables)}</pre>"
    return (f"{name and f'<h3>{escape(name)}</h3>'}<dl class=facts>{items}</dl><pre tabindex=0>{escape(commands)}</pre>"
            f"{_details('Environment', environment) if variables else ''}{_details(f'Ranks ({len(ranks)})', rows)}")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items() if each not in NO_FACT)
    return ", ".join(map(_text, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
