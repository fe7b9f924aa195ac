"""Pipelines on every executor have the bits of one process; idle time and memory by formula are those counted."""

import contextlib

import numpy
import pytest

import gpucoll as gc
from gpucoll import training
from harness.grids import often


class Dense:
    """A stage of a pipeline: tanh of a product with weights; `kept` counts the microbatches not yet gone back."""

    def __init__(self, number):
        shape = numpy.array([7, 9, 5, 11, 3])[number:number + 2]
        self.weight, self.kept, self.most = numpy.random.default_rng(number).standard_normal(shape), 0, 0
        self.gradient = numpy.zeros_like(self.weight)

    def forward(self, x):
        self.kept += 1
        self.most = max(self.most, self.kept)
        y = numpy.tanh(x @ self.weight)
        return y, (x, y)

    def backward(self, kept, gradient):
        self.kept -= 1
        x, y = kept
        gradient = gradient * (1 - y * y)
        self.gradient += x.T @ gradient
        return gradient @ self.weight.T


def in_one_process(stages, x, microbatches):
    for part in numpy.array_split(x, microbatches):
        kept = []
        for stage in stages:
            part, one = stage.forward(part)
            kept.append(one)
        gradient = 2 * part
        for stage, one in zip(reversed(stages), reversed(kept), strict=True):
            gradient = stage.backward(one, gradient)
        yield float((part ** 2).sum())


def pipelined(comm, schedule, microbatches):
    """Two steps on batches of different lengths have the bits of one process; 1f1b keeps few activations."""
    wanted, stage, last = [Dense(number) for number in range(comm.size)], Dense(comm.rank), comm.size - 1
    stages = [stage if rank == comm.rank else None for rank in range(comm.size)]
    pipeline = training.Pipeline(stages, comm, microbatches, schedule)
    for samples in (21, 3000):  # messages below and above the limit of eager ones
        x = numpy.random.default_rng(samples).standard_normal((samples, 7))
        losses = pipeline.step(x if comm.rank == 0 else None, lambda y, number: (float((y ** 2).sum()), 2 * y))
        expected = [*in_one_process(wanted, x, microbatches)]
        assert losses == (expected if comm.rank == last else [])
    assert stage.gradient.tobytes() == wanted[comm.rank].gradient.tobytes()
    assert stage.most == min(microbatches, comm.size - comm.rank if schedule == "1f1b" else microbatches)
    other = ("gpipe", "1f1b")[schedule == "gpipe"] if comm.rank == last else schedule
    with pytest.raises(gc.MismatchError, match="schedule") if last else contextlib.nullcontext():
        training.Pipeline(stages, comm, microbatches, other)
    with pytest.raises(gc.ArgumentError, match="stages for"):
        training.Pipeline([*stages, None], comm, microbatches, schedule)
    with pytest.raises(gc.ArgumentError if comm.rank == last else gc.PeerError) if last else \
            pytest.raises(gc.ArgumentError):
        training.Pipeline(stages, comm, 0 if comm.rank == last else microbatches, schedule)


@pytest.mark.parametrize(("size", "schedule", "microbatches"), often(
    [(4, "1f1b", 7), (3, "gpipe", 4), (2, "1f1b", 2), (4, "1f1b", 1)], (4, "1f1b", 1)))
def test_a_pipeline_has_the_bits_of_one_process(executor, size, schedule, microbatches):
    executor.run(size, pipelined, schedule, microbatches)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_counted_is_that_of_the_formula(schedule):
    for stages, microbatches in ((1, 3), (2, 1), (3, 4), (4, 12), (5, 2), (8, 32)):
        for times in ((1.0, 1.0), (1.0, 2.0), (3.0, 0.5)):
            counted = training.pipeline_bubble(schedule, stages, microbatches, *times)
            assert counted == pytest.approx((stages - 1) / (microbatches + stages - 1), abs=1e-12)
        for wrong in (("1f2b", 0, stages, 1), (schedule, stages, stages, 1), (schedule, 0, stages, 0)):
            with pytest.raises(gc.ArgumentError):
                training.pipeline_schedule(*wrong)


def kept_by_formula(comm, stage):
    weights = {"w": numpy.zeros((comm.size, 12)), "b": numpy.zeros(comm.size)}  # no shard is longer than another
    trainer = training.ZeRO(weights, comm, training.Adam(0.1), stage)
    for name, weight in weights.items():
        trainer.ready(name, numpy.ones_like(weight))
    found = []
    trainer.optimizer._update, update = lambda *given, **state: found.append(trainer.memory()) or update(
        *given, **state), trainer.optimizer._update
    trainer.step()
    counted = {name: max(one[name] for one in found) for name in found[0]}
    assert training.memory(13 * comm.size, comm.size, stage, parameter_bytes=8, optimizer_bytes=16)._asdict() == counted


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_memory_by_formula_is_that_of_a_training(executor, stage):
    executor.run(4, kept_by_formula, stage)
    for wrong in ({"ranks": 0}, {"stage": 4}, {"optimizer_bytes": -1}, {"parameters": -1}):
        with pytest.raises(gc.ArgumentError, match="memory: "):
            training.memory(**{"parameters": 1e9, "ranks": 4, "stage": stage} | wrong)
