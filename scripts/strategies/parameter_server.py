"""Parameter servers: the last ranks keep the weights; the other ranks pull weights and push gradients."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from gpucoll import training
from models import Array
from records import Refusal
from strategies import Strategy, optimizer


class ParameterServer(Strategy):
    """b bytes to and from each of M workers in a step, M b / N to and from each of N servers."""

    def __init__(self, weights: dict[str, Array], comm: Any, options: Namespace) -> None:
        if comm.size <= options.servers:
            raise Refusal(f"--strategy parameter_server: {comm.size} ranks are {options.servers} servers and no worker")
        if options.compression != "none":
            raise Refusal("--strategy parameter_server sends gradients as they are: no --compression")
        self.place = training.ParameterServer(weights, comm, options.servers, optimizer(options), options.staleness)
        self.is_server = self.place.is_server
        super().__init__(weights, comm.split(int(self.is_server)), options)
        self.found: dict[str, Array] = {}
        self.is_fresh = False

    def layer(self, names: tuple[str, ...]) -> Any:
        if not self.is_fresh and not self.is_server:
            with self.communicating():
                self.place.pull()
            self.is_fresh = True
        return super().layer(names)

    def ready(self, name: str, gradient: Array) -> None:
        self.found[name] = gradient

    def step(self) -> None:
        with self.communicating():
            self.place.push(self.found)
        self.is_fresh = False

    def serve(self) -> None:
        self.place.serve()

    def end(self) -> None:
        self.place.pull()
        self.place.done()
        self.is_fresh = True
