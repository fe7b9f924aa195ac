"""Functions of the CUDA driver missing in CuPy."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from gpucoll.device.packages import library

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: calls of the thread never invalidate a capture


def exchange_capture_mode(mode: int) -> int:
    """Set the capture mode of the calling thread by cuThreadExchangeStreamCaptureMode; return the former mode."""
    value = ctypes.c_int(mode)
    _library().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@functools.cache
def _library() -> Any:
    return library("libcuda.so.1")
