"""Where arrays live on a GPU: compile the kernels of `gpucoll.kernels` and launch them."""
