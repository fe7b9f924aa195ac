"""A watchdog for GPUs: what a stream waits for in vain comes to an end, although no thread of the host waits for it.

A call on a GPU only enqueues. Where a rank does not come, the kernels of the others wait, and so does a program that
copies a result to the host: no deadline of the host's counts there. So a thread looks at the oldest call of each
communicator, and calls the hooks that a waiting thread calls. Where a hook raises an error, or the deadline has passed,
the thread notes the error, fills the results with NaN and aborts the transport. The abort ends the kernels, and with
them the wait of the program.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

from gpucoll.errors import CollectiveTimeout, GpucollError, UsageError

PERIOD = 1.0  # seconds between two looks, at most
LOOKS = 20  # before a deadline, at least
CALL = "a call on the GPU"

log = logging.getLogger("gpucoll")
_watched: weakref.WeakSet[DeviceWatch] = weakref.WeakSet()
_thread: threading.Thread | None = None
_changes = threading.Condition()  # of these two


class DeviceWatch:
    """Looks after the calls of one communicator on its GPU. The communicator keeps it, and closes it.

    `may_call` says whether the threads of a process may call the ranks' transport at the same time.
    """

    def __init__(self, gpu: Any, waits: Any, *, may_call: bool) -> None:
        self._gpu, self._waits, self._may_call = gpu, waits, may_call
        self._oldest: object = None  # what was under way at the last look
        self._since = 0.0  # when that was seen first
        self._has_failed = False  # whether a thread had noted a failure by the last look
        self._looking = threading.RLock()
        self.period = min(PERIOD, waits.timeout / LOOKS)
        gpu.order.is_watched = True
        global _thread
        with _changes:
            _watched.add(self)
            if _thread is None or not _thread.is_alive():
                _thread = threading.Thread(target=_serve, name="gpucoll watchdog", daemon=True)
                _thread.start()
            _changes.notify_all()

    def close(self) -> None:
        """Look no more, and return when a look under way has ended; idempotent."""
        self._gpu.order.is_watched = False
        with _changes:
            _watched.discard(self)
            _changes.notify_all()
        if self._looking.acquire(timeout=PERIOD):  # a look may itself wait for CUDA
            self._looking.release()

    def look(self) -> None:
        """Note calls that have ended; end those that will not end by themselves."""
        with self._looking:
            if not self._gpu.order.is_watched:
                return
            error: GpucollError | None = None
            try:
                if not self._waits.failure:
                    self._gpu.check()
                if self._is_idle():
                    return
                error = self._found()
            except UsageError:  # an event became part of a graph of the user's
                return
            except GpucollError as found:
                error = found
            if error is not None:
                self._end(error)

    def _is_idle(self) -> bool:
        """Return whether no call is under way, as far as is known without disturbing the thread that enqueues."""
        oldest = self._gpu.order.oldest()
        if oldest is not self._oldest:
            self._oldest, self._since = oldest, time.monotonic()
        return oldest is None

    def _found(self) -> GpucollError | None:
        """Return why the oldest call will not end, None while it may."""
        if self._waits.failure is not None:  # a thread has met it; the calls have a look's time to end by themselves
            found, self._has_failed = self._has_failed, True
            return self._waits.failure if found else None
        if time.monotonic() > self._since + self._waits.timeout:
            return self._waits.late(CALL) if self._may_call else CollectiveTimeout(
                f"{CALL}: waited {self._waits.timeout:g} s for the other ranks")
        if self._may_call:
            self._look_around()
        return None

    def _look_around(self) -> None:
        """Raise the error that ends a wait, if there is one now; a thread that is in a call has a look of its own."""
        acquire, release, *_ = self._waits.gate()
        if acquire(blocking=False):
            before = self._waits.waits_since, self._waits.name
            try:
                self._waits.waits_since, self._waits.name = self._since, CALL
                for hook in self._waits.hooks:
                    hook()
            finally:
                self._waits.waits_since, self._waits.name = before
                release()

    def _end(self, error: GpucollError) -> None:
        """Note the error; results that are not complete become NaN, and then the kernels end."""
        try:
            if self._waits.failure is None:
                log.error("a call on the GPU cannot end, and its result is not complete: %s", error)
                self._waits.fail(error, may_call=self._may_call)
        finally:
            self._gpu.end(self._gpu.order.unfinished())
            self.close()


def _serve() -> None:
    """Look after all communicators until there is none."""
    global _thread
    while True:
        with _changes:
            _changes.wait_for(lambda: not _watched, min((one.period for one in _watched), default=0.0))
            watches = list(_watched)
            if not watches:
                _thread = None
                return
        for watch in watches:
            try:
                with watch._gpu.device.relaxed:
                    watch.look()
            except Exception:  # as of CUDA's while a stream is captured: the next look may do better
                log.debug("a look at the calls on a GPU has failed", exc_info=True)
        del watches, watch  # a communicator that was dropped is not kept by this thread


def stop() -> None:
    """Look after no communicator any more, and return when the thread has ended: CUDA may end next."""
    with _changes:
        thread = _thread
        _watched.clear()
        _changes.notify_all()
    if thread is not None:
        thread.join(PERIOD)


def forget() -> None:
    """Look after no communicator: they are those of the parent of this process, and so are thread and lock."""
    global _thread, _changes
    _watched.clear()
    _thread, _changes = None, threading.Condition()
