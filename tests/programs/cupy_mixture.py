"""Random programs in CuPy with collectives, on several streams in the right order; each rank prints its wrong results.

    mpiexec -n 2 gpucoll emulate --gpus 2 tests/programs/cupy_mixture.py FIRST COUNT

Every step has a twin in NumPy on the arrays of all ranks, as every rank draws the same steps. Arrays are dropped at
once: their memory serves later steps while the work that uses it is under way.
"""

import random
import sys

import cupy
import numpy

import gpucoll as gc

LENGTH, ARRAYS, STEPS = 48, 4, 40
AXPY = cupy.RawKernel(r"""
extern "C" __global__ void axpy(long long* y, const long long* x, long long a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
""", "axpy")
COMBINED = cupy.ElementwiseKernel("int64 x, int64 y", "int64 z", "z = x % 1009 * 3 + y % 1009", "combined")
TOTAL = cupy.ReductionKernel("int64 x", "int64 y", "x % 1009", "a + b", "y = a", "0", "total")


def axpy(x, y, factor):
    out, given = y + 0, x * 1
    AXPY((3,), (16,), (out, given, numpy.int64(factor), numpy.int32(LENGTH)))
    return out


# By name: a step on two arrays x and y of a rank by a factor, and the same by NumPy.
LOCAL = {
    "add": (lambda x, y, a: (x + y * a) % 1000003,) * 2,
    "temporaries": (lambda x, y, a: (x * 2 + (y - a)) % 1000003,) * 2,
    "kernel": (lambda x, y, a: axpy(y, x, a), lambda x, y, a: x + a * y),
    "elementwise": (lambda x, y, a: COMBINED(x, y), lambda x, y, a: x % 1009 * 3 + y % 1009),
    "total": (lambda x, y, a: x % 1009 + TOTAL(y), lambda x, y, a: x % 1009 + (y % 1009).sum()),
    "where": (lambda x, y, a: cupy.where(x % 2 == 0, x, y), lambda x, y, a: numpy.where(x % 2 == 0, x, y)),
    "join": (lambda x, y, a: cupy.concatenate([x[:a], y[a:]]), lambda x, y, a: numpy.concatenate([x[:a], y[a:]])),
    "sort": (lambda x, y, a: cupy.sort(x), lambda x, y, a: numpy.sort(x)),
    "upload": (lambda x, y, a: x % 1009 + cupy.asarray(numpy.full(LENGTH, a)), lambda x, y, a: x % 1009 + a),
}


def reduced(comm, x, y, algorithm):
    return comm.all_reduce(x % 1009, algorithm=algorithm)


def reduced_in_place(comm, x, y, algorithm):
    given = x % 1009
    return comm.all_reduce(given, given, algorithm=algorithm)


def reduced_later(comm, x, y, algorithm):
    work, other = comm.all_reduce(x % 1009, algorithm=algorithm, async_op=True), y * 2
    return work.wait() + other


def gathered(comm, x, y, algorithm):
    return comm.all_gather(x[:LENGTH // comm.size] + 0).reshape(-1) + y[0]


def sent(comm, x, y, algorithm):
    out = cupy.empty(LENGTH, cupy.int64)
    comm.sendrecv(x * 1, out, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)
    return out


def grouped(comm, x, y, algorithm):
    out = cupy.empty(LENGTH, cupy.int64)
    with comm.group():
        comm.recv(out, (comm.rank - 1) % comm.size)
        total = comm.all_reduce(y % 7, algorithm=algorithm)
        comm.send(x * 1, (comm.rank + 1) % comm.size)
    return out + total


def gathered_by_numpy(xs, ys):
    return [numpy.concatenate([x[:LENGTH // len(xs)] for x in xs]) + y[0] for y in ys]


# A step of all ranks, and the results of all ranks by NumPy.
COMMON = {
    "reduce": (reduced, lambda xs, ys: [sum(x % 1009 for x in xs)] * len(xs)),
    "in place": (reduced_in_place, lambda xs, ys: [sum(x % 1009 for x in xs)] * len(xs)),
    "later": (reduced_later, lambda xs, ys: [sum(x % 1009 for x in xs) + 2 * y for y in ys]),
    "gather": (gathered, gathered_by_numpy),
    "send": (sent, lambda xs, ys: [xs[rank - 1] for rank in range(len(xs))]),
    "group": (grouped, lambda xs, ys: [xs[rank - 1] + sum(y % 7 for y in ys) for rank in range(len(xs))]),
}


def wrong(comm, seed):
    """Run a program; return the steps after which an array was looked at and was wrong."""
    draw, found = random.Random(seed), []
    hosts = [[numpy.arange(LENGTH) * (rank + 1) + number for number in range(ARRAYS)] for rank in range(comm.size)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    stream = streams[0]
    with stream:
        arrays = [cupy.asarray(host) for host in hosts[comm.rank]]
    for step in range(STEPS):
        name = draw.choice([*LOCAL, *COMMON, "look", "stream"])
        i, j, factor = draw.randrange(ARRAYS), draw.randrange(ARRAYS), draw.randrange(1, 5)
        algorithm, following = draw.choice(("ring", "tree", "auto")), draw.choice(streams)
        with stream:
            if name in LOCAL:
                arrays[i] = LOCAL[name][0](arrays[i], arrays[j], factor)
                for own in hosts:
                    own[i] = LOCAL[name][1](own[i], own[j], factor)
            elif name in COMMON:
                arrays[i] = COMMON[name][0](comm, arrays[i], arrays[j], algorithm)
                results = COMMON[name][1]([own[i] for own in hosts], [own[j] for own in hosts])
                for own, result in zip(hosts, results, strict=True):
                    own[i] = result
            elif name == "look" and not numpy.array_equal(cupy.asnumpy(arrays[i]), hosts[comm.rank][i]):
                found.append((seed, step))
        if name == "stream":
            following.wait_event(stream.record())
            stream = following
    with stream:
        found += [(seed, "end") for array, host in zip(arrays, hosts[comm.rank], strict=True)
                  if not numpy.array_equal(cupy.asnumpy(array), host)]
    return found


if __name__ == "__main__":
    first, count = map(int, sys.argv[1:])
    with gc.init(timeout=60) as comm:
        cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
        seen = [one for seed in range(first, first + count) for one in wrong(comm, seed)]
        sys.stdout.write(f"rank {comm.rank}: wrong {seen}\n")
