"""Bine: trees and butterflies over short distances; fewer bytes cross the borders between groups of ranks.

Source: see De Sensi et al., "Bine trees: enhancing collective operations by optimizing communication locality" (2025),
and the authors' library libbine. Bine is short for binomial and negabinary. Step s connects an even rank with the rank
rho(s) = 1 - 2 + 4 - ... places on, and an odd rank with the rank at the same distance back. The distances are 1, 1, 3,
5, 11, instead of 1, 2, 4, 8, 16 in a binomial tree.

    broadcast, from 0       0 ──► 3        0 ──► 7   3 ──► 4        0 ──► 1   7 ──► 6   3 ──► 2   4 ──► 5      8 ranks
    reduce_scatter          0 ◄► 1   2 ◄► 3   4 ◄► 5   6 ◄► 7       half of the blocks
                            7 ◄► 0   1 ◄► 2   3 ◄► 4   5 ◄► 6       a quarter
                            0 ◄► 3   2 ◄► 5   4 ◄► 7   6 ◄► 1       an eighth

Trees begin with the longest distances, when the messages are fewest. Every subtree is an interval of the ring of ranks,
so rounds and bytes are those of `binomial`. If P is not a power of two, some ranks pass the data on to the next rank at
the end.

Butterflies begin with the shortest distances, when the messages are longest. They take ceil(log2 P) rounds and (P - 1)
N / P bytes for every even P, because a block leaves a rank in a single step. For odd P rank 0 passes its data to rank
1, in 2 more rounds. The all-gather is the reduce-scatter in reverse, and an all-reduce is both. On 2^m ranks the
all-reduce equals `swing`. For other P, `swing` folds ranks: it sends more bytes in all, but fewer across the borders.

Good for middle and long arrays, if ranks form nodes, racks or groups of a dragonfly, of any size. If every group has
2^k consecutive ranks, halving with the nearest ranks first sends fewer bytes across the borders. The paper's all-reduce
for short arrays is omitted, because its ranks add in different orders and so get different bits.
"""

import bisect
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from gpucoll.algorithms import Traits, algorithm, find
from gpucoll.core import branches
from gpucoll.core.branches import Branch
from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Rounds, Send, Slice, moved, within, wrapped
from gpucoll.core.topology import Fold, PartSlice, fold, folded, folded_all_gather, folded_reduce_scatter, rho, zigzag

LOG, NEAR = "lg(2 * P - 1)", Traits(groups=True)
WHOLE: dict[str, Any] = {"chunks": "1", "rounds": LOG, "path": f"{LOG} * N", "traits": NEAR}
BLOCKS: dict[str, Any] = {"chunks": "P", "rounds": LOG, "path": "(P - 1) * N / P", "traits": NEAR}
LESS, MORE = "P // 2 * N / P", "(P - 1) * N / P"  # half of all blocks; all blocks but the root's own
# The steps of a butterfly, 1 where rank 0 hands over to rank 1, and one more than the most steps that its block takes
BUTTERFLY, ODD, HANDED = "lg(2 * even(P) - 1)", "(P - even(P))", "lg(3 * even(P) - 1)"
SHARED = "2 * (even(P) - 1) * N / even(P)"


def branch(rank: int, size: int) -> Branch:
    """Return the place of `rank` in the tree of `size` ranks.

    >>> branch(3, 8)
    Branch(parent=0, first=2, ranks=4, children=((4, 4, 2), (2, 2, 1)))
    """
    places = _places(size)
    core, number = len(places) - 1, bisect.bisect(places, rank) - 1
    if rank > places[number]:
        return Branch(places[number], rank, 1, ())

    def led(node: int, step: int) -> tuple[int, int, int]:
        """Return the first number led by `node` before a step with 2^step numbers each, and the ranks behind them."""
        # The sum of the negative distances 2, 8, 32, ... of the steps left, or of 1, 4, 16, ... for an odd node
        first = (node - ((1 << step) - 1 & (0x55555555 if node % 2 else 0xAAAAAAAA))) % core
        end = first + (1 << step)
        return first, places[first], places[min(end, core)] - places[first] + places[max(end - core, 0)]

    node, parent, (_, first, count) = 0, None, led(0, core.bit_length() - 1)
    children: list[tuple[int, int, int]] = []
    for step in reversed(range(core.bit_length() - 1)):
        child = zigzag(node, step, core)
        begin, its_first, its_count = led(child, step)
        if (number - begin) % core < 1 << step:
            node, parent, first, count = child, places[node], its_first, its_count
        elif node == number:
            children.append((places[child], its_first, its_count))
    if places[number + 1] > rank + 1:
        children.append((rank + 1, rank + 1, 1))
    return Branch(parent, first, count, tuple(children))


@functools.lru_cache(maxsize=64)
def _places(size: int) -> tuple[int, ...]:
    """Return the rank of each number of a tree of 2^m numbers, and `size`.

    A number may stand for two ranks: the numbers reached first do, so that a number gives away at most half of its
    ranks in every step.
    """
    core, reached = 1 << size.bit_length() - 1, [0]
    for step in reversed(range(size.bit_length() - 1)):
        reached += [zigzag(number, step, core) for number in reached]
    pairs = {*reached[:size - core]}
    return (*itertools.accumulate((1 + (number in pairs) for number in range(core)), initial=0),)


@algorithm("broadcast", **WHOLE, sent=f"{LOG} * N", received="(P > 1) * N")
def bine_broadcast(rank: int, size: int) -> Rounds:
    """Leave the input of rank 0, the root, on every rank: ceil(log2 P) rounds of N bytes.

    >>> [steps[-1].peer for steps in bine_broadcast(rank=0, size=8)]
    [3, 7, 1]
    """
    return branches.broadcast(branch(rank, size))


@algorithm("reduce", **WHOLE, sent="(P > 1) * N", received=f"{LOG} * N", reduced=f"{LOG} * N")
def bine_reduce(rank: int, size: int) -> Rounds:
    return branches.reduce(branch(rank, size))


@algorithm("scatter", **BLOCKS, sent=MORE, received=LESS)
def bine_scatter(rank: int, size: int, root: int = 0) -> Rounds:
    return branches.scatter(branch, rank, size, root)


@algorithm("gather", **BLOCKS, sent=LESS, received=MORE)
def bine_gather(rank: int, size: int, root: int = 0) -> Rounds:
    return branches.gather(branch, rank, size, root)


@algorithm("reduce_scatter", chunks="P", vectorised="P % 2 == 0", rounds=f"{BUTTERFLY} + 2 * {ODD}",
           path=f"(P - 1 + {ODD} * ({HANDED} + P - 1)) * N / P", sent=f"(P - 1 + {ODD}) * N / P",
           received=f"(P - 1 + {ODD} * ({HANDED} + P - 2)) * N / P",
           reduced=f"(P - 1 + {ODD} * ({HANDED} + P - 2)) * N / P", traits=NEAR)
def bine_reduce_scatter(rank: int, size: int) -> Rounds:
    """Leave block `rank`, reduced over all inputs, on every rank; sums are formed in scratch.

    >>> [steps[0] for steps in bine_reduce_scatter(rank=0, size=4)][0]
    Send(src=Slice(buffer='input', first=1, count=2), peer=1)
    """
    place = fold(rank, size, size - size % 2)
    rounds = folded_reduce_scatter(place, rank, size, lambda source: _collect(place, source, place.blocks))
    yield from moved(rounds, within({"output": "scratch"}))
    yield (Copy(Slice("scratch", rank), Slice("output", 0)),)


@algorithm("all_gather", chunks="P", vectorised="P % 2 == 0", rounds=f"{BUTTERFLY} + 2 * {ODD}",
           path=f"(P - 1 + {ODD} * ({HANDED} + P - 2)) * N / P", sent=f"(P - 1 + {ODD} * ({HANDED} + P - 3)) * N / P",
           received="(P - 1) * N / P", traits=NEAR)
def bine_all_gather(rank: int, size: int) -> Rounds:
    """Leave the inputs of all ranks, in rank order, on every rank."""
    place = fold(rank, size, size - size % 2)
    yield (Copy(Slice("input", 0), Slice("output", rank)),)
    yield from folded_all_gather(place, rank, size, lambda: _distribute(place, place.blocks))


@algorithm("all_reduce", chunks="even(P)", vectorised="P % 2 == 0", rounds=f"2 * {BUTTERFLY} + 2 * {ODD}",
           path=f"{SHARED} + 2 * {ODD} * N", sent=f"{SHARED} + {ODD} * N",
           reduced=f"(even(P) - 1) * N / even(P) + {ODD} * N", traits=NEAR)
def bine_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank: reduce-scatter, then all-gather, both within output.

    >>> [steps[0].peer for steps in bine_all_reduce(rank=0, size=6)]
    [1, 5, 3, 3, 5, 1]
    """
    core = size - size % 2
    if core & core - 1 == 0:
        return find("all_reduce", "swing").make(rank, size)
    place = fold(rank, size, core)
    return folded(place, Slice("output", 0, core), lambda number, source: itertools.chain(
        _collect(place, source.buffer, Slice), _distribute(place, Slice)))


class ButterflyStep(NamedTuple):
    """A step of a butterfly: intervals (distance, count) of blocks sent, kept without a change, and received.

    Distances count from number 0 onwards. The blocks of an odd number lie as far back.
    """

    step: int
    sent: list[tuple[int, int]]
    rest: list[tuple[int, int]]
    received: list[tuple[int, int]]


@functools.lru_cache(maxsize=64)
def _exchanges(core: int) -> list[ButterflyStep]:
    """Return the steps of a reduce-scatter among an even number of ranks.

    A rank ends with the block at distance 0. Before step s it also leads the blocks at rho(s) minus each distance led
    after the step, and these leave in step s. The partner counts from rho(s) in the other direction.
    """
    found, kept = list[ButterflyStep](), {0}
    for step in reversed(range((core - 1).bit_length())):
        left = {(rho(step) - distance) % core for distance in kept} - kept
        received = {(rho(step) - distance) % core for distance in left}
        sent = _runs(left)
        found.append(ButterflyStep(step, sent, _runs(kept - received), received=[
            ((rho(step) - first - count + 1) % core, count) for first, count in sent]))
        kept |= left
    return found[::-1]


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the intervals (first, count) of consecutive `numbers`.

    >>> _runs({7, 1, 2, 3})
    [(1, 3), (7, 1)]
    """
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


def _slices(place: Fold, runs: list[tuple[int, int]], buffer: Buffer, part: PartSlice) -> list[Slice]:
    """Return the slices of the blocks at the distances of `runs` from the rank's number."""
    number: int = place.number  # type: ignore[assignment] # the rank is of the core
    odd = number % 2
    return [part(buffer, one.first, one.count) for distance, count in runs for one in wrapped(
        buffer, number + distance - odd * (2 * distance + count - 1), count, place.core)]


def _collect(place: Fold, source: Buffer, part: PartSlice) -> Rounds:
    """Yield the reduce-scatter: at the end the block of `place.number` in output is reduced."""
    for step, sent, rest, received in _exchanges(place.core):
        peer = place.rank_of(zigzag(place.number, step, place.core))  # type: ignore[arg-type] # of the core
        begun = [Copy(one._replace(buffer="input"), one)
                 for one in _slices(place, [*received, *rest], "output", part) if source == "input"]
        yield (*(Send(one, peer) for one in _slices(place, sent, source, part)), *begun,
               *(RecvReduce(one, peer) for one in _slices(place, received, "output", part)))
        source = "output"


def _distribute(place: Fold, part: PartSlice) -> Rounds:
    """Yield the all-gather: the rounds of `_collect` in reverse."""
    for step, sent, _, received in reversed(_exchanges(place.core)):
        peer = place.rank_of(zigzag(place.number, step, place.core))  # type: ignore[arg-type] # of the core
        yield (*(Send(one, peer) for one in _slices(place, received, "output", part)),
               *(Recv(one, peer) for one in _slices(place, sent, "output", part)))
