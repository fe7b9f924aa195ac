"""All planted faults. Each fault changes texts found exactly once in the source.

`planted.diff` has the faults of the product: below the name of a file, `@@ kind: name @@ the test that catches it`,
then the lines with the old text and with the new. A text may begin and end within a line. A fault of a row of the
catalogue has `row` and its number for the test. `mutation.py` plants the faults one by one and runs the default tier.
The kinds in `BY_NIGHTLY_TESTS` are left to nightly tests planting these faults themselves (`of_kinds`): in place of the
test, such a fault names the program or the check that must fail, a program of ranks with their number and arguments.
`misplaced` quickly finds faults with missing texts.
"""

import itertools
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PLANTED, CATALOGUE = (Path(__file__).parents[1] / name for name in ("planted.diff", "catalogue.txt"))
# Kinds planted by nightly tests: some faults are visible only to a sanitizer or a browser.
BY_NIGHTLY_TESTS = {"race", "thread", "address", "sanitizer", "page", "peer", "engine", "eager", "order", "behind",
                    "plan", "mail", "memory"}


class Fault(NamedTuple):
    """`changes` are pairs of old and new texts in `file`."""

    kind: str
    name: str
    changes: "tuple[tuple[str, str], ...]"
    file: str = ""
    caught: str = ""  # the test that catches the fault, as last recorded, or the row of the catalogue, or a program


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


def of_kinds(*kinds):
    """Return the faults of these kinds, by name."""
    return {fault.name: fault for fault in planted() if fault.kind in kinds}


def changed(source, changes):
    """Return a source with the changes; raise LookupError for an old text that it does not have exactly once."""
    for old, new in changes:
        if source.count(old) != 1:
            raise LookupError(f"{old!r} stands {source.count(old)} times in the source")
        source = source.replace(old, new)
    return source


def misplaced(some):
    """Yield a line for each text of these faults not found exactly once, or left unchanged by the fault."""
    for fault in some:
        for old, new in fault.changes:
            place = ROOT / fault.file
            count = place.read_text().count(old) if place.is_file() else 0
            if count != 1:
                yield f"{fault.kind}: {fault.name}: {old!r} stands {count} times in {fault.file}"
            if old == new:
                yield f"{fault.kind}: {fault.name}: changes nothing"
