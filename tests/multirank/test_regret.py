"""gpucoll bench regret on ranks: what it measures and what decides, with planted clocks, faults and choices."""

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import time

import numpy
import pytest

import gpucoll as gc
from ranks import end_job, require_launcher, same_gpucoll, start_job

pytest.importorskip("gpucoll.bench.regret", reason="gpucoll runs from a checkout here and is not installed")

from gpucoll.bench import regret

from gpucoll.calibration.sweep import ways
from gpucoll.calibration.tune import executors

STAR = {"GPUCOLL_ALGO": "all_reduce:star"}


class Clock:
    """In place of the meter: a call takes what `seconds` says of its way, in the second pass what `again` says."""

    def __init__(self, seconds, again=None):
        self.seconds, self.again = seconds, again or seconds
        self.seen = []  # the ways of each pass

    def __call__(self, comm):
        return self

    def samples(self, calls, seconds):
        named = [way_of(call) for call in calls]
        for call in calls:
            call()
        table = self.again if self.seen and set(named) <= set(self.seen[-1]) and len(named) <= regret.BEST + 1 \
            else self.seconds
        self.seen.append(named)
        return [[table.get(name, 1.0)] * 9 for name in named]


def way_of(call):
    """Who runs what, "auto" where that is left open."""
    algorithm = call.keywords["algorithm"]
    return algorithm if algorithm == "auto" else f"{call.func.__self__.executor}:{algorithm}"


def measured(mpi, collective, sizes, clock=None, plant=None):
    """Exit code, output, rows and wrong elements of a run on ranks of the pool."""
    output, meter = io.StringIO(), regret.Meter
    regret.Meter = clock or meter
    try:
        with gc.Communicator.from_mpi(mpi, timeout=60) as comm, executors(comm, "cpu") as comms, \
                contextlib.redirect_stdout(output):
            if plant is not None:
                plant(comms["mpi"])
            run = regret.Regret(comm, comms, collective)
            run.measure(sizes)
            return run.finish(), output.getvalue(), run.rows, dict(run.wrong), run.record(None, False)
    finally:
        regret.Meter = meter


@pytest.mark.parametrize("collective", ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all",
                                        "scan", "gather_v", "barrier"])
def test_every_way_takes_part_and_is_right(ranks, collective):
    found = ranks(measured, 3, collective, [0] if collective == "barrier" else [1024], Clock({}))
    assert [output for _, output, *_ in found[1:]] == ["", ""]
    code, output, (row,), wrong, record = found[0]
    assert (code, wrong) == (0, {}), output
    names = {(one["executor"], one["algorithm"]) for one in record["sizes"][0]["first"]}
    assert {("mpi", name) for name in gc.algorithms(collective, size=3) if name != "hierarchical"} <= names
    assert ("native", "native") in names
    assert all(one[2][0][1:] == row[1:] for one in found), "the ranks judge differently"


def second_pass_only(mpi):
    """The first pass flatters the tree, the second one finds it slow; the ring is third, and the best."""
    slow = {"mpi:tree": 0.1, "mpi:star": 0.2, "mpi:ring": 0.3, "auto": 5.0}
    clock = Clock(slow, {**slow, "mpi:tree": 4.0, "mpi:star": 3.0, "mpi:ring": 2.0})
    _, _, (row,), *_, record = measured(mpi, "all_reduce", [4096], clock)
    assert [one["algorithm"] for one in record["sizes"][0]["first"]][:3] == ["tree", "star", "ring"]
    return row.best.name, row.regret, row.beyond, clock.seen


def test_the_second_pass_alone_decides(ranks):
    for best, share, beyond, seen in ranks(second_pass_only, 3):
        assert best == "mpi:ring"
        assert share == beyond == pytest.approx(1.5)
        assert sorted(seen[1]) == ["auto", "mpi:ring", "mpi:star", "mpi:tree"]


def ever_slower(mpi):
    """Star, the choice, and one_shot are hopeless: which of them are measured at every size."""
    clock = Clock({"auto": 9.0, "mpi:one_shot": 8.0, "mpi:ring": 1.0})
    _, _, rows, *_, record = measured(mpi, "all_reduce", [1 << 10, 1 << 16, 1 << 18, 1 << 20, 1 << 22], clock)
    names = [{f"{one['executor']}:{one['algorithm']}" for one in size["first"]} for size in record["sizes"]]
    return [row.chosen.name in one for row, one in zip(rows, names, strict=True)], \
        {row.chosen.algorithm for row in rows}, ["mpi:one_shot" in one for one in names]


def test_the_hopeless_are_left_out_but_never_the_choice(ranks):
    for there, chosen, one_shot in ranks(ever_slower, 2, env=STAR):
        assert chosen == {"star"}
        assert there == [True] * 5
        assert one_shot == [True, True, True, False, False]


def spoil(comm):
    """One element of what the tree leaves is wrong on rank 1."""
    whole = comm.all_reduce

    @functools.wraps(whole)
    def all_reduce(x, out, algorithm):
        found = whole(x, out, algorithm=algorithm)
        if algorithm == "tree" and comm.rank == 1:
            out[-1:].view(numpy.uint8)[0] ^= 1
        return found

    comm.all_reduce = all_reduce


class Plain(Clock):
    """A clock that does not ask whose calls they are."""

    def samples(self, calls, seconds):
        return [[1.0] * 9 for _ in calls]


def test_a_wrong_result_is_named_and_the_exit_code_is_1(ranks):
    found = ranks(measured, 2, "all_reduce", [1024, 4096], Plain({}), spoil)
    assert [code for code, *_ in found] == [1, 1]
    _, output, _, wrong, _ = found[0]
    assert wrong == {"mpi:tree at 1024 bytes": 1, "mpi:tree at 4096 bytes": 1}
    assert "# wrong elements: 1 of mpi:tree at 4096 bytes\n" in output


def choices(mpi):
    """Which algorithm auto is said to have been, and the ways there are."""
    with gc.Communicator.from_mpi(mpi) as comm, executors(comm, "cpu") as comms:
        left = ways(comms, "all_reduce")
    _, _, rows, *_ = measured(mpi, "all_reduce", [1000, 70000], Plain({}))
    return [row.chosen.algorithm for row in rows], [":".join(way) for way in left]


@pytest.mark.parametrize(("algo", "chosen"), [("star", "star"), ("all_reduce:torus(2x1)", "torus(2x1)"),
                                              ("all_reduce:native", "native"), ("^native", None)])
def test_the_choice_is_what_ran(ranks, algo, chosen):
    for found, left in ranks(choices, 2, env={"GPUCOLL_ALGO": algo}):
        assert "mpi:ring" in left  # whatever auto may choose, all ways compete
        assert "native:native" in left
        assert set(found) == {chosen} if chosen else "native" not in found


def test_calls_on_a_device_are_refused(ranks):
    for outcome, error in ranks(measured, 2, "all_reduce", [1024], env={"GPUCOLL_DEVICE": "emulated"},
                                allow_errors=True):
        assert outcome == "error"
        assert isinstance(error, gc.UsageError)


def test_the_command_prints_what_it_keeps(mpiexec, tmp_path):
    path = tmp_path / "regret.json"
    job = mpiexec(2, sys.executable, "-m", "gpucoll.bench", "regret", "-b", "1K", "-e", "4K", "--json", path,
                  env={"GPUCOLL_CACHE": str(tmp_path)}, timeout=120)
    assert job.returncode == 0, job.stdout + job.stderr
    record = json.loads(path.read_text())
    lines = [line.split() for line in job.stdout.splitlines() if line[:1] == " "]
    assert [(int(line[0]), line[1], line[5]) for line in lines] == [
        (size["bytes"], *(f"{one['executor']}:{one['algorithm']}" for one in (size["chosen"], size["best"])))
        for size in record["sizes"]]
    assert [line[9] for line in lines] == [f"{100 * size['regret']:.1f}" for size in record["sizes"]]
    assert [size["bytes"] for size in record["sizes"]] == [1024, 4096]
    assert (record["ranks"], record["wrong"], record["interrupted"]) == (2, {}, False)
    assert record["basis"].startswith("the table built-in: ")
    *_, said, basis = job.stdout.splitlines()
    assert said.startswith(f"# regret: mean {100 * record['verdict']['mean']:.1f} %")
    assert basis == f"# auto goes by {record['basis']}"


@pytest.mark.parametrize("arguments", [["all_reduc"], ["--frob"], ["-b", "64K", "-e", "1K"],
                                       ["--json", "/nowhere/at/all.json"]])
def test_wrong_arguments_are_one_line_and_code_2_on_every_rank(mpiexec, arguments):
    job = mpiexec(2, "sh", "-c", '"$0" -m gpucoll bench regret "$@"; echo "exit $?"', sys.executable, *arguments)
    assert job.stdout.split() == ["exit", "2"] * 2, job.stderr
    assert job.stderr.count("\n") == 1
    assert job.stderr.startswith("gpucoll bench regret: ")


def test_ctrl_c_ends_all_ranks_and_keeps_what_was_measured(launcher, tmp_path):
    argv = [sys.executable, "-m", "gpucoll.bench", "regret", "-b", "4", "-f", "2", "--json", tmp_path / "regret.json"]
    output = tmp_path / "output"
    with output.open("wb") as stream:
        process = start_job(require_launcher().command(2, argv), "regret", stream, environment=same_gpucoll())
        try:
            wait_for_a_line(process, output)
            os.kill(process.pid, signal.SIGINT)
            process.wait(20)
        finally:
            end_job(process, "regret")
    assert process.returncode != 0
    record = json.loads((tmp_path / "regret.json").read_text())
    assert record["interrupted"]
    assert [size["bytes"] for size in record["sizes"]][:1] == [4]
    assert record["verdict"]["mean"] >= 0  # printed as well, where the launcher has not closed the output yet


def wait_for_a_line(process, output):
    """Return once there is a line of data; fails after a minute, or where the job ends before."""
    deadline = time.monotonic() + 60
    while not any(line[:1] == b" " for line in output.read_bytes().splitlines()):
        assert time.monotonic() < deadline, output.read_text()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
            pytest.fail(output.read_text())
