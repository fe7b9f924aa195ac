"""Trivance: exchanges in both directions of a ring, at distances 1, 3, 9, ...; ceil(log3 P) steps per phase.

Source: see Jürß, Addanki and Schmid, "Trivance: latency-optimal AllReduce by shortcutting multiport networks" (2026),
and the authors' simulator. A rank exchanges data with the ranks 1, 3, 9, ... places on and back; the last distance is
half of the remaining ranks. Both directions of the ring are used, and each step combines two messages.

    reduce_scatter    step 0    0 ◄► 1 ◄► 2 ◄► 3 ◄► ... ◄► 8 ◄► 0       3 blocks a message          9 ranks
                      step 1    0 ◄► 3 ◄► 6 ◄► 0   and so on            1 block
    all_gather        the same steps in reverse

A block leaves a rank in a single step, the last step from which the block can still reach its owner, so every P is
supported. Cost: 2 ceil(log3 P) rounds. A rank sends 2 (P - 1) N / P bytes, half in each direction, and no message waits
for more than N bytes. Good for middle arrays on rings with links in both directions. The paper's variant for short
arrays sends N bytes in each of ceil(log3 P) rounds. The variant is omitted, because its ranks add in different orders
and so get different bits.
"""

import functools
from typing import NamedTuple

from gpucoll.algorithms import algorithm
from gpucoll.core.schedule import Buffer, Copy, Recv, RecvReduce, Round, Rounds, Send, Slice, Step, wrapped


class KeptBlocks(NamedTuple):
    """Blocks kept by a rank in a step, and whether contributions come from the partners behind and ahead.

    `far` is the distance from the rank to the owner of the first block, around the ring.
    """

    far: int
    blocks: int
    from_behind: bool
    from_ahead: bool


class Stage(NamedTuple):
    """A step of the reduce-scatter: the distance to both partners, and the blocks kept by a rank."""

    distance: int
    parts: tuple[KeptBlocks, ...]


@algorithm("all_reduce", chunks="P", vectorised="1", rounds="2 * log3(P)", path="2 * (P // 2) * N / P",
           sent="2 * (P - 1) * N / P", reduced="(P - 1) * N / P",
           gaps="2 * (log3(P) - (P == 3 ** (log3(P) - 1) + 1))")
def trivance_all_reduce(rank: int, size: int) -> Rounds:
    """Leave the reduction of all inputs on every rank: reduce-scatter, then all-gather, both within output.

    >>> [(step.peer, step.src.first) for step in next(trivance_all_reduce(rank=0, size=9)) if isinstance(step, Send)]
    [(1, 1), (1, 4), (1, 7), (8, 8), (8, 2), (8, 5)]
    """
    stages = _stages(size)
    for number, stage in enumerate(stages):
        yield _reduced(rank, size, stage, "output" if number else "input")
    for distance, parts in reversed(stages):
        ahead, behind = (rank + distance) % size, (rank - distance) % size
        yield (*(Send(one, behind) for part in parts if part.from_behind for one in _at(rank, part, size)),
               *(Send(one, ahead) for part in parts if part.from_ahead for one in _at(rank, part, size)),
               *(Recv(one, ahead) for part in parts if part.from_behind for one in _at(ahead, part, size)),
               *(Recv(one, behind) for part in parts if part.from_ahead for one in _at(behind, part, size)))


def _at(rank: int, part: KeptBlocks, size: int, buffer: Buffer = "output") -> list[Slice]:
    return wrapped(buffer, rank + part.far, part.blocks, size)


def _reduced(rank: int, size: int, stage: Stage, source: Buffer) -> Round:
    """Return a round of the reduce-scatter; the first round reads input and copies the kept blocks to output."""
    (distance, parts), steps = stage, list[Step]()
    ahead, behind = (rank + distance) % size, (rank - distance) % size
    steps += [Send(one, ahead) for part in parts if part.from_behind for one in _at(ahead, part, size, source)]
    steps += [Send(one, behind) for part in parts if part.from_ahead for one in _at(behind, part, size, source)]
    for part in parts:
        for one in _at(rank, part, size):
            steps += [Copy(one._replace(buffer=source), one)] * (source == "input")
            steps += [RecvReduce(one, behind)] * part.from_behind + [RecvReduce(one, ahead)] * part.from_ahead
    return tuple(steps)


@functools.lru_cache(maxsize=64)
def _stages(size: int) -> tuple[Stage, ...]:
    """Return the steps. Of the blocks that both partners could take, each takes half."""
    stages, kept, distances = list[Stage](), {0}, list[int]()
    while 3 ** len(distances) < size:
        power = 3 ** len(distances)
        distances.append(power if 3 * power < size else (size - power + 1) // 2)
    for distance in reversed(distances):
        ahead = {(far + distance) % size for far in kept} - kept
        back = {(far - distance) % size for far in kept} - kept
        for number, far in enumerate(sorted(ahead & back)):
            (ahead if number % 2 else back).remove(far)
        parts = list[KeptBlocks]()
        for far in sorted(kept):
            comes = (far + distance) % size in ahead, (far - distance) % size in back
            if parts and parts[-1] == (far - parts[-1].blocks, parts[-1].blocks, *comes):
                parts[-1] = parts[-1]._replace(blocks=parts[-1].blocks + 1)
            else:
                parts.append(KeptBlocks(far, 1, *comes))
        stages.append(Stage(distance, tuple(parts)))
        kept |= ahead | back
    return (*stages[::-1],)
