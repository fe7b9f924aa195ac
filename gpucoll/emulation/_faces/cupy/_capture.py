"""Stream capture of CUDA's runtime: the calls recorded by a capture, and the calls refused in the meantime.

A stream joins a capture by waiting for an event of the capture. Another stream of the capture must wait for the joined
stream before the end. The mode of cudaStreamBeginCapture forbids calls that may synchronise: to all threads, to the
capturing thread, or to no thread. The numbers are CUDA's cudaErrorStreamCapture*.
"""

import threading

from ._machine import MACHINE, check
from .hostile import on

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Capture:
    def __init__(self, origin, mode):
        self.origin, self.mode, self.thread = origin, mode, threading.get_ident()
        self.uses = []  # accesses of memory: chunk, first byte, end, whether it writes
        self.nodes = []  # pairs (begin, kernel), in the order of submission
        self.given = {origin: 0}  # number of nodes by stream of the capture
        self.loose = set()  # joined streams with a last node awaited by no other stream
        self.open, self.invalid = True, False
        MACHINE.captures.add(self)

    def add(self, queue, begin, kernel):
        self.nodes.append((begin, kernel))
        self.given[queue] += 1
        if queue is not self.origin:
            self.loose.add(queue)

    def wait(self, queue, mark):
        """Make `queue` wait for an event of this capture; an idle stream outside the capture joins."""
        check(self.open, 907, "the capture that the event was recorded in has ended")
        check(queue.capture in (None, self), 902, "two captures cannot become one")
        if queue.capture is None:
            check(not queue.work, 900, "this machine lets only idle streams join a capture")
            queue.capture = self
            self.given.setdefault(queue, 0)
        # Only a wait for the last node takes the other stream back; earlier nodes leave later work unjoined.
        if mark.queue is not queue and mark.count == self.given[mark.queue]:
            self.loose.discard(mark.queue)
            if queue is not self.origin:
                self.loose.add(queue)

    def end(self):
        # Release the streams even on an error: after a failed capture, no stream captures.
        self.open = False
        MACHINE.captures.discard(self)
        for queue in self.given:
            queue.capture = None
        check(not self.invalid, 901, "something forbidden was called during the capture")
        check(not self.loose, 904, "a stream that joined the capture was not waited for")
        return self.nodes


class CapturedMark:
    """A place in a capture, kept by an event recorded during the capture."""

    def __init__(self, capture, queue, count):
        self.capture, self.queue, self.count, self.time = capture, queue, count, None


def forbidden():
    """Invalidate the captures forbidding this thread calls that may synchronise; return whether any exist."""
    if not on("capture_modes") or getattr(MACHINE.current, "mode", GLOBAL) == RELAXED:
        return False
    # A copy of the list: other threads create streams meanwhile.
    captures = {queue.capture for queue in list(MACHINE.queues) if queue.capture is not None}
    spoilt = [one for one in captures if one.mode == GLOBAL or
              (one.mode == THREAD_LOCAL and one.thread == threading.get_ident())]
    for capture in spoilt:
        capture.invalid = True
    return bool(spoilt)


def exchange(mode):
    """Set the capture mode of the calling thread and return the old mode; a relaxed thread spoils no capture."""
    before = getattr(MACHINE.current, "mode", GLOBAL)
    MACHINE.current.mode = mode
    return before


def exchanged(mode):
    """Exchange the capture mode at a ctypes reference, as cuThreadExchangeStreamCaptureMode of CUDA's driver does."""
    mode._obj.value = exchange(mode._obj.value)
    return 0


def unsafe(what):
    """Raise error 900 if a capture forbids this thread a call that may synchronise."""
    check(not forbidden(), 900, f"{what} during a capture that forbids it")


def synchronising(what, device):
    """Apply `unsafe`; by the rule `synchronising`, wait until no kernel of the device runs or is about to run."""
    unsafe(what)
    if on("synchronising"):
        MACHINE.until_idle(device)
