"""Clocks of actions and of threads, and the places of events in streams."""

import threading
import time

CLOCKS = 4096  # actions of a queue whose clocks are kept
_host = threading.local()


def host_clock():
    """Return the actions that this thread knows to have ended."""
    if not hasattr(_host, "clock"):
        _host.clock = {}
    return _host.clock


def clock_of(queue, count=None):
    """Return the actions known to be before an action of a queue, by default the last one."""
    count = queue.issued if count is None else count
    return queue.clocks.get(count) or {queue: count}


def join(clock, known):
    for queue, count in known.items():
        if clock.get(queue, 0) < count:
            clock[queue] = count


class Mark:
    """A place in a queue, and the time at which the queue passed the place."""

    def __init__(self, queue):
        self.queue, self.count, self.time = queue, queue.issued + 1, None

    def passed(self):
        self.time = time.perf_counter()
        return True


class EventState:
    """The object of an event's handle: the mark of a queue or of a capture, None before the first record."""

    def __init__(self, device, timed):
        self.device, self.timed, self.mark = device, timed, None
