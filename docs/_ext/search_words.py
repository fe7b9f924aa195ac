"""Entries of the site's index, by which the search finds the page of a word that people type."""

from pathlib import Path

from sphinx.application import Sphinx

WORDS = {page: words.split("; ") for page, _, words in
         (line.partition(": ") for line in Path(__file__).with_suffix(".txt").read_text().splitlines()) if words}


def setup(app: Sphinx) -> dict[str, bool]:
    """Let Sphinx load this as an extension."""
    app.connect("source-read", _index)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _index(app: Sphinx, page: str, source: list[str]) -> None:
    """Put the entries of a page below its title, or first on a page that includes another file."""
    if page in WORDS:
        entries = "".join(f"   ! single: {word}\n" for word in WORDS[page])
        block = f"```{{eval-rst}}\n.. index::\n{entries}```\n"
        title, end, rest = source[0].partition("\n") if source[0].startswith("#") else ("", "", source[0])
        source[0] = f"{title}{end}\n{block}\n{rest}"
