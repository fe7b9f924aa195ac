"""scripts/train.py without ranks: gradients, the parts of a batch, checkpoints, the log, what it shows and refuses."""

import io
import itertools
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

import digits  # noqa: E402 (the path comes first)
import records  # noqa: E402
import train  # noqa: E402

RANKS = (1, 2, 3, 4, 5, 7, 8)


def samples(count, seed=0):
    """Random images and targets, prepared as the real ones are."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 17, (count, digits.PIXELS))
    table = np.column_stack([pixels, generator.integers(0, 10, count)]).astype(np.uint8)
    return digits.prepare(np, table, "float64")


def gradient(images, targets, weights):
    out = np.full(digits.PARAMETERS + 1, np.nan)
    digits.gradient(np, weights, images, targets, out=out)
    return out


# The network


def test_gradient_is_that_of_finite_differences():
    images, targets = samples(9)
    weights = digits.initial(1, "float64")
    exact = gradient(images, targets, weights)
    # A few parameters of each of the four arrays, the first and last ones among them.
    starts = (0, *digits.ENDS)
    chosen = [index for first, end in itertools.pairwise(starts) for index in np.linspace(first, end - 1, 7, dtype=int)]
    for index in chosen:
        nudge = np.zeros_like(weights)
        nudge[index] = 1e-5
        above, below = (gradient(images, targets, weights + sign * nudge)[-1] for sign in (1, -1))
        assert exact[index] == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-8)


def test_loss_is_the_cross_entropy_of_the_smoothed_targets():
    images, targets = samples(5)
    weights = np.zeros(digits.PARAMETERS)
    assert gradient(images, targets, weights)[-1] == pytest.approx(5 * np.log(10))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("count", [0, 1, 6, 64])
def test_gradients_of_the_parts_add_up_to_that_of_the_batch(ranks, count):
    images, targets = samples(max(count, 1))
    weights = digits.initial(2, "float64")
    parts = [digits.share(np.arange(count), rank, ranks) for rank in range(ranks)]
    total = sum(gradient(images[part], targets[part], weights) for part in parts)
    whole = gradient(images[:count], targets[:count], weights)
    np.testing.assert_allclose(total, whole, rtol=1e-12, atol=1e-13)


def test_a_network_without_samples_has_nothing_right():
    images, targets = samples(3)
    assert digits.correct(np, digits.initial(0, "float32"), images[:0], targets[:0]).tolist() == [0]


def test_correct_counts_the_likeliest_classes():
    images, _ = samples(6)
    weights = np.zeros(digits.PARAMETERS)
    digits.views(weights)[3][4] = 1  # the bias makes every guess a four
    targets = np.eye(10)[[4, 4, 1, 4, 0, 9]]
    assert digits.correct(np, weights, images, targets).tolist() == [3]


def test_views_share_memory_and_cover_the_vector():
    flat = np.zeros(digits.PARAMETERS + 1)
    for view in digits.views(flat):
        view += 1
    assert flat[:-1].tolist() == [1] * digits.PARAMETERS
    assert flat[-1] == 0


# Data


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("batch", [1, 5, 64, 1437, 5000])
def test_every_sample_is_met_once_an_epoch(ranks, batch):
    indices = np.arange(1437) * 3
    batches = digits.batches(indices, batch, seed=3, epoch=4)
    shares = [digits.share(some, rank, ranks) for some in batches for rank in range(ranks)]
    assert sorted(np.concatenate(shares)) == indices.tolist()
    assert [len(some) for some in batches[:-1]] == [batch] * (len(batches) - 1)
    for some in batches:
        assert np.array_equal(np.concatenate([digits.share(some, rank, ranks) for rank in range(ranks)]), some)


def test_shares_are_even_to_one_sample_and_may_be_empty():
    assert [len(digits.share(np.arange(29), rank, 8)) for rank in range(8)] == [4, 4, 4, 4, 4, 3, 3, 3]
    assert [len(digits.share(np.arange(3), rank, 8)) for rank in range(8)] == [1, 1, 1, 0, 0, 0, 0, 0]


def test_order_depends_on_seed_and_epoch_only():
    order = [digits.batches(np.arange(50), 50, seed, epoch)[0].tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(some) for some in order}) == 4
    assert order[3] == digits.batches(np.arange(50), 50, 1, 1)[0].tolist()


def test_split_is_stratified_and_keeps_test_samples_apart():
    pytest.importorskip("sklearn", reason="pip install gpucoll[train]")
    table = digits.read_table()
    assert table.shape == (digits.SAMPLES, digits.PIXELS + 1)
    labels = table[:, digits.PIXELS]
    training, test = digits.split(labels)
    assert sorted([*training, *test]) == list(range(digits.SAMPLES))
    shares = np.bincount(labels[test]) / np.bincount(labels)
    assert np.abs(shares - digits.TEST_SHARE).max() < 0.005


def test_prepared_pixels_and_targets():
    table = np.zeros((2, digits.PIXELS + 1), np.uint8)
    table[1] = 16
    table[:, digits.PIXELS] = 3, 9
    images, targets = digits.prepare(np, table, "float32")
    assert images.dtype == targets.dtype == np.float32
    assert (images.min(), images.max()) == (-1, 1)
    assert targets.argmax(axis=1).tolist() == [3, 9]
    np.testing.assert_allclose(targets.sum(axis=1), 1, rtol=1e-6)


# Options


def test_learning_rate_grows_with_the_batch_up_to_a_limit():
    rates = [train.parse(["--batch", batch]).learning_rate for batch in ("32", "64", "1000")]
    assert rates == [0.1, 0.2, 0.4]
    assert train.parse(["--batch", "1000", "--learning-rate", "0.7"]).learning_rate == 0.7


@pytest.mark.parametrize(
    "argument",
    ["--epochs=0", "--epochs=1.5", "--batch=0", "--seed=-1", "--seed=9223372036854775808", "--learning-rate=nan",
     "--learning-rate=inf", "--learning-rate=-1", "--dtype=float16", "--device=gpu", "--progress=loud", "--epoch=3",
     "--algorithm", "stray"],
)  # fmt: skip
def test_wrong_arguments_are_refused(argument):
    with pytest.raises(train.Refusal):
        train.parse([argument])


@pytest.mark.parametrize(
    ("variables", "threads"),
    [({}, "8"), ({"MPI_LOCALNRANKS": "2"}, "4"), ({"OMPI_COMM_WORLD_LOCAL_SIZE": "64"}, "1"),
     ({"SLURM_NTASKS_PER_NODE": "4"}, "2"), ({"MPI_LOCALNRANKS": "0"}, "8"), ({"MPI_LOCALNRANKS": "two"}, "8")],
)  # fmt: skip
def test_each_rank_gets_its_part_of_the_cores(variables, threads):
    train.limit_threads(variables, 8)
    assert [variables[name] for name in train.THREADS] == [threads] * len(train.THREADS)


def test_a_number_of_threads_that_the_user_chose_stays():
    variables = {"OMP_NUM_THREADS": "3", "MPI_LOCALNRANKS": "8"}
    train.limit_threads(variables, 8)
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["OPENBLAS_NUM_THREADS"] == "1"


# Checkpoints


@pytest.fixture
def settings():
    return train.settings(train.parse([]))


def some_state(seed=0):
    return np.random.default_rng(seed).standard_normal((2, digits.PARAMETERS)).astype("float32")


def test_checkpoint_round_trip(tmp_path, settings):
    path = tmp_path / "run.npz"
    records.write_checkpoint(path, some_state(), 7, settings)
    state, epochs = records.read_checkpoint(path, settings)
    assert epochs == 7
    assert state.dtype == np.float32
    assert np.array_equal(state, some_state())
    assert os.listdir(tmp_path) == ["run.npz"]
    with np.load(path) as file:
        assert {"weights", "momentum", "epoch", "seed", "layers", "batch", "dtype", "learning_rate"} == set(file.files)


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, settings, monkeypatch, moment):
    path = tmp_path / "run.npz"
    records.write_checkpoint(path, some_state(0), 1, settings)
    monkeypatch.setattr(os, moment, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        records.write_checkpoint(path, some_state(1), 2, settings)
    state, epochs = records.read_checkpoint(path, settings)
    assert epochs == 1
    assert np.array_equal(state, some_state(0))
    assert os.listdir(tmp_path) == ["run.npz"]


def test_half_a_file_beside_the_checkpoint_does_no_harm(tmp_path, settings):
    """What a run that was killed while writing leaves behind."""
    path = tmp_path / "run.npz"
    path.with_name("run.npz.part").write_bytes(b"half")
    records.write_checkpoint(path, some_state(), 1, settings)
    assert records.read_checkpoint(path, settings)[1] == 1


@pytest.mark.parametrize(
    ("name", "option"),
    [("batch", "--batch=65"), ("dtype", "--dtype=float64"), ("seed", "--seed=1"), ("learning_rate", "--batch=32")],
)
def test_a_checkpoint_of_other_settings_is_refused(tmp_path, settings, name, option):
    path = tmp_path / "run.npz"
    records.write_checkpoint(path, some_state(), 1, settings)
    changed = train.settings(train.parse([option]))
    with pytest.raises(records.Refusal, match=f"its {name} is .*, asked for is "):
        records.read_checkpoint(path, {**settings, name: changed[name]})


def test_a_checkpoint_of_another_network_is_refused(tmp_path, settings):
    path = tmp_path / "run.npz"
    records.write_checkpoint(path, some_state(), 1, {**settings, "layers": [64, 32, 32, 10]})
    with pytest.raises(records.Refusal, match="layers"):
        records.read_checkpoint(path, settings)


@pytest.mark.parametrize("content", [None, b"", b"no archive", "foreign"])
def test_what_is_no_checkpoint_is_refused(tmp_path, settings, content):
    path = tmp_path / "run.npz"
    if content == "foreign":
        np.savez(path, something=np.arange(3))
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(records.Refusal, match="cannot resume from"):
        records.read_checkpoint(path, settings)


# Log and progress


def step(number, loss=0.5, samples=64, seconds=0.25, communication=0.1):
    return records.Step(number, loss, samples, seconds, communication)


def write_log(path, done, numbers):
    with records.open_log(path, done) as log:
        for number in numbers:
            records.write_step(log, step(number))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_log_lines(tmp_path):
    (line,) = write_log(tmp_path / "log.jsonl", 0, [1])
    assert line == {"step": 1, "loss": 0.5, "samples_per_second": 256.0, "communication_share": 0.4}


def test_a_new_run_starts_the_log_anew_and_a_resumed_one_continues_it(tmp_path):
    path = tmp_path / "log.jsonl"
    write_log(path, 0, [1, 2])
    assert [line["step"] for line in write_log(path, 0, range(1, 6))] == [1, 2, 3, 4, 5]
    with path.open("a") as log:
        log.write('{"step": 6, "lo')  # killed while writing
    assert [line["step"] for line in write_log(path, 3, [4, 5])] == [1, 2, 3, 4, 5]


def test_progress_line():
    text = records.describe(12.3, 30, [step(1, loss=0.5), step(2, loss=0.25)])
    assert text == "epoch 12/30  loss 0.3750  256 samples/s  communication 40 %"
    assert records.describe(3, 30, [step(1)]).startswith("epoch  3/30  ")


def shown(style, times, terminal=False):
    """What a run of two epochs of two steps shows when its steps end at these times, in seconds."""
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    now = [0.0]
    progress = records.Progress(style, 2, stream, clock=lambda: now[0])
    for number, now[0] in enumerate(times, start=1):
        progress.add(step(number), number / 2)
    return stream.getvalue()


def test_lines_come_every_five_seconds_and_at_the_end():
    lines = shown("auto", [1.0, 6.0, 7.0, 8.0]).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]


def test_on_a_terminal_a_bar_redraws_itself_in_one_line(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = shown("auto", [1.0, 1.05, 3.0, 4.0], terminal=True)
    drawn = text.split("\r")[1:]
    assert len(drawn) == 3  # not after 1.05 s
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert drawn[0].startswith("[######..................] epoch 0/2  loss 0.5000  ")
    assert drawn[-1].startswith("[########################] epoch 2/2  ")
    assert {len(line.rstrip("\n")) for line in drawn} == {99}


def test_progress_can_be_chosen_or_switched_off():
    assert shown("off", [1.0, 9.0, 20.0, 30.0]) == ""
    assert "\r" not in shown("lines", [1.0, 2.0, 3.0, 4.0], terminal=True)
    assert "\r" in shown("bar", [1.0, 2.0, 3.0, 4.0])
