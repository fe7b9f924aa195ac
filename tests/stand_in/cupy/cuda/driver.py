"""CUDA's driver: its errors."""


class CUDADriverError(RuntimeError):
    def __init__(self, status, words=""):
        super().__init__(f"CUDA_ERROR {status}: {words}")
