"""scripts/train.py on several ranks: one loss curve for all of them, checkpoints, what it prints and refuses."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import gpucoll as gc

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

import digits  # noqa: E402 (the path comes first)
import train  # noqa: E402

pytest.importorskip("sklearn", reason="pip install gpucoll[train]")

SIZES = (1, 2, 4, 8)
TOLERANCES = {"float64": 1e-9, "float32": 1e-4}  # relative, of every step's loss


@pytest.fixture
def script(mpiexec):
    """`script(ranks, *arguments)`: what `mpiexec -n ranks python scripts/train.py arguments` did."""

    def run(ranks, *arguments, **options):
        return mpiexec(ranks, sys.executable, SCRIPTS / "train.py", *arguments, **options)

    return run


def read_log(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def deviation(losses, expected):
    assert len(losses) == len(expected)
    return max(abs(loss / wanted - 1) for loss, wanted in zip(losses, expected, strict=True))


# One curve, whatever the number of ranks and the order of summation


def curves(mpi, algorithms, arguments):
    """For each algorithm the loss of every step of one training: a program for the pool of ranks."""
    with gc.Communicator.from_mpi(mpi) as comm:
        return {algorithm: curve(comm, [*arguments, "--algorithm", algorithm]) for algorithm in algorithms}


def curve(comm, arguments):
    options = train.parse([*arguments, "--device", "cpu"])
    training = train.Training(comm, options)
    return [step.loss for epoch in range(options.epochs) for step in training.epoch(epoch)]


def assert_one_curve(ranks, algorithms, dtype, *arguments):
    arguments = [*arguments, "--dtype", dtype]
    expected = ranks(curves, 1, ["native"], arguments, timeout=60)[0]["native"]
    for size in SIZES[1:]:
        found = ranks(curves, size, algorithms, arguments, timeout=300)
        assert all(one == found[0] for one in found), "ranks hold different weights"
        worst = {algorithm: deviation(losses, expected) for algorithm, losses in found[0].items()}
        assert max(worst.values()) <= TOLERANCES[dtype], (size, worst)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_all_ranks_and_algorithms_give_one_curve(ranks, dtype):
    names = set.intersection(*(set(gc.algorithms("all_reduce", size=size, op="sum", dtype=dtype)) for size in SIZES))
    assert_one_curve(ranks, [*sorted(names), "native"], dtype, "--epochs", "1")


@pytest.mark.parametrize("batch", ["5", "13"])
def test_ranks_without_samples_change_nothing(ranks, batch):
    """Of 8 ranks, 3 have no sample of 5; batches of 13 are uneven, and leave 7 of 1,437 samples for the last one."""
    assert_one_curve(ranks, ["ring"], "float64", "--epochs", "1", "--batch", batch)


def curves_without_remainder(mpi, algorithms, arguments):
    """As `curves`, with the fault that the samples that do not divide evenly over the ranks are left out."""
    share = digits.share
    digits.share = lambda items, rank, size: np.array_split(items[: len(items) // size * size], size)[rank]
    try:
        return curves(mpi, algorithms, arguments)
    finally:
        digits.share = share


@pytest.mark.mutant
def test_a_curve_of_fewer_samples_is_noticed(ranks):
    arguments = ["--epochs", "1", "--dtype", "float32"]
    right, wrong = (ranks(program, 3, ["ring"], arguments)[0] for program in (curves, curves_without_remainder))
    assert deviation(wrong["ring"], right["ring"]) > 100 * TOLERANCES["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_whole_training_is_one_curve(ranks, dtype):
    assert_one_curve(ranks, ["ring", "tree", "star", "native"], dtype)


def test_the_command_logs_one_curve_for_every_number_of_ranks(script, tmp_path):
    logs = {}
    for size in SIZES:
        path = tmp_path / f"{size}.jsonl"
        done = script(size, "--epochs", "1", "--dtype", "float64", "--progress", "off", "--log", path)
        assert done.returncode == 0, done.stderr
        logs[size] = read_log(path)
    assert [line["step"] for line in logs[1]] == list(range(1, 24))
    for size, lines in logs.items():
        assert deviation([line["loss"] for line in lines], [line["loss"] for line in logs[1]]) <= 1e-9, size
        assert {tuple(line) for line in lines} == {("step", "loss", "samples_per_second", "communication_share")}
        assert all(line["samples_per_second"] > 0 and 0 < line["communication_share"] < 1 for line in lines)


# What it learns, shows and refuses


@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_two_ranks_learn_to_read(script, algorithm):
    done = script(2, "--epochs", "6", "--algorithm", algorithm)
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split(" ")
    assert (last[:2], last[3:]) == (["test", "accuracy"], ["%"])
    assert float(last[2]) >= 94
    assert done.stderr.splitlines()[-1].startswith("epoch 6/6  loss ")


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_eight_ranks_reach_97_per_cent(script, seed):
    done = script(8, "--seed", seed, timeout=90)
    assert float(done.stdout.split()[-2]) >= 97, done.stderr


def assert_refused(done, reason):
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]  # mpiexec may add its own
    assert done.returncode == 2
    assert len(lines) == 1, done.stderr
    assert reason in lines[0]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("argument", "reason"),
    [("--epochs=many", "--epochs"), ("--algorithm=rong", "rong"), ("--executor=pigeon", "pigeon"),
     ("--resume=missing.npz", "missing.npz"), ("--save=missing/run.npz", "missing"), ("--log=missing/log", "missing")],
)  # fmt: skip
def test_wrong_arguments_are_one_line_and_exit_code_2(script, tmp_path, argument, reason):
    assert_refused(script(3, argument, cwd=tmp_path), reason)


def test_without_scikit_learn_it_says_what_to_install(script, tmp_path):
    (tmp_path / "sklearn.py").write_text("raise ImportError('no sklearn here')\n")
    path = os.pathsep.join([str(tmp_path), str(SCRIPTS.parent)])
    assert_refused(script(2, env={"PYTHONPATH": path}), "pip install gpucoll[train]")


def test_help_is_printed_once(script):
    done = script(3, "--help")
    assert done.returncode == 0
    assert done.stdout.count("usage: train.py") == 1


# Checkpoints


def test_a_resumed_run_equals_one_that_was_never_interrupted(script, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for name, epochs, resume in ((whole, 3, ()), (parts, 1, ()), (parts, 3, ("--resume", f"{parts}.npz"))):
        done = script(2, "--epochs", str(epochs), "--save", f"{name}.npz", "--log", f"{name}.jsonl", *resume)
        assert done.returncode == 0, done.stderr
    losses = [[line["loss"] for line in read_log(name.with_suffix(".jsonl"))] for name in (whole, parts)]
    assert losses[0] == losses[1]
    with np.load(f"{whole}.npz") as expected, np.load(f"{parts}.npz") as found:
        assert expected.files == found.files
        assert all(expected[name].tobytes() == found[name].tobytes() for name in expected.files)


def test_a_checkpoint_of_other_settings_is_refused(script, tmp_path):
    path = tmp_path / "run.npz"
    assert script(2, "--epochs", "1", "--save", path).returncode == 0
    assert_refused(script(2, "--resume", path, "--dtype", "float64"), "its dtype is float32, asked for is float64")
