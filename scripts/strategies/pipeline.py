"""Pipeline parallel: a stage of layers on each of some ranks, and microbatches; such pipelines divide the batch."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

import models
from gpucoll import training
from strategies import Chain
from strategies.data_parallel import DataParallel

MICROBATCHES = 4


class Pipeline(DataParallel):
    """A rank keeps its stage only; activations go to the rank after, their gradients to the rank before.

    Source: Narayanan et al., arXiv 2104.04473.
    """

    def __init__(self, weights: dict[str, models.Array], comm: Any, options: Namespace) -> None:
        layers = models.MODELS[options.model]()
        starts = [number for number, layer in enumerate(layers) if layer.names]
        stages = max(count for count in range(1, len(starts) + 1) if comm.size % count == 0)
        cuts = [0, *(starts[len(starts) * number // stages] for number in range(1, stages)), len(layers)]
        mesh = training.Mesh(comm, (comm.size // stages, stages), ("data", "stage"))
        self.line, self.everything, self.given = mesh.along("stage"), weights, Counter[str]()
        self.owners = {name: root for root in range(stages) for layer in layers[cuts[root]:cuts[root + 1]]
                       for name in layer.names}
        self.layers = layers[cuts[self.line.rank]:cuts[self.line.rank + 1]]
        super().__init__({name: weights[name] for name, root in self.owners.items() if root == self.line.rank},
                         mesh.along("data"), options)

    def ready(self, name: str, gradient: models.Array) -> None:
        self.given[name] += 1  # the last microbatch's gradient ends the sum
        with self.averages.no_sync() if self.given[name] % MICROBATCHES else self.communicating(0):
            super().ready(name, gradient)

    def train(self, chain: Chain, x: models.Array, targets: models.Array, scale: float) -> Any:
        xp, start, last = chain.xp, 0, self.line.size - 1

        def loss(scores: models.Array, number: int) -> tuple[Any, models.Array]:
            nonlocal start
            start += len(scores)
            value, gradient = models.loss(xp, scores, targets[start - len(scores):start])
            return value, gradient * scale

        with self.communicating():
            stage = self.computing(Chain(self, xp, self.layers), "forward", "backward")
            values = training.Pipeline([stage] * (last + 1), self.line, MICROBATCHES).step(x, loss)
            return self.line.broadcast(sum(values) + xp.zeros(1, self.options.dtype), root=last)

    def end(self) -> None:
        for name, root in self.owners.items():
            self.line.broadcast(self.everything[name], root=root)
        self.weights = self.everything
