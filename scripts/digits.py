"""Handwritten digits, and the small network that scripts/train.py teaches to read them.

Everything here is written on an array module `xp` (NumPy or CuPy) and knows nothing of ranks, but
for `share`. The network has two layers, 64 -> 128 (tanh) -> 10 (softmax), and all its parameters
stand in one flat vector: one all-reduce carries all gradients.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

SAMPLES, PIXELS, HIDDEN, CLASSES = 1797, 64, 128, 10
LAYERS = (PIXELS, HIDDEN, CLASSES)
SHAPES = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
ENDS = tuple(itertools.accumulate(math.prod(shape) for shape in SHAPES))
PARAMETERS = ENDS[-1]
TEST_SHARE = 0.2
SPLIT_SEED = 0
SMOOTHING = 0.1

Array = Any  # numpy.ndarray or cupy.ndarray; cupy need not be installed


def read_table() -> np.ndarray:
    """All samples that scikit-learn ships: uint8 of shape (1797, 65), 64 pixels (0 to 16), label.

    Raises ImportError where scikit-learn is missing. Nothing is downloaded.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels]).astype(np.uint8)


def split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices for training and for testing, both ascending; a fifth of every class is for testing.

    Always the same split: accuracies of different seeds and rank counts are comparable.
    """
    generator = np.random.default_rng(SPLIT_SEED)
    shuffled = [generator.permutation(np.flatnonzero(labels == c)) for c in range(CLASSES)]
    test = np.concatenate([some[: round(TEST_SHARE * len(some))] for some in shuffled])
    return np.setdiff1d(np.arange(len(labels)), test), np.sort(test)


def prepare(xp: Any, table: np.ndarray, dtype: str) -> tuple[Array, Array]:
    """Images (samples, 64) with pixels in [-1, 1], and targets (samples, 10), both of `dtype`.

    Targets are smoothed one-hot rows (0.91 for the class, 0.01 elsewhere). Smoothing is worth a
    percent of accuracy here, and it keeps gradients moderate to the end, so that different orders
    of summation stay within a few units in the last place of each other.
    """
    images = table[:, :PIXELS] / 8.0 - 1.0
    targets = np.eye(CLASSES)[table[:, PIXELS]] * (1 - SMOOTHING) + SMOOTHING / CLASSES
    return xp.asarray(images.astype(dtype)), xp.asarray(targets.astype(dtype))


def batches(indices: np.ndarray, batch: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The global batches of one epoch, the last one possibly smaller; a function of its arguments.

    Every rank makes the same list, whatever the number of ranks.
    """
    order = np.random.default_rng((seed, epoch)).permutation(indices)
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def share(items: np.ndarray, rank: int, size: int) -> np.ndarray:
    """This rank's contiguous part of `items`; the parts of all ranks are `items`, some empty."""
    return np.array_split(items, size)[rank]


def initial(seed: int, dtype: str) -> np.ndarray:
    """Fresh weights on the host, shape (PARAMETERS,): normal with variance 1 / inputs, bias 0."""
    generator = np.random.default_rng(seed)
    weights = np.zeros(PARAMETERS, dtype)
    for part in views(weights):
        if part.ndim == 2:
            part[...] = generator.standard_normal(part.shape) / math.sqrt(len(part))
    return weights


def views(flat: Array) -> list[Array]:
    """The four arrays of SHAPES as windows on the flat vector: writing to one writes to `flat`."""
    windows = zip(SHAPES, ENDS, strict=True)
    return [flat[end - math.prod(shape) : end].reshape(shape) for shape, end in windows]


def forward(xp: Any, weights: Array, images: Array) -> tuple[Array, Array]:
    """Hidden activations (samples, 128) and log-probabilities (samples, 10)."""
    into_hidden, hidden_bias, into_classes, class_bias = views(weights)
    hidden = xp.tanh(images @ into_hidden + hidden_bias)
    scores = hidden @ into_classes + class_bias
    scores -= scores.max(axis=1, keepdims=True)  # exp cannot overflow
    return hidden, scores - xp.log(xp.exp(scores).sum(axis=1, keepdims=True))


def gradient(xp: Any, weights: Array, images: Array, targets: Array, out: Array) -> None:
    """Overwrites `out`, shape (PARAMETERS + 1,): sums over samples of gradient and, last, of loss.

    Sums, not means: added over ranks and divided by the global count they are right also where
    ranks have different numbers of samples, or none.
    """
    out[...] = 0
    if not len(images):
        return
    hidden, logarithms = forward(xp, weights, images)
    by_score = xp.exp(logarithms) - targets
    by_hidden = by_score @ views(weights)[2].T * (1 - hidden * hidden)
    parts = (images.T @ by_hidden, by_hidden.sum(0), hidden.T @ by_score, by_score.sum(0))
    for window, part in zip(views(out), parts, strict=True):
        window[...] = part
    out[-1] = -(targets * logarithms).sum()


def correct(xp: Any, weights: Array, images: Array, targets: Array) -> Array:
    """How many samples the network reads rightly: int64 of shape (1,), on the array's device."""
    if not len(images):
        return xp.zeros(1, "int64")
    guesses = forward(xp, weights, images)[1].argmax(axis=1)
    return (guesses == targets.argmax(axis=1)).sum(dtype="int64").reshape(1)
