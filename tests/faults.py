"""All planted faults: the one home in which their tables meet. Each changes texts that stand in the source once.

`mutation.py` plants them one by one and runs the default tier; those of `BY_NIGHTLY_TESTS` it leaves to the tests that
plant them themselves. `misplaced` says in a moment which of them cannot be planted any more.
"""

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
for folder in ("tests/kernels", "tests"):
    sys.path.insert(0, str(ROOT / folder))

import engine_mutants  # noqa: E402 (the path comes first)
from peer import mutants as peer_mutants  # noqa: E402
from planted import PLANTED  # noqa: E402
from planted_connections import PLANTED_CONNECTIONS  # noqa: E402
from planted_gpu import PLANTED_GPU  # noqa: E402
from planted_rows import PLANTED_ROWS  # noqa: E402

# Kinds of which nightly tests plant every fault themselves: some only a sanitizer or a browser sees.
BY_NIGHTLY_TESTS = {"race", "thread", "address", "sanitizer", "page", "peer", "engine", "eager", "order", "behind",
                    "plan", "mail", "memory"}


class Fault(NamedTuple):
    """`changes` are texts of one file and what becomes of them; no file: the one of kernels/ that has them."""

    kind: str
    name: str
    changes: "tuple[tuple[str, str], ...]"
    file: str = ""


def faults():
    """The faults of every table of the repository."""
    kernels = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "kernels" / "mutants.py"), run_name="kernels"))

    everything = *PLANTED, *PLANTED_ROWS, *PLANTED_CONNECTIONS, *PLANTED_GPU
    yield from (Fault(kind, name, ((old, new),), file) for kind, name, file, old, new in everything)
    for kind, table in (("kernel", kernels.MUTANTS), ("peer", peer_mutants.MUTANTS), ("race", peer_mutants.RACES)):
        yield from (Fault(kind, name, ((mutant.old, mutant.new),)) for name, mutant in table.items())
    for kind, table in engine_mutants.TABLES.items():
        yield from (Fault(kind, name, mutant.changes) for name, mutant in table.items())


def place_of(fault, old, tree=ROOT):
    """The file in which a text of the fault stands; LookupError where it is not there exactly once."""
    files = [tree / fault.file] if fault.file else [path for path in (tree / "kernels").iterdir() if path.is_file()]
    counts = {path: path.read_text().count(old) for path in files if path.is_file()}
    if sum(counts.values()) != 1:
        raise LookupError(f"{fault.kind}: {fault.name}: {old!r} stands {sum(counts.values())} times in "
                          f"{fault.file or 'kernels/'}")
    return max(counts, key=counts.get)


def misplaced(some):
    """What is wrong with the places of these faults, a line for each text."""
    for fault in some:
        for old, new in fault.changes:
            try:
                place_of(fault, old)
            except LookupError as error:
                yield str(error)
            if old == new:
                yield f"{fault.kind}: {fault.name}: changes nothing"
