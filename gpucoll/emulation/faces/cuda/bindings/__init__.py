"""A stand-in for NVIDIA's package cuda-bindings: the driver's functions used by gpucoll."""
