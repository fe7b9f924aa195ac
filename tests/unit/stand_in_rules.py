"""The rules of the stand-in's hostile machine, each shown by a few lines that also run without the rule.

Run by `test_stand_in_rules.py` as a program on a host with two GPUs. The program reads orders, a line of JSON
each, and answers each order in a separate process with a new machine.
"""

import functools
import importlib
import json
import os
import random
import sys
import threading
import traceback
import types

import cupy
import numpy
import torch_like
from cupy import _connect, _ipc, _memory, _wire, hostile
from cupy._machine import MACHINE
from cupy.cuda import nccl, runtime

from gpu import restless

LONG, SHORT = 20, 0.02  # seconds: for calls that must end, and for calls that must not


def status(call, *arguments):
    """Return CUDA's or NCCL's error code of a call, 0 without an error."""
    try:
        call(*arguments)
    except runtime.CUDARuntimeError as error:
        return int(str(error).split()[2].rstrip(":"))
    except nccl.NcclError as error:
        return error.status
    return 0


def blocks(call, release, rule):
    """Return whether the call waits for `release`, as demanded by the rule; the wait must not be endless."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(SHORT if hostile.on(rule) else LONG)
    waits = thread.is_alive()
    release()
    thread.join(LONG)
    assert not thread.is_alive()
    return waits


def put(stream, action, kernel=True):
    MACHINE.submit(MACHINE.queue(stream.ptr), lambda: action, kernel=kernel)


def alone():
    """Return NCCL's communicator of one rank."""
    return nccl.NcclCommunicator(1, bytes(128), 0)


class Mailbox:
    """Messages between hosts, here threads; if all wait for messages never sent, every wait fails."""

    def __init__(self, size):
        self.sent, self.wanted, self.news = {}, dict.fromkeys(range(size)), threading.Condition()

    def put(self, rank, peer, tag, value):
        with self.news:
            self.sent[rank, peer, tag] = value
            self.news.notify_all()

    def take(self, rank, peer, tag):
        wanted = peer, rank, tag
        with self.news:
            self.wanted[rank] = wanted
            self.news.notify_all()
            self.news.wait_for(lambda: wanted in self.sent or not {None, *self.sent} & {*self.wanted.values()})
            if wanted not in self.sent:
                raise TimeoutError
            self.wanted[rank] = None
            return self.sent.pop(wanted)

    def end(self, rank):
        with self.news:
            del self.wanted[rank]
            self.news.notify_all()


def hosts(*groups):
    """Return the outcomes of ranks making these groups of (sends, receives): "" or the error."""
    mail, ends = Mailbox(len(groups)), [""] * len(groups)

    def host(rank):
        connections = _connect.Connections(rank, len(groups))
        try:
            for sends, receives in groups[rank]:
                connections.reach(set(sends), set(receives), False, functools.partial(mail.put, rank),
                                  functools.partial(mail.take, rank))
        except (TimeoutError, _connect.Truncated) as error:
            ends[rank] = str(error).split(":")[0] or "deadlock"
        mail.end(rank)

    threads = [threading.Thread(target=host, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG)
    return sorted(set(ends))


def protocol():
    right, left = [1, 2, 0], [2, 0, 1]
    together = [[([right[rank]], [left[rank]])] for rank in range(3)]
    in_turn = [[([right[rank]], []), ([], [left[rank]])] for rank in range(3)]
    truncated = [([1], []), ([], [1])], [([0], [0])]
    return hosts(*together), hosts(*in_turn), hosts(*truncated)


def connect():
    """A first message waits for its peer, only in its own thread, until the communicator is aborted."""
    comm, ends = alone(), []
    silent = types.SimpleNamespace(isend=lambda *_: types.SimpleNamespace(test=lambda: (True, None)),
                                   iprobe=lambda *_: False, Isend=lambda *_, **__: types.SimpleNamespace(Test=bool))
    comm.wire, comm._connections = _wire.Wire(0, 2, silent), _connect.Connections(0, 2)
    x = cupy.ones(3)
    return blocks(lambda: ends.append(status(comm.send, x.data.ptr, 24, 1, 1, 0)), comm.abort, "connect"), ends


def graphs_alive():
    comm, x, stream = alone(), cupy.ones(3), cupy.cuda.Stream(non_blocking=True)
    stream.begin_capture()
    comm.allReduce(x.data.ptr, x.data.ptr, 3, 8, 0, stream.ptr)
    graphs = [stream.end_capture()]

    def release():
        while not comm.destroying:
            pass
        aborting = threading.Thread(target=comm.abort)
        aborting.start()
        while comm.comm:
            pass
        graphs.clear()
        aborting.join(LONG)

    return blocks(comm.destroy, release, "graphs_alive"), len(hostile.reported)


def float8():
    comm, x = alone(), cupy.zeros(8, "u1")
    return status(comm.allReduce, x.data.ptr, x.data.ptr, 8, 10, 0, 0), status(
        comm.broadcast, x.data.ptr, x.data.ptr, 8, 10, 0, 0)


def rounding():
    """Return a sum; rounding at every hop loses small values coming after the large value."""
    rooms = [numpy.array([value] * 3, "f2").view("u1") for value in (2048, 1, 1)]
    return nccl.reduced(6, 0, rooms).view("f2").tolist()


def synchronising():
    """Return whether each of some calls waits while a kernel runs."""
    stream, here = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Device().id
    pointer, found = runtime.malloc(512), []
    for call in (lambda: runtime.malloc(512), lambda: runtime.free(pointer), lambda: cupy.empty(100_000, "u1"),
                 lambda: cupy._raw._Module("path", here)):
        gate = threading.Event()
        put(stream, gate.is_set)
        found.append(blocks(call, gate.set, "synchronising"))
        stream.synchronize()
    return found


def finalizers():
    """Return whether a finalizer frees memory in the thread of the GPU, and whether a later call has freed it."""
    from cupy import _ipc

    stream, pointer = cupy.cuda.Stream(non_blocking=True), runtime.malloc(512)
    put(stream, lambda: runtime.free(pointer) is None)
    stream.synchronize()
    found = [pointer in _ipc._own]
    put(stream, lambda: True)
    stream.synchronize()
    return [*found, pointer in _ipc._own]


def queues():
    """Return the order of two streams; the first waits for the second, but not for long."""
    streams, order, asked = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)], [], []

    def first():
        asked.append(1)
        if not order and len(asked) < 200:
            return False
        order.append(1)
        return True

    put(streams[0], first)
    put(streams[1], lambda: order.append(2) is None)
    runtime.deviceSynchronize()
    return order


def null_stream():
    """Return the contents of memory while a blocking stream works, and afterwards."""
    stream, gate = cupy.cuda.Stream(), threading.Event()
    pointer = runtime.malloc(4)
    runtime.memset(pointer, 1, 4)
    runtime.deviceSynchronize()
    put(stream, gate.is_set)
    runtime.memset(pointer, 2, 4)
    found = [int(_ipc._own[pointer][1][0])]
    gate.set()
    runtime.deviceSynchronize()
    return [*found, int(_ipc._own[pointer][1][0])]


def handles():
    found = []
    for kind in (cupy.cuda.Stream, cupy.cuda.Event):
        one = kind()
        address = one.ptr
        del one
        found.append(kind().ptr == address)
    return found


def codes():
    stream, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    stream.begin_capture()
    event.record(stream)
    captured = status(runtime.eventQuery, event.ptr) or runtime.eventQuery(event.ptr)
    stream.end_capture()
    MACHINE.fail(RuntimeError("an illegal address"))
    raised = status(runtime.streamQuery, stream.ptr)
    return captured, status(runtime.eventQuery, event.ptr), raised or runtime.streamQuery(stream.ptr)


def capture_modes():
    """Return the codes of malloc in each mode, in the capturing and in another thread, and of the capture's end."""
    found = []
    for mode in (runtime.streamCaptureModeGlobal, runtime.streamCaptureModeThreadLocal,
                 runtime.streamCaptureModeRelaxed):
        for is_other in (False, True):
            stream, told = cupy.cuda.Stream(non_blocking=True), []
            stream.begin_capture(mode)
            ask = threading.Thread(target=lambda told=told: told.append(status(runtime.malloc, 8)))
            (ask.start if is_other else ask.run)()
            if is_other:
                ask.join(LONG)
            found.append((*told, status(stream.end_capture)))
    blocking = cupy.cuda.Stream()
    blocking.begin_capture()
    return found, status(cupy.cuda.Stream.null.is_capturing)


def capability():
    device = cupy.cuda.Device()
    return device.compute_capability, device.attributes["MultiProcessorCount"]


def memory():
    """Return whether freed memory is reused and filled, and size and old content of pinned memory used again."""
    x = cupy.full(512, 7, "u1")
    address = x.data.ptr
    del x
    y = cupy.empty(512, "u1")
    pinned = cupy.cuda.alloc_pinned_memory(100)
    numpy.frombuffer(pinned, "u1")[:] = 3
    size = len(numpy.frombuffer(pinned, "u1"))
    del pinned
    again = int(numpy.frombuffer(cupy.cuda.alloc_pinned_memory(300), "u1")[0])
    return y.data.ptr == address, int(y.get()[0]) == _memory.GARBAGE, size, again


def memory_of_a_destroyed_stream():
    """Return whether a new stream has the handle and the memory of a destroyed one, and what its array holds.

    The destroyed stream still works, and overwrites its freed memory late: after the new stream's array has values.
    """
    gate, old = threading.Event(), cupy.cuda.Stream(non_blocking=True)
    handle = old.ptr
    with old:
        x = cupy.empty(512, "u1")
    address = x.data.ptr
    put(old, gate.is_set, kernel=False)
    del x
    MACHINE.settle()
    del old
    new = cupy.cuda.Stream(non_blocking=True)
    with new:
        y = cupy.full(512, 7, "u1")
        new.synchronize()
        gate.set()
        runtime.deviceSynchronize()
        return new.ptr == handle, y.data.ptr == address, int(y.get()[0])


def device_changes():
    class Comm:
        rank = 0

        def rude(self):
            runtime.setDevice(1)

        def polite(self):
            with cupy.cuda.Device(1):
                pass

    one, refused = restless._Restless(Comm(), random.Random(0)), []
    for name in ("rude", "polite"):
        try:
            for _ in range(9):
                getattr(one, name)()
        except AssertionError:
            refused.append(name)
    return refused, runtime.getDevice()


def torch():
    """Return the errors of asking tensors for their interface, and whether the right streams were requested."""
    found = []
    for tensor in (torch_like.Tensor(cupy.ones(3), requires_grad=True),
                   torch_like.Tensor(cupy.ones(3, "u1"), torch_like.float8_e5m2)):
        try:
            hasattr(tensor, "__cuda_array_interface__")
        except (RuntimeError, KeyError) as error:
            found.append(type(error).__name__)
    stream = cupy.cuda.Stream(non_blocking=True)
    tensor = torch_like.Tensor(cupy.ones(3))
    with stream:
        cupy.from_dlpack(tensor.detach())
    return found, tensor.asked == [stream.ptr]


def without_nccl():
    importlib.reload(cupy.cuda)
    from cupy.cuda import nccl
    return nccl.available, hasattr(nccl, "get_unique_id")


def answer(order):
    """Run an order in a separate process: the machine is new."""
    os.environ.update(order["variables"])
    try:
        return {"found": globals()[order["name"]]()}
    except BaseException:
        return {"error": traceback.format_exc()}


def main():
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(json.dumps(answer(json.loads(line))), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
