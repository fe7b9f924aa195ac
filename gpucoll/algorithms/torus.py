"""Torus: a ring along each side in turn; the bytes of a single ring, in far fewer rounds.

Ranks are laid out in rows, rows in layers. A reduce-scatter along the rows leaves a share on each rank. The next
reduce-scatter, along the columns, cuts the share further, and so on. All-gathers then run the same rings in reverse
order. ``torus(4x2)`` has 4 rows of 2; ``torus(2x2x2)`` is a cube.

    0 ── 1        rows:     0 ◄► 1   2 ◄► 3   4 ◄► 5   6 ◄► 7       4 x 2
    2 ── 3        columns:  0 ──► 2 ──► 4 ──► 6 ──► 0
    4 ── 5                  1 ──► 3 ──► 5 ──► 7 ──► 1
    6 ── 7

Cost: twice the sum of (side - 1) over all sides in rounds; 2 (P - 1) N / P bytes. Good for short and middle arrays on
tori, and on many ranks. A rank sends over one link at a time, the other links along the sides are idle: on a torus
`bidirectional_ring` has half the time for long arrays, as ``gpucoll simulate all_reduce 64M --topology "torus(8x8)"``
shows. An algorithm that uses all links depends on their places: ``gpucoll synthesize "torus(8x8)" all_reduce`` makes
it, up to the bound of the links. Without parameters the torus has two or three sides with the fewest hops; a prime P is
a ring. Source: folklore; the phases are those of `ring`.
"""

import functools
import math
import re
from collections.abc import Iterator

from gpucoll.algorithms import Algorithm, Nodes, Traits, algorithm, phases
from gpucoll.core.schedule import Buffer, Rounds, moved, within
from gpucoll.core.topology import factors
from gpucoll.errors import ArgumentError


def _bind(entry: Algorithm, text: str) -> Algorithm:
    if not re.fullmatch(r"[1-9]\d{0,9}(x[1-9]\d{0,9}){0,2}", text):
        raise ArgumentError(f"torus({text}): the sides are up to three whole numbers, as in torus(4x2) or "
                            "torus(2x2x2)", code="GC-ALGO")
    sides = tuple(map(int, text.split("x")))
    ranks, steps = math.prod(sides), sum(sides) - len(sides)
    # A ring of a single rank moves nothing, not even input to output: leave out these sides.
    long = tuple(side for side in sides if side > 1)

    def unfit(size: int, nodes: Nodes) -> str | None:
        return None if size == ranks else f"{' x '.join(map(str, sides))} is {ranks}"

    return entry._replace(make=functools.partial(entry.make, sides=long), unfit=unfit,
                          cost=entry.cost._replace(rounds=entry.cost.rounds.replace("hops(P)", str(steps))))


def _variants(collective: str, size: int) -> Iterator[str]:
    """Yield the sides of all tori of `size` ranks."""
    for first in (side for side in range(1, size + 1) if size % side == 0):
        rest = size // first
        yield from (f"{first}x{side}x{rest // side}" for side in range(1, rest + 1) if rest % side == 0)


@algorithm("all_reduce", chunks="P", vectorised="1", bind=_bind, variants=_variants, rounds="2 * hops(P)",
           path="2 * (P - 1) * N / P", reduced="(P - 1) * N / P", traits=Traits(layout="grid"))
def torus_all_reduce(rank: int, size: int, sides: tuple[int, ...] = ()) -> Rounds:
    """Leave the reduction of all inputs on every rank.

    >>> [steps[0].peer for steps in torus_all_reduce(rank=0, size=8, sides=(4, 2))]
    [1, 2, 2, 2, 2, 2, 2, 1]
    """
    lines = list(_lines(rank, size, sides or factors(size)))
    for number, line in enumerate(lines):
        yield from line("reduce_scatter", "output" if number else "input")
    for line in reversed(lines):
        yield from line("all_gather", "output")


def _lines(rank: int, size: int, sides: tuple[int, ...]) -> Iterator[functools.partial[Rounds]]:
    """Yield the phases along each side, the last side first, on the share left by the sides before."""
    stride, offset, share = 1, 0, size
    for side in reversed(sides):
        share //= side
        place = rank // stride % side
        yield functools.partial(_along, place, side, rank - place * stride, stride, offset, share)
        offset, stride = offset + place * share, stride * side


def _along(place: int, side: int, first: int, stride: int, offset: int, share: int, kind: str,
           source: Buffer) -> Rounds:
    """Yield a phase of `ring` among `side` ranks, `stride` apart from rank `first` on, each with a share."""
    return moved(phases(kind)["ring"](place, side), within({"input": source}, offset, share),
                 lambda peer: first + peer * stride)
