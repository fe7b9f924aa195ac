"""Circulant: both the fewest rounds and the fewest bytes, for every P.

Source: see Träff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms" (2024). Each round halves the number
of blocks that a rank still handles, rounded up. The new number of blocks is the skip of the round: the rank sends the
other blocks to the rank that many places on. In a reduce-scatter of five ranks, rank r sends

    round 1   blocks r + 3, r + 4   to rank r + 3        skips 5 ► 3 ► 2 ► 1
    round 2   block  r + 2          to rank r + 2
    round 3   block  r + 1          to rank r + 1

So block r collects the contributions of all ranks on rank r. A reduce-scatter takes ceil(log2 P) rounds; a rank
sends, receives and combines (P - 1) N / P bytes. An all-gather makes the same rounds in reverse. Blocks keep their
positions, and a range that wraps around is two slices, so the blocks of an all-gather may have different lengths. Good
for all lengths if every pair of ranks has a fast connection. The code uses `rank` in arithmetic only, so `rank` may be
an array of ranks.
"""

import itertools

from gpucoll.algorithms import Traits, algorithm, phase
from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Rounds, Send, Slice, Step, moved, within, wrapped

SINGLE_PASS = {"chunks": "P", "vectorised": "1", "rounds": "lg(2 * P - 1)", "path": "(P - 1) * N / P"}
DOUBLE_PASS = {"chunks": "P", "vectorised": "1", "rounds": "2 * lg(2 * P - 1)", "path": "2 * (P - 1) * N / P"}


@algorithm("all_reduce", **DOUBLE_PASS, reduced="(P - 1) * N / P", traits=Traits(probes=(1 << 16,)))
def circulant_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank: reduce-scatter, then all-gather, both within output.

    Cost: 2 ceil(log2 P) rounds and 2 (P - 1) N / P bytes.

    >>> [steps[0].peer for steps in circulant_all_reduce(rank=0, size=5)]
    [3, 2, 1, 4, 3, 2]
    """
    yield from collect(rank, size)
    yield from distribute(rank, size)


@algorithm("reduce_scatter", **SINGLE_PASS, reduced="(P - 1) * N / P")
def circulant_reduce_scatter(rank: int, size: int) -> Rounds:
    """Leave block `rank`, reduced over all inputs, on every rank; sums are formed in scratch."""
    yield from moved(collect(rank, size), within({"output": "scratch"}))
    yield (Copy(Slice("scratch", rank), Slice("output", 0)),)


@algorithm("all_gather_v", **SINGLE_PASS)
@algorithm("all_gather", **SINGLE_PASS)
def circulant_all_gather(rank: int, size: int) -> Rounds:
    """Leave all blocks on every rank. The first round sends the input itself, and copies it meanwhile."""
    own, rounds = Copy(Slice("input", 0), Slice("output", rank)), distribute(rank, size)
    for first in itertools.islice(rounds, 1):
        # For many ranks at once a slice may be empty on some of them.
        yield (own, *(Send(Slice("input", 0, step.src.count), step.peer) if isinstance(step, Send) else step
                      for step in first))
    yield from rounds if size > 1 else [(own,)]


@phase("reduce_scatter")
def collect(rank: int, size: int) -> Rounds:
    """Leave block `rank` of output reduced.

    Before each round a rank holds partial sums of `above` blocks, from block `rank` on.
    """
    source: Buffer = "input"
    for above, skip in _skips(size):
        sent = wrapped(source, rank + skip, above - skip, size)
        kept = wrapped("output", rank, above - skip, size)
        steps: list[Step] = [Send(part, (rank + skip) % size) for part in sent]
        # The first round also copies the blocks without a contribution in this round: later rounds read output only.
        if source == "input":
            begun = [*kept, *wrapped("output", rank + above - skip, 2 * skip - above, size)]
            steps += [Copy(part._replace(buffer=source), part) for part in begun]
        yield (*steps, *(RecvReduce(part, (rank - skip) % size) for part in kept))
        source = "output"


@phase("all_gather")
def distribute(rank: int, size: int) -> Rounds:
    """Leave all blocks in output; block `rank` must be complete. The rounds of `collect` in reverse."""
    for above, skip in reversed(_skips(size)):
        sent = wrapped("output", rank, above - skip, size)
        came = wrapped("output", rank + skip, above - skip, size)
        yield (*(Send(part, (rank - skip) % size) for part in sent),
               *(Recv(part, (rank + skip) % size) for part in came))


def _skips(size: int) -> list[tuple[int, int]]:
    """Return the pairs (blocks before, blocks after) of all rounds: each round halves the number, rounded up."""
    skips = [size]
    while skips[-1] > 1:
        skips.append((skips[-1] + 1) // 2)
    return list(itertools.pairwise(skips))
