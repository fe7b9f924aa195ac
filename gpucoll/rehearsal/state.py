"""The state of a process that each virtual rank must have for itself: environment, random numbers, world, groups."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from types import ModuleType
from typing import Any

import numpy

import gpucoll.communicator
from gpucoll.launch.launchers import torchrun_variables

WORDS = 624  # of the state of MT19937; the position follows


class ProcessState:
    """The state of the process, saved at the end of a rank's turn and restored at the beginning of the next turn.

    `main` is the module `__main__` of each rank; None leaves the process' own module there.
    """

    def __init__(self, size: int, *, is_program: bool) -> None:
        self._kept: list[dict[str, Any]] = [{} for _ in range(size)]
        self._arguments = [*sys.argv]
        self._numpy_owner: int | None = None  # the rank whose state NumPy's generator has
        self._mark = _numpy_mark()
        own = _environment()
        self._random = random.getstate()
        for number, kept in enumerate(self._kept):
            kept["environment"] = own | {name.encode(): value.encode() for name, value in torchrun_variables(
                number, size, number, size).items()} if is_program else own
            kept["main"] = ModuleType("__main__") if is_program else None
        self._before = {**self._saved(), "environment": own, "main": sys.modules["__main__"],
                        "numpy": numpy.random.get_state(), "random": self._random}

    def main(self, number: int) -> ModuleType:
        """Return the module `__main__` of a rank."""
        main: ModuleType = self._kept[number]["main"]
        return main

    def switch(self, old: int | None, new: int | None) -> None:
        """Save the state of rank `old` and restore the state of rank `new`; None is the process itself."""
        if old is not None:
            kept = self._kept[old]
            kept |= self._saved()
            if self._mark != _numpy_mark():
                kept["numpy"], self._numpy_owner = numpy.random.get_state(), old
            if kept["random"] == self._random:  # no rank has drawn a number yet
                del kept["random"]
        if new is None:
            numpy.random.set_state(self._before["numpy"])
            self._restore(self._before)
            return
        there = self._kept[new]
        if "numpy" in there and self._numpy_owner != new:
            numpy.random.set_state(there["numpy"])
            self._numpy_owner = new
        elif self._numpy_owner not in (None, new):
            numpy.random.seed()  # the rank has not drawn a number: processes begin with states of their own
            self._numpy_owner = None
        self._mark = _numpy_mark()
        if "random" not in there and random.getstate() != self._random:
            random.seed()
            there["random"] = random.getstate()
        self._restore(there)

    def _saved(self) -> dict[str, Any]:
        groups = sys.modules.get("gpucoll.distributed.groups")
        start = sys.modules.get("gpucoll.distributed.start")
        return {"environment": _environment(), "random": random.getstate(), "world": gpucoll.communicator._world,
                "groups": [*groups.groups] if groups else [], "variables": [*start.variables] if start else [],
                "arguments": sys.argv}

    def _restore(self, kept: dict[str, Any]) -> None:
        wanted, here = kept["environment"], _environment()
        if wanted != here:
            for name in here.keys() - wanted.keys():
                del os.environb[name]
            os.environb.update({name: value for name, value in wanted.items() if here.get(name) != value})
        random.setstate(kept.get("random", self._random))
        gpucoll.communicator._world = kept.get("world")
        for module, name in (("groups", "groups"), ("start", "variables")):
            there = sys.modules.get(f"gpucoll.distributed.{module}")
            if there is not None:
                getattr(there, name)[:] = kept.get(name, ())
        sys.argv = kept.setdefault("arguments", [*self._arguments])
        if kept["main"] is not None:
            sys.modules["__main__"] = kept["main"]


def _environment() -> dict[Any, Any]:
    # The encoded form behind `os.environ`: a copy of the decoded form would cost more than a change of turns.
    found: dict[Any, Any] = dict(getattr(os.environ, "_data", None) or os.environb)
    return found


def _numpy_mark() -> tuple[int, ...]:
    """Return a mark that changes with each number drawn from NumPy's global generator.

    The mark is read in memory: `get_state` copies 2.5 KB, at the cost of several changes of turns.
    """
    generator = numpy.random.mtrand._rand._bit_generator  # type: ignore[attr-defined]
    if type(generator).__name__ != "MT19937":
        return ()
    words = (ctypes.c_uint32 * (WORDS + 1)).from_address(generator.ctypes.state_address)
    return words[0], words[WORDS - 1], words[WORDS]
