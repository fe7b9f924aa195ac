"""Helpers shared by programs on CuPy arrays."""

import contextlib
import threading

import cupy
import numpy

import gpucoll as gc
from harness.pace import seconds
from oracles import oracle

PATIENCE = seconds(60)


@contextlib.contextmanager
def held(stream):
    """Inside, no work enqueued on the stream begins before the event is set; a wait for this work would never end."""
    gate = threading.Event()
    stream.launch_host_func(lambda _: gate.wait(PATIENCE / 4), None)
    try:
        yield gate
    finally:
        gate.set()


def refused(code, call, *arguments, **options):
    """Return the words of the GpucollError with this code raised by the call; "" without an error."""
    try:
        call(*arguments, **options)
    except gc.GpucollError as error:
        if error.code != code:
            raise
        return str(error) or code
    return ""


def same(found, expected):
    assert isinstance(found, cupy.ndarray), type(found)
    cupy.cuda.get_current_stream().synchronize()  # a waiting copy would keep other threads from creating events
    host = found.get()
    assert oracle.same_bits(host, expected), (host, expected)


def ranges(comm, count, factor=1):
    """Return the inputs of all ranks: float32, exact in any sum."""
    return [numpy.arange(count, dtype=numpy.float32) * factor + rank for rank in range(comm.size)]


def ramp(comm, count, factor=1):
    """Return this rank's input, made by kernels on the current stream."""
    return cupy.arange(count, dtype=numpy.float32) * numpy.float32(factor) + numpy.float32(comm.rank)


def raising(error, before=lambda: None):
    def call(*_):
        before()
        raise error

    return call


class Foreign:
    """Another library's array: DLPack only. The memory follows the order of the requested stream."""

    def __init__(self, array, stream):
        self._array, self._stream, self.asked = array, stream, []

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.asked.append(stream)
        with self._stream:
            return self._array.__dlpack__(stream=stream, max_version=max_version)


def called_before(comm):
    """Return a producer's stream, our stream with the next call already made once, and the result of the call."""
    theirs, ours = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    total = sum(ranges(comm, 900, 3))
    with ours:
        same(comm.all_reduce(ramp(comm, 900, 3), algorithm="tree"), total)
    return theirs, ours, total
