"""`gpucoll bench report F.json ... [-o page.html]`: one HTML page made of what runs left behind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gpucoll.arguments import Parser, refuse
from gpucoll.errors import ArgumentError

from . import records
from .page.layout import page

__all__ = ["main", "page"]

PROGRAM = "gpucoll bench report"


def main(arguments: Sequence[str]) -> int:
    """Write the page of the files named by `arguments`, which follow the word `report`; return the exit code.

    It is 0; what cannot be read or written ends the process with exit code 2 and one line.
    """
    given = _parser().parse_args(arguments)
    try:
        _write(made(given.files), given.output)
    except ArgumentError as error:
        refuse(PROGRAM, str(error))
    return 0


def _parser() -> Parser:
    parser = Parser(PROGRAM, allow_abbrev=False, description="Make one page of benchmark results; it needs no network.",
                    epilog="Several files are compared, the first being what the others are held against. Files of "
                           "nccl-tests' -J are read as well.")
    parser.add_argument("files", nargs="+", metavar="F.json", help="what a run wrote with -J, or scripts/bench")
    parser.add_argument("-o", "--output", metavar="PAGE.html", help="where to write; standard output otherwise")
    return parser


def made(files: Sequence[str]) -> str:
    """Return the page of the files; raise ArgumentError where one of them holds no results."""
    found = [(record, name) for file, name in zip(files, names(files), strict=True) for record in records.read(file)]
    try:
        return page([record for record, _ in found], [name for _, name in found])
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
        if len(set(short)) == len(set(paths)):
            return short
    return list(files)


def _write(text: str, output: str | None) -> None:
    if output is None:
        sys.stdout.write(text)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"cannot write {output}: {error.strerror}", code="GC-FILE") from None
