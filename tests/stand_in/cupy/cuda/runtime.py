"""CUDA's runtime: devices, streams, events and graphs by their handles."""

import ctypes
import os

import numpy

from .. import _memory
from .._ipc import free, ipcCloseMemHandle, ipcGetMemHandle, ipcOpenMemHandle, malloc, memset
from .._machine import MACHINE, CUDARuntimeError, Event, Mark, Queue, check

__all__ = ["CUDARuntimeError", "free", "ipcCloseMemHandle", "ipcGetMemHandle", "ipcOpenMemHandle", "malloc", "memset"]

streamNonBlocking, streamLegacy, eventDisableTiming, memcpyDeviceToDevice = 1, 1, 2, 3


def getDeviceCount():
    check(MACHINE.devices, 100)
    return MACHINE.devices


def getDevice():
    return MACHINE.device()


def setDevice(device):
    check(0 <= device < MACHINE.devices, 101)
    MACHINE.current.device = device


def runtimeGetVersion():
    return 13020


driverGetVersion = runtimeGetVersion


def deviceGetPCIBusId(device):
    check(0 <= device < MACHINE.devices, 101)
    return f"0000:{int(os.environ.get('STAND_IN_BUS', '10')) + device:02X}:00.0"


def getDeviceProperties(device):
    check(0 <= device < MACHINE.devices, 101)
    return {"name": b"stand-in", "totalGlobalMem": 1 << 30, "major": 9, "minor": 0, "multiProcessorCount": 2}


def deviceSynchronize():
    queues = [queue for queue in MACHINE.queues if queue.device == getDevice()]
    check(all(queue.capture is None for queue in queues), 900)
    MACHINE.finish([(queue, queue.issued) for queue in queues])


def memcpyAsync(target, source, nbytes, kind, stream):
    check(kind == memcpyDeviceToDevice, 1, "the stand-in copies inside a device only")
    queue = MACHINE.queue(stream)
    to, begun = (_memory.view(address, nbytes, queue.device) for address in (target, source))
    MACHINE.submit(queue, lambda: lambda: numpy.copyto(to, begun) is None)


def streamCreateWithFlags(flags):
    return MACHINE.new_queue(blocking=not flags & streamNonBlocking)


def streamDestroy(stream):
    del MACHINE.objects[stream]


def streamSynchronize(stream):
    queue = MACHINE.queue(stream)
    check(queue.capture is None, 900, "a capturing stream cannot be waited for")
    with MACHINE.news:
        points = [(queue, queue.issued), *MACHINE.implied(queue)]
    MACHINE.finish(points if queue.handle == 0 else points[:1])


def streamQuery(stream):
    queue = MACHINE.queue(stream)
    if queue.capture is not None:
        return 900
    return 0 if MACHINE.ended(queue, queue.issued) else 600


def streamWaitEvent(stream, event):
    """What the stream is given from here on follows the event."""
    queue, mark = MACHINE.queue(stream), MACHINE.find(event, Event).mark
    if mark is not None:
        check(queue.capture is None, 905, "an event from outside in a capture")
        MACHINE.submit(queue, lambda: _nothing, after=[(mark.queue, mark.count)])


def streamBeginCapture(stream):
    queue = MACHINE.find(stream, Queue)
    check(queue.capture is None, 900)
    queue.capture = []


def streamEndCapture(stream):
    queue = MACHINE.find(stream, Queue)
    check(queue.capture is not None, 900)
    nodes, queue.capture = queue.capture, None
    return MACHINE.keep(_Graph(nodes))


def streamIsCapturing(stream):
    return MACHINE.queue(stream).capture is not None


def eventCreateWithFlags(flags):
    return MACHINE.keep(Event(getDevice(), timed=not flags & eventDisableTiming))


def eventDestroy(handle):
    MACHINE.objects.pop(handle, None)


graphDestroy = eventDestroy


def eventRecord(event, stream):
    """The event stands for what the stream has been given so far."""
    event, queue = MACHINE.find(event, Event), MACHINE.queue(stream)
    check(event.device == queue.device, 400, "event and stream are of different devices")
    check(queue.capture is None, 900, "the stand-in captures no events")
    with MACHINE.news:
        event.mark = mark = Mark(queue)
        MACHINE.submit(queue, lambda: mark.passed)


def eventQuery(event):
    mark = MACHINE.find(event, Event).mark
    return 0 if mark is None or MACHINE.ended(mark.queue, mark.count) else 600


def eventSynchronize(event):
    mark = MACHINE.find(event, Event).mark
    MACHINE.finish([] if mark is None else [(mark.queue, mark.count)])


def eventElapsedTime(start, end):
    events = [MACHINE.find(handle, Event) for handle in (start, end)]
    check(all(event.timed and event.mark is not None for event in events), 400, "an event without a time")
    check(all(event.mark.time is not None for event in events), 600)
    return ctypes.c_float(1e3 * (events[1].mark.time - events[0].mark.time)).value


# Graphs: what a stream was given in a capture


class _Graph:
    """What a graph's handle stands for; a launch waits for the one before."""

    def __init__(self, nodes):
        self.nodes, self.last = nodes, ()

    def launch(self, queue):
        check(queue.capture is None, 900, "a graph inside a graph")
        MACHINE.submit(queue, lambda: _nothing, after=self.last)
        for begin in self.nodes:
            MACHINE.submit(queue, begin)
        self.last = [(queue, queue.issued)]


def _nothing():
    return True


def graphLaunch(graph, stream):
    MACHINE.find(graph, _Graph).launch(MACHINE.queue(stream))
