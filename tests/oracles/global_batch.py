"""A linear model trained on a global batch divided among ranks; a rank's own sums are exact.

The gradient of a sample has few bits, and the second half of the samples counts less. The sum over either half fits
float32, and the sum over all samples float64, so a rank's own sum is exact on any number of ranks. A sum over ranks
does not fit float32: the order of additions shows.
"""

import numpy

SAMPLES, FEATURES, STEPS, RATE = 16, 9, 100, 0.125


def _data():
    random = numpy.random.default_rng(5)
    return numpy.round(16 * random.standard_normal((SAMPLES, FEATURES))) / 16, random.standard_normal(SAMPLES)


INPUTS, TARGETS = _data()


def gradient(weights, rank, size):
    """Return the mean gradient of a rank's samples, float32 of shape (FEATURES,), at `weights`."""
    each = SAMPLES // size
    mine = slice(rank * each, rank * each + each)
    errors = (INPUTS[mine] * weights.astype("f8")).sum(1) - TARGETS[mine]
    gradients = numpy.clip(numpy.round(errors[:, None] * INPUTS[mine] * 4096) / 4096, -16, 16)
    scales = numpy.where(numpy.arange(SAMPLES) < SAMPLES // 2, 1.0, 2.0 ** -14)[mine, None]
    return ((gradients * scales).sum(0) / each).astype("f4")


def trained(size=1):
    """Return the weights after all steps; with `size` ranks the mean is formed in rank order, rounded in each step."""
    weights = numpy.zeros(FEATURES, "f4")
    for _ in range(STEPS):
        total, *more = (gradient(weights, rank, size) for rank in range(size))
        for one in more:
            total = total + one
        weights = weights - numpy.float32(RATE) * (total / numpy.float32(size))
    return weights
