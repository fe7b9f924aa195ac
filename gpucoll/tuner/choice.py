"""The choice of executor and algorithm for a call, among those allowed by GPUCOLL_ALGO (in NCCL_ALGO's grammar)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpucoll.algorithms import algorithms, find, library_names, names_of, own_names
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.ops import Order
from gpucoll.errors import ArgumentError, nearest
from gpucoll.tuner.model import PRICED, Candidate, Model, World, segments
from gpucoll.tuner.table import BUILT_IN, Table

ALL = ""  # the key of the rule for collectives without a rule of their own
NCCL_ONLY = ("collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")  # accepted in rules, but not available here


class Rule(NamedTuple):
    """A rule of GPUCOLL_ALGO for a collective: only these names or, if `excluded`, all but these names."""

    names: tuple[str, ...]
    excluded: bool


def allowed(text: str, collective: str, there: Sequence[str]) -> Sequence[str]:
    """Return the names of `there` allowed by the rules of `text`; names in an inclusion keep their parameters.

    A rule for all collectives is ignored if no name remains. Raises ArgumentError if a rule for this collective leaves
    no name.

    >>> allowed("^ring;broadcast:tree", "all_reduce", ["ring", "tree"])
    ['tree']
    """
    known = rules(text)
    rule = known.get(collective, known.get(ALL))
    if rule is None:
        return there
    names = [_of_nccl(collective, name) for name in rule.names]
    left = [name for name in there if name not in names] if rule.excluded else \
        [name for name in names if base(name) in (*there, *own_names(collective))]
    if not left and collective in known:
        raise ArgumentError(f"GPUCOLL_ALGO excludes all algorithms of {collective}: {', '.join(there)}",
                            code="GC-ALGO")
    return left or there


def _of_nccl(collective: str, name: str) -> str:
    """Return the algorithm with this name in NCCL, as the chain of a broadcast for `ring`; else the name itself.

    >>> _of_nccl("broadcast", "ring"), _of_nccl("all_reduce", "ring")
    ('chain', 'ring')
    """
    there = algorithms(collective)
    return name if name in there else next((one for one in there if find(collective, one).traits.in_nccl == name), name)


@functools.lru_cache(maxsize=16)
def rules(text: str) -> dict[str, Rule]:
    """Return the rules of GPUCOLL_ALGO by collective; raise ArgumentError for unknown names.

    >>> rules("AllReduce:tree,ring;^star")
    {'all_reduce': Rule(names=('tree', 'ring'), excluded=False), '': Rule(names=('star',), excluded=True)}
    """
    parts = (part.rpartition(":") for part in text.replace(" ", "").lower().split(";") if part)
    return {_collective(head) if colon else ALL: _rule(names) for head, colon, names in parts}


def _rule(text: str) -> Rule:
    names = tuple(names_of(text.removeprefix("^")))
    known = {name for collective in COLLECTIVES for name in algorithms(collective)} | {"native", *NCCL_ONLY}
    for name in names:
        if base(name) not in known:
            raise ArgumentError(f"GPUCOLL_ALGO: no algorithm is named {name!r}{nearest(name, sorted(known))}",
                                code="GC-ALGO")
    return Rule(names, text.startswith("^"))


def base(name: str) -> str:
    """Return the name of an algorithm without its parameters.

    >>> base("torus(4x2)")
    'torus'
    """
    return name.partition("(")[0]


def _collective(text: str) -> str:
    """Return the collective named in NCCL's spelling (allreduce, reducescatter) or in gpucoll's."""
    for name in COLLECTIVES:
        if text in (name, name.replace("_", "")):
            return name
    raise ArgumentError(f"GPUCOLL_ALGO: no collective is named {text!r}{nearest(text, COLLECTIVES)}", code="GC-ALGO")


NATIVE = "native"


class Choice(NamedTuple):
    """The executor, the algorithm and the number of segments of a call."""

    executor: str
    algorithm: str
    segments: int


def scheduled(collective: str, size: int, nodes: int) -> list[str]:
    """Return the algorithms considered by `auto` for `size` ranks on `nodes` nodes; user-defined algorithms are not.

    Algorithms depending on the ranks' nodes, or made for groups of ranks, are left out on a single node: there another
    algorithm costs as much. On several nodes algorithms for groups come last: `ranked` keeps this order where
    predictions and loads are equal.

    >>> scheduled("reduce_scatter", 4, 1)
    ['circulant', 'direct', 'recursive_halving', 'ring']
    """
    entries = [find(collective, name) for name in library_names(collective, size)]
    return [entry.name for entry in sorted(entries, key=lambda entry: entry.traits.groups)
            if nodes > 1 or not (entry.traits.groups or "nodes" in entry.options)]


class Tuner:
    """The choices for one communicator. All ranks have the same table, and so make the same choices.

    `nodes` is the node of every rank, `prefer` the text of GPUCOLL_ALGO. A choice is cached for all sizes with the same
    number of binary digits, and found again in well under 2 us. A call may demand an `order` of combination: then only
    algorithms with this order are taken, and the result depends on nothing but the inputs.
    """

    def __init__(self, nodes: Sequence[int], table: Table, prefer: str = "") -> None:
        self._nodes, self._prefer = tuple(nodes), prefer
        self.table = table
        # The model for arrays on a device, made at the first call on this device
        self.model: Callable[[str], Model] = functools.cache(
            lambda device: Model(self.table, World(self._nodes, device)))
        self._kept: dict[tuple[str, str, int, tuple[str, ...], str, Order], tuple[str, str]] = {}

    def choose(self, collective: str, algorithm: str, nbytes: int, executors: tuple[str, ...],
               device: str = "cpu", order: Order = "any") -> Choice:
        """Return the choice for a call, among the `executors` able to serve the call.

        `nbytes` is the larger of input and output. A named `algorithm` is kept; "auto" takes the best algorithm allowed
        by GPUCOLL_ALGO. Raises ArgumentError if no algorithm is left, or if `order` excludes the named one.
        """
        key = (collective, algorithm, nbytes.bit_length(), executors, device, order)
        kept = self._kept.get(key)
        if kept is None:
            if algorithm != "auto":
                self._check_order(collective, [algorithm], order)
            kept = self._kept[key] = self._choose(collective, algorithm, nbytes, executors, device, order)
        executor, name = kept
        if executor in PRICED and name != NATIVE:
            return Choice(executor, name, self.model(device).segments(collective, name, nbytes, executor))
        return Choice(executor, name, segments(collective, name, nbytes, len(self._nodes)))

    def candidates(self, collective: str, nbytes: int, executors: Sequence[str], device: str = "cpu",
                   algorithm: str = "auto", order: Order = "any") -> list[Candidate]:
        """Return the candidates for sizes with as many binary digits as `nbytes`, the choice first."""
        names: Iterable[str] = [algorithm]
        if algorithm == "auto":
            names = self._names(collective, executors, order)
        # The largest power of two up to `nbytes` (0 for 0), as choices are cached by the number of digits
        return self.model(device).candidates(collective, 1 << nbytes.bit_length() >> 1, executors, [*names])

    def source(self, device: str) -> str:
        """Return in words the table, and the shape used for choices on `device`."""
        shape = self.model(device).shape
        return (f"{self.table.source}: {shape.ranks} ranks on {shape.nodes} node{'s' * (shape.nodes > 1)}, "
                f"{f'measured {shape.measured}' if shape.measured else 'estimated'}")

    def has_measured(self, executor: str, device: str) -> bool:
        """Return whether a table measured on this machine, not the built-in table, has links of `executor`."""
        return self.table.source != BUILT_IN and any(
            link.executor == executor for shape in self.table.shapes if shape.device == device for link in shape.links)

    def _choose(self, collective: str, algorithm: str, nbytes: int, executors: tuple[str, ...],
                device: str, order: Order) -> tuple[str, str]:
        able = [name for name in executors if algorithm in (NATIVE, "auto") or name != NATIVE]
        able = [NATIVE] if algorithm == NATIVE else able
        if len(able) == 1 and algorithm != "auto":
            return able[0], algorithm
        candidates = self.candidates(collective, nbytes, able, device, algorithm, order)
        if candidates:
            return candidates[0].executor, candidates[0].algorithm
        if algorithm == "auto":  # without any prediction: the first algorithm of the first executor
            names = self._names(collective, able, order)
            algorithm = next(name for name in names if (name == NATIVE) == (able[0] == NATIVE))
        return able[0], algorithm

    def _names(self, collective: str, executors: Sequence[str], order: Order) -> Sequence[str]:
        """Return the names that "auto" may take; raise ArgumentError if none is left."""
        schedules = scheduled(collective, len(self._nodes), len(set(self._nodes)))
        names = [NATIVE] * (NATIVE in executors) + (schedules if set(executors) - {NATIVE} else [])
        if not names:
            raise ArgumentError(f"{collective}: no executor can run this call", code="GC-ALGO")
        # A rule of GPUCOLL_ALGO for this collective is kept or refused; a rule for all collectives may be ignored.
        ordered = names if collective in rules(self._prefer) else self._check_order(collective, names, order)
        return self._check_order(collective, allowed(self._prefer, collective, ordered), order)

    def _check_order(self, collective: str, names: Sequence[str], order: Order) -> list[str]:
        """Return the `names` that combine in `order`; raise ArgumentError if none does."""
        left = [name for name in names if is_ordered(collective, name, order)]
        if not left:
            others = [name for name in algorithms(collective, size=len(self._nodes))
                      if is_ordered(collective, name, order)]
            how = "by a single reduction in rank order" if order == "at once" else "in rank order"
            raise ArgumentError(f"{collective}: {', '.join(names)} does not combine all contributions {how}, as "
                                f"promised by the option deterministic; use auto, or one of {', '.join(others)}",
                                code="GC-DETERMINISTIC")
        return left


def is_ordered(collective: str, name: str, order: Order) -> bool:
    """Return whether an algorithm combines the contributions to an element in `order`, on every executor.

    >>> is_ordered("all_reduce", "ring", "in order"), is_ordered("scan", "linear", "at once")
    (False, False)
    """
    if order == "any" or not COLLECTIVES[collective].reduces:
        return True
    row = None if name == NATIVE else find(collective, name)
    return row is not None and (row.at_once if order == "at once" else row.in_rank_order)
