"""`bench.training ddp`: the same PyTorch model trained over gpucoll and by DistributedDataParallel over Gloo."""

from __future__ import annotations

import argparse
import copy
import functools
from collections.abc import Callable
from typing import Any

import gpucoll as gc
from gpucoll.training import DataParallel

from .contestants import gloo
from .training import MIB, medians


def measure(comm: gc.Communicator, options: argparse.Namespace) -> list[str]:
    """Return the step time of each contestant, and its part beyond computing; raise LeftOut without PyTorch.

    All contestants compute the same model and backward pass, with one thread each. gpucoll and "ddp, views" leave the
    means in their buckets; "ddp", the default of DDP, copies the means back. The time of the plain model is subtracted.
    """
    dist = gloo(comm)
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(1)
    layers = [(torch.nn.Linear(options.width, options.width), torch.nn.ReLU()) for _ in range(options.layers)]
    plain = torch.nn.Sequential(*(module for layer in layers for module in layer))
    x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(comm.rank))
    ours, finish = averaged(torch, copy.deepcopy(plain), comm, options.bucket_bytes)
    theirs = {name: DistributedDataParallel(copy.deepcopy(plain), bucket_cap_mb=options.bucket_bytes / MIB,
                                            gradient_as_bucket_view=is_view)
              for name, is_view in (("ddp", False), ("ddp, views", True))}

    def step(model: Any) -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    def over_gpucoll() -> None:
        step(ours)
        finish()

    calls = {name: functools.partial(step, model) for name, model in theirs.items()}
    times = medians(comm, {"compute": lambda: step(plain), "gpucoll": over_gpucoll, **calls}, options.repeats)
    for model in theirs.values():
        for mine, other in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    dist.destroy_process_group()
    count = sum(weight.numel() for weight in plain.parameters())
    rest = {name: times[name] - times["compute"] for name in ("gpucoll", *theirs)}
    return [f"{options.layers} layers of {options.width}, {count} parameters of float32, batch {options.batch}, "
            f"{comm.size} ranks, PyTorch {torch.__version__}, {options.repeats} repeats",
            f"{'':12} {'step ms':>9} {'compute ms':>11} {'communication ms':>17}",
            *(f"{name:12} {times[name]:9.2f} {times['compute']:11.2f} {ms:17.2f}" for name, ms in rest.items()),
            *(f"communication, {name} / gpucoll {rest[name] / rest['gpucoll']:.2f}" for name in theirs)]


def averaged(torch: Any, model: Any, comm: gc.Communicator, bucket_bytes: int) -> tuple[Any, Callable[[], None]]:
    """Return the model, with gradients passed to gpucoll during backward, and a function waiting for the means."""
    parameters = dict(model.named_parameters())
    trainer = DataParallel(parameters, comm, bucket_bytes)
    means = {name: torch.from_numpy(array) for name, array in trainer.gradients.items()}

    def ready(name: str, parameter: Any) -> None:
        trainer.ready(name, parameter.grad)
        parameter.grad = means[name]

    for name, parameter in parameters.items():
        parameter.register_post_accumulate_grad_hook(functools.partial(ready, name))
    return model, trainer.finish
