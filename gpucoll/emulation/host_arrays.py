"""The GPU of NumPy arrays, with GPUCOLL_DEVICE=emulated: the entry point "emulated" of the group "gpucoll.devices".

In a program on emulated GPUs it is one of these. In any other program each process has a GPU, found by gpucoll alone:
`import cupy` finds the installed CuPy, or none.
"""

from __future__ import annotations

from typing import Any

from gpucoll.emulation import CUPY_FACE, machine

_cupy: Any = machine()


def device(ordinal: int | None) -> Any:
    """Return the GPU of a communicator; `ordinal` is the rank's GPU in the program's CuPy, or None."""
    return _cupy.numpy_device(0 if ordinal is None or _cupy.__name__ == CUPY_FACE else ordinal)
