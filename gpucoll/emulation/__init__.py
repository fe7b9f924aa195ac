"""GPUs on the host: programs for CuPy, with kernels of their own and NCCL, run where there is no GPU.

    _faces/cupy   what `import cupy` finds: arrays in host memory, streams, events, pools, NCCL, kernels by g++
    _faces/cupyx  the parts of cupyx that programs use
    _faces/cuda   CUDA's driver, as the package cuda-bindings has it
    command      `gpucoll emulate`
    plugin       pytest's option `--emulate-gpus`
    host_arrays  the GPU of NumPy arrays, with GPUCOLL_DEVICE=emulated
    torch_cuda   torch.cuda, for tensors in host memory

Times mean nothing here. What has no counterpart on the host raises UsageError (GC-EMULATION) that names it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from gpucoll.errors import ArgumentError, UsageError

FACES = Path(__file__).resolve().parent / "_faces"
TEMPERS = ("strict", "quick")
MOST_DEVICES = 4096
CUPY_FACE = f"{__name__}._faces.cupy"  # the machine where `import cupy` does not find it


def install(gpus: int = 1, temper: str = "strict", seed: int = 0) -> None:
    """Make `import cupy` find emulated GPUs, in this process and in its children.

    Call it before the import.

    Parameters
    ----------
    gpus : int, optional
        The number of GPUs that every process sees.
    temper : {"strict", "quick"}, optional
        "strict" does the work of streams late and in a random order, reuses memory as soon as a GPU might, and raises
        an error where two streams use the same memory without order. "quick" does all work at once.
    seed : int, optional
        Of the random order.

    Raises
    ------
    ArgumentError
        Another temper or number (GC-EMULATION).
    UsageError
        This process has imported another CuPy (GC-EMULATION).

    Examples
    --------
    >>> from gpucoll import emulation
    >>> emulation.install(gpus=0)
    Traceback (most recent call last):
    gpucoll.errors.ArgumentError: [GC-EMULATION] gpus=0 is not a number of GPUs in 1..4096
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= MOST_DEVICES:
        raise ArgumentError(f"gpus={gpus!r} is not a number of GPUs in 1..{MOST_DEVICES}", code="GC-EMULATION")
    if temper not in TEMPERS:
        raise ArgumentError(f"temper={temper!r} is not one of {', '.join(TEMPERS)}", code="GC-EMULATION")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentError(f"seed={seed!r} is not a whole number", code="GC-EMULATION")
    if CUPY_FACE in sys.modules:
        raise UsageError("this process has emulated a GPU for NumPy arrays; call gpucoll.emulation.install first",
                         code="GC-EMULATION")
    if "cupy" in sys.modules and not is_installed():
        raise UsageError("this process has imported another CuPy; call gpucoll.emulation.install before `import cupy`",
                         code="GC-EMULATION")
    _put(gpus, temper, seed)


def _put(gpus: int, temper: str, seed: int = 0) -> None:
    places = os.pathsep.join(filter(None, [str(FACES), os.environ.get("PYTHONPATH")]))
    os.environ |= {"EMULATED_GPUS": str(gpus), "EMULATED_SEED": str(seed), "EMULATED_TEMPER": temper,
                   "EMULATED_PEERS": "1", "PYTHONPATH": places,
                   "EMULATED_RULES": "hostile" if temper == "strict" else ""}
    if str(FACES) not in sys.path:
        sys.path.insert(0, str(FACES))


def is_installed() -> bool:
    """Return whether `import cupy` has found, or will find, emulated GPUs.

    Returns
    -------
    bool
        True after `install`.

    See Also
    --------
    install : Installs them.

    Examples
    --------
    >>> from gpucoll import emulation
    >>> emulation.is_installed() in (True, False)
    True
    """
    found = sys.modules.get("cupy")  # perhaps by a link to the faces
    return str(FACES) in map(os.path.realpath, [f"{found.__file__}/../.."] if found else sys.path)


def machine() -> Any:
    """Return the CuPy of emulated GPUs: the program's, or that of gpucoll alone."""
    return importlib.import_module("cupy" if is_installed() else CUPY_FACE)


def on_host(value: Any) -> Any:
    """Return the NumPy array on the memory of an array of an emulated GPU, any other value unchanged."""
    return getattr(value, "_host", value)


@contextlib.contextmanager
def installed(gpus: int, temper: str) -> Iterator[None]:
    """Do as `install` inside of the block, and then leave all as before, so that another CuPy may be imported."""
    places, variables, modules = [*sys.path], dict(os.environ), _modules()
    for name in modules:
        del sys.modules[name]
    try:
        _put(gpus, temper)
        yield
    finally:
        found = sys.modules.get("cupy")
        if found is not None:
            found.leave()
        for name in _modules():
            del sys.modules[name]
        sys.modules.update(modules)
        sys.path[:] = places
        for name in [name for name in os.environ if name == "PYTHONPATH" or name.startswith("EMULATED_")]:
            os.environ.pop(name, None)
        os.environ |= variables


def _modules() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items()
            if name.partition(".")[0] in ("cupy", "cupyx") or name.startswith("cuda.bindings")}
