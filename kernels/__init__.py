"""The device code: CUDA C++ that NVRTC compiles for GPUs and g++ for CPUs; installed as `gpucoll.kernels`."""
