"""gpucoll bench regret: the interval of a median, the judgement, the lines, the arguments, its place in the suite."""

import doctest
import importlib.machinery
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("gpucoll.bench.regret", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import records, regret
from gpucoll.bench.regret import Row, Timing, judged, timing, verdict

from gpucoll.calibration.sweep import BULK, hopeful

ROOT = Path(__file__).parents[2]
RING, TREE, STAR = ("mpi", "ring"), ("mpi", "tree"), ("mpi", "star")


def test_doctests():
    assert doctest.testmod(regret).failed == 0


# ---------------------------------------------------------------- the interval


def place(count):
    """Which of `count` sorted seconds the interval begins with."""
    return int(timing(RING, [float(number) for number in range(count)]).low)


def coverage(count, first):
    """The share of all ways to lie below or above the median, in which the interval from number `first` holds it."""
    held = 0
    for sides in itertools.product((-1, 1), repeat=count):
        row = sorted(sides)
        held += row[first] < 0 < row[-1 - first]
    return held / 2 ** count


@pytest.mark.parametrize("count", range(6, 15))
def test_the_interval_is_the_narrowest_that_is_sure_enough(count):
    """Every way that a sample can lie about its median is tried."""
    first = place(count)
    assert coverage(count, first) >= 0.95 > coverage(count, first + 1)


@pytest.mark.parametrize("count", range(1, 6))
def test_few_seconds_are_their_own_interval(count):
    assert place(count) == 0
    assert coverage(5, 0) < 0.95


def test_a_timing_does_not_depend_on_the_order_or_the_shape():
    seconds = [4.0, 1.0, 3.0, 2.0, 1e9, 6.0, 5.0]
    assert timing(RING, seconds) == timing(RING, sorted(seconds)) == Timing("mpi", "ring", 4.0, 1.0, 1e9)


# ---------------------------------------------------------------- the judgement


def sample(middle):
    """Nine seconds about their median; the interval is from 0.9 to 1.1 of it."""
    return [middle * share for share in (0.1, 0.9, 0.95, 0.97, 1.0, 1.02, 1.05, 1.1, 7.0)]


def test_the_choice_is_held_against_the_least_median():
    row = judged(64, TREE, {TREE: sample(3.0), RING: sample(2.0), STAR: sample(8.0)})
    assert (row.nbytes, row.chosen.name, row.best.name) == (64, "mpi:tree", "mpi:ring")
    assert row.regret == pytest.approx(0.5)
    assert row.beyond == pytest.approx(3.0 * 0.9 / (2.0 * 1.1) - 1)


def test_intervals_that_meet_are_no_proof():
    row = judged(64, TREE, {TREE: sample(1.2), RING: sample(1.0)})
    assert row.regret == pytest.approx(0.2)
    assert row.beyond == 0


def test_the_best_choice_has_no_regret():
    row = judged(64, TREE, {TREE: sample(1.0), RING: sample(1.5)})
    assert (row.best, row.regret, row.beyond) == (row.chosen, 0, 0)


def row_of(regret, beyond, nbytes=8):
    """A row of that regret, beyond the intervals `beyond`."""
    return Row(nbytes, Timing("mpi", "tree", 1 + regret, 1 + beyond, 9.0), Timing("mpi", "ring", 1.0, 0.5, 1.0))


@pytest.mark.parametrize(("rows", "within"), [
    ([(0.0, 0.0)], True), ([(0.125, 0.0)], False), ([(0.125, 0.0), (0.0, 0.0)], True),
    ([(0.375, 0.3125), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)], False), ([(0.375, 0.25), *[(0.0, 0.0)] * 3], True)])
def test_the_goal_is_of_the_mean_and_of_the_worst(rows, within):
    found = verdict([row_of(*one) for one in rows])
    assert found["within"] == within
    assert found["mean"] == sum(one for one, _ in rows) / len(rows)
    assert (found["worst"], found["beyond"]) == tuple(map(max, zip(*rows, strict=True)))
    assert ("within the goal" if within else "MISSES the goal") in regret._verdict_line(found)


def test_a_line_has_every_figure_under_its_title():
    row = judged(1024, TREE, {TREE: [3e-6] * 9, RING: [2e-6] * 9})
    line, titles = regret._line(row), regret.LINE.format(*regret.TITLES[0])
    assert line.split() == ["1024", "mpi:tree", "3.00", "3.00", "3.00", "mpi:ring", "2.00", "2.00", "2.00", "50.0",
                            "50.0"]
    assert len(line) == len(titles)
    assert [line[:titles.index(title) + len(title)].split()[-1] for title in ("size", "regret", "beyond")] == \
        ["1024", "50.0", "50.0"]


# ---------------------------------------------------------------- who is measured at the next size


def left_after(seconds, shares):
    slow, left = {}, list(seconds)
    for share in shares:
        left = hopeful({way: seconds[way] for way in left}, slow, share)
    return left


def test_who_is_slow_twice_in_a_row_at_large_sizes_is_left_out():
    seconds = {RING: 1.0, TREE: 2.9, STAR: 3.1}
    assert left_after(seconds, [BULK]) == [RING, TREE, STAR]
    assert left_after(seconds, [BULK, 4 * BULK]) == [RING, TREE]


def test_who_is_slow_at_small_sizes_may_be_the_quickest_at_large_ones():
    assert left_after({RING: 9.0, STAR: 1.0}, [BULK // 2] * 5) == [RING, STAR]


def test_who_was_slow_once_starts_anew():
    slow = {}
    for star in (9.0, 1.0, 9.0):
        left = hopeful({RING: 1.0, STAR: star}, slow, BULK)
    assert left == [RING, STAR]


# ---------------------------------------------------------------- arguments, and the suite


@pytest.mark.parametrize(("arguments", "words"), [
    (["all_reduc"], "did you mean all_reduce"), (["-b", "8X"], "'8X' is no number of bytes"), (["--frob"], "--frob"),
    (["-b", "64K", "-e", "1K"], "-e/--maxbytes 1024 is below"), (["-f", "1"], "not a whole number of at least 2"),
    (["-b", "0"], "0 is less than a float32"), (["all_reduce", "ring"], "ring"), ([], "one rank has nothing to choose"),
    (["-b", "2000T"], "'2000T' is no number of bytes")])
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, words):
    job = subprocess.run([sys.executable, "-m", "gpucoll", "bench", "regret", *arguments], capture_output=True,
                         text=True, timeout=60, check=False)
    assert (job.returncode, job.stdout, job.stderr.count("\n")) == (2, "", 1), job.stderr
    assert job.stderr.startswith("gpucoll bench regret: ")
    assert words in job.stderr


def test_wrong_arguments_do_not_start_mpi():
    job = subprocess.run([sys.executable, "-c", "import sys, gpucoll.bench.regret as r; r._parser();"
                          "print([name for name in ('mpi4py.MPI', 'cupy') if name in sys.modules])"],
                         capture_output=True, text=True, timeout=60, check=True)
    assert job.stdout == "[]\n"


def test_help_names_the_flags():
    job = subprocess.run([sys.executable, "-m", "gpucoll", "bench", "regret", "--help"], capture_output=True, text=True,
                         timeout=60, check=True)
    assert all(flag in job.stdout for flag in ("--minbytes", "--maxbytes", "--stepfactor", "--json"))


@pytest.fixture(scope="module")
def suite():
    """scripts/bench as a module; it has no ending."""
    loader = importlib.machinery.SourceFileLoader("standing_suite_with_regret", str(ROOT / "scripts" / "bench"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def test_the_standing_suite_asks_for_what_there_is(suite):
    ranks, line = suite.REGRET
    verb, *arguments = line.split()
    given = regret._parser().parse_args([*arguments, "-J", "F.json"])
    assert (ranks, verb, given.collective, given.json) == (4, "regret", "all_reduce", "F.json")


def test_the_suites_file_keeps_it_beside_the_runs(suite, tmp_path):
    run = json.loads((ROOT / "tests" / "samples" / "bench.json").read_text())
    path = suite.write([run], str(tmp_path), "host", "2026-01-02", {"verdict": {"mean": 0.123456789}})
    assert json.loads(Path(path).read_text())["regret"] == {"verdict": {"mean": 0.123457}}
    assert len(records.read(path)) == 1
    assert Path(path).read_text().startswith('{"suite"')  # by which the README's maker knows it
