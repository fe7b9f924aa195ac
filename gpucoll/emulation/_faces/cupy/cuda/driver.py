"""CUDA's driver, as `cupy.cuda.driver`: the errors of CuPy's calls, and the context of a thread."""

from .._machine import MACHINE


class CUDADriverError(RuntimeError):
    def __init__(self, status, words=""):
        super().__init__(f"CUDA_ERROR {status}: {words}")


def ctxGetCurrent():
    """Return an address, or 0 in a thread without use of a GPU."""
    return 0x5000_0000_0000 + MACHINE.device() if MACHINE.has_context() else 0
