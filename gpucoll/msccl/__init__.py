"""MSCCL's XML, as msccl-tools, TACCL and TE-CCL write it: read as schedules of ours, and written from them.

    program     the file, as data; what is none is refused
    order       messages matched, steps ordered, races found
    rounds      the same as rounds of our steps, proved
    write       rounds as thread blocks
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from gpucoll.algorithms import Nodes, algorithm, registry
from gpucoll.msccl.program import XmlProgram, parsed
from gpucoll.msccl.rounds import rounds_of
from gpucoll.schedule import Copy, Reduce, Round, Rounds, Slice, Step, moved

__all__ = ["register"]

Ranks: TypeAlias = tuple[tuple[Round, ...], ...]
_REGISTERED: dict[tuple[str, str], str] = {}  # the digest of what was read, by collective and name


def register(content: bytes, file: str) -> tuple[str, str]:
    """Register the algorithm of a file, proved; return its collective and name.

    The name is that of the file's element, with more where another algorithm has it. The same file is the same one.
    """
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    program = parsed(content, file)
    taken = {name for _, name in registry()} | {"auto", "native", "all"}
    for name in (program.name, f"{program.name}_{digest[:8]}"):
        key = program.row.name, name
        if _REGISTERED.get(key) == digest and key in registry():
            return key
        if name not in taken:
            break
    ranks = rounds_of(program)
    chunks, size = program.chunks, program.size

    def unfit(ranks: int, nodes: Nodes) -> str | None:
        return None if ranks == size else f"{file} is for {size}"

    algorithm(program.row.name, name, chunks=chunks, unfit=unfit)(_generator(program, ranks))
    _REGISTERED[key] = digest
    return key


def _generator(program: XmlProgram, ranks: Ranks) -> Callable[..., Rounds]:
    """Return the generator of the rounds; those of another root are those of root 0, all ranks renamed."""
    if not program.row.rooted:
        return lambda rank, size: iter(ranks[rank])
    row, per_block = program.row, program.per_block

    def make(rank: int, size: int, root: int = 0) -> Rounds:
        def place(part: Slice) -> Slice:
            is_block = (row.input if part.buffer == "input" else row.output).blocks and part.buffer != "scratch"
            turned = (part.first + root * per_block) % (size * per_block)
            return part._replace(first=turned) if is_block else part

        rounds = ranks[(rank - root) % size]
        apart = ([one for step in steps for one in _chunks(step)] for steps in rounds) if row.blocks else rounds
        return moved((tuple(steps) for steps in apart), place, lambda peer: (peer + root) % size)

    return make


def _chunks(step: Step) -> Iterator[Step]:
    """Yield a step for each chunk of it."""
    first = step[0]
    for index in range(first.count):
        if isinstance(step, Copy | Reduce):
            yield type(step)(*(Slice(part.buffer, part.first + index) for part in step))
        else:
            yield type(step)(Slice(first.buffer, first.first + index), step.peer)
