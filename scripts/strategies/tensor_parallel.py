"""Tensor parallel: two ranks divide the weights of each pair of layers, and pairs of ranks divide the batch."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from gpucoll import training
from models import MODELS, Array
from records import Refusal
from strategies.data_parallel import DataParallel


class TensorParallel(DataParallel):
    """One sum of activations for each pair of layers in the forward pass, and one in the backward pass.

    Gradients are averaged over the pairs of ranks, as in data parallel training over the ranks.

    Source: Shoeybi et al., arXiv 1909.08053.
    """

    def __init__(self, weights: dict[str, Array], comm: Any, options: Namespace) -> None:
        if options.compression != "none" and comm.size < 3:
            raise Refusal("--strategy tensor_parallel: two ranks send no gradients that --compression could shorten")
        model = 2 if comm.size % 2 == 0 else 1
        mesh = training.Mesh(comm, (comm.size // model, model), ("data", "model"))
        self.pair = mesh.along("model")
        cut = {name: axis for layer in MODELS[options.model]() for name, axis in layer.cut.items()}
        for name, weight in weights.items():
            comm.broadcast(weight, root=0)
            spec = tuple("model" if axis == cut.get(name) else None for axis in range(weight.ndim))
            weights[name] = training.shard(weight, mesh, spec).local
        super().__init__(weights, mesh.along("data"), options)

    def joined(self, part: Array, is_divided: bool) -> Array:
        if not is_divided:
            return part
        with self.communicating():
            return self.pair.all_reduce(part)
