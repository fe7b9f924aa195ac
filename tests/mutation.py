"""Run the tests on planted faults, one by one, to see whether any test notices: a measure of the tests' value.

    python tests/mutation.py [--only PATTERN] [--rows [1,5]] [--jobs N] [--list] [--record]

Each fault is planted into a copy of the tree, and tests run there up to the first failure. For a fault named by a row
of tests/catalogue.txt only the row's tests run. For other faults the last known catcher runs first, then the tests
known to catch faults of the same file, then those of the same kind including slow tests, then the rest of the default
tier, for `SEARCH` seconds in all. Lint, types and the tests planting faults themselves do not count. Prints the
catching test of each fault. The exit code is 1 below 90 %, or if a fault of a row or a schedule is missed, or if a text
is gone. `--record` notes the catching tests in tests/planted.diff.
"""

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from faults import tables
from faults.tables import BY_NIGHTLY_TESTS, PLANTED, ROOT, Fault, planted, row_of, written
from gpucoll.device import CompileError
from harness import extension, reporting
from harness.grids import SHARE as SHARES
from harness.grids import is_in_share

SHARE = 0.9
SEARCH = 600  # seconds; a fault not noticed by then counts as missed
NO_FAILURE = (0, 5)  # pytest's exit codes if all tests pass, and if none is selected
TIER = "not slow and not nightly and not mutant"
SLOW = "slow and not nightly and not mutant"
# The first two would notice an unused name, the third the missing text of the fault.
LEFT_OUT = ["tests/unit/test_style.py", "tests/unit/test_typing.py", "tests/unit/test_planted.py"]


class Verdict(NamedTuple):
    fault: Fault
    caught: str  # the first failed test, "" if all passed, or the reason for running nothing
    seconds: float
    planted: bool = True


def own_tests(fault):
    """Return the tests of the catalogue's row that the fault belongs to; [] without a row."""
    return [f"tests/{test}" for test in tables.tests_of(tables.rows().get(row_of(fault), []))]


def plant(fault, tree):
    """Plant the fault into the tree; raise LookupError unless its text is found exactly once."""
    if fault.changes:
        place = tree / fault.file
        place.write_text(tables.changed(place.read_text(), fault.changes))


def copy_tree(tree):
    """Copy the files known to git; link the two folders installed inside the package into the package."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in filter(None, listed.split("\0"))]
    files = [str(path.relative_to(ROOT)) for path in paths if path.is_file() or path.is_symlink()]
    pack = subprocess.Popen(["tar", "-cf", "-", "--null", "-T", "-"], cwd=ROOT, stdin=-1, stdout=-1)
    pack.stdin.write("\0".join(files).encode())
    pack.stdin.close()
    subprocess.run(["tar", "-xf", "-", "-C", tree], stdin=pack.stdout, check=True)
    for folder in ("bench", "kernels"):
        (tree / "gpucoll" / folder).symlink_to(tree / folder)


def name_of(fault):
    return f"{fault.kind}: {fault.name}"


def record(verdicts):
    """Record the tests catching the faults in planted.diff."""
    found = {name_of(one.fault): one.caught.partition(": exit code")[0].removeprefix("tests/") for one in verdicts
             if one.planted and not own_tests(one.fault)}
    found = {name: test for name, test in found.items() if "::" in test and " tests/" not in test}
    known = [*planted()]
    PLANTED.write_text(written(fault._replace(caught=found.get(name_of(fault), fault.caught)) for fault in known))


def judge(fault, tests=(), before=""):
    """Return whether a test notices the fault (one of `tests`, if given); without a fault, whether all tests pass."""
    began = time.monotonic()
    ends = began + SEARCH if fault.changes else float("inf")
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        try:
            plant(fault, tree)
            extension.install(tree)
        except (LookupError, CompileError) as error:
            return Verdict(fault, str(error), 0, planted=False)
        near = likely(other for other in planted() if other.file == fault.file)
        first = [*tests] or likely(other for other in planted() if other.kind == fault.kind)
        rest = ["tests", *(f"--ignore={path}" for path in first)]
        selections = [(TIER, first), (SLOW, first), *([] if tests else [(TIER, rest)])]
        for marks, selection in [("", [before] if before else []), (TIER, [] if tests else near), *selections]:
            if time.monotonic() > ends:
                break
            caught = first_failure(tree, marks, selection, ends) if selection else ""
            if caught:
                break
        shutil.rmtree(f"{sys.pycache_prefix}{tree}", ignore_errors=True)  # the compiled modules of the tree
        return Verdict(fault, caught, time.monotonic() - began)


def likely(some):
    """Return the files of the tests that catch these faults, the most frequent first."""
    files = Counter(f"tests/{fault.caught.partition('::')[0]}" for fault in some if "::" in fault.caught)
    return [file for file, _ in files.most_common() if (ROOT / file).exists()]


def first_failure(tree, marks, selection, ends):
    """Return the first test failing in the tree, or crashing the process; "" if all pass before the deadline."""
    record = tree / "record"
    record.write_text("")
    variables = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{tree / 'scripts'}", reporting.RECORD: str(record),
                 SHARES: "1/1"}  # the catching test may be of another share
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks, *selection]
    left = None if ends == float("inf") else max(1.0, ends - time.monotonic())
    try:
        job = subprocess.run([*command, *(f"--ignore={path}" for path in LEFT_OUT)], cwd=tree, env=variables, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", timeout=left)
    except subprocess.TimeoutExpired:
        return ""
    if job.returncode in NO_FAILURE or "ERROR: not found:" in job.stdout:  # a recorded test no longer exists
        return ""
    _, failed, running = reporting.read(record)
    died = f"{' '.join(running)}: exit code {job.returncode}: {job.stdout.strip()[-300:]}"
    return failed[0] if failed else died


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults whose `kind: name` matches")
    parser.add_argument("--rows", nargs="?", const=",".join(map(str, tables.rows())), metavar="NUMBERS",
                        help="faults that these rows of the catalogue name, by default all of its rows")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), metavar="N")
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    parser.add_argument("--record", action="store_true", help="note which tests caught the faults, for the next time")
    options = parser.parse_args()
    chosen = [fault for fault in planted() if fault.kind not in BY_NIGHTLY_TESTS
              and fnmatch.fnmatch(name_of(fault), options.only)]
    if options.rows:
        chosen = [fault for fault in chosen if row_of(fault) in map(int, options.rows.split(","))]
    chosen = [fault for fault in chosen if is_in_share(name_of(fault))]
    if options.list:
        print("\n".join(map(name_of, chosen)))
        return 0
    verdicts = []
    befores = [f"tests/{fault.caught}" if fault.caught and not own_tests(fault) else "" for fault in chosen]
    named = {test for fault, before in zip(chosen, befores, strict=True) for test in (own_tests(fault) or [before])}
    sound = judge(Fault("", "no fault at all", ()), () if "" in named else sorted(named))
    if sound.caught:
        print(f"without any fault, {sound.caught} fails: nothing can be said of the faults")
        return 1
    with ThreadPoolExecutor(options.jobs) as pool:
        for verdict in pool.map(judge, chosen, map(own_tests, chosen), befores):
            verdicts.append(verdict)
            reporting.write("caught" if verdict.planted and verdict.caught else "missed", verdict.fault.name)
            caught = verdict.caught if verdict.planted else f"(cannot be planted: {verdict.caught})"
            print(f"{name_of(verdict.fault)} | {caught or 'NOT CAUGHT'} | {verdict.seconds:.0f} s", flush=True)
            if options.record:
                record(verdicts)
    return conclude(verdicts)


def conclude(verdicts):
    """Print the shares of caught faults by kind; return 0 if the shares are sufficient."""
    for kind in dict.fromkeys(verdict.fault.kind for verdict in verdicts):
        of_kind = [verdict for verdict in verdicts if verdict.fault.kind == kind and verdict.planted]
        if of_kind:
            print(f"{kind}: {sum(bool(verdict.caught) for verdict in of_kind)} of {len(of_kind)} caught")
    counted = [verdict for verdict in verdicts if verdict.planted]
    share = sum(bool(verdict.caught) for verdict in counted) / max(1, len(counted))
    lost = [verdict for verdict in verdicts if not verdict.planted]
    missed = [verdict for verdict in counted if not verdict.caught
              and (verdict.fault.kind == "schedule" or own_tests(verdict.fault))]
    print(f"caught: {100 * share:.0f} % of {len(counted)}; {len(lost)} could not be planted")
    return int(share < SHARE or bool(lost) or bool(missed))


if __name__ == "__main__":
    sys.exit(main())
