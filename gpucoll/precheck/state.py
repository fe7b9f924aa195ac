"""The state of a process that each virtual rank must have for itself: environment, random numbers, world, groups."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy

import gpucoll
from gpucoll import internal
from gpucoll.internal import torchrun_variables

PACKAGE = os.path.dirname(gpucoll.__file__) + os.sep
MASTER_VARIABLES = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}  # read by programs; nobody connects
SEED, NOBODY = 1 << 31, -1  # no seed of a program; the owner of a generator of the process


class ProcessState:
    """The state of the process, saved at the end of a rank's turn and restored at the beginning of the next turn.

    Each rank of a program has a module `__main__` and torchrun's variables of its own; a function keeps those of the
    process.
    """

    def __init__(self, size: int, *, is_program: bool) -> None:
        self._kept: list[dict[str, Any]] = [{} for _ in range(size)]
        self.mains: list[ModuleType] = [ModuleType("__main__") if is_program else sys.modules["__main__"]
                                        for _ in range(size)]
        self._arguments = [*sys.argv]
        self._is_program, self._count = is_program, len(sys.modules)
        # A rank may give up its turn in the middle of an import, and holds the lock of the module then.
        self._locks: list[dict[Any, Any]] = [{} for _ in range(size)]
        self._modules: list[dict[str, ModuleType]] = [{} for _ in range(size)]
        own: dict[Any, Any] = _environment()
        for number, kept in enumerate(self._kept):
            variables = {**torchrun_variables(number, size, number, size), **MASTER_VARIABLES} if is_program else {}
            kept["environment"] = own | {name.encode(): value.encode() for name, value in variables.items()}
        # Modules of which each rank has variables of its own, with the function that makes these variables.
        self._followed: list[tuple[ModuleType, Callable[[], dict[str, Any]]]] = []
        self._before = {**self._saved(), "main": sys.modules["__main__"], "numpy": numpy.random.get_state(),
                        "python": random.getstate(), "locks": _bootstrap._module_locks}
        # Of each generator: the rank whose numbers it draws (None: nobody has drawn), and its mark at the turn's begin.
        self._generators, self._seeds = {**GENERATORS}, itertools.count(SEED)
        self._owners: dict[str, int | None] = dict.fromkeys(GENERATORS, NOBODY)
        self._marks = {name: one.mark() for name, one in GENERATORS.items()}
        self._follow_generator_of_torch()

    def follow(self, module: ModuleType, fresh: Callable[[], dict[str, Any]]) -> None:
        """Give each rank variables of its own in a module shared by all ranks: ``fresh()`` at first."""
        self._before[module.__name__] = {name: getattr(module, name) for name in fresh()}
        self._followed.append((module, fresh))
        vars(module).update(fresh())

    def _follow_generator_of_torch(self) -> None:
        torch = sys.modules.get("torch")
        generator = getattr(torch, "default_generator", None)
        if generator is not None and "torch" not in self._generators:
            self._generators["torch"] = GlobalGenerator(lambda: generator.get_state().numpy().tobytes(),
                                                        generator.get_state, generator.set_state,
                                                        generator.manual_seed)
            self._before["torch"] = generator.get_state()
            self._owners["torch"], self._marks["torch"] = NOBODY, object()  # the present rank may have drawn

    def switch(self, old: int | None, new: int | None) -> None:
        """Save the state of rank `old` and restore the state of rank `new`; None is the process itself."""
        if old is not None and old == new:  # another thread of the rank
            return
        if old is not None:
            self._kept[old] |= self._saved()
        self._follow_generator_of_torch()
        if self._is_program:
            self._swap_modules(old, new)
        if new is None:
            for name, generator in self._generators.items():
                generator.set(self._before[name])
            self._restore(self._before, self._before["main"])
            return
        kept = self._kept[new]
        for name, generator in self._generators.items():
            self._draw_for(name, generator, old, new)
        self._restore(kept, self.mains[new])

    def _swap_modules(self, old: int | None, new: int | None) -> None:
        """Replace the program's modules, imported by each rank for itself; libraries are shared by all ranks."""
        if old is not None:
            here = self._modules[old]
            added = itertools.islice(reversed(sys.modules), max(0, len(sys.modules) - self._count))
            here |= {name: sys.modules[name] for name in [*added]
                     if is_of_program(getattr(sys.modules[name], "__file__", None) or "")}
            for name in here:
                sys.modules.pop(name, None)
        if new is not None:
            sys.modules.update(self._modules[new])
            self._count = len(sys.modules)
        _bootstrap._module_locks = self._before["locks"] if new is None else self._locks[new]

    def _draw_for(self, name: str, generator: GlobalGenerator, old: int | None, new: int) -> None:
        """Give a generator the state of rank `new`; copy states only if a number was drawn."""
        if old is not None and generator.mark() != self._marks[name]:
            self._kept[old][name], self._owners[name] = generator.get(), old
        owner, kept = self._owners[name], self._kept[new]
        if owner not in (None, new):
            if name in kept:
                generator.set(kept[name])
                self._owners[name] = new
            else:
                # No number drawn yet: processes begin with states of their own, the same in each run of a program.
                generator.seed(next(self._seeds))
                self._owners[name] = None
        self._marks[name] = generator.mark()

    def _saved(self) -> dict[str, Any]:
        return {"environment": _environment(), "world": internal.world(), "arguments": sys.argv,
                **{name: [*found] for name, found in _lists().items()},
                **{module.__name__: {name: vars(module)[name] for name in self._before[module.__name__]}
                   for module, _ in self._followed}}

    def _restore(self, kept: dict[str, Any], main: ModuleType) -> None:
        # A change of the variables themselves would cost more than a change of turns.
        os.environ._data = os.environb._data = kept["environment"]  # type: ignore[attr-defined]
        internal.set_world(kept.get("world"))
        for name, there in _lists().items():
            there[:] = kept.get(name, ())
        for module, fresh in self._followed:
            vars(module).update(kept.get(module.__name__) or fresh())
        sys.argv = kept.setdefault("arguments", [*self._arguments])
        sys.modules["__main__"] = main


class GlobalGenerator(NamedTuple):
    """A global generator of random numbers; `mark` changes with each number drawn."""

    mark: Callable[[], object]
    get: Callable[[], Any]
    set: Callable[[Any], None]
    seed: Callable[[int], object]


@contextlib.contextmanager
def replaced(replacements: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    """Give attributes other values inside the block: of each the owner, the name and the value."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def is_of_program(file: str) -> bool:
    """Return whether a module's file is Python code, neither installed nor the interpreter's nor of this package."""
    installed = {"site-packages", "dist-packages"} & {*file.split(os.sep)}  # a user's own packages among them
    return file.endswith(".py") and not installed and not file.startswith(
        (PACKAGE, sys.prefix + os.sep, sys.base_prefix + os.sep, "/usr/lib/python"))


def _lists() -> dict[str, list[Any]]:
    """Return the lists of `gpucoll.distributed` that each rank has for itself, by name."""
    there = (("gpucoll.distributed.groups", "groups"), ("gpucoll.distributed.start", "variables"))
    return {name: getattr(sys.modules[module], name) for module, name in there if module in sys.modules}


def _environment() -> dict[Any, Any]:
    return os.environ._data  # type: ignore[attr-defined]


def _numpy_mark() -> object:
    state = numpy.random.get_state()
    return (state[1].tobytes(), *state[2:]) if isinstance(state, tuple) else object()  # another generator of a program


_bootstrap: Any = importlib._bootstrap
GENERATORS = {
    "numpy": GlobalGenerator(_numpy_mark, numpy.random.get_state, numpy.random.set_state, numpy.random.seed),
    "python": GlobalGenerator(random.getstate, random.getstate, random.setstate, random.seed),
}
