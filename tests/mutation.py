"""Run the tests on planted faults, one by one, to see whether any test notices: a measure of the tests' value.

    python tests/mutation.py [--only PATTERN] [--rows [1,5]] [--jobs N] [--list] [--record]

Each fault is planted into a copy of the tree, and tests run there up to the first failure. For a fault named by a row
of the catalogue (tests/catalogue.py) only the row's tests run. For other faults the last known catcher runs first, then
tests of the same file, then likely tests including slow tests, then the rest of the default tier, for `SEARCH` seconds
in all. Lint, types and the tests planting faults themselves do not count. Prints the catching test of each fault. The
exit code is 1 below 90 %, or if a fault of a row or a schedule is missed, or if a text is gone. `--record` notes the
catching tests in tests/catchers.json.
"""

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import extension
import reporting
from catalogue import ROWS
from faults import BY_NIGHTLY_TESTS, ROOT, Fault, faults, place_of
from gpucoll.device import CompileError
from grids import SHARE as SHARES
from grids import is_in_share

SHARE = 0.9
SEARCH = 600  # seconds; a fault not noticed by then counts as missed
CATCHERS = ROOT / "tests" / "catchers.json"  # by fault: the catching test, as last recorded
NO_FAILURE = (0, 5)  # pytest's exit codes if all tests pass, and if none is selected
TIER = "not slow and not nightly and not mutant"
SLOW = "slow and not nightly and not mutant"
# The first two would notice an unused name, the third the missing text of the fault.
LEFT_OUT = ["tests/unit/test_style.py", "tests/unit/test_typing.py", "tests/unit/test_planted.py"]
NEAR = {  # by the file of a fault, or the beginning of its name: tests of this file, catching most faults
    "gpucoll/algorithms": ["contract/test_blocks.py", "contract/test_contract.py"],
    "gpucoll/analysis/draw": ["unit/test_draw.py"], "gpucoll/analysis/nccl_tuning": ["unit/test_nccl_choice.py"],
    "gpucoll/arrays/__init__.py": ["contract/test_blocks.py"],
    "gpucoll/arrays/accept.py": ["contract/test_outs.py"], "gpucoll/arrays/dlpack.py": ["unit/test_dlpack.py"],
    "gpucoll/arrays/space.py": ["unit/test_tables.py"], "gpucoll/arrays/segments.py": ["multirank/test_edges.py"],
    "gpucoll/communicator/cartesian.py": ["contract/test_neighbours.py"],
    "gpucoll/communicator/wildcards.py": ["multirank/test_wildcards.py"],
    "gpucoll/communicator/persistent.py": ["contract/test_plans.py"],
    "gpucoll/communicator/points.py": ["multirank/test_edges.py", "multirank/test_points.py"],
    "gpucoll/communicator/ragged.py": ["contract/test_blocks.py", "multirank/test_metadata.py"],
    "gpucoll/device/messages.py": ["unit/test_receives.py"], "gpucoll/errors.py": ["unit/test_api.py"],
    "gpucoll/executors/engine/__init__.py": ["multirank/test_culprits.py", "multirank/test_disagreements.py",
                                             "multirank/test_eager.py"],
    "gpucoll/executors/engine/instructions.py": ["contract/test_contract.py", "unit/test_plan.py"],
    "gpucoll/executors/engine/plans.py": ["contract/test_shared.py", "engine/test_plans.py"],
    "gpucoll/health/preflight.py": ["multirank/test_deferred.py", "multirank/test_disagreements.py"],
    "gpucoll/health/processes.py": ["multirank/test_culprits.py"],
    "gpucoll/communicator/links.py": ["multirank/test_culprits.py"],
    "gpucoll/mpi": ["multirank/test_mpi.py"], "gpucoll/msccl": ["unit/test_msccl.py"],
    "gpucoll/core/parsing.py": ["unit/test_parsing.py"],
    "gpucoll/plan/__init__.py": ["unit/test_plan.py", "unit/test_schedules.py"],
    "gpucoll/verify/symbolic.py": ["unit/test_schedules.py", "unit/test_algorithm.py"],
    "gpucoll/verify/user.py": ["unit/test_algorithm.py"],
    "gpucoll/launch/standalone.py": ["multirank/test_standalone.py"],
    "gpucoll/training/buckets.py": ["unit/test_buckets.py"],
    "gpucoll/training/checkpoint.py": ["contract/test_checkpoint.py"],
    "gpucoll/training/compression.py": ["contract/test_compression.py"],
    "gpucoll/training/feedback.py": ["contract/test_compression.py"],
    "gpucoll/training/layout.py": ["contract/test_layout.py"],
    "gpucoll/training/redistribution.py": ["contract/test_layout.py"],
    "gpucoll/training": ["contract/test_training.py"], "gpucoll/tuner": ["unit/test_tuner.py"],
    "gpucoll/progress/operations.py": ["unit/test_waits.py"],
    "kernels/engine/combine.h": ["multirank/test_one_pass.py"],
    "kernels/device/compress.cu": ["kernels/test_compress.py"],
    "kernels/device/feedback.h": ["kernels/test_compress.py"],
    "kernels/device/blocks.h": ["kernels/test_block_scaled.py"],
    "kernels/device/quantise.cu": ["kernels/test_block_scaled.py"],
    "gpucoll/block_scaled": ["contract/test_block_scaled_collectives.py"],
    "gpucoll/core/formats.py": ["contract/test_block_scaled_collectives.py"],
    "kernels/engine/flight.h": ["unit/test_saved_files.py"],
    "kernels/device/functions.h": ["kernels/test_reduce.py"], "kernels/device/number.h": ["kernels/test_move.py"],
    "kernels/device/pack.cu": ["kernels/test_move.py"], "kernels/device/peer": ["peer/test_kernels.py"],
    "kernels/device/reduce.cu": ["kernels/test_reduce.py"], "kernels/device/scale.cu": ["kernels/test_move.py"],
    "kernels/device/walk.h": ["kernels/test_move.py", "kernels/test_reduce.py"],
}
LIKELY = {  # by the kind of a fault; the rest of the tier follows
    "schedule": ["tests/unit/test_schedules.py", "tests/contract"],
    "product": ["tests/contract", "tests/unit"],
    "kernel": ["tests/kernels", "tests/contract"],
    "guard": [*(f"tests/multirank/test_{part}.py" for part in
                ("edges", "points", "wildcards", "culprits", "deferred", "deaths", "disagreements", "stand_in",
                 "catalogue")),
              "tests/unit/test_network.py", "tests/unit/test_receives.py"],
    "cache": ["tests/unit/test_store.py"],
    "store": [*(f"tests/unit/test_{part}.py" for part in ("connections", "network", "rank_store")),
              "tests/multirank/test_standalone.py"],
    "ucx": ["tests/multirank/test_ucx.py"],
    "elastic": ["tests/unit/test_guests.py", "tests/multirank/test_elastic.py"],
    "gpu": ["tests/multirank/test_stand_in.py"],
    "compiler": ["tests/unit/test_nvrtc.py", "tests/unit/test_kernels_command.py"],
    "training": ["tests/unit/test_buckets.py",
                 *(f"tests/contract/test_{part}.py" for part in ("training", "compression", "layout", "checkpoint"))],
    "native": ["tests/multirank/test_native.py"],
}


class Verdict(NamedTuple):
    fault: Fault
    caught: str  # the first failed test, "" if all passed, or the reason for running nothing
    seconds: float
    planted: bool = True


def own_tests(fault):
    """Return the tests of the catalogue's row naming the fault; [] without such a row."""
    return [f"tests/{test}" for row in ROWS.values() if fault.name in row.mutants for test in row.tests]


def plant(fault, tree):
    """Plant the fault into the tree; raise LookupError unless its text is found exactly once."""
    for old, new in fault.changes:
        place = place_of(fault, old, tree)
        place.write_text(place.read_text().replace(old, new))


def copy_tree(tree):
    """Copy the files known to git; link the two folders installed inside the package into the package."""
    listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout
    files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
    pack = subprocess.Popen(["tar", "-cf", "-", "--null", "-T", "-"], cwd=ROOT, stdin=-1, stdout=-1)
    pack.stdin.write("\0".join(files).encode())
    pack.stdin.close()
    subprocess.run(["tar", "-xf", "-", "-C", tree], stdin=pack.stdout, check=True)
    for folder in ("bench", "kernels"):
        (tree / "gpucoll" / folder).symlink_to(tree / folder)


def name_of(fault):
    return f"{fault.kind}: {fault.name}"


def caught_before():
    return json.loads(CATCHERS.read_text()) if CATCHERS.exists() else {}


def record(verdicts):
    """Record the tests catching the faults; drop removed faults."""
    known = caught_before()
    caught = ((one.fault, one.caught.partition(": exit code")[0]) for one in verdicts if one.planted)
    known.update((name_of(fault), test) for fault, test in caught
                 if not own_tests(fault) and "::" in test and " tests/" not in test)
    names = {name_of(fault) for fault in faults() if fault.kind not in BY_NIGHTLY_TESTS}
    kept = {name: test for name, test in sorted(known.items()) if name in names}
    CATCHERS.write_text(json.dumps(kept, indent=0) + "\n")


def judge(fault, tests=(), before=""):
    """Return whether a test notices the fault (one of `tests`, if given); without a fault, whether all tests pass."""
    began = time.monotonic()
    ends = began + SEARCH if fault.changes else float("inf")
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        try:
            near = near_tests(fault, tree)
            plant(fault, tree)
            extension.install(tree)
        except (LookupError, CompileError) as error:
            return Verdict(fault, str(error), 0, planted=False)
        likely = [str(path.relative_to(tree)) for pattern in LIKELY.get(fault.kind, []) for path in tree.glob(pattern)]
        rest = ["tests", *(f"--ignore={path}" for path in likely)]
        first = [*tests] or likely
        selections = [(TIER, first), (SLOW, first), *([] if tests else [(TIER, rest)])]
        for marks, selection in [("", [before] if before else []), (TIER, [] if tests else near), *selections]:
            if time.monotonic() > ends:
                break
            caught = first_failure(tree, marks, selection, ends) if selection else ""
            if caught:
                break
        shutil.rmtree(f"{sys.pycache_prefix}{tree}", ignore_errors=True)  # the compiled modules of the tree
        return Verdict(fault, caught, time.monotonic() - began)


def near_tests(fault, tree):
    """Return the tests of the files of a fault."""
    files = {str(place_of(fault, old, tree).relative_to(tree)) for old, _ in fault.changes}
    chosen = [max((start for start in NEAR if file.startswith(start)), key=len, default="") for file in sorted(files)]
    return [f"tests/{test}" for start in filter(None, chosen) for test in NEAR[start]]


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
    parser.add_argument("--rows", nargs="?", const=",".join(map(str, ROWS)), metavar="NUMBERS",
                        help="faults that these rows of the catalogue name, by default all of its rows")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))), metavar="N")
    parser.add_argument("--list", action="store_true", help="name the faults and stop")
    parser.add_argument("--record", action="store_true", help="note which tests caught the faults, for the next time")
    options = parser.parse_args()
    chosen = [fault for fault in faults() if fault.kind not in BY_NIGHTLY_TESTS
              and fnmatch.fnmatch(name_of(fault), options.only)]
    if options.rows:
        names = [name for number in options.rows.split(",") for name in ROWS[int(number)].mutants]
        chosen = [fault for fault in chosen if fault.name in names]
    chosen = [fault for fault in chosen if is_in_share(name_of(fault))]
    if options.list:
        print("\n".join(map(name_of, chosen)))
        return 0
    verdicts, known = [], caught_before()
    befores = ["" if own_tests(fault) else known.get(name_of(fault), "") for fault in chosen]
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
            print(f"{name_of(verdict.fault)} | {caught or 'NOT CAUGHT'} | {verdict.seconds:.0f} s",
                  flush=True)
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
