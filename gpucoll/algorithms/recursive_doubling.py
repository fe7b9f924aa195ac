"""Recursive doubling: after round k every rank holds the data of 2^k ranks; log2 P rounds, the minimum.

On the hypercube of P = 2^m ranks, partners at a distance of 1, 2, 4, ... exchange everything held.

    all_reduce    0 ◄► 1   2 ◄► 3    then   0 ◄► 2   1 ◄► 3        4 ranks
    all_gather    the same ways; the blocks exchanged double in number
    scan          0 ──► 1 ──► 2 ──► 3, then 0 ──► 2, 1 ──► 3       data move to higher ranks only

Cost: log2 P rounds. An all-reduce moves N bytes per round: good for short arrays. An all-gather moves (P - 1) N / P
bytes in all: good for all lengths on 2^m ranks. Ranks beyond a power of two hand over to a neighbour and receive the
result at the end: 2 more rounds. Source: see Thakur, Rabenseifner and Gropp, "Optimization of collective communication
operations in MPICH" (2005). For scans see Hillis and Steele, "Data parallel algorithms" (1986): ceil(log2 P) rounds of
N bytes for every P, without folding.
"""

from gpucoll.algorithms import Traits, algorithm, phase
from gpucoll.core.schedule import Copy, Recv, Reduce, Rounds, Send, Slice, Step
from gpucoll.core.topology import FOLDED, TWICE, doubling, fold, folded, folded_all_gather


@algorithm("all_reduce", chunks="1", vectorised="not rest(P)", rounds=f"lg(P) + 2 * {FOLDED}",
           path=f"(lg(P) + 2 * {FOLDED}) * N", sent=f"(lg(P) + {FOLDED}) * N", reduced=f"(lg(P) + {FOLDED}) * N",
           traits=Traits(probes=(8, 1 << 20)))
def recursive_doubling_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank.

    Both partners combine in the same order, the lower rank's part first. All ranks then form the same bits even for an
    op depending on the order of its operands, e.g. complex multiplication with fused additions.

    >>> [[type(step).__name__ for step in steps] for steps in recursive_doubling_all_reduce(rank=1, size=2)]
    [['Copy', 'Send', 'Recv'], ['Copy', 'Reduce']]
    """
    place = fold(rank, size)
    last = place.core.bit_length() - 2

    def core(number: int, source: Slice) -> Rounds:
        begun = [Copy(source, Slice("scratch", number % 2))]
        for step in range(last + 1):
            bit, partner, pair = number >> step & 1, place.rank_of(number ^ 1 << step), step % 2 * 2
            yield (*begun, Send(Slice("scratch", pair + bit) if step else source, partner),
                   Recv(Slice("scratch", pair + 1 - bit), partner))
            total = Slice("output", 0) if step == last else Slice("scratch", 2 - pair + (number >> step + 1 & 1))
            yield (Copy(Slice("scratch", pair), total), Reduce(Slice("scratch", pair + 1), total))
            begun = []

    return folded(place, Slice("scratch", 4), core)


@algorithm("all_gather", chunks="P", vectorised="not rest(P)", rounds=f"lg(P) + 2 * {FOLDED}",
           path=f"(two(P) - 1 + {TWICE} + {FOLDED} * P) * N / P",
           sent=f"(two(P) - 1 + {TWICE} + {FOLDED} * (P - 1)) * N / P", received="(P - 1) * N / P")
def recursive_doubling_all_gather(rank: int, size: int) -> Rounds:
    yield (Copy(Slice("input", 0), Slice("output", rank)),)
    yield from distribute(rank, size)


@phase("all_gather")
def distribute(rank: int, size: int) -> Rounds:
    place = fold(rank, size)
    return folded_all_gather(place, rank, size, lambda: doubling(
        place.number, place.across(place.number), place.blocks))  # type: ignore[arg-type] # the core's numbers


@algorithm("scan", chunks="1", rounds="lg(2 * P - 1)", path="lg(2 * P - 1) * N", reduced="lg(2 * P - 1) * N")
def recursive_doubling_scan(rank: int, size: int) -> Rounds:
    """Leave the reduction, in rank order, of the inputs of ranks 0 to `rank` on every rank."""
    total, distance = Slice("input", 0), 1
    # Messages still to be received. Sums alternate between scratch and output, so the last sum is formed in output.
    left = rank.bit_length()
    if rank == 0:
        yield (Copy(total, Slice("output", 0)),)
    while distance < size:
        steps: list[Step] = [Send(total, rank + distance)] if rank + distance < size else []
        if distance <= rank:
            left -= 1
            came = Slice("scratch" if left % 2 else "output", 0)
            steps += [Recv(came, rank - distance), Reduce(total, came)]
            total = came
        if steps:
            yield tuple(steps)
        distance *= 2


@algorithm("exscan", chunks="1", rounds="lg(2 * P - 1)", path="lg(2 * P - 1) * N",
           reduced="max(lg(2 * P - 1) - 1, 2 * lg(2 * P - 1) - 4 + (P - 1 >= 3 * 2 ** (lg(2 * P - 1) - 2)), 0) * N")
def recursive_doubling_exscan(rank: int, size: int) -> Rounds:
    """Leave the reduction, in rank order, of the inputs of ranks 0 to `rank` - 1 on every rank but rank 0.

    The data to pass on are the sum received and this rank's input. The rank combines both in scratch only when a
    message needs the result.
    """
    own, passed, came, distance = Slice("input", 0), Slice("input", 0), None, 1
    left = rank.bit_length()
    while distance < size:
        # The round before received something: the sum to pass on is out of date.
        if came is not None and rank + distance < size and distance <= 2 * rank:
            passed = Slice("scratch", 1)
            yield (Copy(came, passed), Reduce(own, passed))
        steps: list[Step] = [Send(passed, rank + distance)] if rank + distance < size else []
        if distance <= rank:
            left -= 1
            new = Slice("scratch" if left % 2 else "output", 0)
            steps += [Recv(new, rank - distance), *([Reduce(came, new)] if came is not None else [])]
            came = new
        if steps:
            yield tuple(steps)
        distance *= 2
