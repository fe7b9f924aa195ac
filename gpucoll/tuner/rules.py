"""GPUCOLL_ALGO: what the user allows `algorithm="auto"` to choose from, in NCCL_ALGO's grammar."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from gpucoll.algorithms import algorithms, names_of
from gpucoll.collectives import COLLECTIVES
from gpucoll.errors import ArgumentError, nearest

NCCL_ONLY = ("collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")  # understood, and not to be had here


class Rule(NamedTuple):
    """What GPUCOLL_ALGO says of a collective: only these names, or none of these.

    `strict` where it names the collective: then it must be met.
    """

    names: tuple[str, ...]
    excluded: bool
    strict: bool = False


def allowed(text: str, collective: str, there: Sequence[str]) -> Sequence[str]:
    """Return which of the names `there` the rules of `text` leave; those of an inclusion with their parameters.

    A rule for all collectives that leaves this one nothing does not count; one of its own is then an ArgumentError.

    >>> allowed("^ring;broadcast:tree", "all_reduce", ["ring", "tree"])
    ['tree']
    """
    rule = rules(text).get(collective)
    if rule is None:
        return there
    left = [name for name in there if name not in rule.names] if rule.excluded else \
        [name for name in rule.names if base(name) in there]
    if not left and rule.strict:
        raise ArgumentError(f"GPUCOLL_ALGO leaves {collective} none of its algorithms: {', '.join(there)}",
                            code="GC-ALGO")
    return left or there


@functools.lru_cache(maxsize=16)
def rules(text: str) -> dict[str, Rule]:
    """Return the rules of GPUCOLL_ALGO by collective, in NCCL_ALGO's grammar; ArgumentError for unknown names.

    >>> rules("AllReduce:tree,ring;broadcast:^tree")
    {'all_reduce': Rule(names=('tree', 'ring'), excluded=False, strict=True), \
'broadcast': Rule(names=('tree',), excluded=True, strict=True)}
    """
    general: dict[str, Rule] = {}
    named: dict[str, Rule] = {}
    for part in filter(None, text.replace(" ", "").lower().split(";")):
        head, colon, names = part.rpartition(":")
        if colon:
            named[_collective(head)] = _rule(names, strict=True)
        else:
            general = dict.fromkeys(COLLECTIVES, _rule(names, strict=False))
    return general | named


def _rule(text: str, *, strict: bool) -> Rule:
    names = tuple(names_of(text.removeprefix("^")))
    known = {name for collective in COLLECTIVES for name in algorithms(collective)} | {"native", *NCCL_ONLY}
    for name in names:
        if base(name) not in known:
            raise ArgumentError(f"GPUCOLL_ALGO: no algorithm is named {name!r}{nearest(name, sorted(known))}",
                                code="GC-ALGO")
    return Rule(names, text.startswith("^"), strict)


def base(name: str) -> str:
    """Return the name of an algorithm without its parameters.

    >>> base("torus(4x2)")
    'torus'
    """
    return name.partition("(")[0]


def _collective(text: str) -> str:
    """Return the collective of NCCL's spelling, e.g. allreduce or reducescatter, or of our own."""
    for name in COLLECTIVES:
        if text in (name, name.replace("_", "")):
            return name
    raise ArgumentError(f"GPUCOLL_ALGO: no collective is named {text!r}{nearest(text, COLLECTIVES)}", code="GC-ALGO")
