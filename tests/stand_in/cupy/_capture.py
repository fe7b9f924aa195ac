"""Captures: what streams are given while the first of them captures, and what CUDA refuses meanwhile.

A stream that waits for an event of the capture joins it, and must be waited for before the capture ends. The numbers
are those of CUDA's cudaErrorStreamCapture*.
"""

import threading

from ._machine import MACHINE, check
from .hostile import on

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Capture:
    def __init__(self, origin, mode):
        self.origin, self.mode, self.thread = origin, mode, threading.get_ident()
        self.nodes = []  # of (begin, kernel)
        self.given = {origin: 0}  # how many nodes each of its streams has been given
        self.loose = set()  # streams whose last node nobody waits for
        self.open, self.invalid = True, False

    def add(self, queue, begin, kernel):
        self.nodes.append((begin, kernel))
        self.given[queue] += 1
        if queue is not self.origin:
            self.loose.add(queue)

    def mark(self, queue):
        return CapturedMark(self, queue, self.given[queue])

    def wait(self, queue, mark):
        """A stream waits for an event of this capture."""
        check(self.open, 907, "the capture that the event was recorded in has ended")
        check(queue.capture in (None, self), 903, "two captures cannot become one")
        if queue.capture is None:
            check(not queue.work, 900, "the stand-in lets only idle streams join a capture")
            queue.capture = self
            self.given.setdefault(queue, 0)
        if mark.queue is not queue and mark.count == self.given[mark.queue]:
            self.loose.discard(mark.queue)
            if queue is not self.origin:
                self.loose.add(queue)

    def end(self):
        self.open = False
        for queue in self.given:
            queue.capture = None
        check(not self.invalid, 901, "something forbidden was called during the capture")
        check(not self.loose, 904, "a stream that joined the capture was not waited for")
        return self.nodes


class CapturedMark:
    """A place in a capture: what an event stands for that was recorded there."""

    def __init__(self, capture, queue, count):
        self.capture, self.queue, self.count, self.time = capture, queue, count, None


def forbidden():
    """Whether some capture forbids this thread what may synchronise; that capture is spoilt by the call."""
    if not on("capture_modes") or getattr(MACHINE.current, "mode", GLOBAL) == RELAXED:
        return False
    captures = {queue.capture for queue in list(MACHINE.queues) if queue.capture is not None}
    spoilt = [one for one in captures if one.mode == GLOBAL or
              (one.mode == THREAD_LOCAL and one.thread == threading.get_ident())]
    for capture in spoilt:
        capture.invalid = True
    return bool(spoilt)


def exchange(mode):
    """Set the mode of the calling thread, and return the former: a relaxed thread spoils no other thread's capture."""
    before = getattr(MACHINE.current, "mode", GLOBAL)
    MACHINE.current.mode = mode
    return before


def unsafe(what):
    """A call that may synchronise: refused during a capture, and one that waits while a kernel runs."""
    check(not forbidden(), 900, f"{what} during a capture that forbids it")


def synchronising(what, device):
    """The same, and by the rule of that name it returns when no kernel of the device runs or is about to."""
    unsafe(what)
    if on("synchronising"):
        MACHINE.until_idle(device)
