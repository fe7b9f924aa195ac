"""scripts/train.py on several ranks: one loss curve for all of them, checkpoints, what it prints and refuses."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import digits
import gpucoll as gc
import train

pytest.importorskip("sklearn", reason="pip install gpucoll[train]")

SCRIPTS = Path(train.__file__).parent
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


def curves(mpi, algorithms, arguments, share=digits.share):
    """For each algorithm the loss of every step of one training: a program for the pool of ranks."""
    before, digits.share = digits.share, share
    try:
        with gc.Communicator.from_mpi(mpi) as comm:
            return {algorithm: curve(comm, [*arguments, "--algorithm", algorithm]) for algorithm in algorithms}
    finally:
        digits.share = before


def curve(comm, arguments):
    options = train.parse([*arguments, "--device", "cpu"])
    training = train.Training(comm, options)
    return [step.loss for epoch in range(options.epochs) for step in training.epoch(epoch)]


def assert_one_curve(ranks, algorithms, dtype, *arguments, sizes=(2, 4, 8)):
    arguments = [*arguments, "--dtype", dtype]
    expected = ranks(curves, 1, ["native"], arguments, timeout=300)[0]["native"]
    for size in sizes:
        found = ranks(curves, size, algorithms, arguments, timeout=300)
        assert all(one == found[0] for one in found), "ranks hold different weights"
        worst = {algorithm: deviation(losses, expected) for algorithm, losses in found[0].items()}
        assert max(worst.values()) <= TOLERANCES[dtype], (size, worst)


def test_ranks_and_algorithms_give_one_curve_even_without_samples(ranks):
    """Batches of 1,436 leave one of 1,437 samples for the last one: all ranks but one have none."""
    assert_one_curve(ranks, ["auto", "ring"], "float32", "--epochs", "1", sizes=(4,))
    assert_one_curve(ranks, ["ring"], "float64", "--epochs", "3", "--batch", "1436", sizes=(3,))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_every_algorithm_gives_one_curve(ranks, dtype):
    names = [set(gc.algorithms("all_reduce", size=size, op="sum", dtype=dtype)) for size in (2, 4, 8)]
    assert_one_curve(ranks, [*sorted(set.intersection(*names)), "native"], dtype, "--epochs", "1")
    assert_one_curve(ranks, ["ring"], dtype, "--epochs", "1", "--batch", "5")
    assert_one_curve(ranks, ["ring", "tree", "star", "native"], dtype)


def without_remainder(items, rank, size):
    return np.array_split(items[: len(items) // size * size], size)[rank]


@pytest.mark.mutant
@pytest.mark.nightly
def test_a_curve_of_fewer_samples_is_noticed(ranks):
    arguments = ["--epochs", "1", "--dtype", "float32"]
    right, wrong = (ranks(curves, 3, ["ring"], arguments, *more)[0] for more in ((), (without_remainder,)))
    assert deviation(wrong["ring"], right["ring"]) > 100 * TOLERANCES["float32"]


def test_a_resumed_run_equals_one_that_was_never_interrupted_and_learns(script, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for name, epochs, resume in ((whole, 3, ()), (parts, 1, ()), (parts, 3, ("--resume", f"{parts}.npz"))):
        done = script(2, "--epochs", str(epochs), "--save", f"{name}.npz", "--log", f"{name}.jsonl", *resume)
        assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1].split(" ")
    assert (last[:2], last[3:]) == (["test", "accuracy"], ["%"])
    assert float(last[2]) >= 85
    assert done.stderr.splitlines()[-1].startswith("epoch 3/3  loss ")
    logs = [read_log(name.with_suffix(".jsonl")) for name in (whole, parts)]
    assert [line["loss"] for line in logs[0]] == [line["loss"] for line in logs[1]]
    assert [line["step"] for line in logs[1]] == list(range(1, 3 * 23 + 1))
    assert all(line["samples_per_second"] > 0 and 0 < line["communication_share"] < 1 for line in logs[0])
    with np.load(f"{whole}.npz") as expected, np.load(f"{parts}.npz") as found:
        assert all(expected[name].tobytes() == found[name].tobytes() for name in expected.files)
    assert_refused(script(2, "--resume", f"{whole}.npz", "--dtype", "float64"), "its dtype is float32, asked for is f")


@pytest.mark.nightly
@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_eight_ranks_reach_97_per_cent(script, seed):
    assert float(script(8, "--seed", seed, timeout=300).stdout.split()[-2]) >= 97


def assert_refused(done, reason):
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]  # mpiexec may add its own
    assert (done.returncode, len(lines), done.stdout) == (2, 1, ""), done.stderr
    assert reason in lines[0]
    assert "Traceback" not in done.stderr


def test_wrong_arguments_are_one_line_and_exit_code_2(script, tmp_path):
    assert_refused(script(2, "--algorithm=rong", cwd=tmp_path), "rong")
    assert_refused(script(2, "--save=missing/run.npz", cwd=tmp_path), "missing")
    (tmp_path / "sklearn.py").write_text("raise ImportError('no sklearn here')\n")
    path = os.pathsep.join([str(tmp_path), str(SCRIPTS.parent)])
    assert_refused(script(2, env={"PYTHONPATH": path}), "pip install gpucoll[train]")


@pytest.mark.slow
def test_other_arguments_and_help(script, tmp_path):
    for argument, reason in (("--epochs=many", "--epochs"), ("--executor=pigeon", "pigeon"),
                             ("--resume=missing.npz", "missing.npz"), ("--log=missing/log", "missing")):
        assert_refused(script(3, argument, cwd=tmp_path), reason)
    done = script(3, "--help")
    assert (done.returncode, done.stdout.count("usage: train.py")) == (0, 1)
