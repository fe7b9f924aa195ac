"""PyTorch for CPUs on emulated GPUs: the backend "gpucoll" takes all tensors for tensors on a GPU, and follows streams.

    python -m gpu.torch_streams SEEDS program arguments ...     # SEEDS times, each in another order of the streams

A program of PyTorch runs unchanged, on the CPU. Its own operations are launches for which the host waits, as with
CUDA_LAUNCH_BLOCKING=1, and so is its wait for another stream. All work of the backend is enqueued on streams of the
machine: what the backend fails to order after or before the program's work works on old data. The rank's GPU is not
the one of the rank's number.
"""

import contextlib
import os
import random
import runpy
import sys
import threading
import types

import cupy
import numpy
import torch
from cupy import _dlpack, _memory
from cupy._machine import MACHINE

import gpucoll.torch
from gpucoll.device.cuda import CurrentDevice
from gpucoll.launch import launchers
from gpucoll.torch import group, handles

METHODS = """broadcast allreduce allreduce_coalesced reduce all_gather_single all_gather_single_coalesced allgather
    reduce_scatter_single reduce_scatter_single_coalesced allgather_coalesced gather scatter reduce_scatter alltoall
    all_to_all_single send recv _allgather_base _reduce_scatter_base alltoall_base allgather_into_tensor_coalesced
    reduce_scatter_tensor_coalesced""".split()
GPU = torch.device("cuda", (int(os.environ["RANK"]) + 1) % MACHINE.devices)
ON_GPU = CurrentDevice(GPU.index)
_memory.foreign.append("PyTorch's")


class Event:
    def __init__(self, stream):
        with ON_GPU:
            self._event = stream.record()

    def query(self):
        return self._event.done


class Stream:
    device = GPU

    def __init__(self, device=GPU):
        assert torch.device(device) == GPU
        with ON_GPU:
            self.own = cupy.cuda.Stream(non_blocking=True)
        self.cuda_stream = self.own.ptr

    def __cuda_stream__(self):
        return 0, self.cuda_stream

    def record_event(self):
        return Event(self.own)

    def wait_event(self, event):
        with ON_GPU:
            self.own.wait_event(event._event)

    def wait_stream(self, other):
        self.wait_event(other.record_event())


DEFAULT = Stream()
_local = threading.local()


def current_stream(device=None):
    return getattr(_local, "stream", DEFAULT)


@contextlib.contextmanager
def in_stream(stream):
    before, _local.stream = current_stream(), stream
    try:
        yield
    finally:
        _local.stream = before


def synchronize(device=None):
    """Wait for a GPU, as PyTorch the thread's current one by default, and make a context there."""
    with CurrentDevice(cupy.cuda.runtime.getDevice() if device is None else device.index):
        MACHINE.use()
        cupy.cuda.runtime.deviceSynchronize()


class Tensor(torch.Tensor):
    """A tensor seen as a tensor on the GPU: the host waits for the current stream, then the CPU computes."""

    is_cuda, device = True, GPU

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), options=None):
        if getattr(_local, "stream", None) is not None:
            _local.stream.own.synchronize()
        return super().__torch_function__(function, kinds, arguments, options or {})

    def record_stream(self, stream):
        MACHINE.put(MACHINE.queue(stream.cuda_stream), lambda kept=self: True)

    def __dlpack_device__(self):
        return 2, GPU.index

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if stream != current_stream().cuda_stream:
            with ON_GPU:
                cupy.cuda.runtime.streamWaitEvent(stream, current_stream().record_event()._event.ptr)
        dtype = torch.empty(0, dtype=self.dtype).numpy().dtype
        return _dlpack.capsule(cupy._creation.unowned(tuple(self.shape), dtype, self.data_ptr(), self,
                                                      tuple(step * dtype.itemsize for step in self.stride())))


def on_gpu(value):
    """Return the tensors of a call as tensors on the GPU."""
    if isinstance(value, list | tuple):
        return type(value)(map(on_gpu, value))
    dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
    return value.detach().as_subclass(Tensor) if dense else value


def followed(method):
    """Return a method of the group for tensors on the GPU. An all-reduce begins before the program has written."""
    def call(self, *arguments, **options):
        given = [*map(on_gpu, arguments)]
        if method.__name__ == "allreduce":
            written_late(given[0] if isinstance(given[0], list) else [given[0]])
        try:
            return method(self, *given, **{name: on_gpu(value) for name, value in options.items()})
        finally:
            current_stream().own.synchronize()

    return call


def waited(self, timeout=None, wait=handles.TorchWork.wait):
    """Wait as the program does; then the host waits for the program's stream."""
    found = wait(self, timeout)
    current_stream().own.synchronize()
    return found


def written_late(tensors):
    """Let the elements of tensors come from work of the current stream that has not begun."""
    floats = [tensor.data.as_subclass(torch.Tensor) for tensor in tensors if tensor.is_floating_point()]
    for one in {tensor.data_ptr(): tensor for tensor in floats}.values():
        kept = one.clone()
        one.fill_(float("nan"))
        MACHINE.put(MACHINE.queue(current_stream().cuda_stream), lambda one=one, kept=kept: written(one, kept))


def written(tensor, elements):
    with torch.no_grad():
        tensor.copy_(elements)
    return True


def from_dlpack(array):
    array.__dlpack__(stream=current_stream().cuda_stream)
    host = array._host
    kept = types.SimpleNamespace(kept=array, __array_interface__={**host.__array_interface__, "version": 3})
    return on_gpu(torch.from_numpy(numpy.asarray(kept)))


def empty(*shape, device=None, made=torch.empty, **options):
    is_ours = device is not None and torch.device(device).type == "cuda"
    found = made(*shape, device="cpu" if is_ours else device, **options)
    return on_gpu(found) if is_ours else found


class Future(torch.futures.Future):
    """A future that is complete once the work of the current stream has ended."""

    def __init__(self, *, devices=None):
        super().__init__()

    def set_result(self, result):
        current_stream().own.synchronize()
        super().set_result(result)


def batch(ops, start=gpucoll.torch.batch_isend_irecv):
    for one in ops:
        one.tensor = on_gpu(one.tensor)
    return start(ops)


for name in METHODS:
    setattr(group.TorchProcessGroup, name, followed(getattr(group.TorchProcessGroup, name)))
handles.TorchWork.wait = waited
torch.cuda.Stream, torch.cuda.stream, torch.cuda.current_stream = Stream, in_stream, current_stream
torch.cuda.synchronize, torch.futures.Future = synchronize, Future
torch.empty, torch.from_dlpack = empty, from_dlpack
torch.distributed.batch_isend_irecv = torch.distributed.distributed_c10d.batch_isend_irecv = batch

if __name__ == "__main__":
    seeds, *sys.argv = sys.argv[1:]
    for seed in range(int(seeds)):
        MACHINE.order = random.Random(100 * seed + int(os.environ["RANK"]))
        if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:  # a rank could still meet the store of the last time
            from mpi4py import MPI

            os.environ["MASTER_PORT"] = str(MPI.COMM_WORLD.bcast(launchers.free_port()))
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert cupy.hostile.contexts.keys() == {GPU.index}, cupy.hostile.contexts
    assert not cupy.hostile.reported, cupy.hostile.reported
