"""`gpucoll bench report F.json ...`: one HTML page made of what runs left behind; it needs no server and no network."""

from __future__ import annotations

import string
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gpucoll.analysis.document import DARK, LIGHT, LINES, asset, page_file, palettes
from gpucoll.analysis.sizes import byte_text
from gpucoll.arguments import Parser, refuse
from gpucoll.errors import ArgumentError, GpucollError, UsageError

from . import records, tables
from .compare import FEWEST, Change, change
from .curves import Panel, Record, Row, devices, figure, numbers, pairs, panels, time_text
from .records import PLACEMENTS
from .summary import geometric_mean
from .tables import BY, named, table

PROGRAM = "gpucoll bench report"
PAGE = "report.html"
# What charts need besides: lines on dark paper have the same hues, moved until they stand out there.
DARK_LINES = ("#509bf1", "#ff8a47", "#33cf9f", "#f0a1e4", "#f3dd6a", "#7d6bf0", "#bfeaff", "#b8563c")
DAY = {**LIGHT, "bound": "#3c4650", "peer": "#6a737c", "good": "#0a7a4b", "bad": "#c02f1d",
       **{f"line-{number}": colour for number, colour in enumerate(LINES)}}
NIGHT = {**DARK, "bound": "#c3ccd5", "peer": "#98a3ae", "good": "#4fd19a", "bad": "#ff8b7a",
         **{f"line-{number}": colour for number, colour in enumerate(DARK_LINES)}}
READ_AS = {"memory_gib": "memory (GiB)", "cpu": "processor", "mpi": "MPI", "numpy": "NumPy", "cupy": "CuPy",
           "gpus": "GPUs", "nccl": "NCCL", "python": "Python"}
UNKNOWN: tuple[object, ...] = ("", None, 0, [], {})
Files = Mapping[str, Sequence[Record]]  # the records of each file, by the name that the page gives it


def main(arguments: Sequence[str]) -> int:
    """Write the page of the files named by `arguments`, which follow the word `report`; return the exit code.

    It is 0; what cannot be read or written ends the process with exit code 2 and one line.
    """
    parser = Parser(PROGRAM, allow_abbrev=False, description="Make one page of benchmark results; it needs no network.",
                    epilog="Several files are compared, the first being what the others are held against. Files of "
                           "nccl-tests' -J are read as well. Needs plotly: pip install gpucoll[report].")
    parser.add_argument("files", nargs="+", metavar="F.json", help="what a run wrote with -J, or scripts/bench")
    parser.add_argument("-o", "--output", metavar="PAGE.html", default=PAGE,
                        help=f"where to write ({PAGE}); - is standard output")
    given = parser.parse_args(arguments)
    try:
        text = made(given.files)
        if given.output == "-":
            sys.stdout.write(text)
        else:
            Path(given.output).write_text(text, encoding="utf-8")
    except OSError as error:
        refuse(PROGRAM, f"[GC-FILE] cannot write {given.output}: {error.strerror}")
    except GpucollError as error:
        refuse(PROGRAM, str(error))
    if given.output != "-":
        print(given.output)
    return 0


def made(files: Sequence[str]) -> str:
    """Return the page of the files; raise ArgumentError where one of them holds no results."""
    found = dict(zip(names(files), map(records.read, files), strict=True))
    try:
        return page(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArgumentError(f"results of another shape than nccl-tests' JSON: {error!r}", code="GC-FILE") from None


def names(files: Sequence[str]) -> list[str]:
    """Return what the page calls each file: no more of its path than tells it apart.

    >>> names(["old/run.json", "new/run.json"]), names(["a.json", "/tmp/b.json"])
    (['old/run.json', 'new/run.json'], ['a.json', 'b.json'])
    """
    paths = [Path(file) for file in files]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        short = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(short)) == len(files):
            return short
    return [f"{file} {number}" for number, file in enumerate(files, 1)]


def page(files: Files) -> str:
    """Return a page with all that the files hold; several are compared. Raises UsageError where plotly is missing."""
    try:
        from plotly.offline import get_plotlyjs

        from . import figures
    except ImportError as error:
        raise UsageError(f"it needs plotly ({error}): pip install gpucoll[report]", code="GC-PLOT") from None
    letters = [*string.ascii_uppercase[:len(files)]] if len(files) > 1 else [""]
    found = panels([*files.values()])
    styles = numbers(found)
    body = [_head(files, letters, found), _notes(files, letters),
            *(_tiles(group, letter) for group, letter in zip(files.values(), letters, strict=True)),
            _contents(found)]
    for place, panel in enumerate(found):
        charts = figures.of_panel(panel, styles, letters)
        pictures = "".join(
            f'<div class="side">{"".join(map(_figure, sides))}</div>' if placement == PLACEMENTS[0] or len(charts) == 1
            else f'<details><summary>In place</summary><div class="side">{"".join(map(_figure, sides))}</div></details>'
            for placement, sides in charts.items())
        measured = tables.results(panel, letters)
        if charts:
            opened = " open" if len(found) < 3 else ""
            measured = f"<details{opened}><summary>Every measurement</summary>{measured}</details>"
        title, _, details = panel.title.partition(" · ")
        compared = "".join(_comparison(panel, later, letters, styles) for later in range(1, len(files)))
        body.append(f'<section class="panel" id="panel-{place}"><h2>{escape(title)} <small>{escape(details)}</small>'
                    f"</h2>\n{_lead(panel, letters)}{pictures}{measured}{compared}</section>\n")
    for record in (record for group in files.values() for record in group):
        maps = [_figure(figures.pair_map(size, rows)) + f"<details><summary>Every pair</summary>"
                f"{tables.pairs(size, rows)}</details>" for size, rows in pairs(record).items()]
        body.append(_section("sendrecv <small>every pair of ranks</small>", "".join(maps)))
        overlap = _own(record).get("overlap")
        body.append(_section("Overlap", tables.overlap(overlap) if overlap else ""))
    body.append(_section("Machine and commands", "".join(
        _machine(group, name if len(files) > 1 else "") for name, group in files.items())))
    tests = dict.fromkeys(panel.title.partition(" · ")[0] for panel in found)
    return page_file(": ".join(filter(None, ["gpucoll bench", ", ".join(tests)])),
                     asset(__package__, "report.css") + palettes(DAY, NIGHT),
                     "".join([*body, asset(__package__, "glossary.html"), "</main>\n"]),
                     get_plotlyjs() + asset(__package__, "report.js"))


def _figure(chart: Any) -> str:
    """Return a figure that the page's script draws when it comes into view."""
    data = chart.to_json().replace("<", "\\u003c")  # nothing in it ends the script element
    height = chart.layout.height
    return f'<figure style="height:{height}px"><script type="application/json">{data}</script></figure>\n'


def _section(heading: str, content: str) -> str:
    """Return a section, or nothing where it would be empty."""
    return f'<section class="panel"><h2>{heading}</h2>{content}</section>\n' if content else ""


def _own(record: Record) -> dict[str, Any]:
    """Return what gpucoll adds to nccl-tests' schema; nothing for nccl-tests' own files."""
    return record.get("gpucoll") or {}


def _head(files: Files, letters: Sequence[str], found: Sequence[Panel]) -> str:
    every = [record for group in files.values() for record in group]
    tests = dict.fromkeys(panel.title.partition(" · ")[0] for panel in found)
    hosts = dict.fromkeys(str(_own(record).get("machine", {}).get("host") or "") for record in every)
    said = filter(None, [", ".join(tests), ", ".join(filter(None, hosts)), str(every[0].get("start_time") or "")])
    runs = "".join(f"<li>{named('', letter)} {escape(name)}</li>" for name, letter in zip(files, letters, strict=True))
    return ('<a class="skip" href="#main">Skip to the results</a><header><div><h1>gpucoll bench</h1>'
            f"<p>{escape(' · '.join(said))}</p>{f'<ol class=runs>{runs}</ol>' if len(files) > 1 else ''}</div>"
            '<button id="theme" type="button" hidden>Light or dark</button></header>\n<main id="main">\n')


def _notes(files: Files, letters: Sequence[str]) -> str:
    """Return what a reader has to know before believing the rest: errors, slow links, what could not be measured."""
    notes: dict[tuple[str, str], list[str]] = {}
    for group, letter in zip(files.values(), letters, strict=True):
        for record in group:
            own = _own(record)
            said = ["The run was interrupted: what had been measured until then is here."] * bool(
                own.get("interrupted")) + [*(record.get("errors") or []), *(own.get("findings") or [])]
            left = [f"Left out: {one.get('what')} ({one.get('reason')})" for one in own.get("left_out") or []]
            for note in (*(("bad", str(text)) for text in said), *(("plain", text) for text in left)):
                notes.setdefault(note, []).append(letter)
    items = "".join(f'<li class="{kind}">{escape(text)}{"".join(named("", letter) for letter in dict.fromkeys(of))}'
                    "</li>" for (kind, text), of in notes.items())
    return f'<ul class="notes">{items}</ul>\n' if items else ""


def _tiles(group: Sequence[Record], letter: str) -> str:
    """Return what matters most of a file: whether the data are right, bandwidth, the machine, ratios to peers."""
    tiles: list[tuple[str, str, str]] = []
    outs = [record["out_of_bounds"] for record in group if record.get("out_of_bounds")]
    if outs:
        good, wrong = all(out.get("okay") == "true" for out in outs), sum(out.get("count") or 0 for out in outs)
        tiles.append(("good", "all correct", "data") if good else ("bad", f"{wrong:g} wrong", "data"))
    average = group[0].get("average_bus_bandwidth") or {}
    if len(group) == 1 and group[0]["results"] and average:
        low = average.get("okay") == "false"
        tiles.append(("bad" if low else "", f"{figure(average['bandwidth'])} GB/s",
                      "average bus bandwidth" + (", below the least that was asked for" if low else "")))
    copies = [copy["bandwidth"] for record in group if (copy := _own(record).get("copy") or {}).get("bandwidth")]
    if copies:
        ends = dict.fromkeys([figure(min(copies)), figure(max(copies))])
        tiles.append(("", f"{' to '.join(ends)} GB/s", "copy bandwidth of the machine"))
    best: dict[str, list[tuple[float, str]]] = {}  # for each peer the best algorithm of each collective of each run
    for record in group:
        for peer, tests in (_own(record).get("ratios") or {}).items():
            best.setdefault(peer, []).extend(max((ratio, name) for name, ratio in row.items())
                                             for row in tests.values() if row)
    for peer, row in best.items():
        if row:
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
    """Return what a reader takes home from a panel: who is first on the least data, and who reaches most."""
    rows = [row for row in panel.rows if panel.placements[:1] and panel.placements[0] in row.sides]
    if not rows:
        return ""
    side, least = panel.placements[0], min(row.size for row in rows)

    def leaders(ordered: Sequence[Row], words: Mapping[int, str]) -> str:
        """Name the first, and where that is a peer the first of ours as well."""
        first = [ordered[0], *[row for row in ordered if not row.peer][:ordered[0].peer]]
        return "; of ours ".join(f"<b>{escape(row.name)}</b>{named('', letters[row.file])} {words[id(row)]}"
                                 for row in first)

    short = sorted((row for row in rows if row.size == least), key=lambda row: row.sides[side].time)
    fast = sorted(rows, key=lambda row: -row.sides[side].busbw)
    times = {id(row): time_text(row.sides[side].time) for row in short}
    bandwidths = {id(row): f"{figure(row.sides[side].busbw)} GB/s at {byte_text(row.size)}" for row in fast}
    return (f"<p>Shortest time at {byte_text(least)}: {leaders(short, times)}. "
            f"Highest bus bandwidth: {leaders(fast, bandwidths)}.</p>\n")


def _comparison(panel: Panel, later: int, letters: Sequence[str], styles: Mapping[str, int]) -> str:
    """Return how a later file differs from the first one; peers tell the machine's part from ours."""
    from . import figures

    side = PLACEMENTS[0]
    before = {(row.name, row.size): row.sides[side] for row in panel.rows if row.file == 0 and side in row.sides}
    found: dict[str, dict[int, Change]] = {}
    counts = {peer: dict.fromkeys(("faster", "slower", "alike"), 0) for peer in (False, True)}
    sure = []
    for row in panel.rows:
        old, new = before.get((row.name, row.size)), row.sides.get(side)
        if row.file != later or not old or not new or not old.time or not new.time:
            continue
        one = change(row.name, new.times or [new.time], old.times or [old.time])
        is_sure = min(len(old.times), len(new.times)) >= FEWEST
        sure += [(row.name, row.size)] * is_sure
        counts[row.peer][one.verdict() if is_sure else "alike"] += 1
        found.setdefault(row.name, {})[row.size] = one
    if not found:
        return ""
    ours, theirs = counts[False], counts[True]
    verdict = (f"{ours['faster']} of {sum(ours.values())} faster, {ours['slower']} slower, {ours['alike']} without a "
               "clear difference.")
    if sum(theirs.values()):
        verdict += (f" The peers are a control: {theirs['faster'] + theirs['slower']} of {sum(theirs.values())} of "
                    "theirs changed too, which is the machine's doing or their version's.")
    title = f"{letters[later]} against {letters[0]}"
    several = len({size for changes in found.values() for size in changes if size}) > 1
    return (f"<h3>{title}</h3><p>{verdict}</p>"
            f"{_figure(figures.speedups(panel, found, styles)) if several else ''}"
            f"{tables.differences(f'{title}: {panel.title}', found, sure)}")


def _machine(group: Sequence[Record], name: str) -> str:
    """Return what one file says about its machine and its commands."""
    first, last, own = group[0], group[-1], _own(group[0])
    repetitions = {f"{config['iterations']} timed after {config['warmup_iters']}" for record in group
                   if (config := record.get("config") or {}).keys() >= {"iterations", "warmup_iters"}}
    per_rank = [figure(each) for each in (own.get("copy") or {}).get("per_rank") or []]
    facts = {"started": first.get("start_time"), "ended": last.get("end_time"),
             "program": " ".join(str(own[key]) for key in ("program", "version", "revision") if own.get(key)),
             "NCCL of nccl-tests": first.get("nccl_version"),
             "repetitions": repetitions.pop() if len(repetitions) == 1 else None,
             "copy bandwidth by rank (GB/s)": per_rank if len(group) == 1 else None, **(own.get("machine") or {})}
    items = "".join(f"<div><dt>{escape(READ_AS.get(key, key.replace('_', ' ')))}</dt><dd>{escape(_text(value))}</dd>"
                    "</div>" for key, value in facts.items() if value not in UNKNOWN)
    commands = "\n".join(" ".join(map(str, record.get("args") or [])) for record in group)
    variables = "\n".join(map(str, first.get("env") or []))
    environment = (f"<details><summary>Environment</summary><pre tabindex=0>{escape(variables)}</pre></details>"
                   if variables else "")
    ranks = max((devices(record) for record in group), key=len)
    columns = ("rank", "hostname", "pid", "device", "device_hex", "device_info")
    rows = table("Ranks", ["rank", "host", "process", "device", "address", "processor or GPU"],
                 [[escape(str(rank.get(column, ""))) for column in columns] for rank in ranks])
    return (f"{name and f'<h3>{escape(name)}</h3>'}<dl class=facts>{items}</dl>"
            f"<pre tabindex=0>{escape(commands)}</pre>{environment}"
            f"<details><summary>Ranks ({len(ranks)})</summary>{rows}</details>\n")


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items() if each not in UNKNOWN)
    return ", ".join(map(_text, value)) if isinstance(value, Iterable) and not isinstance(value, str) else str(value)
