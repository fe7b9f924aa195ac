"""The environment variables that gpucoll reads from its users: those of the table of options, and no others."""

import re

from harness.sources import ROOT, files

READ = re.compile(r"(?<![A-Z_])GPUCOLL_[A-Z_]*[A-Z]")
TESTS = "GPUCOLL_TEST_"  # read by tests and scripts alone
VARIABLES = {f"GPUCOLL_{name}" for name in """TIMEOUT CHECK EXECUTOR ALGO DEVICE SHARE_GPU DEBUG DUMP_DIR CACHE FAULT
    METRICS SUMMARY DETERMINISTIC SECRET""".split()}


def test_gpucoll_reads_the_variables_of_the_table_and_no_others():
    sources = {name for path in files("gpucoll", "bench", "scripts") for name in READ.findall(path.read_text())
               if not name.startswith(TESTS)}
    table = READ.findall("".join(line.split("|")[2] for line in
                                 (ROOT / "docs/guide/options.md").read_text().splitlines() if line.startswith("|")))
    assert len(table) == len(set(table))
    assert sources == set(table) == VARIABLES
    pages = {name for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if path.parent.name != "changes.d"
             for name in READ.findall(path.read_text()) if not name.startswith(TESTS)}
    assert pages <= VARIABLES
