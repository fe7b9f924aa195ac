"""What programs on CuPy arrays share."""

import contextlib
import threading

import cupy
import numpy

import gpucoll as gc
import oracle
from pace import seconds

PATIENCE = seconds(60)


@contextlib.contextmanager
def held(stream):
    """Inside, nothing that is enqueued on the stream begins: what waits for it would wait for ever."""
    gate = threading.Event()
    stream.launch_host_func(lambda _: gate.wait(PATIENCE / 4), None)
    try:
        yield
    finally:
        gate.set()


def refused(code, call, *arguments, **options):
    """The words of the error of ours, with this code, that the call raises; none where it raises none."""
    try:
        call(*arguments, **options)
    except gc.GpucollError as error:
        if error.code != code:
            raise
        return str(error) or code
    return ""


def same(found, expected):
    assert isinstance(found, cupy.ndarray), type(found)
    cupy.cuda.get_current_stream().synchronize()  # a copy that waits lets no other thread make an event
    host = found.get()
    assert oracle.same_bits(host, expected), (host, expected)


def ranges(comm, count, factor=1):
    """What every rank gives: float32, exact in any sum."""
    return [numpy.arange(count, dtype=numpy.float32) * factor + rank for rank in range(comm.size)]


def ramp(comm, count, factor=1):
    """This rank's, made by kernels on the current stream."""
    return cupy.arange(count, dtype=numpy.float32) * numpy.float32(factor) + numpy.float32(comm.rank)


def raising(error, before=lambda: None):
    def call(*_):
        before()
        raise error

    return call


class Foreign:
    """Another library's array: DLPack only. It gives its memory in the order of the stream that it is asked for."""

    def __init__(self, array, stream):
        self._array, self._stream, self.asked = array, stream, []

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        self.asked.append(stream)
        with self._stream:
            return self._array.__dlpack__(stream=stream, max_version=max_version)


def called_before(comm):
    """A producer's stream and ours, on which the call that follows has been made before; and its result."""
    theirs, ours = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    total = sum(ranges(comm, 900, 3))
    with ours:
        same(comm.all_reduce(ramp(comm, 900, 3), algorithm="tree"), total)
    return theirs, ours, total
