"""ZeRO, stages 1 to 3: the optimizer's state, also the gradients, also the weights are divided over ranks."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import records
from gpucoll import training
from models import Array
from strategies import Strategy, compression, optimizer


class ZeRO(Strategy):
    """b + b + k bytes become 2 b + k / P, b + (b + k) / P or (2 b + k) / P; see `gpucoll.training.zero`."""

    def __init__(self, weights: dict[str, Array], comm: Any, options: Namespace) -> None:
        super().__init__({}, comm, options)
        self.given = weights if options.resume else None  # read into by `load`; otherwise stage 3 frees the weights
        self.stage = int(options.strategy[-1])
        rule = self.computing(optimizer(options), "step")
        self.parts = training.ZeRO(weights, comm, rule, self.stage, self._shorter())

    def _shorter(self) -> Any:
        return None if self.options.compression == "none" else compression(self.options)

    @contextlib.contextmanager
    def layer(self, names: tuple[str, ...]) -> Iterator[Mapping[str, Array]]:
        if not names:
            yield {}
            return
        with contextlib.ExitStack() as stack:
            with self.communicating():
                weights = stack.enter_context(self.parts.layer(names))
            yield weights

    def ready(self, name: str, gradient: Array) -> None:
        self.parts.ready(name, gradient)

    def step(self) -> None:
        with self.communicating():
            self.parts.step()

    def save(self, path: Path, settings: Mapping[str, Any]) -> None:
        records.on_first(self.comm, lambda: path.mkdir(exist_ok=True))
        records.on_first(self.comm, lambda: (path / records.SETTINGS).write_text(json.dumps(settings)))
        self.parts.save(path)

    def load(self, path: Path, settings: Mapping[str, Any]) -> int:
        records.on_first(self.comm, lambda: records.check_settings(path, settings))
        self.parts = training.ZeRO.load(path, self.comm, self.computing(optimizer(self.options), "step"), self.stage,
                                        self._shorter(), parameters=self.given)
        self.given = None
        return self.parts.optimizer.steps
