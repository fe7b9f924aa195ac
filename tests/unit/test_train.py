"""scripts/train.py without ranks: gradients, the parts of a batch, checkpoints, the log, what it shows and refuses."""

import itertools
import json
import os

import numpy as np
import pytest

import digits
import records
import train


def samples(count, seed=0):
    """Random images and targets, prepared as the real ones are."""
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 17, (count, digits.PIXELS))
    table = np.column_stack([pixels, generator.integers(0, 10, count)]).astype(np.uint8)
    return digits.prepare(np, table, "float64")


def test_gradient_is_that_of_finite_differences():
    images, targets = samples(9)
    weights = digits.initial(1, "float64")

    def gradient(weights, part=slice(None)):
        out = np.full(digits.PARAMETERS + 1, np.nan)
        digits.gradient(np, weights, images[part], targets[part], out=out)
        return out

    exact = gradient(weights)
    for first, end in itertools.pairwise((0, *digits.ENDS)):  # a few parameters of each of the four arrays
        for index in np.linspace(first, end - 1, 7, dtype=int):
            nudge = np.zeros_like(weights)
            nudge[index] = 1e-5
            above, below = (gradient(weights + sign * nudge)[-1] for sign in (1, -1))
            assert exact[index] == pytest.approx((above - below) / 2e-5, rel=1e-6, abs=1e-8)
    assert exact[-1] == pytest.approx(sum(gradient(weights, slice(*ends))[-1] for ends in ((0, 5), (5, 9), (9, 9))))


@pytest.mark.parametrize("batch", [5, 64, 5000])
def test_every_sample_is_met_once_an_epoch_in_an_order_of_seed_and_epoch(batch):
    indices = np.arange(1437) * 3
    batches = digits.batches(indices, batch, seed=3, epoch=4)
    assert [len(some) for some in batches[:-1]] == [batch] * (len(batches) - 1)
    assert np.array_equal(np.concatenate(digits.batches(indices, batch, 3, 4)), np.concatenate(batches))
    assert not np.array_equal(np.concatenate(digits.batches(indices, batch, 3, 5)), np.concatenate(batches))
    for ranks in (1, 3, 8):
        shares = [[digits.share(some, rank, ranks) for rank in range(ranks)] for some in batches]
        assert sorted(np.concatenate(list(itertools.chain(*shares)))) == indices.tolist()
        assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in shares)


def test_the_real_samples_are_split_alike_in_every_class():
    pytest.importorskip("sklearn", reason="pip install gpucoll[train]")
    table = digits.read_table()
    labels = table[:, digits.PIXELS]
    training, test = digits.split(labels)
    assert sorted([*training, *test]) == list(range(digits.SAMPLES))
    assert np.abs(np.bincount(labels[test]) / np.bincount(labels) - digits.TEST_SHARE).max() < 0.005
    images, targets = digits.prepare(np, table, "float32")
    assert (images.dtype, images.min(), images.max()) == (np.float32, -1, 1)
    assert np.array_equal(targets.argmax(axis=1), labels)


def test_options():
    rates = [train.parse(["--batch", batch]).learning_rate for batch in ("32", "64", "1000")]
    assert rates == [0.1, 0.2, 0.4]
    for wrong in ("--epochs=0", "--seed=9223372036854775808", "--learning-rate=nan", "--dtype=float16", "stray"):
        with pytest.raises(train.Refusal):
            train.parse([wrong])
    for variables, threads in (({}, "8"), ({"MPI_LOCALNRANKS": "2"}, "4"), ({"OMP_NUM_THREADS": "3"}, "3")):
        train.limit_threads(variables, 8)  # each rank has its part of the cores unless the user chose
        assert variables["OMP_NUM_THREADS"] == threads


def some_state(seed=0):
    return np.random.default_rng(seed).standard_normal((2, digits.PARAMETERS)).astype("float32")


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path, settings = tmp_path / "run.npz", train.settings(train.parse([]))
    path.with_name("run.npz.part").write_bytes(b"half")  # a run that was killed
    records.write_checkpoint(path, some_state(0), 1, settings)
    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, moment, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                records.write_checkpoint(path, some_state(1), 2, settings)
        state, epochs = records.read_checkpoint(path, settings)
        assert (epochs, state.dtype, state.tobytes()) == (1, np.float32, some_state(0).tobytes())
        assert os.listdir(tmp_path) == ["run.npz"]


def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path):
    path, settings = tmp_path / "run.npz", train.settings(train.parse([]))
    records.write_checkpoint(path, some_state(), 1, settings)
    with pytest.raises(records.Refusal, match="its batch is 64, asked for is 65"):
        records.read_checkpoint(path, {**settings, "batch": 65})
    np.savez(path, something=np.arange(3))  # another's archive
    for content in (path.read_bytes(), b"no archive"):
        path.write_bytes(content)
        with pytest.raises(records.Refusal, match="cannot resume from"):
            records.read_checkpoint(path, settings)


def write_log(path, done, numbers):
    with records.open_log(path, done) as log:
        for number in numbers:
            records.write_step(log, records.Step(number, 0.5, samples=64, seconds=0.25, communication=0.1))
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_new_run_starts_the_log_anew_and_a_resumed_one_continues_it(tmp_path):
    path = tmp_path / "log.jsonl"
    assert write_log(path, 0, [1]) == [
        {"step": 1, "loss": 0.5, "samples_per_second": 256.0, "communication_share": 0.4}]
    assert [line["step"] for line in write_log(path, 0, range(1, 6))] == [1, 2, 3, 4, 5]
    with path.open("a") as log:
        log.write('{"step": 6, "lo')  # killed while writing
    assert [line["step"] for line in write_log(path, 3, [4, 5])] == [1, 2, 3, 4, 5]
