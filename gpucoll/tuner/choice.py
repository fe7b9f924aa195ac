"""Which executor and which algorithm a call takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpucoll.algorithms import algorithms
from gpucoll.errors import ArgumentError
from gpucoll.tuner.model import Candidate, Model, World
from gpucoll.tuner.rules import allowed
from gpucoll.tuner.segments import segments
from gpucoll.tuner.table import BUILT_IN, Table

NATIVE = "native"


class Choice(NamedTuple):
    """Who runs what, and its pipelining."""

    executor: str
    algorithm: str
    segments: int


def scheduled(collective: str, size: int, nodes: int) -> list[str]:
    """Return the algorithms that are worth a thought for so many ranks: within one node hierarchical is another one.

    >>> scheduled("reduce_scatter", 4, 1)
    ['circulant', 'direct', 'recursive_halving', 'ring']
    """
    return [name for name in algorithms(collective, size=size) if nodes > 1 or name != "hierarchical"]


class Tuner:
    """Chooses for one communicator: the same on all of its ranks, since all have the same table.

    `nodes` is the node of every rank, `prefer` GPUCOLL_ALGO. What was chosen for a collective and a size is kept, for
    all sizes of as many binary digits: the next call finds it in well under 2 us.
    """

    def __init__(self, nodes: Sequence[int], table: Table, prefer: str = "") -> None:
        self.table = table
        self._nodes, self._prefer = tuple(nodes), prefer
        self._models: dict[str, Model] = {}
        self._kept: dict[tuple[str, str, int, tuple[str, ...], str], tuple[str, str]] = {}

    def choose(self, collective: str, algorithm: str, nbytes: int, executors: tuple[str, ...],
               device: str = "cpu") -> Choice:
        """Return the choice for `nbytes` of the larger of input and output, out of the `executors` that can serve.

        An `algorithm` that is named stays; "auto" is the best one that GPUCOLL_ALGO allows. Raises ArgumentError where
        no executor is left for it.
        """
        key = (collective, algorithm, nbytes.bit_length(), executors, device)
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self._choose(collective, algorithm, nbytes, executors, device)
        return Choice(*found, segments(found[1], nbytes, len(self._nodes)))

    def model(self, device: str) -> Model:
        """Return the model of calls on arrays of `device`."""
        if device not in self._models:
            self._models[device] = Model(self.table, World(self._nodes, device))
        return self._models[device]

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
        found = self.candidates(collective, nbytes, able, device, algorithm)
        if found:
            return found[0].executor, found[0].algorithm
        return able[0], self._usual(collective, able, algorithm)

    def _usual(self, collective: str, able: Sequence[str], algorithm: str) -> str:
        """Return what serves where nothing can be predicted: the first that there is."""
        if algorithm != "auto":
            return algorithm
        names = allowed(self._prefer, collective, self._names(collective, able))
        return next(name for name in names if (name == NATIVE) == (able[0] == NATIVE))

    def _names(self, collective: str, executors: Sequence[str]) -> list[str]:
        """Return the algorithms to choose from."""
        schedules = scheduled(collective, len(self._nodes), len(set(self._nodes)))
        names = [NATIVE] * (NATIVE in executors) + (schedules if set(executors) - {NATIVE} else [])
        if not names:
            raise ArgumentError(f"{collective}: nothing can run it", code="GC-ALGO")
        return names
