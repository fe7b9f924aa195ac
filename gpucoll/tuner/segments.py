"""Into how many messages an algorithm cuts what it moves at once: the one home of pipelining."""

from __future__ import annotations

SEGMENT = 1 << 22  # bytes of a ring's message
PIPELINE = 1 << 16  # bytes of a tree's message
MOST_SEGMENTS = 64


def segments(algorithm: str, nbytes: int, size: int) -> int:
    """Return into how many messages a rank's part of `nbytes` is cut.

    >>> segments("tree", 1 << 20, 4), segments("ring", 100, 4)
    (16, 1)
    """
    in_parts = algorithm in ("ring", "bidirectional_ring")
    part, message = (nbytes // size, SEGMENT) if in_parts else (nbytes, PIPELINE)
    return max(1, min(MOST_SEGMENTS, -(-part // message)))
