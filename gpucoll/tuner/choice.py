"""Which executor and which algorithm a call takes, out of what GPUCOLL_ALGO allows, in NCCL_ALGO's grammar."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gpucoll.algorithms import algorithms, find, names_of, own_names
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.errors import ArgumentError, nearest
from gpucoll.tuner.model import Candidate, Model, World, segments
from gpucoll.tuner.table import BUILT_IN, Table

ALL = ""  # the key of the rule for all collectives that have none of their own
NCCL_ONLY = ("collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")  # understood, and not to be had here


class Rule(NamedTuple):
    """What GPUCOLL_ALGO says of a collective: only these names, or none of these."""

    names: tuple[str, ...]
    excluded: bool


def allowed(text: str, collective: str, there: Sequence[str]) -> Sequence[str]:
    """Return which of the names `there` the rules of `text` leave; those of an inclusion with their parameters.

    A rule for all collectives that leaves this one nothing does not count; one of its own is then an ArgumentError.

    >>> allowed("^ring;broadcast:tree", "all_reduce", ["ring", "tree"])
    ['tree']
    """
    known = rules(text)
    rule = known.get(collective, known.get(ALL))
    if rule is None:
        return there
    left = [name for name in there if name not in rule.names] if rule.excluded else \
        [name for name in rule.names if base(name) in (*there, *own_names(collective))]
    if not left and collective in known:
        raise ArgumentError(f"GPUCOLL_ALGO leaves {collective} none of its algorithms: {', '.join(there)}",
                            code="GC-ALGO")
    return left or there


@functools.lru_cache(maxsize=16)
def rules(text: str) -> dict[str, Rule]:
    """Return the rules of GPUCOLL_ALGO by collective, in NCCL_ALGO's grammar; ArgumentError for unknown names.

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
    """Return the collective of NCCL's spelling, e.g. allreduce or reducescatter, or of our own."""
    for name in COLLECTIVES:
        if text in (name, name.replace("_", "")):
            return name
    raise ArgumentError(f"GPUCOLL_ALGO: no collective is named {text!r}{nearest(text, COLLECTIVES)}", code="GC-ALGO")


NATIVE = "native"


class Choice(NamedTuple):
    """Who runs what, and its pipelining."""

    executor: str
    algorithm: str
    segments: int


def scheduled(collective: str, size: int, nodes: int) -> list[str]:
    """Return the algorithms among which `auto` chooses for so many ranks: a user's own are left out.

    An algorithm that depends on the ranks' nodes is left out on a single node: it equals another algorithm there.

    >>> scheduled("reduce_scatter", 4, 1)
    ['circulant', 'direct', 'recursive_halving', 'ring']
    """
    out = own_names(collective)
    return [name for name in algorithms(collective, size=size) if name not in out
            and (nodes > 1 or "nodes" not in find(collective, name).options)]


class Tuner:
    """Chooses for one communicator: the same on all of its ranks, since all have the same table.

    `nodes` is the node of every rank, `prefer` GPUCOLL_ALGO. A `deterministic` one takes only algorithms that reduce in
    rank order: their bits depend on nothing but the inputs. What was chosen for a collective and a size is kept, for
    all sizes of as many binary digits: the next call finds it in well under 2 us.
    """

    def __init__(self, nodes: Sequence[int], table: Table, prefer: str = "", *, deterministic: bool = False) -> None:
        self.table, self._deterministic = table, deterministic
        self._nodes, self._prefer = tuple(nodes), prefer
        # Of calls on arrays of a device
        self.model: Callable[[str], Model] = functools.cache(lambda device: Model(table, World(self._nodes, device)))
        self._kept: dict[tuple[str, str, int, tuple[str, ...], str], tuple[str, str]] = {}

    def choose(self, collective: str, algorithm: str, nbytes: int, executors: tuple[str, ...],
               device: str = "cpu") -> Choice:
        """Return the choice for `nbytes` of the larger of input and output, out of the `executors` that can serve.

        An `algorithm` that is named stays; "auto" is the best one that GPUCOLL_ALGO allows. Raises ArgumentError where
        no executor is left for it.
        """
        if self._deterministic and algorithm != "auto" and not self._is_deterministic(collective, algorithm):
            others = [name for name in algorithms(collective, size=len(self._nodes))
                      if self._is_deterministic(collective, name)]
            raise ArgumentError(f"{collective}: {algorithm} does not reduce in rank order, which deterministic=True "
                                f"promises; take auto, or one of {', '.join(others)}", code="GC-DETERMINISTIC")
        key = (collective, algorithm, nbytes.bit_length(), executors, device)
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._choose(collective, algorithm, nbytes, executors, device)
        return Choice(*kept, segments(collective, kept[1], nbytes, len(self._nodes)))

    def candidates(self, collective: str, nbytes: int, executors: Sequence[str], device: str = "cpu",
                   algorithm: str = "auto") -> list[Candidate]:
        """Return what could be chosen for sizes of as many digits as `nbytes`, the choice first."""
        names: Iterable[str] = [algorithm]
        if algorithm == "auto":
            names = allowed(self._prefer, collective, self._names(collective, executors))
        return self.model(device).candidates(collective, 1 << nbytes.bit_length() >> 1, executors, [*names])

    def source(self, device: str) -> str:
        """Return in words which part of which table the choices on `device` go by."""
        shape = self.model(device).shape
        return (f"{self.table.source}: {shape.ranks} ranks on {shape.nodes} node{'s' * (shape.nodes > 1)}, measured "
                f"{shape.measured}")

    def has_measured(self, executor: str, device: str) -> bool:
        """Return whether the table of this very machine knows an executor on a device."""
        return self.table.source != BUILT_IN and any(
            link.executor == executor for shape in self.table.shapes if shape.device == device for link in shape.links)

    def _choose(self, collective: str, algorithm: str, nbytes: int, executors: tuple[str, ...],
                device: str) -> tuple[str, str]:
        able = [name for name in executors if algorithm in (NATIVE, "auto") or name != NATIVE]
        able = [NATIVE] if algorithm == NATIVE else able
        if len(able) == 1 and algorithm != "auto":
            return able[0], algorithm
        candidates = self.candidates(collective, nbytes, able, device, algorithm)
        if candidates:
            return candidates[0].executor, candidates[0].algorithm
        if algorithm == "auto":  # nothing can be predicted: the first that there is
            names = allowed(self._prefer, collective, self._names(collective, able))
            algorithm = next(name for name in names if (name == NATIVE) == (able[0] == NATIVE))
        return able[0], algorithm

    def _names(self, collective: str, executors: Sequence[str]) -> list[str]:
        schedules = scheduled(collective, len(self._nodes), len(set(self._nodes)))
        names = [NATIVE] * (NATIVE in executors) + (schedules if set(executors) - {NATIVE} else [])
        if self._deterministic:
            names = [name for name in names if self._is_deterministic(collective, name)]
        if not names:
            raise ArgumentError(f"{collective}: nothing can run it", code="GC-ALGO")
        return names

    @staticmethod
    def _is_deterministic(collective: str, name: str) -> bool:
        """Return whether the same inputs give the same bits by whatever runs the algorithm."""
        return not COLLECTIVES[collective].reduces or (name != NATIVE and find(collective, name).in_rank_order)
