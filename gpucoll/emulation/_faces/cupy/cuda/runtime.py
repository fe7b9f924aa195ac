"""CUDA's runtime, as `cupy.cuda.runtime`: devices, streams, events and graphs by handles, with CUDA's error numbers.

Rules of CUDA: valid handles, event and stream on a common device, no wait for a capturing stream, timed events.
"""

import ctypes

from .. import _memory, hostile
from .._capture import GLOBAL, RELAXED, THREAD_LOCAL, Capture, CapturedMark, forbidden, unsafe
from .._clocks import EventState, Mark
from .._ipc import free, ipcCloseMemHandle, ipcGetMemHandle, ipcOpenMemHandle, malloc, memset, memsetAsync
from .._machine import MACHINE, CUDARuntimeError, Queue, check
from .._order import launches

streamDefault, streamNonBlocking, streamLegacy, streamPerThread = 0, 1, 1, 2
eventDefault, eventBlockingSync, eventDisableTiming, eventInterprocess = 0, 1, 2, 4
memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = range(5)
is_hip = False
streamCaptureModeGlobal, streamCaptureModeThreadLocal, streamCaptureModeRelaxed = GLOBAL, THREAD_LOCAL, RELAXED


def getDeviceCount():
    check(MACHINE.devices, 100)
    return MACHINE.devices


def getDevice():
    return MACHINE.device()


def setDevice(device):
    check(0 <= device < MACHINE.devices, 101)
    MACHINE.use(device)


def runtimeGetVersion():
    return 13020


driverGetVersion = runtimeGetVersion


def deviceGetPCIBusId(device):
    check(0 <= device < MACHINE.devices, 101)
    return f"0000:{MACHINE.bus + device:02X}:00.0"


def getDeviceProperties(device):
    check(0 <= device < MACHINE.devices, 101)
    major, minor = map(int, hostile.capability())
    return {"name": b"emulated", "totalGlobalMem": _memory.TOTAL, "major": major, "minor": minor,
            "multiProcessorCount": hostile.processors(), "warpSize": 32, "maxThreadsPerBlock": 1024,
            "maxThreadsDim": (1024, 1024, 64), "maxGridSize": ((1 << 31) - 1, 65535, 65535),
            "sharedMemPerBlock": 48 << 10, "sharedMemPerMultiprocessor": 164 << 10, "regsPerBlock": 1 << 16,
            "maxThreadsPerMultiProcessor": 2048, "totalConstMem": 1 << 16, "l2CacheSize": 40 << 20,
            "clockRate": 1_410_000, "memoryClockRate": 1_215_000, "memoryBusWidth": 5120, "integrated": 0,
            "concurrentKernels": 1, "asyncEngineCount": 3, "unifiedAddressing": 1, "managedMemory": 1,
            "cooperativeLaunch": 0, "canMapHostMemory": 1, "pciDomainID": 0, "pciDeviceID": 0,
            "pciBusID": MACHINE.bus + device,
            "uuid": MACHINE.bus.to_bytes(8) + device.to_bytes(8)}


def deviceGetAttribute(attribute, device):
    return check(attribute == 133, 1, "of all attributes the emulation knows cudaDevAttrMpsEnabled") or 0


def deviceSynchronize():
    unsafe("cudaDeviceSynchronize")
    queues = [queue for queue in MACHINE.queues if queue.device == getDevice()]
    check(not [*filter(_spoils, queues)], 900, "a capturing stream cannot be waited for")
    MACHINE.finish([(queue, queue.issued) for queue in queues])


def memGetInfo():
    return _memory.TOTAL - _memory.get_default_memory_pool().used_bytes(), _memory.TOTAL


def deviceCanAccessPeer(device, peerDevice):
    check(0 <= device < MACHINE.devices and 0 <= peerDevice < MACHINE.devices, 101)
    return int(device != peerDevice and hostile.peers())


def deviceEnablePeerAccess(peerDevice):
    pair = getDevice(), peerDevice
    check(deviceCanAccessPeer(*pair), 101, "the device has no access to this peer")
    check(pair not in _memory.peers, 704, "cudaErrorPeerAccessAlreadyEnabled")
    _memory.peers.add(pair)


def deviceDisablePeerAccess(peerDevice):
    check((getDevice(), peerDevice) in _memory.peers, 705, "cudaErrorPeerAccessNotEnabled")
    _memory.peers.remove((getDevice(), peerDevice))


def memcpyAsync(dst, src, size, kind, stream):
    """Copy between addresses of GPUs and of the host; which they are, the addresses tell."""
    _memory.copied(MACHINE.queue(stream), dst, src, size)


def memcpy(dst, src, size, kind):
    memcpyAsync(dst, src, size, kind, 0)
    streamSynchronize(0)


def memcpyPeerAsync(dst, dstDevice, src, srcDevice, size, stream):
    memcpyAsync(dst, src, size, memcpyDefault, stream)


def memcpyPeer(dst, dstDevice, src, srcDevice, size):
    memcpy(dst, src, size, memcpyDefault)


def streamCreateWithFlags(flags):
    return MACHINE.new_queue(blocking=not flags & streamNonBlocking)


def streamCreate():
    return streamCreateWithFlags(streamDefault)


def streamGetFlags(stream):
    check(MACHINE.queue(stream).capture is None, 900)  # cudaErrorStreamCaptureUnsupported, as on a GPU
    return 0 if MACHINE.queue(stream).blocking else streamNonBlocking


def streamDestroy(stream):
    MACHINE.find(stream, Queue)
    MACHINE.drop(stream)


def streamSynchronize(stream):
    queue = MACHINE.queue(stream)
    check(not _spoils(queue), 900, "a capturing stream cannot be waited for")
    unsafe("cudaStreamSynchronize")
    with MACHINE.news:
        points = [(queue, queue.issued), *MACHINE.implied(queue)]
    MACHINE.finish(points if queue.handle == 0 else points[:1])


def _spoils(queue):
    """Invalidate the capture of a stream that is waited for or asked; return whether the stream captures."""
    if queue.capture is not None:
        queue.capture.invalid = True
    return queue.capture is not None


def streamQuery(stream):
    queue = MACHINE.queue(stream)
    return 900 if _spoils(queue) else _asked(queue, queue.issued)


def _asked(queue, count):
    """Return the code of cudaStreamQuery or cudaEventQuery, which CuPy passes on unchanged."""
    if forbidden():
        return 900
    if MACHINE.fault is not None and hostile.on("codes"):
        return 700
    return 0 if MACHINE.ended(queue, count) else 600


def streamWaitEvent(stream, event):
    """Make all later work of the stream follow the event."""
    queue, mark = MACHINE.queue(stream), MACHINE.find(event, EventState).mark
    if isinstance(mark, CapturedMark):
        mark.capture.wait(queue, mark)
    elif mark is not None:
        check(queue.capture is None, 905, "an event from outside in a capture")
        MACHINE.submit(queue, lambda: lambda: True, after=[(mark.queue, mark.count)])


def streamBeginCapture(stream, mode=streamCaptureModeRelaxed):
    queue = MACHINE.find(stream, Queue)
    check(queue.capture is None, 900)
    queue.capture = Capture(queue, mode)


def streamEndCapture(stream):
    queue = MACHINE.find(stream, Queue)
    check(queue.capture is not None, 401, "the stream does not capture")
    if queue.capture.origin is not queue:
        _spoils(queue)
        raise CUDARuntimeError(903, "the capture was begun in another stream")
    return MACHINE.keep(_Graph(queue.capture))


def streamIsCapturing(stream):
    queue = MACHINE.queue(stream)
    if queue.handle == 0:
        MACHINE.implied(queue)  # error 906 if a blocking stream captures
    return queue.capture is not None


def eventCreateWithFlags(flags):
    MACHINE.until_copied()
    return MACHINE.keep(EventState(MACHINE.use(), timed=not flags & eventDisableTiming))


def eventDestroy(event):
    MACHINE.drop(event)


def eventRecord(event, stream):
    """Make the event stand for all work given to the stream so far."""
    event, queue = MACHINE.find(event, EventState), MACHINE.queue(stream)
    MACHINE.until_copied(queue)
    check(event.device == queue.device, 400, "event and stream are of different devices")
    if queue.capture is not None:
        event.mark = CapturedMark(queue.capture, queue, queue.capture.given[queue])
        return
    # Under the lock: the count in the mark must be the number of the submitted action.
    with MACHINE.news:
        event.mark = mark = Mark(queue)
        MACHINE.submit(queue, lambda: mark.passed)


def eventQuery(event):
    mark = MACHINE.find(event, EventState).mark
    if isinstance(mark, CapturedMark):
        check(hostile.on("codes"), 907, "the event was recorded in a capture")
        return 907
    return 0 if mark is None else _asked(mark.queue, mark.count)


def eventSynchronize(event):
    mark = MACHINE.find(event, EventState).mark
    check(not isinstance(mark, CapturedMark), 907, "the event was recorded in a capture")
    unsafe("cudaEventSynchronize")
    MACHINE.finish([] if mark is None else [(mark.queue, mark.count)])


def eventElapsedTime(start, end):
    events = [MACHINE.find(handle, EventState) for handle in (start, end)]
    check(all(event.timed and event.mark is not None for event in events), 400, "an event without a time")
    check(all(event.mark.time is not None for event in events), 600)
    return ctypes.c_float(1e3 * (events[1].mark.time - events[0].mark.time)).value


# Graphs: the work given to a stream in a capture


class _Graph:
    """The object of a graph's handle; a launch waits for the previous launch."""

    def __init__(self, capture):
        self.nodes, self.uses, self.last = capture.end(), capture.uses, ()
        self.users = [begin.comm for begin, _ in self.nodes if hasattr(begin, "comm")]  # NCCL counts graphs
        for comm in self.users:
            comm.graphs += 1

    def launch(self, queue):
        check(queue.capture is None, 900, "a graph inside a graph")
        MACHINE.submit(queue, lambda: lambda: True, after=self.last)
        for begin, kernel in self.nodes:
            MACHINE.submit(queue, begin, kernel=kernel)
        self.last = [(queue, queue.issued)]
        launches(queue, self.uses)


def graphDestroy(graph):
    for comm in MACHINE.drop(graph).users:
        comm.graphs -= 1


def graphLaunch(graphExec, stream):
    MACHINE.find(graphExec, _Graph).launch(MACHINE.queue(stream))
