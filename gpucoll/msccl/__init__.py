"""MSCCL's XML, as written by msccl-tools, TACCL and TE-CCL: conversion to gpucoll's schedules, and back.

    documents   parses a file, and refuses wrong files
    order       matches messages and orders steps
    rounds      converts steps to the rounds of a schedule, proved by `gpucoll.verify`
    write       converts rounds to thread blocks
"""

from __future__ import annotations

import hashlib

from gpucoll.algorithms import Nodes, algorithm, registry
from gpucoll.msccl.documents import parsed
from gpucoll.msccl.rounds import rounds_of

__all__ = ["register"]

_REGISTERED: dict[tuple[str, str], str] = {}  # from collective and name to the digest of the file


def register(content: bytes, file: str) -> tuple[str, str]:
    """Prove and register the algorithm of a file; return the collective and the name.

    The name is the file's ``algo name``, with part of the digest appended if another algorithm has this name. A file
    registered before is not registered again.
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
