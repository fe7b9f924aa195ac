"""All planted faults, collected from their tables. Each fault changes texts found exactly once in the source.

`mutation.py` plants the faults one by one and runs the default tier. The kinds in `BY_NIGHTLY_TESTS` are left to
nightly tests planting these faults themselves. `misplaced` quickly finds faults with missing texts.
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
from planted_bits import PLANTED_BITS  # noqa: E402
from planted_connections import PLANTED_CONNECTIONS  # noqa: E402
from planted_elastic import ELASTIC  # noqa: E402
from planted_gpu import PLANTED_GPU  # noqa: E402
from planted_graphs import PLANTED_GRAPHS  # noqa: E402
from planted_insight import PLANTED_INSIGHT  # noqa: E402
from planted_nccl import PLANTED_NCCL  # noqa: E402
from planted_precheck import PLANTED_PRECHECK  # noqa: E402
from planted_rows import PLANTED_ROWS  # noqa: E402

# Kinds planted by nightly tests: some faults are visible only to a sanitizer or a browser.
BY_NIGHTLY_TESTS = {"race", "thread", "address", "sanitizer", "page", "peer", "engine", "eager", "order", "behind",
                    "plan", "mail", "memory"}


class Fault(NamedTuple):
    """`changes` are pairs of old and new texts in `file`; without a file: in the file of kernels/ with the text."""

    kind: str
    name: str
    changes: "tuple[tuple[str, str], ...]"
    file: str = ""


def faults():
    """Yield the faults of every table of the repository."""
    kernels = SimpleNamespace(**runpy.run_path(str(ROOT / "tests" / "kernels" / "mutants.py"), run_name="kernels"))

    everything = (*PLANTED, *PLANTED_BITS, *PLANTED_CONNECTIONS, *ELASTIC, *PLANTED_GPU,
                  *PLANTED_GRAPHS, *PLANTED_INSIGHT, *PLANTED_NCCL, *PLANTED_PRECHECK, *PLANTED_ROWS)
    yield from (Fault(kind, name, ((old, new),), file) for kind, name, file, old, new in everything)
    for kind, table in (("kernel", kernels.MUTANTS), ("peer", peer_mutants.MUTANTS), ("race", peer_mutants.RACES)):
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
