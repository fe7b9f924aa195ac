"""The machine behind the stand-in: GPUs whose streams are queues, worked off by one thread in a seeded random order.

What no event orders may happen in any order, and later than the host thinks, as on a GPU. Errors are CUDA's, by number.
"""

import collections
import contextlib
import itertools
import os
import random
import socket
import threading
import time

from .hostile import connections, contexts, on

VERSION = "14.2.0"  # of CuPy
LAG = 3e-4  # seconds between what the host asks for and its beginning, unless the host waits
NAP = 5e-5  # seconds between two looks at what waits for another process


class CUDARuntimeError(RuntimeError):
    """An error of a call of CUDA's runtime."""

    def __init__(self, status, words=""):
        super().__init__(f"CUDA error {status}: {words}")


def check(condition, status, words=""):
    if not condition:
        raise CUDARuntimeError(status, words)


class Queue:
    """One stream: actions in order, each begun when those before it and those it depends on have ended."""

    def __init__(self, device, blocking, handle=None, channel=0):
        self.device, self.blocking, self.handle, self.channel = device, blocking, handle, channel
        self.work = collections.deque()  # of (dependencies, action, whether it is a kernel)
        self.issued = self.ended = 0
        self.capture = None

    def ready(self, dependencies):
        return all(queue.ended >= count for queue, count in dependencies)

    def advance(self, most):
        """How many actions have ended; at most so many."""
        done = 0
        while done < most and self.work and self.ready(self.work[0][0]) and self.work[0][1]():
            self.work.popleft()
            self.ended += 1
            done += 1
        return done

    def runs(self):
        """Whether a kernel of it runs, or will as soon as the machine comes to it: no other stream, nor the host, is
        waited for."""
        work = list(self.work)
        first = work[0] if work else None
        return first is not None and any(kernel for _, _, kernel in work) and self.ready(first[0]) and (
            not getattr(first[1], "on_host", False))


class Mark:
    """A place in a queue, and when it was passed."""

    def __init__(self, queue):
        self.queue, self.count, self.time = queue, queue.issued + 1, None

    def passed(self):
        self.time = time.perf_counter()
        return True


class Machine:
    """All GPUs of this process. `submit` may be called by any thread; one thread of its own does the work."""

    def __init__(self, seed):
        self.devices = int(os.environ.get("STAND_IN_GPUS", "1"))
        self.news = threading.Condition()
        self.fault = None
        self.hurry = False  # whether the host waits
        self.order = random.Random(seed)
        self.handles = itertools.count(0x7000_0000_0000, 0x40)  # streams, events and graphs
        self.objects = {}
        self.gone = collections.defaultdict(list)  # by kind: handles of what was destroyed
        self.made = collections.Counter()  # streams by device
        self.due = collections.deque()  # what the pool does with freed memory as soon as a thread comes by
        self.queues = [Queue(device, True, 0) for device in range(self.devices)]  # the null streams come first
        self.current = threading.local()
        self.claims = {}  # by the device: a socket whose name no other process can have
        self.thread = None

    # Handles

    def keep(self, thing):
        """A new handle that stands for `thing`."""
        with self.news:
            gone = self.gone[type(thing)]
            handle = gone.pop() if gone and on("handles") else next(self.handles)
            self.objects[handle] = thing
        return handle

    def drop(self, handle):
        """The handle stands for nothing from here on; what it stood for, or None."""
        with self.news:
            found = self.objects.pop(handle, None)
            if found is not None:
                self.gone[type(found)].append(handle)
        return found

    def find(self, handle, kind):
        """What a handle stands for; an error where it stands for nothing of that kind, as after its destruction."""
        found = self.objects.get(handle)
        check(isinstance(found, kind), 400, f"{handle:#x} is no {kind.__name__}")
        return found

    def queue(self, handle):
        """The queue of a stream: 0 and 1 are the null stream of the current device."""
        return self.queues[self.use()] if handle in (0, 1) else self.find(handle, Queue)

    def new_queue(self, blocking):
        device = self.use()
        with self.news:
            self.made[device] += 1
            queue = Queue(device, blocking, channel=self.made[device] % connections())
            queue.handle = self.keep(queue)
            self.queues.append(queue)
        return queue.handle

    def device(self):
        """The calling thread's current device: 0 in every new thread."""
        check(self.devices, 100)
        return getattr(self.current, "device", 0)

    def has_context(self):
        """Whether the calling thread has used a GPU."""
        return hasattr(self.current, "device")

    def use(self, device=None):
        """The calling thread uses its current device, or makes `device` that: the process has a context on it."""
        device = self.device() if device is None else device
        if os.environ.get("STAND_IN_EXCLUSIVE") and device not in self.claims:
            self.claims[device] = self.claim(device)
        contexts.add(device)
        self.current.device = device
        return device

    def claim(self, device):
        """The GPU is this process's alone; error 46 where another process with the same STAND_IN_EXCLUSIVE has it."""
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0stand-in {os.environ['STAND_IN_EXCLUSIVE']} GPU {device}")
        except OSError:
            claim.close()
            raise CUDARuntimeError(46, "the GPU is in exclusive mode and has a context of another process") from None
        return claim

    # Work

    def submit(self, queue, begin, after=(), kernel=False):
        """Put the action that `begin` returns at the end of a queue, or `begin` in the graph that is being captured."""
        self.check()
        self.settle()
        if queue.capture is not None:
            queue.capture.add(queue, begin, kernel)
            return
        with self.news:
            self.put(queue, begin(), [*after, *self.implied(queue), *self.ahead(queue)], kernel)

    def put(self, queue, action, after=(), kernel=False):
        """Put an action at the end of a queue, even of one that captures."""
        with self.news:
            queue.work.append((after, action, kernel))
            queue.issued += 1
            self.wake()

    def implied(self, queue):
        """What the null stream waits for, and what waits for it: all streams but the non-blocking ones."""
        null = self.queues[queue.device]
        if queue is null:
            others = [other for other in self.queues
                      if other.blocking and other.device == queue.device and other is not null]
            check(all(other.capture is None for other in others), 906)
            return [(other, other.issued) for other in others]
        return [(null, null.issued)] if queue.blocking else []

    def ahead(self, queue):
        """What other streams have in the same hardware queue: it goes first."""
        return [(other, other.issued) for other in self.queues if other is not queue and other.ended < other.issued
                and (other.device, other.channel) == (queue.device, queue.channel)] if on("queues") else []

    def settle(self):
        """Do what is due. Not where it arises: a collector may come by inside any lock."""
        while self.due and not self.runs_here():
            with contextlib.suppress(IndexError):  # another thread was first
                self.due.popleft()()

    def wake(self):
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, name="stand-in GPU", daemon=True)
            self.thread.start()
        self.news.notify_all()

    def runs_here(self):
        """Whether this thread stands for the GPU; finalizers may run in it, too."""
        return threading.current_thread() is self.thread

    def serve(self):
        while True:
            with self.news:
                self.news.wait_for(lambda: any(queue.work for queue in self.queues))
            if not self.hurry:
                time.sleep(LAG)
            if not self.round():
                time.sleep(NAP)

    def round(self):
        """Let every queue go on, in random order and not always as far as it could; whether anything has ended."""
        with self.news:
            busy = [queue for queue in self.queues if queue.work]
        done = 0
        try:
            for queue in self.order.sample(busy, len(busy)):
                done += queue.advance(self.order.choice((1, 2, 1000)))
        except Exception as error:
            self.fail(error)
        if done:
            with self.news:
                self.queues[:] = [q for q in self.queues if q.work or q.handle == 0 or self.objects.get(q.handle) is q]
                self.hurry = self.hurry and any(queue.work for queue in self.queues)
                self.news.notify_all()
        return done

    def fail(self, error):
        """A fault in device code ends everything, and every later call says so."""
        with self.news:
            self.fault = error
            for queue in self.queues:
                queue.work.clear()
                queue.ended = queue.issued
            self.news.notify_all()

    def check(self):
        check(self.fault is None, 719, repr(self.fault))

    # Waiting

    def finish(self, points):
        """Return when all these (queue, count) have ended."""
        with self.news:
            while not all(queue.ended >= count for queue, count in points):
                self.hurry = True
                self.news.notify_all()
                self.news.wait(0.1)
        self.check()

    def until_idle(self, device):
        """Return when no kernel of the device runs."""
        with self.news:
            while any(queue.runs() for queue in self.queues if queue.device == device) and self.fault is None:
                self.hurry = True
                self.news.notify_all()
                self.news.wait(0.01)

    def ended(self, queue, count):
        """Whether it has ended; the host that asks seems to wait."""
        self.check()
        self.hurry = self.hurry or queue.ended < count
        return queue.ended >= count


class Event:
    """What an event's handle stands for: a mark, of a queue or in a capture, or nothing yet."""

    def __init__(self, device, timed):
        self.device, self.timed, self.mark = device, timed, None


MACHINE = Machine(int(os.environ.get("STAND_IN_SEED", "0")) + os.getpid())


@contextlib.contextmanager
def on_device(device):
    """The current device, for a while."""
    before = MACHINE.device()
    MACHINE.use(device)
    try:
        yield
    finally:
        MACHINE.use(before)
