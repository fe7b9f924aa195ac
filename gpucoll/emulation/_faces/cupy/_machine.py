"""The machine: GPUs and CUDA's streams, as queues served by a single thread in a seeded random order.

Actions not ordered by events run in any order, and later than the host expects, as on a GPU. Rules of CUDA: the null
stream and the blocking streams wait for each other, destroyed handles are invalid, and after a fault of device code
every call fails. Errors have CUDA's numbers.
"""

import collections
import contextlib
import gc
import itertools
import os
import random
import socket
import threading
import time
import traceback

from gpucoll.errors import UsageError
from gpucoll.launch.launchers import started

from ._clocks import CLOCKS, clock_of, host_clock, join
from .hostile import contexts, on

VERSION = "14.2.0"  # of the imitated CuPy
LAG = 3e-4  # seconds between a submission and the start of the work, unless the host waits
QUICK = os.environ.get("EMULATED_TEMPER") == "quick"
NAP = 5e-5  # seconds between polls of actions waiting for another process


NAMES = dict(zip((1, 2, 46, 100, 101, 201, 400, 401, 600, 700, 704, 705, 719, 802, *range(900, 908)), """
InvalidValue MemoryAllocation DevicesUnavailable NoDevice InvalidDevice DeviceUninitialized InvalidResourceHandle
IllegalState NotReady IllegalAddress PeerAccessAlreadyEnabled PeerAccessNotEnabled LaunchFailure SystemNotReady
StreamCaptureUnsupported StreamCaptureInvalidated StreamCaptureMerge StreamCaptureUnmatched StreamCaptureUnjoined
StreamCaptureIsolation StreamCaptureImplicit CapturedEvent""".split(), strict=True))


class CUDARuntimeError(RuntimeError):
    """An error of a call of CUDA's runtime, with CUDA's number and name."""

    def __init__(self, status, words=""):
        super().__init__(status, words)
        self.status = status

    def __str__(self):
        return f"cudaError{NAMES.get(self.status, 'Unknown')}: {self.args[1]} ({self.status})"


def check(condition, status, words=""):
    if not condition:
        raise CUDARuntimeError(status, words)


def have_ended(points):
    """Return whether in each queue, of pairs (queue, count), so many actions have ended."""
    return all(queue.ended >= count for queue, count in points)


class Queue:
    """A stream: a sequence of actions, each begun after the end of its predecessors and dependencies."""

    def __init__(self, device, blocking, handle=None, channel=0):
        self.device, self.blocking, self.handle, self.channel = device, blocking, handle, channel
        self.work = collections.deque()  # triples (dependencies, action, is a kernel)
        self.issued = self.ended = 0
        self.capture, self.priority = None, 0
        self.clocks = {}  # by number of an action: the actions known to be before it, see _order.py

    def advance(self, most):
        """Run up to `most` actions, as far as possible without blocking; return the number of ended actions."""
        # An action returns whether the action has ended; otherwise a later round asks again, and nothing blocks.
        done = 0
        while done < most and self.work and have_ended(self.work[0][0]) and self.work[0][1]():
            self.work.popleft()
            self.ended += 1
            done += 1
        return done

    def runs(self):
        """Return whether a kernel is queued and the first action waits for no other stream and not for the host."""
        # A copy: the GPU's thread removes actions meanwhile.
        work = list(self.work)
        return any(kernel for *_, kernel in work) and have_ended(work[0][0]) and not getattr(
            work[0][1], "on_host", False)


class Machine:
    """All GPUs of this process. Any thread may call `submit`; a single thread of the machine does the work."""

    def __init__(self, seed):
        self.devices = int(os.environ.get("EMULATED_GPUS") or os.environ.get("STAND_IN_GPUS", "1"))
        # The PCI bus of the first GPU: programs of one user have GPUs of their own, also under a launcher.
        program = os.getppid() if started() else os.getpid()
        self.bus = int(os.environ.setdefault("EMULATED_BUS", str(16 * (1 + program % 4000))))  # also of children
        # Guards handles and queues, and announces progress to waiting hosts.
        self.news = threading.Condition()
        self.fault = None
        self.hurry = False  # whether the host waits: work then starts without LAG
        self.order = random.Random(seed)
        self.handles = itertools.count(0x7000_0000_0000, 0x40)  # streams, events and graphs
        self.objects = {}
        self.gone = collections.defaultdict(list)  # by kind: handles of destroyed objects, for reuse
        self.made = collections.Counter()  # number of created streams by device
        self.due = collections.deque()  # deferred work on freed memory, done by `settle`
        self.queues = [Queue(device, True, 0) for device in range(self.devices)]  # the null streams come first
        self.busy, self.captures = set(), set()  # the queues with work, the captures under way
        self.current = threading.local()
        self.copies = []  # streams of the threads copying to ordinary host memory
        self.claims = {}  # by device: a socket with a name unique among processes
        self.thread = None
        self.has_thread = True  # without a thread, the hosts that wait for work do it
        self.work_lock = threading.Lock()
        self.worker = None  # the number of the thread at work

    # Handles

    def keep(self, thing):
        """Return a handle of `thing`; by the rule `handles`, reuse the handle of a destroyed object."""
        with self.news:
            gone = self.gone[type(thing)]
            handle = gone.pop() if gone and on("handles") else next(self.handles)
            self.objects[handle] = thing
        return handle

    def drop(self, handle):
        """Invalidate a handle; return the object of the handle, or None."""
        with self.news:
            found = self.objects.pop(handle, None)
            if found is not None:
                self.gone[type(found)].append(handle)
        return found

    def find(self, handle, kind):
        """Return the object of a handle; raise error 400 for an invalid handle or another kind of object."""
        found = self.objects.get(handle)
        check(isinstance(found, kind), 400, f"{handle:#x} is no {kind.__name__}")
        return found

    def queue(self, handle):
        """Return the queue of a stream's handle: 0 and 1 are the null stream of the current device, 2 the thread's."""
        if handle == 2:
            own = self.current.own = getattr(self.current, "own", {})
            if self.use() not in own:
                own[self.use()] = self.new_queue(blocking=True)
            handle = own[self.use()]
        return self.queues[self.use()] if handle in (0, 1) else self.find(handle, Queue)

    def new_queue(self, blocking):
        device = self.use()
        self.until_copied()
        with self.news:
            self.made[device] += 1
            channels = min(32, int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") or 8))
            queue = Queue(device, blocking, channel=self.made[device] % channels)
            queue.handle = self.keep(queue)
            self.queues.append(queue)
        return queue.handle

    def device(self):
        """Return the calling thread's current device: 0 in every new thread."""
        check(self.devices, 100)
        return getattr(self.current, "device", 0)

    def has_context(self):
        """Return whether the calling thread has used a GPU."""
        return hasattr(self.current, "device")

    def use(self, device=None):
        """Make `device` current in the calling thread (None: no change), with a context of the process."""
        device = self.device() if device is None else device
        if os.environ.get("EMULATED_EXCLUSIVE") and device not in self.claims:
            self.claims[device] = self.claim(device)
        if device not in contexts and not QUICK:
            contexts[device] = "".join(traceback.format_stack())
        self.current.device = device
        return device

    def claim(self, device):
        """Reserve the GPU; raise error 46 if another process with the same EMULATED_EXCLUSIVE has the GPU."""
        claim = socket.socket(socket.AF_UNIX)
        try:
            # A name in the abstract namespace ends with the process, so a killed process leaves no claim.
            claim.bind(f"\0gpucoll emulated {os.environ['EMULATED_EXCLUSIVE']} GPU {device}")
        except OSError:
            claim.close()
            raise CUDARuntimeError(46, "the GPU is in exclusive mode and has a context of another process") from None
        return claim

    # Work

    def submit(self, queue, begin, after=(), kernel=False):
        """Append the action returned by `begin` to a queue, or `begin` to the graph of a capturing queue."""
        self.check()
        self.settle()
        if queue.capture is not None:
            queue.capture.add(queue, begin, kernel)
            return
        # A single lock: the counts taken as dependencies must still hold when the action is appended.
        with self.news:
            self.put(queue, begin(), [*after, *self.implied(queue), *self.ahead(queue)], kernel)
        if QUICK:
            self.at_once(queue)

    def is_idle(self):
        """Return whether work given now may be done now: by the temper "quick", if nothing is under way."""
        return QUICK and not (self.busy or self.captures or self.fault)

    def is_capturing(self, stream):
        return bool(self.captures) and self.queue(stream).capture is not None

    def at_once(self, queue):
        """Do the work of a stream in the calling thread, as far as it waits for nobody and no other thread works."""
        if self.runs_here() or not self.work_lock.acquire(blocking=False):  # the caller may hold `news`
            return
        try:
            while queue.work and self.round():
                pass
        finally:
            self.work_lock.release()

    def put(self, queue, action, after=(), kernel=False):
        """Append an action to a queue, even to a capturing queue."""
        with self.news:
            self.busy.add(queue)
            queue.work.append((after, action, kernel))
            queue.issued += 1
            if on("order"):
                self.note(queue, after)
            self.wake()

    def note(self, queue, after):
        """Note which actions are before the last one of a queue."""
        clock = {queue: queue.issued}
        befores = [clock_of(other, count) for other, count in [(queue, queue.issued - 1), *after]]
        for known in (host_clock(), *befores):
            join(clock, known)
        queue.clocks[queue.issued] = clock
        if len(queue.clocks) > CLOCKS:
            del queue.clocks[next(iter(queue.clocks))]

    def implied(self, queue):
        """Return implicit dependencies: the null stream and the blocking streams wait for each other."""
        null = self.queues[queue.device]
        if queue is null:
            others = [other for other in self.queues
                      if other.blocking and other.device == queue.device and other is not null]
            check(all(other.capture is None for other in others), 906)
            return [(other, other.issued) for other in others]
        return [(null, null.issued)] if queue.blocking else []

    def ahead(self, queue):
        """Return the unfinished work of other streams in the same hardware queue, which must end first."""
        return [(other, other.issued) for other in self.queues if other is not queue and other.ended < other.issued
                and (other.device, other.channel) == (queue.device, queue.channel)] if on("queues") else []

    def settle(self):
        """Do deferred work. Finalizers only defer, because the garbage collector may run inside any lock."""
        while self.due and not self.runs_here():
            with contextlib.suppress(IndexError):  # another thread was first
                self.due.popleft()()

    def wake(self):
        if self.thread is None and self.has_thread:
            self.thread = threading.Thread(target=self.serve, name="emulated GPU", daemon=True)
            self.thread.start()
        self.news.notify_all()

    def runs_here(self):
        """Return whether the calling thread does the GPUs' work; finalizers may run on such a thread, too."""
        return self.worker == threading.get_ident()

    def help(self):
        """Do work in the calling thread, if the machine has no thread of its own; return whether an action ended."""
        if not self.has_thread and self.work_lock.acquire(blocking=False):
            try:
                return self.round() > 0
            finally:
                self.work_lock.release()
        return False

    def serve(self):
        while True:
            with self.news:
                self.news.wait_for(lambda: any(queue.work for queue in self.queues))
            # Let the host run ahead, so that a missing wait shows as old data.
            if not self.hurry:
                time.sleep(LAG)
            with self.work_lock:
                done = self.round()
            if not done:
                time.sleep(NAP)

    def round(self):
        """Advance all queues in random order, not always as far as possible; return the number of ended actions."""
        with self.news:
            busy = [queue for queue in self.queues if queue.work]
        done, self.worker, collects = 0, threading.get_ident(), gc.isenabled()
        gc.disable()  # a finalizer may wait for the GPU: here it would wait for itself
        try:
            for queue in self.order.sample(busy, len(busy)):
                # Unequal progress shows programs relying on an order without events.
                done += queue.advance(self.order.choice((1, 2, 1000)))
        except Exception as error:
            self.fail(error)
        finally:
            self.worker = None
            gc.enable() if collects else None
        if done:
            with self.news:
                # As in CUDA, a destroyed stream first completes all work.
                self.queues[:] = [q for q in self.queues if q.work or q.handle == 0 or self.objects.get(q.handle) is q]
                self.busy = {queue for queue in self.busy if queue.work}
                self.hurry = self.hurry and any(queue.work for queue in self.queues)
                self.news.notify_all()
        return done

    def fail(self, error):
        """Record a fault of device code: all work is dropped, and every later call raises error 719."""
        with self.news:
            self.fault = error
            # Everything counts as ended, so that waiting hosts wake up and raise the fault.
            for queue in self.queues:
                queue.work.clear()
                queue.ended = queue.issued
            self.busy.clear()
            self.news.notify_all()

    def fault_at_the_end(self):
        """Return the fault of device code that no call has raised, once all work has ended; None without one."""
        with contextlib.suppress(CUDARuntimeError):
            self.finish([(queue, queue.issued) for queue in self.queues])
        return self.fault

    def forget_thread(self):
        """In a forked process, fail as CUDA does, if the parent has used a GPU before."""
        if self.thread is not None:
            self.fault = RuntimeError("cudaErrorInitializationError: this process was forked from one that had used "
                                      "a GPU; start it by spawn, or fork before")

    def check(self):
        if isinstance(self.fault, UsageError):  # a program's missing order, with its line
            raise self.fault
        check(self.fault is None, 719, repr(self.fault))

    # Waiting

    def finish(self, points):
        """Wait until each (queue, count) has ended; raise error 719 after a fault."""
        while not have_ended(points):
            with self.news:
                # `round` clears `hurry` as soon as all queues are empty, so set `hurry` in every turn.
                self.hurry = True
                self.news.notify_all()
                if self.has_thread:
                    self.news.wait_for(lambda: have_ended(points), 0.1)
            if not (self.has_thread or self.help()):
                time.sleep(NAP)
        for queue, count in points:
            join(host_clock(), clock_of(queue, count))
        self.check()

    @contextlib.contextmanager
    def copying(self, queue):
        """Note a copy to ordinary host memory in a stream within the `with` block."""
        with self.news:
            self.copies.append(queue)
        try:
            yield
        finally:
            with self.news:
                self.copies.remove(queue)
                self.news.notify_all()

    def until_copied(self, queue=None):
        """By the rule `copies`, wait until no thread copies to ordinary host memory: in a stream, or in any stream."""
        with self.news:
            self.news.wait_for(lambda: not (self.copies if queue is None else queue in self.copies)
                               or not on("copies") or self.fault is not None)

    def until_idle(self, device):
        """Wait until no kernel of the device runs."""
        with self.news:
            while any(queue.runs() for queue in self.queues if queue.device == device) and self.fault is None:
                self.hurry = True
                self.news.notify_all()
                self.news.wait(0.01)

    def ended(self, queue, count):
        """Return whether `count` actions of the queue have ended; a polling host counts as waiting."""
        if queue.ended < count:
            self.hurry = True
            self.help()
        self.check()
        if queue.ended >= count:
            join(host_clock(), clock_of(queue, count))
        return queue.ended >= count


# The process id gives every rank an order of its own.
MACHINE = Machine(int(os.environ.get("EMULATED_SEED", "0")) + os.getpid())
os.register_at_fork(after_in_child=MACHINE.forget_thread)


@contextlib.contextmanager
def on_device(device):
    """Make `device` current within the `with` block; a thread that has used no GPU keeps it."""
    before = MACHINE.device() if MACHINE.has_context() else device
    MACHINE.use(device)
    try:
        yield
    finally:
        MACHINE.use(before)
