"""CUDA's driver: its errors, and the context of a thread."""

from .._machine import MACHINE


class CUDADriverError(RuntimeError):
    def __init__(self, status, words=""):
        super().__init__(f"CUDA_ERROR {status}: {words}")


def ctxGetCurrent():
    """An address, 0 in a thread that has not used a GPU."""
    return 0x5000_0000_0000 + MACHINE.device() if MACHINE.has_context() else 0
