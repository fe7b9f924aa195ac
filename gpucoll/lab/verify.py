"""Prove one schedule, or all schedules of the registry for many sizes, and the plans made of them.

`gpucoll.verify.symbolic` proves schedules, `gpucoll.plan.proof` proves plans.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.internal import COLLECTIVES, Proof, find, prove, prove_plans, registry, schedules

FEW = 16  # the largest number of ranks for proofs with all parameters and with uneven nodes


def verify(name: str, algorithm: str, size: int, *, root: int = 0, segments: int = 1,
           nodes: Sequence[int] | None = None, plans: bool = False) -> Proof:
    """Prove the schedules of all ranks together, or raise ScheduleError.

    Parameters
    ----------
    name : str
        The name of the collective.
    algorithm : str
        A name from `gpucoll.algorithms`.
    size : int
        The number of ranks.
    root : int, optional
        The root of a rooted collective.
    segments : int, optional
        The number of messages for a rank's part (pipelining).
    nodes : sequence of int or None, optional
        The node of each rank, for algorithms that depend on nodes.
    plans : bool, optional
        Also prove the plans made from the schedules: for buffers with chunks of different lengths and with an empty
        chunk, in place and not, with all ranks on one node, on nodes of different sizes, and on separate nodes.

    Returns
    -------
    Proof
        The numbers of rounds and messages.

    Raises
    ------
    ScheduleError
        The schedules are wrong; the error names rank, round and chunk.
    ArgumentError
        An unknown name (GC-ALGO, GC-COLLECTIVE).

    See Also
    --------
    gpucoll.algorithm : User's algorithms are proved at their first use.

    Examples
    --------
    >>> from gpucoll.lab.verify import verify
    >>> verify("all_reduce", "ring", 4, plans=True)
    Proof(rounds=6, messages=24)
    """
    everyone = schedules(name, algorithm, size=size, root=root, segments=segments, nodes=nodes)
    proof = prove(name, everyone, chunks=everyone[0].chunks, root=root)
    if plans:
        chunks = everyone[0].chunks // size if COLLECTIVES[name].blocks else everyone[0].chunks
        for elements, in_place in itertools.product((chunks + chunks // 2 + 1, chunks - 1), (False, True)):
            for placed in dict.fromkeys((None, (0,) * size, _uneven(size))):
                prove_plans(everyone, elements, root=root, in_place=in_place, nodes=placed)
    return proof


class ProofRow(NamedTuple):
    """The result for one algorithm: the number of schedules proved, and the first error as `fault`."""

    collective: str
    algorithm: str
    schedules: int
    fault: str | None


def prove_registry(sizes: Sequence[int], segments: Sequence[int], collective: str | None = None,
                   algorithm: str | None = None, *, plans: bool = False) -> Iterator[ProofRow]:
    """Yield a row for every algorithm, proved for all `sizes`, all `segments` and, in rooted collectives, three roots.

    A user's algorithm, or an algorithm with parameters in the name, is proved only for supported sizes. Up to 16 ranks
    the proofs cover all parameters of an algorithm, and uneven nodes if the algorithm uses nodes. Proofs of built-in
    algorithms for more ranks run in parallel, in one process per core. With `plans` the plans of up to 16 ranks are
    proved, too: that takes about 30 times as long.
    """
    base = (algorithm or "").partition("(")[0]
    named = [(kind, algorithm or name) for kind, name in registry()
             if collective in (None, kind) and base in ("", name)]
    # If no collective accepts these parameters keep all names, so that the first proof raises the error.
    asked = [(*key, sizes, segments, plans) for key in [key for key in named if _exists(*key)] or named]
    with contextlib.ExitStack() as held:
        each: Callable[..., Iterable[ProofRow]] = map
        if max(sizes, default=0) > FEW and not all(find(*one[:2]).own for one in asked):
            each = held.enter_context(concurrent.futures.ProcessPoolExecutor(len(os.sched_getaffinity(0)))).map
        yield from each(_proved, asked)


def _exists(kind: str, name: str) -> bool:
    try:
        find(kind, name)
    except ArgumentError:
        return False
    return True


def _proved(asked: tuple[str, str, Sequence[int], Sequence[int], bool]) -> ProofRow:
    kind, name, sizes, segments, plans = asked
    entry = find(kind, name)
    is_for_some = entry.own or "(" in name

    def names(size: int) -> list[str]:
        said = entry.variants(kind, size) if entry.variants is not None and size <= FEW and "(" not in name else ()
        return [name, *(f"{name}({one})" for one in said)]

    claims: list[dict[str, Any]] = [
        {"algorithm": one, "size": size, "root": root, "segments": pieces, "nodes": nodes}
        for size in sizes if not is_for_some or entry.unfit(size, None) is None for one in names(size)
        for root in ({0, size // 2, size - 1} if COLLECTIVES[kind].rooted else {0})
        for pieces in (segments if "segments" in entry.options else (1,))
        for nodes in ({None, _uneven(size)} if "nodes" in entry.options and size <= FEW else {None})]
    if not claims:
        reason = entry.unfit(sizes[0], None)
        return ProofRow(kind, name, 0, f"it does not support {', '.join(map(str, sizes))} ranks: {reason}")
    for claim in claims:
        try:
            verify(kind, **claim, plans=plans and claim["size"] <= FEW)
        except GpucollError as error:
            asked_for = ", ".join(f"{option} {value}" for option, value in claim.items())
            return ProofRow(kind, name, len(claims), f"{asked_for}: {error}")
    return ProofRow(kind, name, len(claims), None)


def _uneven(size: int) -> tuple[int, ...]:
    """Return the node of each rank, for nodes of 1, 2, 3, ... ranks; the last node has the rest.

    >>> _uneven(8)
    (0, 1, 1, 2, 2, 2, 3, 3)
    """
    return tuple((math.isqrt(8 * rank + 1) - 1) // 2 for rank in range(size))
