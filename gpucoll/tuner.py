"""What ``algorithm="auto"`` chooses: the one home of the policy.

The thresholds are bytes of the larger of input and output: below, MPI's own collective is
quicker, since Python costs some microseconds a round; from there on the ring is, since
NumPy combines faster than MPI does and a ring moves the fewest bytes.
"""

from __future__ import annotations

from typing import NamedTuple

SEGMENT = 1 << 22  # bytes of a ring's message
PIPELINE = 1 << 16  # bytes of a tree's message
MOST_SEGMENTS = 64
RING_FROM = {"all_reduce": 1 << 18, "reduce_scatter": 1 << 18, "all_gather": 1 << 20}
SCHEDULED = {"all_reduce": "tree", "reduce": "tree", "broadcast": "tree", "barrier": "dissemination"}


class Choice(NamedTuple):
    """An algorithm and its pipelining."""

    algorithm: str
    segments: int


def choose(collective: str, algorithm: str, nbytes: int, size: int, *, executor: str | None = None,
           prefer: str = "") -> Choice:
    """Return `algorithm` with its segments; "auto" is the choice for `nbytes` on `size` ranks and `executor`."""
    if algorithm == "auto":
        algorithm = _automatic(collective, nbytes, size, executor)
    return Choice(algorithm, segments(algorithm, nbytes, size))


def _automatic(collective: str, nbytes: int, size: int, executor: str | None) -> str:
    if executor == "native":
        return "native"
    small = size == 1 or nbytes < RING_FROM.get(collective, nbytes + 1)
    if executor is None and small:
        return "native"
    return SCHEDULED.get(collective, "ring") if small else "ring"


def segments(algorithm: str, nbytes: int, size: int) -> int:
    """Return into how many messages a rank's part of `nbytes` is cut."""
    part, message = (nbytes // size, SEGMENT) if algorithm == "ring" else (nbytes, PIPELINE)
    return max(1, min(MOST_SEGMENTS, -(-part // message)))
