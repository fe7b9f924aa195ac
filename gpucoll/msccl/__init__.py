"""MSCCL's XML, as msccl-tools, TACCL and TE-CCL write it: read as schedules of ours, and written from them.

    documents   the file, as data; what is none is refused
    order       messages matched, steps ordered, races found
    rounds      the same as rounds of our steps, proved
    write       rounds as thread blocks
"""

from __future__ import annotations

import hashlib

from gpucoll.algorithms import Nodes, algorithm, registry
from gpucoll.msccl.documents import parsed
from gpucoll.msccl.rounds import rounds_of

__all__ = ["register"]

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

    def unfit(size: int, nodes: Nodes) -> str | None:
        return None if size == program.size else f"{file} is for {program.size}"

    algorithm(program.row.name, name, chunks=program.chunks, unfit=unfit)(lambda rank, size: iter(ranks[rank]))
    _REGISTERED[key] = digest
    return key
