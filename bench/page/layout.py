"""One HTML page that needs nothing else: no server, no network, and no script for all but conveniences."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gpucoll.analysis.document import asset, page_file, palettes, script_data
from gpucoll.analysis.sizes import byte_text

from . import facts, tables
from .axes import NARROW, WIDE, figure, time_text
from .canvas import DARK, LIGHT, Picture, svg, variables
from .charts import BANDWIDTH, LATENCY, WORDS, Quantity, lines, speedups, values
from .curves import Difference, Panel, Record, differences, names, pairs, panels
from .heatmap import pair_map

HINT = "Point at the picture or use the arrow keys to read values."
TEXTS = {BANDWIDTH.name: lambda value: f"{figure(value)} GB/s", LATENCY.name: time_text}


def page(records: Sequence[Record], files: Sequence[str] = ()) -> str:
    """Return a page with all that `records` hold, each from the file of its name; several files are compared."""
    files = files or ([""] if len(records) == 1 else [f"run {run}" for run, _ in enumerate(records, 1)])
    letters = _letters(files)
    found = panels(records)
    styles = names(found)
    sections = [*(_panel(panel, place, styles, letters, opened=len(found) < 3) for place, panel in enumerate(found)),
                *map(_pairs, records), *map(_overlap, records)]
    body = [_head(records, found, files), facts.notes(records, letters), facts.tiles(records, letters),
            _contents(found), *sections, _machines(records, files), asset(__package__, "glossary.html"), "</main>\n"]
    style = asset(__package__, "page.css") + palettes(LIGHT, DARK)
    return page_file(_title(records), style, "".join(body), asset(__package__, "page.js"))


def _letters(files: Sequence[str]) -> list[str]:
    """Return A, B, ... for each file; nothing where there is one only.

    >>> _letters(["old", "old", "new"])
    ['A', 'A', 'B']
    """
    known = list(dict.fromkeys(files))
    if len(known) == 1:
        return [""] * len(files)
    signs = string.ascii_uppercase if len(known) <= 26 else [str(place) for place, _ in enumerate(known, 1)]
    return [signs[known.index(file)] for file in files]


def _title(records: Sequence[Record]) -> str:
    tests = dict.fromkeys(test for record in records for test in facts.ours(record).get("tests") or [])
    return f"gpucoll bench: {', '.join(tests)}" if tests else "gpucoll bench"


def _head(records: Sequence[Record], found: Sequence[Panel], files: Sequence[str]) -> str:
    tests = dict.fromkeys(panel.kind.collective for panel in found)
    hosts = dict.fromkeys(str(facts.ours(record).get("machine", {}).get("host") or "") for record in records)
    said = [", ".join(tests), ", ".join(filter(None, hosts)), str(records[0].get("start_time") or "")]
    letters = dict(zip(files, _letters(files), strict=True))
    runs = "".join(f"<li>{tables.run_letter(letter)} {escape(file)}</li>" for file, letter in letters.items() if letter)
    return ('<a class="skip" href="#main">Skip to the results</a><header><div><h1>gpucoll bench</h1>'
            f'<p>{escape(" · ".join(filter(None, said)))}</p>{runs and f"<ol class=runs>{runs}</ol>"}</div>'
            '<button id="theme" type="button" hidden>Light or dark</button></header>\n<main id="main">\n')


def _contents(found: Sequence[Panel]) -> str:
    links = "".join(f'<li><a href="#panel-{place}">{escape(panel.title)}</a></li>' for place, panel in enumerate(found))
    return f'<nav aria-label="Results"><ul>{links}</ul></nav>\n' if len(found) > 1 else ""


def _panel(panel: Panel, place: int, styles: Mapping[str, int], letters: Sequence[str], *, opened: bool) -> str:
    """Return the section of a panel: what it says, pictures by placement, the table, and how later runs differ."""
    letters = _told_apart(panel, letters)
    sides = "".join(f'<div class="side {placement}">{_pictures(panel, placement, styles, letters)}</div>'
                    for placement in panel.placements)
    title, *details = panel.title.split(" · ")
    return (f'<section class="panel" id="panel-{place}">'
            f'<h2>{escape(title)} <small>{escape(" · ".join(details))}</small></h2>\n'
            f"{facts.summary(panel, letters)}{_choice(panel, place)}{_legend(panel, styles, letters)}{sides}"
            f"<details{' open' if opened else ''}><summary>Every measurement</summary>"
            f"{tables.results(panel, styles, letters)}</details>\n"
            f"{_comparisons(panel, styles, letters)}</section>\n")


def _told_apart(panel: Panel, letters: Sequence[str]) -> list[str]:
    """Return the letters of the runs, numbered where one file holds several of this panel; none for a single run."""
    if len(panel.runs) == 1:
        return [""] * len(letters)
    alone = len({letters[run] for run in panel.runs}) == len(panel.runs)
    return [letter if alone else f"{letter}{run + 1}" for run, letter in enumerate(letters)]


def _choice(panel: Panel, place: int) -> str:
    """Return the switch between placements, which needs no script."""
    if len(panel.placements) < 2:
        return ""
    return "".join(f'<input type="radio" name="placement-{place}" id="{placement}-{place}" class="pick-{placement}"'
                   f'{" checked" if not turn else ""}><label for="{placement}-{place}">{WORDS[placement]}</label>'
                   for turn, placement in enumerate(panel.placements))


def _legend(panel: Panel, styles: Mapping[str, int], letters: Sequence[str]) -> str:
    chips = "".join(f'<button type="button" aria-pressed="true" data-shows="{curve.run}:{escape(curve.name)}">'
                    f"{tables.name(panel, curve, styles, letters)}</button>" for curve in panel.curves)
    return f'<div class="legend" role="group" aria-label="Lines to show">{chips}</div>'


def _pictures(panel: Panel, placement: str, styles: Mapping[str, int], letters: Sequence[str]) -> str:
    drawn = {quantity: [lines(panel, quantity, styles, letters, placement=placement, size=size)
                        for size in (WIDE, NARROW)] for quantity in (BANDWIDTH, LATENCY)}
    return "".join(_figure(pictures, readings=_readings(panel, quantity, placement, letters))
                   for quantity, pictures in drawn.items())


def _figure(drawn: Sequence[Picture], *, caption: str = "", readings: object = None) -> str:
    """Return a figure that shows the first picture where there is room and the second one on a phone."""
    wide, narrow = (svg(picture, variables) for picture in drawn)
    reader = (f'<script type="application/json">{script_data(readings)}</script>'
              f'<output aria-live="polite">{HINT}</output>')
    return (f'<figure{" tabindex=0" if readings else ""}>{caption and f"<figcaption>{escape(caption)}</figcaption>"}'
            f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>{reader if readings else ""}</figure>\n')


def _readings(panel: Panel, quantity: Quantity, placement: str, letters: Sequence[str]) -> list[tuple[str, list[Any]]]:
    """Return for every size its name and what each line has there, the best first: what pointer and keys read off."""
    found: dict[float, list[tuple[float, str, str]]] = {}
    for curve in panel.curves:
        for nbytes, value in values(curve, quantity, placement):
            name = " ".join(filter(None, (curve.name, letters[curve.run])))
            found.setdefault(nbytes, []).append((value, f"{curve.run}:{curve.name}", name))
    text, most_first = TEXTS[quantity.name], quantity is BANDWIDTH
    ordered = {nbytes: sorted(found[nbytes], reverse=most_first) for nbytes in sorted(found)}
    return [(byte_text(int(nbytes)), [(key, name, text(value)) for value, key, name in row])
            for nbytes, row in ordered.items()]


def _comparisons(panel: Panel, styles: Mapping[str, int], letters: Sequence[str]) -> str:
    """Return how each later run differs from the first, algorithm by algorithm."""
    first, *later = panel.runs
    return "".join(_comparison(panel, first, run, styles, letters) for run in later)


def _comparison(panel: Panel, first: int, run: int, styles: Mapping[str, int], letters: Sequence[str]) -> str:
    found = differences(panel, first, run)
    if not found:
        return ""
    title = f"{letters[run]} against {letters[first]}"
    drawn = [speedups(f"{panel.title}: {title}", found, styles, size=size) for size in (WIDE, NARROW)]
    return (f"<h3>{escape(title)}</h3><p>{escape(_verdict(found))}</p>"
            f"{_figure(drawn, caption='Above 1 is faster; the bands are 95% intervals of the repetitions')}"
            f"{tables.differences(f'{title}: {panel.title}', found)}")


def _verdict(found: Sequence[Difference]) -> str:
    """Return how much changed, and how much of that peers did as well: they tell the machine's part from ours."""
    mine, peers = ([change for curve, row in found if curve.peer is peer for change in row] for peer in (False, True))
    counts = [sum(tables.direction(change) == wanted for change in mine) for wanted in (1, -1, 0)]
    control = (f" The peers are a control: {sum(map(bool, map(tables.direction, peers)))} of {len(peers)} of theirs "
               "changed too, which is the machine's doing or their version's." if peers else "")
    return f"{counts[0]} of {len(mine)} faster, {counts[1]} slower, {counts[2]} without a clear difference.{control}"


def _pairs(record: Record) -> str:
    parts = [_figure([pair_map(nbytes, row, size=size) for size in (WIDE, NARROW)])
             + f"<details><summary>Every pair</summary>{tables.pairs(nbytes, row)}</details>"
             for nbytes, row in pairs(record).items()]
    return _section("sendrecv <small>every pair of ranks</small>", "".join(parts))


def _section(heading: str, content: str) -> str:
    """Return a section, or nothing where it would be empty."""
    return f'<section class="panel"><h2>{heading}</h2>{content}</section>\n' if content else ""


def _overlap(record: Record) -> str:
    rows = facts.ours(record).get("overlap") or []
    return _section("Overlap", tables.overlap(rows) if rows else "")


def _machines(records: Sequence[Record], files: Sequence[str]) -> str:
    groups: dict[str, list[Record]] = {}
    for file, record in zip(files, records, strict=True):
        groups.setdefault(file, []).append(record)
    return _section("Machine and commands", "".join(facts.machine(found, file) for file, found in groups.items()))
