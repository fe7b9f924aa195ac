"""The strategies of scripts/train.py for dividing training over ranks: a file each, based on `gpucoll.training`."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import models
from gpucoll import training
from gpucoll.training.compression import compression_named
from models import Array, Layer

MOMENTUM = 0.9


def optimizer(options: Namespace) -> Any:
    """Return the optimizer of the model; `options.rate` is a function of the number of the step."""
    return training.Adam(options.rate) if options.model == "transformer" else training.SGD(options.rate, MOMENTUM)


def compression(options: Namespace) -> Any:
    """Return the compression named by `--compression`; for none, exact averaging by `--algorithm`."""
    is_exact = options.compression == "none"
    return training.Exact(options.algorithm) if is_exact else compression_named(options.compression)


class Chain:
    """Layers one after another, computed by a strategy on arrays of the module `xp`."""

    def __init__(self, strategy: Any, xp: Any, layers: Sequence[Layer]) -> None:
        self.strategy, self.xp, self.layers = strategy, xp, layers

    def forward(self, x: Array) -> tuple[Array, Any]:
        """Return the output of the last layer, and the data kept by each layer for the backward pass."""
        everything = []
        for layer in self.layers:
            x, kept = self.strategy.forward(self.xp, layer, x)
            everything.append(kept)
        return x, everything

    def backward(self, kept: Any, gradient: Array) -> Array:
        """Return the gradient of the input; the strategy gets the gradients of the weights."""
        for layer, one in zip(reversed(self.layers), reversed(kept), strict=True):
            gradient = self.strategy.backward(self.xp, layer, one, gradient)
        return gradient


class Strategy:
    """The base of the strategies. By default every rank has all weights; `comm` joins the ranks sharing a batch."""

    is_server = False

    def __init__(self, weights: dict[str, Array], comm: Any, options: Namespace) -> None:
        self.weights, self.comm, self.options = weights, comm, options
        self.exposed = 0.0  # seconds spent by the rank in collectives, or waiting

    @contextlib.contextmanager
    def communicating(self, sign: int = 1) -> Iterator[None]:
        """Count the time inside as communication; subtract the time if `sign` is -1."""
        began = time.perf_counter()
        yield
        self.exposed += sign * (time.perf_counter() - began)

    def computing(self, thing: Any, *names: str) -> Any:
        """Return `thing`; its methods `names` count as computing, even inside `communicating`."""
        for name in names:
            setattr(thing, name, self.communicating(-1)(getattr(thing, name)))
        return thing

    def train(self, chain: Chain, x: Array, targets: Array, scale: float) -> Any:
        """Find the gradients of some samples, times `scale`; return the sum of their losses."""
        scores, kept = chain.forward(x)
        loss, gradient = models.loss(chain.xp, scores, targets)
        chain.backward(kept, gradient * scale)
        return chain.xp.asarray(loss).reshape(1)

    def layer(self, names: tuple[str, ...]) -> contextlib.AbstractContextManager[Mapping[str, Array]]:
        """Return a context with the weights of a layer."""
        return contextlib.nullcontext(self.weights)

    def forward(self, xp: Any, layer: Layer, x: Array) -> tuple[Array, Any]:
        with self.layer(layer.names) as w:
            part, kept = layer.forward(xp, w, x)
            return layer.finish(xp, w, x, self.joined(part, layer.ends), kept)

    def backward(self, xp: Any, layer: Layer, kept: Any, dy: Array) -> Array:
        """Return the gradient of the layer's input; pass on the gradients of the weights at once."""
        with self.layer(layer.names) as w:
            part, found = layer.backward(xp, w, kept, dy)
        self.give(layer, found)
        return layer.finish_backward(dy, self.joined(part, layer.begins))

    def joined(self, part: Array, is_divided: bool) -> Array:
        """Return the sum of the parts of a layer over the ranks that divide the layer, if it `is_divided`."""
        return part

    def give(self, layer: Layer, gradients: Mapping[str, Array]) -> None:
        for name in reversed(layer.names):
            with self.communicating():
                self.ready(name, gradients[name])

    def ready(self, name: str, gradient: Array) -> None:
        """Accept the gradient of a weight: the mean over this rank's samples times the rank's share of the batch."""
        raise NotImplementedError

    def step(self) -> None:
        """Change the weights."""
        raise NotImplementedError

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Write a checkpoint; not every strategy has `save` and `load`."""
        raise NotImplementedError

    def load(self, path: Path, settings: Mapping[str, Any]) -> int:
        """Read a checkpoint; return the number of steps at the time of saving."""
        raise NotImplementedError

    def serve(self) -> None:
        """On a server: serve requests until all workers are done."""

    def end(self) -> None:
        """Called after the last step."""
