"""The tables of the page: all measurements, differences of runs; every cell is escaped HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gpucoll.lab.sizes import byte_text

from .curves import CurveSide, Panel
from .records import PLACEMENTS
from .summary import FEWEST, change

NO_NUMBER, BY = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"  # a missing number; the unit of ratios
TEXT_COLUMNS = {"algorithm", "verdict", "collective", "host", "device", "address", "processor or GPU"}  # of text
VERDICTS = {"faster": '<b class="good">faster</b>', "slower": '<b class="bad">slower</b>',
            "alike": "no clear difference", "": "too few repetitions"}


def table(caption: str, titles: Sequence[str], rows: Iterable[Sequence[str]], above: str = "") -> str:
    """Return a table, scrolling within the page; a change in the first column begins a new part.

    A title may end in a bar and its unit; `above` is a row over the titles.
    """
    kinds = [' class="text"' if title in TEXT_COLUMNS else "" for title in titles]
    heads = "".join(f'<th scope="col"{kind}>{name}{unit and f" <small>{unit}</small>"}</th>' for kind, (name, _, unit)
                    in zip(kinds, (title.partition("|") for title in titles), strict=True))
    body, part = [], None
    for row in rows:
        first, *others = zip(kinds, row, strict=True)
        cells = "".join(f"<td{kind}>{cell}</td>" for kind, cell in others)
        begins = ' class="first"' if row[0] != part else ""
        body.append(f'<tr{begins}><th scope="row"{first[0]}>{first[1]}</th>{cells}</tr>')
        part = row[0]
    name = escape(caption)
    return (f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><caption>{name}</caption>'
            f"<thead>{above}<tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>\n")


def results(panel: Panel, letters: Sequence[str]) -> str:
    """Return the table of a panel: a row for every size of every line."""
    peers = list(dict.fromkeys(peer for row in panel.rows for peer in row.ratios))
    figures = ["time|µs", "p99|µs", "algbw|GB/s", "busbw|GB/s", "#wrong"]
    own = ["of bound|%", *(f"{escape(peer)} / ours|{BY}" for peer in peers), "skew|µs", "slowest rank"]
    spans = [(3, ""), (len(figures) + len(own), "out of place"), (len(figures), "in place")]
    above = "".join(f'<th scope="colgroup" colspan="{count}">{text}</th>' for count, text in spans)
    best = {(row.size, placement): min(other.sides[placement].time for other in panel.rows
                                       if other.size == row.size and placement in other.sides)
            for row in panel.rows for placement in row.sides}
    rows = []
    for row in sorted(panel.rows, key=lambda row: (row.size, row.file, row.peer)):
        out, *rest = ([NO_NUMBER] * len(figures) if side is None else
                      _figures(side, best[row.size, placement]) for placement in PLACEMENTS
                      for side in [row.sides.get(placement)])
        side = row.sides.get(PLACEMENTS[0])
        rows.append([
            byte_text(row.size), f"{row.elements:,}", named(row.name, letters[row.file]), *out,
            digits(100 * side.busbw / row.bound) if side and row.bound else NO_NUMBER,
            *(f"{row.ratios[peer]:.2f}" if peer in row.ratios else NO_NUMBER for peer in peers), microseconds(row.skew),
            NO_NUMBER if row.late is None else escape(str(row.late)), *rest[0]])
    return table(f"Every measurement: {panel.title}", ["size", "count", "algorithm", *figures, *own, *figures], rows,
                 f'<tr class="above">{above}</tr>')


def _figures(side: CurveSide, best: float) -> list[str]:
    """Return the cells of one placement; a bar behind the bandwidth shows the ratio to the best of the size."""
    part = best / side.time if side.time else 0.0
    busbw = f"<b>{digits(side.busbw)}</b>" if part == 1 else digits(side.busbw)
    wrong = "N/A" if side.wrong is None else f'<b class="bad">{side.wrong:g}</b>' if side.wrong else "0"
    return [microseconds(side.time), microseconds(side.p99), digits(side.algbw),
            f'<span class="bar" style="--part:{100 * part:.0f}%">{busbw}</span>', wrong]


def named(name: str, letter: str) -> str:
    """Return a name, followed by the letter of the file if there are several."""
    return escape(name) + (f' <b class="run">{escape(letter)}</b>' if letter else "")


def microseconds(time: float | None) -> str:
    """Return a time in us, with two decimals for short times."""
    return NO_NUMBER if time is None else f"{time:,.{2 if time < 100 else 1 if time < 1000 else 0}f}"


def digits(value: float) -> str:
    """Return a number with three significant digits, trailing zeros included: for columns.

    >>> digits(1234.5), digits(0.01), digits(9.0)
    ('1,234', '0.0100', '9.00')
    """
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".") if value else "0"


def differences(panel: Panel, later: int, letters: Sequence[str]) -> str:
    """Return the differences of a later file from the first: verdicts for figures with enough repetitions, and a table.

    The peers are the same library in both files, so their changes are due to the machine.
    """
    side, rows, verdicts = PLACEMENTS[0], [], []
    before = {(row.name, row.size): row.sides[side] for row in panel.rows if row.file == 0 and side in row.sides}
    for row in sorted(panel.rows, key=lambda row: (row.size, row.name)):
        old, new = before.get((row.name, row.size)), row.sides.get(side)
        if row.file != later or not old or not new or not old.time or not new.time:
            continue
        one = change(row.name, new.times or [new.time], old.times or [old.time])
        is_sure, ratio = min(len(old.times), len(new.times)) >= FEWEST, one.interval
        verdicts.append((row.peer, one.verdict() if is_sure else "alike"))
        rows.append([byte_text(row.size), escape(row.name), microseconds(one.old), microseconds(one.new),
                     f"{1 / ratio.ratio:.3f}", f"{1 / ratio.high:.3f} … {1 / ratio.low:.3f}" if is_sure else NO_NUMBER,
                     VERDICTS[one.verdict() if is_sure else ""]])
    if not rows:
        return ""
    ours, theirs = ([verdict for of_peer, verdict in verdicts if of_peer == peer] for peer in (False, True))
    said = (f"{ours.count('faster')} of {len(ours)} faster, {ours.count('slower')} slower, {ours.count('alike')} "
            "without a clear difference.")
    if theirs:
        said += (f" The peers are a control: {len(theirs) - theirs.count('alike')} of {len(theirs)} of theirs changed "
                 "too, which is the machine's doing or their version's.")
    title = f"{letters[later]} against {letters[0]}"
    return f"<h3>{title}</h3><p>{said}</p>" + table(
        f"{title}: {panel.title}", ["size", "algorithm", "before|µs", "after|µs", f"times as fast|{BY}",
                                    f"95% interval|{BY}", "verdict"], rows)
