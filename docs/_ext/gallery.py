"""Generator of the gallery of algorithms: a page for each file of `gpucoll/algorithms`, from the registry.

Before Sphinx begins, pages go to `docs/gallery`, pictures and animated pages to `docs/_drawings`. Git ignores both
folders.
"""

from __future__ import annotations

import importlib
import re
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpucoll.algorithms import Algorithm, registry
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.lab.draw import draw
from gpucoll.lab.formula import FORMULA, by_formula, total_sent
from gpucoll.simulator import shipped, simulate
from gpucoll.tuner import segments

WIDEST = 1000  # pixels of a picture on a page: a wider picture is drawn again with fewer ranks
RANKS = (8, 6, 5, 4)
HEADING, SHAPE = 152, 1.75  # pixels of a drawing above its rounds; width over height of a card's picture
PRICED = 8  # ranks, on a mebibyte
PAPER = re.compile(r'([A-Z][^".]*?), "([^"]+)" +\((\d{4})\)')

INDEX = """# Gallery of algorithms

For readers in search of an algorithm, or of the idea behind a name: the rounds of every algorithm of the registry, the
cost and the source. All pictures are drawn from the schedules run by the library, and each schedule is proved before.
[The table of costs](../costs.md) has all formulas side by side; `gpucoll draw` draws
[an algorithm of your own](../algorithms.md) in the same way.

"""


class Page(NamedTuple):
    """A file of `gpucoll/algorithms`: its name, the two parts of its docstring, and its algorithms."""

    name: str
    title: str
    text: str
    rows: list[Algorithm]

    @property
    def papers(self) -> list[tuple[str, ...]]:
        return [(authors.rpartition("see ")[2], *rest) for authors, *rest in PAPER.findall(" ".join(self.text.split()))]


def pages() -> list[Page]:
    """Return the pages of all files, by name."""
    names = sorted({name for _, name in registry()})
    order = list(COLLECTIVES)
    found = []
    for name in names:
        title, _, text = (importlib.import_module(f"gpucoll.algorithms.{name}").__doc__ or "").partition("\n")
        rows = [row for (_, other), row in registry().items() if other == name]
        found.append(Page(name, title, text, sorted(rows, key=lambda row: order.index(row.collective))))
    return found


def prose(text: str) -> str:
    """Return a docstring as Markdown; indented lines become literal text."""
    parts = []
    for paragraph in re.split(r"\n{2,}(?=\S)", textwrap.dedent(text).strip("\n")):
        lines = paragraph.splitlines()
        drawn = [index for index, line in enumerate(lines) if line.startswith("    ")]
        if drawn and all(line.startswith("    ") or not line for line in lines[drawn[0]:]):
            parts += ["\n".join(lines[:drawn[0]]), "```text\n" + textwrap.dedent("\n".join(lines[drawn[0]:])) + "\n```"]
        else:
            parts.append(paragraph)
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def picture(row: Algorithm) -> tuple[int, str]:
    """Return the drawing on an algorithm's page, as (number of ranks, SVG)."""
    for size in RANKS:
        drawing = draw(row.name, row.collective, size=size, form="svg")
        width = re.search(r'width="(\d+)', drawing)
        if size == RANKS[-1] or width is None or int(width[1]) <= WIDEST:
            break
    return size, drawing


def thumbnail(drawing: str) -> str:
    """Return a card's picture: the beginning of a drawing's rounds, in the shape of all cards."""
    height = int(re.search(r'height="(\d+)', drawing)[1]) - HEADING  # type: ignore[index]
    width = round(height * SHAPE)
    sides = f'width="{width}" height="{height}" viewBox="16 {HEADING} {width} {height}"'
    return re.sub(r'width="[^"]*" height="[^"]*" viewBox="[^"]*"', sides, drawing, count=1)


def section(row: Algorithm, drawings: Path) -> Iterator[str]:
    """Yield a page's lines on one collective, after writing its picture and its animated page."""
    name = f"{row.name}-{row.collective}"
    size, drawing = picture(row)
    depth = segments(row.collective, row.name, 1 << 20, PRICED)
    (drawings / f"{name}.svg").write_text(drawing, encoding="utf-8")
    (drawings / f"{name}.html").write_text(draw(row.name, row.collective, size=RANKS[0]), encoding="utf-8")
    yield from (
        f"## {row.collective}", "",
        "```{raw} html",
        f'<div class="drawing" tabindex="0"><img class="dark-light" src="{name}.svg" loading="lazy"',
        f'alt="{row.name}, {row.collective} on {size} ranks: what every rank holds after every round"></div>',
        f'<p><a class="step" href="{name}.html">Step through it, on {RANKS[0]} ranks</a></p>',
        "```", "",
        f"| | formula | P = {PRICED}, N = 1 MiB, S = {depth} |", "|---|---|---|")
    price = row.price(PRICED, 1 << 20, depth)
    for label, field, unit in (("rounds", "rounds", ""), ("bytes on the longest path", "path", " B"),
                               ("most bytes sent", "sent", " B"), ("most bytes received", "received", " B"),
                               ("most bytes combined", "reduced", " B")):
        yield f"| {label} | `{getattr(row.cost, field)}` | {float(price[field]):,.0f}{unit} |"
    total = float((total_sent(row.collective, row.name, PRICED, depth) or 0) * (1 << 20))
    predicted = simulate(row.collective, row.name, PRICED, 1 << 20, segments=depth)
    yield f"| bytes sent by all ranks together | counted | {total:,.0f} B |"
    yield (f"| [time](../guide/time.md) on one switch | `{FORMULA}` | {by_formula(predicted, shipped('switch'))} |")
    notes = [f"The data is cut into `{row.chunks}` chunks."]
    if row.in_rank_order:
        notes.append("Contributions are combined in rank order, so that `deterministic=True` allows it.")
    if row.at_once:
        notes.append("A single reduction combines all contributions, so that `deterministic=\"exact\"` allows it, too.")
    if "segments" in row.options:
        notes.append("It is pipelined in `S` segments.")
    yield from ("", " ".join(notes), "",
                "```sh", f"gpucoll draw {row.name} --collective {row.collective} --ranks {RANKS[0]} -o {name}.html",
                "```", "")


def write(page: Page, folder: Path, drawings: Path) -> None:
    """Write the page of one file of algorithms."""
    lines = [f"# {page.name}", "", page.title, "", prose(page.text), ""]
    for row in page.rows:
        lines += section(row, drawings)
    lines += ["The letters and functions of the formulas are explained above [the table of costs](../costs.md).", ""]
    (folder / f"{page.name}.md").write_text("\n".join(lines), encoding="utf-8")
    (drawings / f"{page.name}.svg").write_text(thumbnail(picture(page.rows[0])[1]), encoding="utf-8")


def index(found: list[Page]) -> str:
    """Return the gallery's first page: a card for each file, and a table of the papers."""
    lines = [INDEX, "::::{grid} 1 2 3 3", ":gutter: 3", ""]
    for page in found:
        lines += [f":::{{grid-item-card}} {page.name}", f":link: {page.name}", ":link-type: doc",
                  ":class-card: card-drawn", "", "```{raw} html",
                  f'<img class="dark-light thumb" src="{page.name}.svg" loading="lazy" alt="">', "```", "",
                  page.title, "", f"{{.collectives}}\n{', '.join(row.collective for row in page.rows)}", ":::", ""]
    lines += ["::::", "", "## By collective", "", "| collective | algorithms |", "|---|---|"]
    for collective in COLLECTIVES:
        there = [page.name for page in found if any(row.collective == collective for row in page.rows)]
        lines.append(f"| {collective} | {', '.join(f'[{name}]({name}.md)' for name in there)} |")
    lines += ["", "## Papers", "", "| algorithm | authors, title, year |", "|---|---|"]
    lines += [f"| [{page.name}]({page.name}.md) | "
              + "; ".join(f"{authors}, *{title}* ({year})" for authors, title, year in page.papers) + " |"
              for page in found if page.papers]
    lines += ["", "All other algorithms are folklore, or combinations of the algorithms above.", "",
              "```{toctree}", ":hidden:", "", *(page.name for page in found), "```", ""]
    return "\n".join(lines)


def generate(app: object, config: object) -> None:
    """Write all pages and pictures anew, before Sphinx looks for the folders."""
    source = Path(__file__).parents[1]
    folder, drawings = source / "gallery", source / "_drawings" / "gallery"
    for old in (folder, drawings):
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(parents=True)
    found = pages()
    for page in found:
        write(page, folder, drawings)
    (folder / "index.md").write_text(index(found), encoding="utf-8")
    (drawings.parent / "hero.svg").write_text(draw("ring", size=4, form="svg"), encoding="utf-8")


def setup(app: object) -> dict[str, bool]:
    """Register the generator with Sphinx."""
    app.connect("config-inited", generate, priority=100)  # type: ignore[attr-defined]
    return {"parallel_read_safe": True, "parallel_write_safe": True}
