"""A program of a user: data-parallel training in CuPy, the update by a fused kernel. Each rank prints its error.

    mpiexec -n 8 gpucoll emulate --gpus 8 --temper quick tests/programs/cupy_training.py
"""

import sys

import cupy
import numpy

import gpucoll as gc

STEPS, ROWS, WIDTH, RATE, MOMENTUM = 100, 64, 32, 0.01, 0.9
UPDATE = cupy.RawKernel(r"""
extern "C" __global__ void update(float* weights, float* speed, const float* gradient, float rate, float momentum,
                                  int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        speed[i] = momentum * speed[i] + gradient[i];
        weights[i] -= rate * speed[i];
    }
}
""", "update")


def data(rank):
    """Return the inputs of a rank and the outputs of the model that the training has to find."""
    x = numpy.random.default_rng(rank).standard_normal((ROWS, WIDTH)).astype(numpy.float32)
    return x, x @ numpy.linspace(-1, 1, WIDTH, dtype=numpy.float32)


def expected(size):
    """Return the weights after a training on the data of all ranks by NumPy."""
    weights, speed, parts = numpy.zeros(WIDTH), numpy.zeros(WIDTH), [data(rank) for rank in range(size)]
    for _ in range(STEPS):
        speed = MOMENTUM * speed + sum(x.T @ (x @ weights - y) for x, y in parts) * (2 / ROWS / size)
        weights -= RATE * speed
    return weights


with gc.init() as comm:
    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    x, y = map(cupy.asarray, data(comm.rank))
    weights = comm.broadcast(cupy.zeros(WIDTH, cupy.float32) + comm.rank, 0)
    speed = cupy.zeros_like(weights)
    for _ in range(STEPS):
        gradient = x.T @ (x @ weights - y) * numpy.float32(2 / ROWS)
        comm.all_reduce(gradient, gradient, op="avg")
        UPDATE((1,), (WIDTH,), (weights, speed, gradient, numpy.float32(RATE), numpy.float32(MOMENTUM),
                                numpy.int32(WIDTH)))
    error = float(abs(cupy.asnumpy(weights) - expected(comm.size)).max())
    sys.stdout.write(f"rank {comm.rank} of {comm.size}: {error < 1e-4}\n")
