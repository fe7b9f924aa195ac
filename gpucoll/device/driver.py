"""Calls of CUDA's driver that CuPy does not have."""

from __future__ import annotations

import ctypes
import functools

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: the calls of a thread have nothing to do with captures


def exchange_capture_mode(mode: int) -> int:
    """Set the capture mode of the calling thread; return the former one. cuThreadExchangeStreamCaptureMode."""
    value = ctypes.c_int(mode)
    _library().cuThreadExchangeStreamCaptureMode(ctypes.byref(value))
    return value.value


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
