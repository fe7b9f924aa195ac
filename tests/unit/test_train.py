"""scripts/train.py without ranks: gradients, samples, checkpoints, the log, plots and refusals."""

import os

import numpy as np
import pytest

import digits
import models
import records
import texts
import train


def on_one_rank(layers, weights, x, targets):
    """Return the loss and the gradients of the weights."""
    everything = []
    for layer in layers:
        part, kept = layer.forward(np, weights, x)
        x, kept = layer.finish(np, weights, x, part, kept)
        everything.append(kept)
    loss, dy = models.loss(np, x, targets)
    found = {}
    for layer, kept in zip(reversed(layers), reversed(everything), strict=True):
        part, some = layer.backward(np, weights, kept, dy)
        found |= some
        dy = layer.finish_backward(dy, part)
    return loss, found


@pytest.mark.parametrize("name", models.MODELS)
def test_gradients_are_those_of_finite_differences(name):
    layers, chance = models.MODELS[name](), np.random.default_rng(1)
    weights = models.initial(layers, 0, "float64")
    if name == "transformer":
        x, targets = texts.prepare(np, texts.read_table()[:3], "float64")
    else:
        table = np.column_stack([chance.integers(0, 17, (5, 64)), chance.integers(0, 10, 5)]).astype(np.uint8)
        x, targets = digits.prepare(np, table, "float64")
    loss, exact = on_one_rank(layers, weights, x, targets)
    assert list(weights) == [name for layer in layers for name in layer.names]
    for name, weight in weights.items():
        assert exact[name].shape == weight.shape
        for place in (tuple(chance.integers(0, weight.shape)) for _ in range(3)):
            around = []
            for nudge in (1e-6, -1e-6):
                nudged = {**weights, name: weight.copy()}
                nudged[name][place] += nudge
                around.append(on_one_rank(layers, nudged, x, targets)[0])
            assert exact[name][place] == pytest.approx((around[0] - around[1]) / 2e-6, rel=1e-4, abs=1e-6), name
    parts = [on_one_rank(layers, weights, x[some], targets[some]) for some in (slice(0, 1), slice(1, None))]
    assert loss == pytest.approx(sum(part for part, _ in parts))
    empty = on_one_rank(layers, weights, x[:0], targets[:0])  # a rank may have no sample of a batch
    assert empty[0] == 0
    assert not any(gradient.any() for gradient in empty[1].values())


def test_options():
    rates = [train.parse(["--batch", batch]).learning_rate for batch in ("32", "64", "1000")]
    assert rates == [0.1, 0.2, 0.4]
    for wrong in ("--epochs=0", "--seed=9223372036854775808", "--learning-rate=nan", "--dtype=float16", "stray",
                  "--strategy=zero4", "--strategy=zero1 --algorithm=ring"):
        with pytest.raises(train.Refusal):
            train.parse(wrong.split())
    launched = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
    for variables, threads in (({}, "8"), (launched, "4"), ({"OMP_NUM_THREADS": "3"}, "3")):
        train.limit_threads(variables, 8)  # without the user's choice each rank gets an equal part of the cores
        assert variables["OMP_NUM_THREADS"] == threads


def some_arrays(seed=0):
    chance = np.random.default_rng(seed)
    return {"weight/w": chance.standard_normal((3, 5)).astype("float32"), "momentum/w": chance.standard_normal((3, 5))}


def test_an_interrupted_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path, settings = tmp_path / "run.npz", train.settings(train.parse([]))
    path.with_name("run.npz.part").write_bytes(b"half")  # left by a killed run
    records.write_checkpoint(path, some_arrays(0), 7, settings)
    for moment in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, moment, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                records.write_checkpoint(path, some_arrays(1), 8, settings)
        found = some_arrays(2)
        assert records.read_checkpoint(path, found, settings) == 7
        assert all(found[name].tobytes() == wanted.tobytes() for name, wanted in some_arrays(0).items())
        assert os.listdir(tmp_path) == ["run.npz"]


def test_what_is_no_checkpoint_of_this_run_is_refused(tmp_path):
    path, settings = tmp_path / "run.npz", train.settings(train.parse([]))
    records.write_checkpoint(path, some_arrays(), 1, settings)
    with pytest.raises(records.Refusal, match="its batch is 64, asked for is 65"):
        records.read_checkpoint(path, some_arrays(), {**settings, "batch": 65})
    with pytest.raises(records.Refusal, match="its weight/w is float32"):
        records.read_checkpoint(path, {"weight/w": np.zeros((3, 6))}, settings)
    np.savez(path, something=np.arange(3))  # an archive without a checkpoint
    for content in (path.read_bytes(), b"no archive"):
        path.write_bytes(content)
        with pytest.raises(records.Refusal, match="cannot resume from"):
            records.read_checkpoint(path, some_arrays(), settings)
