"""`bench.training backend`: torch.distributed with the backend "gpucoll" and with Gloo, in turn in one run."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib
from typing import Any

import gpucoll as gc

from .contestants import LeftOutPeer
from .training import MIB, medians

BACKEND_SIZES = (4 << 10, MIB, 16 * MIB)


def measure(comm: gc.Communicator, options: argparse.Namespace) -> list[str]:
    """Return the milliseconds of dist.all_reduce by size, and of a DDP step; raise LeftOut without PyTorch."""
    try:
        import torch
        import torch.distributed as dist
    except ImportError as error:
        raise LeftOutPeer("PyTorch is not installed: pip install torch") from error
    importlib.import_module("gpucoll.torch")  # registers the backend
    torch.set_num_threads(1)
    dist.init_process_group("gpucoll")
    groups = {"gpucoll": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    lines = [f"dist.all_reduce of float32, {comm.size} ranks, PyTorch {torch.__version__}, {options.repeats} repeats",
             f"{'bytes':>12} {'gpucoll ms':>11} {'gloo ms':>9} {'ratio':>6}"]
    for nbytes in BACKEND_SIZES:
        x = torch.zeros(nbytes // 4)
        calls = {name: functools.partial(dist.all_reduce, x, group=group) for name, group in groups.items()}
        lines.append(_line(f"{nbytes:12}", medians(comm, calls, options.repeats)))
    calls = _steps(torch, comm.rank, groups, options)
    times = medians(comm, calls, options.repeats)
    count = options.layers * (options.width + 1) * options.width
    lines += [f"a DDP step, {options.layers} layers of {options.width}, {4 * count / MIB:.1f} MiB of gradients, batch "
              f"{options.batch}", _line(f"{'step':>12}", times)]
    dist.destroy_process_group()
    return lines


def _line(name: str, times: dict[str, float]) -> str:
    return f"{name} {times['gpucoll']:11.3f} {times['gloo']:9.3f} {times['gloo'] / times['gpucoll']:6.2f}"


def _steps(torch: Any, rank: int, groups: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return a training step of the same model for each group."""
    torch.manual_seed(1)
    layers = [(torch.nn.Linear(options.width, options.width), torch.nn.ReLU()) for _ in range(options.layers)]
    plain = torch.nn.Sequential(*(module for layer in layers for module in layer))
    x = torch.randn(options.batch, options.width, generator=torch.Generator().manual_seed(rank))
    bucket = options.bucket_bytes / MIB

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    models = {name: torch.nn.parallel.DistributedDataParallel(copy.deepcopy(plain), process_group=group,
                                                              bucket_cap_mb=bucket)
              for name, group in groups.items()}
    return {name: functools.partial(step, model, torch.optim.SGD(model.parameters(), 0.1))
            for name, model in models.items()}
