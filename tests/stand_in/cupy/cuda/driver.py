"""CUDA's driver: its errors."""


class CUDADriverError(RuntimeError):
    """An error of a call of CUDA's driver."""

    def __init__(self, status, words=""):
        self.status = status
        super().__init__(f"CUDA_ERROR {status}: {words}")
