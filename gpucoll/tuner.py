"""What ``algorithm="auto"`` chooses: the one home of the policy.

The thresholds are bytes of the larger of input and output: below, MPI's own collective is
quicker, since Python costs some microseconds a round; from there on the ring is, since
NumPy combines faster than MPI does and a ring moves the fewest bytes.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from gpucoll.algorithms import algorithms
from gpucoll.collectives import COLLECTIVES
from gpucoll.errors import ArgumentError, nearest

SEGMENT = 1 << 22  # bytes of a ring's message
PIPELINE = 1 << 16  # bytes of a tree's message
MOST_SEGMENTS = 64
RING_FROM = {"all_reduce": 1 << 20, "reduce_scatter": 1 << 20, "all_gather": 1 << 20}
# Where there is no native collective, or none that serves better: the schedule for small arrays.
SCHEDULED = {"all_reduce": "tree", "reduce": "tree", "broadcast": "tree", "all_gather": "ring",
             "reduce_scatter": "ring", "gather": "linear", "scatter": "linear", "all_to_all": "direct",
             "scan": "linear", "exscan": "linear", "barrier": "dissemination"}


NCCL_ONLY = ("collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")  # understood, and not to be had here


class Choice(NamedTuple):
    """An algorithm and its pipelining."""

    algorithm: str
    segments: int


class Rule(NamedTuple):
    """What GPUCOLL_ALGO says of a collective: only these names, the first that exists, or none of these.

    `strict` where it names the collective: then it must be met.
    """

    names: tuple[str, ...]
    excluded: bool
    strict: bool = False


def choose(collective: str, algorithm: str, nbytes: int, size: int, *, executor: str | None = None,
           device: str = "cpu", prefer: str = "") -> Choice:
    """Return `algorithm` with its segments; "auto" is the choice for `nbytes` on `size` ranks and `executor`.

    On a GPU it is NCCL's own collective wherever `executor` allows that. `prefer` overrides "auto": see `rules`.
    """
    if algorithm == "auto":
        algorithm = _automatic(collective, nbytes, size, executor, device)
        rule = rules(prefer).get(collective)
        algorithm = algorithm if rule is None else _obey(rule, collective, algorithm, executor)
    return Choice(algorithm, segments(algorithm, nbytes, size))


def _automatic(collective: str, nbytes: int, size: int, executor: str | None, device: str) -> str:
    small = size == 1 or nbytes < RING_FROM.get(collective, nbytes + 1)
    schedule = SCHEDULED.get(collective, "direct") if small else "ring"
    better = device == "cuda" or (small and collective in SCHEDULED)
    native = executor == "native" or (executor is None and better)
    return "native" if native else schedule


def _obey(rule: Rule, collective: str, choice: str, executor: str | None) -> str:
    """Return the choice under `rule`; where a rule for all leaves nothing for this collective, the choice stands."""
    there = [*algorithms(collective)] if executor != "native" else []
    there += ["native"] if executor in (None, "native") else []
    there.sort(key=lambda name: name != SCHEDULED.get(collective, "direct"))  # the usual one first
    allowed = [name for name in (there if rule.excluded else rule.names)
               if _base(name) in there and (name in rule.names) != rule.excluded]
    if not allowed and rule.strict:
        raise ArgumentError(f"GPUCOLL_ALGO leaves {collective} none of its algorithms: {', '.join(there)}",
                            code="GC-ALGO")
    return choice if (choice in allowed and rule.excluded) or not allowed else allowed[0]


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
    names = tuple(re.split(r",(?![^(]*\))", text.removeprefix("^")))  # but not at the commas of parameters
    known = {name for collective in COLLECTIVES for name in algorithms(collective)} | {"native", *NCCL_ONLY}
    for name in names:
        if _base(name) not in known:
            raise ArgumentError(f"GPUCOLL_ALGO: no algorithm is named {name!r}{nearest(name, sorted(known))}",
                                code="GC-ALGO")
    return Rule(names, text.startswith("^"), strict)


def _base(name: str) -> str:
    """Return the name of an algorithm without its parameters, e.g. torus of torus(4x2)."""
    return name.partition("(")[0]


def _collective(text: str) -> str:
    """Return the collective of NCCL's spelling, e.g. allreduce or reducescatter, or of our own."""
    for name in COLLECTIVES:
        if text in (name, name.replace("_", "")):
            return name
    raise ArgumentError(f"GPUCOLL_ALGO: no collective is named {text!r}{nearest(text, COLLECTIVES)}", code="GC-ALGO")


def segments(algorithm: str, nbytes: int, size: int) -> int:
    """Return into how many messages a rank's part of `nbytes` is cut."""
    in_parts = algorithm in ("ring", "bidirectional_ring")
    part, message = (nbytes // size, SEGMENT) if in_parts else (nbytes, PIPELINE)
    return max(1, min(MOST_SEGMENTS, -(-part // message)))
