"""The pages of the site: the build command, and a check for broken links. Standard library only."""

from __future__ import annotations

import functools
import os
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from processes import ROOT

DOCS = os.path.join(ROOT, "docs")


def command(python: str, builder: str, output: str) -> list[str]:
    """Return the command to build the site, with warnings as errors."""
    return [python, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder, DOCS, output]


class Page(HTMLParser):
    """The links of a page, and the anchors in the page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


@functools.cache
def page(path: Path) -> Page:
    """Return the parsed page."""
    found = Page()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def broken(folder: str | Path) -> list[str]:
    """Return a line for each broken link inside the site."""
    page.cache_clear()
    lines = []
    for path in sorted(Path(folder).rglob("*.html")):
        if "_static" in path.relative_to(folder).parts:  # templates of the theme
            continue
        for link in dict.fromkeys(page(path).links):
            there = urlsplit(link)
            if there.scheme or there.netloc:
                continue
            target = (path.parent / unquote(there.path)).resolve() if there.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                lines.append(f"{path.relative_to(folder)}: {link}: there is no such file")
            elif target.suffix == ".html" and there.fragment and unquote(there.fragment) not in page(target).places:
                lines.append(f"{path.relative_to(folder)}: {link}: there is no such place")
    return lines
