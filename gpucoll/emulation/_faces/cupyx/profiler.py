"""`cupyx.profiler`: the results have the right form; their times mean nothing."""

import contextlib
import time

import cupy
import numpy


class PerfCaseResult:
    def __init__(self, name, cpu_times, gpu_times):
        self.name, self.cpu_times, self.gpu_times = name, cpu_times, gpu_times

    def to_str(self, show_gpu=False):
        cpu, gpu = (1e6 * times.mean() for times in (self.cpu_times, self.gpu_times))
        return f"{self.name:<20}: CPU: {cpu:9.3f} us GPU-0: {gpu:9.3f} us"

    __str__ = __repr__ = to_str


def benchmark(func, args=(), kwargs=None, n_repeat=10000, *, name=None, n_warmup=10, max_duration=float("inf"),
              devices=None):
    """Call a function `n_warmup` and at most `n_repeat` times, and return the durations."""
    for _ in range(n_warmup):
        func(*args, **(kwargs or {}))
    cpu, gpu, began = [], [], time.perf_counter()
    while len(cpu) < n_repeat and (not cpu or time.perf_counter() < began + max_duration):
        started = time.perf_counter()
        func(*args, **(kwargs or {}))
        cpu.append(time.perf_counter() - started)
        cupy.cuda.runtime.deviceSynchronize()
        gpu.append(time.perf_counter() - started)
    return PerfCaseResult(name or func.__name__, numpy.array(cpu), numpy.array([gpu]))


@contextlib.contextmanager  # which also serves as a decorator
def time_range(message=None, color_id=None, argb_color=None, sync=False):
    yield


profile = contextlib.nullcontext
