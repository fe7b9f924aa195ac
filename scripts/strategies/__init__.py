"""How scripts/train.py divides training over ranks: one file a strategy, each on `gpucoll.training`."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpucoll import training
from gpucoll.training.compression import named
from models import Array, Layer

MOMENTUM = 0.9


def optimizer(options: Namespace) -> Any:
    """What the model is trained by; `options.rate` is a function of the number of the step."""
    return training.Adam(options.rate) if options.model == "transformer" else training.SGD(options.rate, MOMENTUM)


def compression(options: Namespace) -> Any:
    """What `--compression` names; exactly, by `--algorithm`, where that is none."""
    return training.Exact(options.algorithm) if options.compression == "none" else named(options.compression)


class Strategy:
    """Every rank has all weights, and its samples of each batch; `comm` joins the ranks that share one."""

    is_server = False

    def __init__(self, weights: dict[str, Array], comm: Any, options: Namespace) -> None:
        self.weights, self.comm, self.options = weights, comm, options
        self.exposed = 0.0  # seconds that the rank has spent in collectives, or waiting
        self._seen = 0.0  # of which an asynchronous operation was under way: only those of `comm` are asynchronous

    @property
    def hidden(self) -> float:
        """Seconds that the rank has computed while an asynchronous operation was under way."""
        return float(self.comm.seconds_under_way) - self._seen

    @contextlib.contextmanager
    def communicating(self, sign: int = 1) -> Iterator[None]:
        """Counts the time inside; takes it away again where `sign` is -1."""
        under_way, began = self.comm.seconds_under_way, time.perf_counter()
        yield
        self.exposed += sign * (time.perf_counter() - began)
        self._seen += sign * (self.comm.seconds_under_way - under_way)

    def computing(self, rule: Any) -> Any:
        """The optimizer, whose steps count as computing, even inside `communicating`."""
        step = rule.step

        def timed(*arguments: Any) -> None:
            with self.communicating(-1):
                step(*arguments)

        rule.step = timed
        return rule

    def layer(self, names: tuple[str, ...]) -> contextlib.AbstractContextManager[Mapping[str, Array]]:
        """The weights of a layer, inside."""
        return contextlib.nullcontext(self.weights)

    def forward(self, xp: Any, layer: Layer, x: Array) -> tuple[Array, Any]:
        with self.layer(layer.names) as w:
            part, kept = layer.forward(xp, w, x)
            return layer.finish(xp, w, x, part, kept)

    def backward(self, xp: Any, layer: Layer, kept: Any, dy: Array) -> Array:
        """The gradient of the layer's input; those of its weights are given away as soon as they are there."""
        with self.layer(layer.names) as w:
            part, found = layer.backward(xp, w, kept, dy)
        self.give(layer, found)
        return layer.finish_backward(dy, part)

    def give(self, layer: Layer, gradients: Mapping[str, Array]) -> None:
        for name in reversed(layer.names):
            with self.communicating():
                self.ready(name, gradients[name])

    def ready(self, name: str, gradient: Array) -> None:
        """Takes the gradient of a weight, the mean over this rank's samples times its share of the batch."""
        raise NotImplementedError

    def step(self) -> None:
        """Changes the weights."""
        raise NotImplementedError

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Writes a checkpoint; not of every strategy, nor does `load` read one."""
        raise NotImplementedError

    def load(self, path: Path, settings: Mapping[str, Any]) -> int:
        """The steps that had been taken when it was saved."""
        raise NotImplementedError

    def serve(self) -> None:
        """Does what is asked of a server, until nobody asks any more."""

    def end(self) -> None:
        """Nobody takes a step any more."""
