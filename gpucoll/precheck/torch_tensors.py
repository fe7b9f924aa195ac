"""Tensors of torch wanted on a GPU, made in host memory: programs for GPUs on virtual ranks of a machine without any.

`torch.cuda` is that of emulated GPUs.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.jit import _builtins
from torch.utils import _device

from gpucoll.emulation import CUPY_FACE, installed, is_installed, torch_cuda

MEMORY_FUNCTIONS = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
NO_EFFECT = ("empty_cache", "init", "manual_seed", "manual_seed_all", "seed", "ipc_collect", "reset_peak_memory_stats",
             "reset_max_memory_allocated", "set_per_process_memory_fraction")
TENSOR_METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "type")


def on_host(value: Any) -> Any:
    """Return the CPU for a device of CUDA, and any other value itself."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


@functools.cache  # TorchScript knows functions by their number, which must not pass to another function
def _hosted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of torch that takes the CPU for each device of CUDA among its arguments."""

    @functools.wraps(function)
    def hosted(*arguments: Any, **options: Any) -> Any:
        return function(*map(on_host, arguments), **{name: on_host(value) for name, value in options.items()})

    operator = _builtins._find_builtin(function)
    if operator is not None:
        _builtins._register_builtin(hosted, operator)
    return hosted


def _without(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """Return a function that drops the options `names`, which tell it of GPUs."""

    @functools.wraps(function)
    def without(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **{name: value for name, value in options.items() if name not in names})

    return without


def replacements(gpus: int) -> list[tuple[Any, str, Any]]:
    """Return the functions of torch to be replaced: owner, name and replacement."""
    if not is_installed() and CUPY_FACE not in sys.modules:  # the program has another CuPy
        with installed(gpus, "quick"):
            importlib.import_module(CUPY_FACE).leave()
    constructors = [function.__name__ for function in _device._device_constructors()] + [
        "empty_like", "full_like", "ones_like", "rand_like", "randn_like", "randint_like", "zeros_like", "load"]
    parallel = torch.nn.parallel.DistributedDataParallel
    hosted = [*((torch, name) for name in constructors if hasattr(torch, name)),
              *((torch.Tensor, name) for name in TENSOR_METHODS), (_device.DeviceContext, "__init__"),
              (DeviceMesh, "__init__"), (torch, "set_default_device")]
    return [
        *((owner, name, _hosted(getattr(owner, name))) for owner, name in hosted),
        *((torch.cuda, name, value) for name, value in torch_cuda.names().items()),
        *((owner, name, lambda self, *_, **__: self)
          for owner, name in ((torch.Tensor, "cuda"), (torch.Tensor, "pin_memory"), (torch.nn.Module, "cuda"))),
        # torch._dynamo wants an object of its own for each name.
        *((torch.cuda, name, lambda *_, **__: None) for name in NO_EFFECT),
        *((torch.cuda, name, lambda *_: 0) for name in MEMORY_FUNCTIONS),
        (torch.cuda, "is_bf16_supported", lambda *_, **__: True), (torch.cuda, "memory_summary", lambda *_, **__: ""),
        (torch.Tensor, "record_stream", lambda *_: None),
        (parallel, "__init__", _without(parallel.__init__, "device_ids", "output_device")),
        (distributed_c10d, "_get_default_timeout", lambda _: distributed_c10d.default_pg_timeout),
        *((module, "init_process_group", _without(distributed_c10d.init_process_group, "device_id"))
          for module in (torch.distributed, distributed_c10d))]
