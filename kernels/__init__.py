"""The C++ and CUDA sources, installed as `gpucoll.kernels`; includes are written from this folder.

    device     CUDA C++ that NVRTC compiles for GPUs and g++ for CPUs
    emulation  GPUs on the CPU: blocks of threads as fibers
    engine     the engine of calls inside a node, without Python
    binding    the Python modules `_engine` and `_ucx`
"""
