"""Data parallel: every rank has all weights and the optimizer's state; gradients are averaged in buckets."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import records
from gpucoll import training
from models import Array
from strategies import Strategy, compression, optimizer


class DataParallel(Strategy):
    """Sends 2 (P - 1) / P bytes for each byte of weights, and keeps 1 + 1 + k bytes, k for the optimizer."""

    def __init__(self, weights: dict[str, Array], comm: Any, options: Namespace) -> None:
        super().__init__(weights, comm, options)
        self.averages = training.DataParallel(weights, comm, compression=compression(options))
        self.rule = optimizer(options)

    def ready(self, name: str, gradient: Array) -> None:
        self.averages.ready(name, gradient)

    def step(self) -> None:
        with self.communicating():
            self.averages.finish()
        self.rule.step(self.weights, self.averages.gradients)

    def arrays(self) -> dict[str, Array]:
        """Return the contents of a checkpoint, by name."""
        found = {f"weight/{name}": weight for name, weight in self.weights.items()}
        return found | {f"{kind}/{name}": row for name, weight in self.weights.items()
                        for kind, row in self.rule.state_of(name, weight).items()}

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        records.on_first(self.comm, lambda: records.write_checkpoint(path, self.arrays(), self.rule.steps, settings))

    def load(self, path: Path, settings: Mapping[str, Any]) -> int:
        found = records.on_first(self.comm, lambda: records.read_checkpoint(path, self.arrays(), settings)) or 0
        for array in self.arrays().values():
            self.comm.broadcast(array, root=0)
        self.rule.steps = self.comm.broadcast_object(found)
        return int(self.rule.steps)
