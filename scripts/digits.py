"""Handwritten digits from scikit-learn, as samples for the mlp and cnn of scripts/train.py."""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLES, PIXELS, CLASSES = 1797, 64, 10
TEST_SHARE = 0.2
SPLIT_SEED = 0
SMOOTHING = 0.1

Array = Any  # numpy.ndarray or cupy.ndarray; cupy need not be installed


def read_table() -> np.ndarray:
    """Return all samples of scikit-learn: uint8 of shape (1797, 65), 64 pixels (0 to 16) and the label.

    Raises ImportError without scikit-learn. Nothing is downloaded.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return np.column_stack([images, labels]).astype(np.uint8)


def split(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices for training and for testing, both ascending; a fifth of every class is for testing.

    The split is always the same, so accuracies of different seeds and numbers of ranks are comparable.
    """
    labels, generator = table[:, PIXELS], np.random.default_rng(SPLIT_SEED)
    shuffled = [generator.permutation(np.flatnonzero(labels == c)) for c in range(CLASSES)]
    test = np.concatenate([some[: round(TEST_SHARE * len(some))] for some in shuffled])
    return np.setdiff1d(np.arange(len(labels)), test), np.sort(test)


def prepare(xp: Any, table: np.ndarray, dtype: str) -> tuple[Array, Array]:
    """Return images (samples, 64) with pixels in [-1, 1], and targets (samples, 10), both of `dtype`.

    Targets are smoothed one-hot rows (0.91 for the class, 0.01 elsewhere). Smoothing gains a percent of accuracy here.
    Smoothing also keeps gradients moderate to the end, so different orders of summation differ only by a few units in
    the last place.
    """
    images = table[:, :PIXELS] / 8.0 - 1.0
    targets = np.eye(CLASSES)[table[:, PIXELS]] * (1 - SMOOTHING) + SMOOTHING / CLASSES
    return xp.asarray(images.astype(dtype)), xp.asarray(targets.astype(dtype))
