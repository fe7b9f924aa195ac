"""NVIDIA's package cuda-bindings on emulated GPUs: the driver's functions used by gpucoll."""
