"""A step of training x @ up @ down by each strategy of `gpucoll.training`, and the bytes kept by a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gpucoll as gc
from gpucoll.training import Adam, DataParallel, Linear, Mesh, ParameterServer, ZeRO, shard

StepCall = Callable[[], None]


class Watched(Adam):
    """Adam, recording the bytes kept by the rank at the step."""

    memory: Callable[[], Mapping[str, int]] | None = None  # returns the bytes kept; None: count the arrays here
    kept: int = 0

    def step(self, parameters: Mapping[str, Any], gradients: Mapping[str, Any]) -> None:
        super().step(parameters, gradients)
        counted = nbytes(parameters) + nbytes(gradients) + self.nbytes
        self.kept = counted if self.memory is None else sum(self.memory().values())

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(map(nbytes, self.state.values()))


def nbytes(arrays: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in arrays.values())


def gradients(up: Any, down: Any, x: Any) -> dict[str, Any]:
    """Return the gradients of |x up down - x|**2 / 2, the mean over samples, in the order of a backward pass."""
    error = (x @ up @ down - x) / len(x)
    return {"down": (x @ up).T @ error, "up": x.T @ (error @ down.T)}


def data_parallel(comm: gc.Communicator, weights: Any, adam: Watched, x: Any) -> StepCall:
    trainer = DataParallel(weights, comm)

    def step() -> None:
        for name, gradient in gradients(**weights, x=x).items():
            trainer.ready(name, gradient)
        trainer.finish()
        adam.step(weights, trainer.gradients)

    return step


def zero(stage: int) -> Callable[..., StepCall]:
    def begin(comm: gc.Communicator, weights: Any, adam: Watched, x: Any) -> StepCall:
        trainer = ZeRO(weights, comm, adam, stage)
        adam.memory = trainer.memory

        def step() -> None:
            for names in ("up", "down"):  # forward: stage 3 gathers each layer; backward gathers both again
                with trainer.layer(names):
                    pass
            with trainer.layer("down") as down, trainer.layer("up") as up:
                found = gradients(**up, **down, x=x)
            for name, gradient in found.items():
                trainer.ready(name, gradient)
            trainer.step()

        return step

    return begin


def linear(comm: gc.Communicator, weights: Any, adam: Watched, x: Any) -> StepCall:
    mesh = Mesh(comm, (comm.size,), ("model",))
    up, down = (Linear(shard(weights[name], mesh, spec)) for name, spec in (("up", (None, "model")),
                                                                            ("down", ("model", None))))
    given = shard(x, mesh, (None, None))

    def step() -> None:
        error = (down.forward(up.forward(given)).local - x) / len(x)
        by_hidden, by_down = down.backward(shard(error, mesh, (None, None)))
        by_up = up.backward(by_hidden)[1]
        adam.step({"up": up.weight.local, "down": down.weight.local}, {"up": by_up.local, "down": by_down.local})

    return step


def worker(place: ParameterServer, x: Any) -> StepCall:
    def step() -> None:
        place.push(gradients(**place.pull(), x=x))

    return step
