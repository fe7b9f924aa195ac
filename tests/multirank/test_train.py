"""scripts/train.py on several ranks: the same loss curve on all, checkpoints, output and refusals."""

import contextlib
import io
import json
import sys
from pathlib import Path

import pytest

import gpucoll as gc
import train
from harness.commands import gpucoll_run

pytest.importorskip("sklearn", reason="pip install gpucoll[train]")

SCRIPTS = Path(train.__file__).parent


@pytest.fixture
def script(mpiexec):
    """Return `script(ranks, *arguments)`, which runs `mpiexec -n ranks python scripts/train.py arguments`."""
    def run(ranks, *arguments, **options):
        return mpiexec(ranks, sys.executable, SCRIPTS / "train.py", *arguments, **options)
    return run


def curves(mpi, algorithms, arguments):
    """Train once for each algorithm, on the pool's ranks; return for each algorithm the loss of every step."""
    options = [train.parse([*arguments, "--device", "cpu", "--algorithm", algorithm]) for algorithm in algorithms]
    with gc.Communicator.from_mpi(mpi) as comm:
        trainings = [train.Training(comm, one) for one in options]
        return {one.algorithm: [step.loss for epoch in range(one.epochs) for step in training.epoch(epoch)]
                for one, training in zip(options, trainings, strict=True)}


def strategy_curves(mpi, arguments):
    """Return for each strategy the loss of every step, then the accuracy; a parameter server returns nothing."""
    found = {}
    with gc.Communicator.from_mpi(mpi) as comm:
        for strategy in train.STRATEGIES:
            training = train.Training(comm, train.parse([*arguments, "--device", "cpu", "--strategy", strategy]))
            if training.strategy.is_server:
                training.strategy.serve()
                continue
            found[strategy] = [step.loss for step in training.epoch(0)]
            training.strategy.end()
            found[strategy].append(training.accuracy())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn", pytest.param("transformer", marks=pytest.mark.nightly)])
def test_every_strategy_gives_one_curve(ranks, model):
    arguments = ["--dtype", "float64", "--batch", "400", "--model", model]
    expected = ranks(curves, 1, ["native"], [*arguments, "--epochs", "1"], timeout=300)[0]["native"]
    for size in (2, 4):
        everyone = ranks(strategy_curves, size, arguments, timeout=300)
        for strategy, (*losses, accuracy) in everyone[0].items():
            assert losses == pytest.approx(expected, rel=1e-9, abs=0), (size, strategy)
            assert accuracy == everyone[0]["data_parallel"][-1]
        assert "parameter_server" not in everyone[-1]


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_never_interrupted_and_learns(ranks, script, tmp_path):
    path = tmp_path / "run.npz"
    for epochs, resume in (("1", ()), ("2", ("--resume", path))):
        done = script(2, "--epochs", epochs, "--save", path, "--log", path.with_suffix(".jsonl"), *resume)
        assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1].removeprefix("test accuracy ").removesuffix(" %")) >= 75
    assert done.stderr.splitlines()[-1].startswith("epoch 2/2  loss ")
    log = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["loss"] for line in log] == ranks(curves, 2, ["auto"], ["--epochs", "2"])[0]["auto"]
    assert [line["step"] for line in log] == list(range(1, 2 * 23 + 1))
    assert all(line["samples_per_second"] > 0 and 0 < line["communication_share"] < 1 for line in log)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", ["0", "1"])
def test_eight_ranks_reach_97_per_cent(script, seed):
    assert float(script(8, "--seed", seed, timeout=300).stdout.split()[-2]) >= 97


def refused(mpi, commands):
    """Return the exit code and the standard error of each command, on all ranks of the pool."""
    found = []
    for command in commands:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            found.append((train.main(command.split()), said.getvalue()))
    return found


REFUSED = {  # command: words of the line
    "--algorithm=rong": "rong", "--save=missing/run.npz": "missing", "--epochs=many": "many",
    "--strategy=pigeon": "pigeon", "--executor=pigeon": "pigeon", "--resume=missing.npz": "missing.npz",
    "--log=missing/log": "missing", "--plot=missing/run.svg": "missing", "--plot=run.pdf": "run.pdf",
    "--strategy=tensor_parallel --resume=run": "not for --strategy tensor_parallel",
    "--strategy=parameter_server --compression=int8": "no --compression",
    "--compression=int8 --save=run.npz": "is for --strategy zero1"}


def test_wrong_arguments_are_one_line_and_exit_code_2(ranks, script, tmp_path):
    done = script(2, "--strategy=tensor_parallel", "--compression=int8", cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train.py: ")]  # mpiexec may add lines
    assert (done.returncode, len(lines), done.stdout) == (2, 1, ""), done.stderr
    assert "two ranks send no gradients" in lines[0]
    first, *others = ranks(refused, 8, REFUSED)
    for (code, said), (command, word) in zip(first, REFUSED.items(), strict=True):
        assert (code, said.count("\n"), word in said) == (2, 1, True), (command, said)
    assert others == [[(2, "")] * len(REFUSED)] * 7


BY_STORE = """
import runpy, sys
sys.modules["gpucoll.bench"] = None  # a clone on the path has none, and it is needed for --plot only
sys.argv[0] = {script!r}
sys.path.insert(0, {folder!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_training_without_mpi(tmp_path):
    text = BY_STORE.format(script=str(SCRIPTS / "train.py"), folder=str(SCRIPTS))
    (program := tmp_path / "program.py").write_text(text)
    found = gpucoll_run("--standalone", "-n", 2, program, "--epochs=1", "--progress=off", "--device=cpu",
                        f"--save={tmp_path / 'saved.npz'}")
    assert (found.returncode, "test accuracy" in found.stdout) == (0, True), found.stdout + found.stderr


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_bytes_of_the_pages_are_those_of_a_run(mpiexec, ranks):
    """The program counts messages in the schedules that run; it ends with 1 if a count differs from the formula."""
    job = mpiexec(ranks, sys.executable, "-m", "gpucoll.bench.strategies", "--steps", "1", env={"OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stdout + job.stderr
    head, _, *printed = job.stdout.splitlines()
    pages = "\n".join(page.read_text() for page in (SCRIPTS.parent / "docs/training").glob("*.md"))
    quoted = [line for table in pages.split(f"{head}\n")[1:] for line in table.partition("\n\n")[0].splitlines()[1:]]
    assert len(quoted) >= 3
    assert {*quoted} <= {*printed}
