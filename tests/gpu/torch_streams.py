"""PyTorch for CPUs on emulated GPUs: the backend "gpucoll" takes all tensors for tensors on a GPU, and follows streams.

    python -m gpu.torch_streams SEEDS program arguments ...     # SEEDS times, each in another order of the streams

A program of PyTorch runs unchanged, on the CPU. Its own operations are launches for which the host waits, as with
CUDA_LAUNCH_BLOCKING=1, and so is its wait for another stream. All work of the backend is enqueued on streams of the
machine: what the backend fails to order after or before the program's work works on old data. The rank's GPU is not
the one of the rank's number.
"""

import os
import random
import runpy
import sys
import types

import cupy
import numpy
import torch
from cupy import _dlpack, _memory
from cupy._machine import MACHINE

import gpucoll.torch
from gpucoll.emulation import torch_cuda
from gpucoll.emulation.torch_cuda import current_stream
from gpucoll.launch import launchers
from gpucoll.torch import group, handles

METHODS = """broadcast allreduce allreduce_coalesced reduce all_gather_single all_gather_single_coalesced allgather
    reduce_scatter_single reduce_scatter_single_coalesced allgather_coalesced gather scatter reduce_scatter alltoall
    all_to_all_single send recv _allgather_base _reduce_scatter_base alltoall_base allgather_into_tensor_coalesced
    reduce_scatter_tensor_coalesced""".split()
_memory.foreign.append("PyTorch's")


class Tensor(torch.Tensor):
    """A tensor seen on the GPU: the host waits for a stream that was made current, then the CPU computes."""

    is_cuda, device = True, torch.device("cuda", (int(os.environ["RANK"]) + 1) % MACHINE.devices)

    @classmethod
    def __torch_function__(cls, function, kinds, arguments=(), options=None):
        if current_stream(cls.device) is not torch_cuda.default_stream(cls.device):
            stream().synchronize()
        return super().__torch_function__(function, kinds, arguments, options or {})

    def record_stream(self, stream):
        MACHINE.put(MACHINE.queue(stream.cuda_stream), lambda kept=self: True)

    def __dlpack_device__(self):
        return 2, self.device.index

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        current = current_stream(self.device)
        if stream != (current.cuda_stream or 1):
            with torch_cuda.on_device(self.device):
                cupy.cuda.runtime.streamWaitEvent(stream, current.record_event().own.ptr)
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
            stream().synchronize()

    return call


def stream():
    return current_stream(Tensor.device)


def waited(self, timeout=None, wait=handles.TorchWork.wait):
    """Wait as the program does; then the host waits for the program's stream."""
    found = wait(self, timeout)
    stream().synchronize()
    return found


def written_late(tensors):
    """Let the elements of tensors come from work of the current stream that has not begun."""
    floats = [tensor.data.as_subclass(torch.Tensor) for tensor in tensors if tensor.is_floating_point()]
    for one in {tensor.data_ptr(): tensor for tensor in floats}.values():
        kept = one.clone()
        one.fill_(float("nan"))
        with torch_cuda.on_device(Tensor.device):
            MACHINE.put(MACHINE.queue(stream().cuda_stream), lambda one=one, kept=kept: written(one, kept))


def written(tensor, elements):
    with torch.no_grad():
        tensor.copy_(elements)
    return True


def from_dlpack(array):
    array.__dlpack__(stream=stream().cuda_stream or 1)
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
        stream().synchronize()
        super().set_result(result)


def batch(ops, start=gpucoll.torch.batch_isend_irecv):
    for one in ops:
        one.tensor = on_gpu(one.tensor)
    return start(ops)


for name in METHODS:
    setattr(group.TorchProcessGroup, name, followed(getattr(group.TorchProcessGroup, name)))
handles.TorchWork.wait = waited
for name in ("Stream", "stream", "current_stream", "synchronize"):
    setattr(torch.cuda, name, torch_cuda.names()[name])
torch.empty, torch.from_dlpack, torch.futures.Future = empty, from_dlpack, Future
torch.distributed.batch_isend_irecv = torch.distributed.distributed_c10d.batch_isend_irecv = batch

if __name__ == "__main__":
    seeds, *sys.argv = sys.argv[1:]
    for seed in range(int(seeds)):
        MACHINE.order = random.Random(100 * seed + int(os.environ["RANK"]))
        if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:  # a rank could still meet the store of the last time
            from mpi4py import MPI

            os.environ["MASTER_PORT"] = str(MPI.COMM_WORLD.bcast(launchers.free_port()))
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert cupy.hostile.contexts.keys() == {Tensor.device.index}, cupy.hostile.contexts
    assert not cupy.hostile.reported, cupy.hostile.reported
