"""The text of Python's help on its language, as samples for the transformer of scripts/train.py."""

from __future__ import annotations

from typing import Any

import numpy as np

TOKENS = 97  # printable ASCII, the end of a line, and a token for all other characters
LENGTH = 32  # characters per sample
SAMPLES, TESTS = 2048, 256

Array = Any


def read_tokens() -> np.ndarray:
    """Return the characters of the text as numbers: 0 for the end of a line, 1 to 95 from space to ~, 96 for others."""
    from pydoc_data.topics import topics

    codes = np.frombuffer("".join(topics[name] for name in sorted(topics)).encode("ascii", "replace"), np.uint8)
    tokens = np.where((codes >= 32) & (codes < 127), codes.astype(np.int64) - 31, 96)
    return np.where(codes == 10, 0, tokens)


def read_table() -> np.ndarray:
    """Return disjoint samples of LENGTH + 1 characters: uint8 of shape (SAMPLES + TESTS, LENGTH + 1)."""
    tokens = read_tokens()
    starts = np.linspace(0, len(tokens) - LENGTH - 1, SAMPLES + TESTS).astype(np.int64)
    return np.stack([tokens[start:start + LENGTH + 1] for start in starts]).astype(np.uint8)


def split(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices for training and for testing: every ninth sample, from all over the text."""
    every = np.arange(len(table))
    return every[every % 9 != 0][:SAMPLES], every[every % 9 == 0][:TESTS]


def prepare(xp: Any, table: np.ndarray, dtype: str) -> tuple[Array, Array]:
    """Return characters (samples, LENGTH), and the next characters as one-hot rows (samples, LENGTH, TOKENS)."""
    targets = np.eye(TOKENS, dtype=dtype)[table[:, 1:]]
    return xp.asarray(table[:, :-1].astype(np.int64)), xp.asarray(targets)
