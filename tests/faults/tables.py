"""All planted faults. Each fault changes texts found exactly once in the source.

`planted.diff` has the faults of the product: below the name of a file, `@@ kind: name @@ the test that catches it`,
then the lines with the old text and with the new. A text may begin and end within a line. A fault of a row of the
catalogue has `row` and its number for the test. The faults of the engine and of the peer kernels are beside the tests
that plant these. `mutation.py` plants the faults one by one and runs the default tier. The kinds in `BY_NIGHTLY_TESTS`
are left to nightly tests planting these faults themselves. `misplaced` quickly finds faults with missing texts.
"""

import itertools
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
for folder in ("tests/kernels", "tests"):
    sys.path.insert(0, str(ROOT / folder))

from faults import engine_mutants  # noqa: E402 (the path comes first)
from peer import mutants as peer_mutants  # noqa: E402

PLANTED, CATALOGUE = (Path(__file__).parents[1] / name for name in ("planted.diff", "catalogue.txt"))
# Kinds planted by nightly tests: some faults are visible only to a sanitizer or a browser.
BY_NIGHTLY_TESTS = {"race", "thread", "address", "sanitizer", "page", "peer", "engine", "eager", "order", "behind",
                    "plan", "mail", "memory"}


class Fault(NamedTuple):
    """`changes` are pairs of old and new texts in `file`; without a file: in the file of kernels/ with the text."""

    kind: str
    name: str
    changes: "tuple[tuple[str, str], ...]"
    file: str = ""
    caught: str = ""  # the test that catches the fault, as last recorded, or the row of the catalogue


def planted(text=None):
    """Yield the faults of `planted.diff`, or of a text in its form."""
    for part in (text or PLANTED.read_text()).removesuffix("\n").split("\n\n"):
        head, *blocks = part.split("\n@@ ")
        if not (head.startswith("--- ") and blocks):
            raise ValueError(f"{PLANTED.name}: {head!r} is not the name of a file above faults")
        for block in blocks:
            title, *lines = block.split("\n")
            called, _, caught = title.partition(" @@ ")
            kind, _, name = called.partition(": ")
            old, new = ("\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
            yield Fault(kind, name, ((old, new),), head.removeprefix("--- "), caught)


def written(some):
    """Return the text of faults of `planted.diff`."""
    parts = []
    for file, inside in itertools.groupby(some, lambda fault: fault.file):
        lines = [f"--- {file}"]
        for kind, name, ((old, new),), _, caught in inside:
            lines += [f"@@ {kind}: {name}" + f" @@ {caught}" * bool(caught), *("-" + line for line in old.split("\n")),
                      *("+" + line for line in new.split("\n") if new)]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def row_of(fault):
    """Return the number of the fault's row of the catalogue, 0 without a row."""
    return int(fault.caught.removeprefix("row ")) if fault.caught.startswith("row ") else 0


def rows():
    """Return the tests of each row of the catalogue, by number; a part without a test begins with "open: "."""
    blocks = [block.splitlines() for block in CATALOGUE.read_text().split("\n\n")]
    return {int(head.split()[0]): [line.strip() for line in lines] for head, *lines in blocks if head[0].isdecimal()}


def tests_of(row):
    return [one for one in row if not one.startswith("open: ")]


def faults():
    """Yield the faults of every table of the repository."""
    yield from planted()
    for kind, table in (("peer", peer_mutants.MUTANTS), ("race", peer_mutants.RACES)):
        yield from (Fault(kind, name, ((mutant.old, mutant.new),)) for name, mutant in table.items())
    for kind, table in engine_mutants.TABLES.items():
        yield from (Fault(kind, name, mutant.changes) for name, mutant in table.items())


def place_of(fault, old, tree=ROOT):
    """Return the file with a text of the fault; raise LookupError unless the text is found exactly once."""
    files = [tree / fault.file] if fault.file else [path for path in (tree / "kernels").rglob("*.*") if path.is_file()]
    counts = {path: path.read_text().count(old) for path in files if path.is_file()}
    if sum(counts.values()) != 1:
        raise LookupError(f"{fault.kind}: {fault.name}: {old!r} stands {sum(counts.values())} times in "
                          f"{fault.file or 'kernels/'}")
    return max(counts, key=counts.get)


def misplaced(some):
    """Yield a line for each text of these faults not found exactly once, or left unchanged by the fault."""
    for fault in some:
        for old, new in fault.changes:
            try:
                place_of(fault, old)
            except LookupError as error:
                yield str(error)
            if old == new:
                yield f"{fault.kind}: {fault.name}: changes nothing"
