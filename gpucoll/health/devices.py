"""The GPU watchdog: ends calls whose stream waits in vain for another rank, although no host thread waits for the call.

A call on a GPU only enqueues kernels. If a rank does not come, the kernels of the other ranks spin, and a program that
copies a result to the host blocks inside CUDA, without a deadline. The watchdog thread therefore looks at the oldest
call of each communicator and runs the hooks that a waiting host thread would run. If a hook raises an error, or the
deadline has passed, the watchdog records the error, fills the unfinished results with NaN and aborts the transport.
The abort ends the kernels, and the program's copy returns. A "look" is one such inspection.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Any

from gpucoll.errors import CollectiveTimeout, GpucollError, UsageError

# Look twice a second: a hang is rare, and each look costs event queries, but a failure elsewhere is to be told within a
# second. A short timeout gets at least LOOKS looks before its deadline, so that the deadline is met within 5 %.
PERIOD = 0.5  # seconds between two looks, at most
LOOKS = 20
DEVICE_CALL = "a call on the GPU"

log: logging.Logger = logging.getLogger("gpucoll")


class DeviceWatch:
    """The watch over one communicator's calls on one GPU, owned and closed by the communicator.

    `may_call` says whether the watchdog thread may call the ranks' transport (MPI) while another thread does.
    """

    def __init__(self, gpu: Any, waits: Any, *, may_call: bool) -> None:
        self._gpu, self._waits, self._may_call = gpu, waits, may_call
        self._oldest: object = None  # the oldest call under way at the last look
        self._since = 0.0  # when a look first saw that call as the oldest
        self._has_failed = False  # whether `waits.failure` was set by the last look
        # Held during a look, so that `close` can wait for its end. Reentrant, because a look that ends the calls closes
        # this watch itself.
        self._looking = threading.RLock()
        self._closed = threading.Event()
        gpu.order.watch()
        # Weak: during the sleep, the thread must not keep a dropped communicator alive.
        arguments = weakref.ref(self), self._closed, min(PERIOD, waits.timeout / LOOKS)
        threading.Thread(target=_serve, args=arguments, name="gpucoll watchdog", daemon=True).start()

    def close(self) -> None:
        """Stop watching, and wait up to PERIOD seconds for a look under way to end. Idempotent."""
        self._gpu.order.is_watched = False
        self._closed.set()
        # Bounded: a look may itself be blocked inside CUDA, and closing must not hang with it.
        if self._looking.acquire(timeout=PERIOD):
            self._looking.release()

    def look(self) -> None:
        """Drop calls that have completed; abort calls that can no longer complete."""
        with self._looking:
            # `close` may have run between the thread's copy of the list of watches and this look.
            if not self._gpu.order.is_watched:
                return
            error: GpucollError | None = None
            try:
                if not self._waits.failure:
                    self._gpu.check()
                if self._is_idle():
                    return
                error = self._found()
            except UsageError:  # an event was captured into a graph of the user's, and cannot be queried
                return
            except GpucollError as found:
                error = found
            if error is not None:
                self._end(error)

    def _is_idle(self) -> bool:
        """Return whether no call is known to be under way; restart the clock when the oldest call has changed."""
        # May miss the newest calls: `oldest` does not disturb a thread that keeps enqueuing.
        oldest = self._gpu.order.oldest()
        if oldest is not self._oldest:
            self._oldest, self._since = oldest, time.monotonic()
        return oldest is None

    def _found(self) -> GpucollError | None:
        """Return the error because of which the oldest call cannot complete; None while the call may still complete."""
        # Another thread has recorded a failure. Calls already under way get one period to complete by themselves.
        if self._waits.failure is not None:
            found, self._has_failed = self._has_failed, True
            return self._waits.failure if found else None
        # Finding the culprits (`late`) may send messages, so a single-threaded MPI gets an error without names.
        if time.monotonic() > self._since + self._waits.timeout:
            return self._waits.late(DEVICE_CALL) if self._may_call else CollectiveTimeout(
                f"{DEVICE_CALL}: waited {self._waits.timeout:g} s for the other ranks")
        if self._may_call:
            self._look_around()
        return None

    def _look_around(self) -> None:
        """Run the hooks of a wait, which raise if the wait is hopeless."""
        # Without blocking: a thread inside a call holds the lock, and runs the hooks itself.
        acquire, release, *_ = self._waits.gate()
        if acquire(blocking=False):
            # The hooks measure a wait by its start and report its name: lend them this call's, then restore.
            before = self._waits.waits_since, self._waits.name
            try:
                self._waits.waits_since, self._waits.name = self._since, DEVICE_CALL
                for hook in self._waits.hooks:
                    hook()
            finally:
                self._waits.waits_since, self._waits.name = before
                release()

    def _end(self, error: GpucollError) -> None:
        """Record the error, fill incomplete results with NaN, then abort the kernels and stop watching."""
        try:
            if self._waits.failure is None:
                log.error("a call on the GPU cannot end, and its result is not complete: %s", error)
                self._waits.fail(error, may_call=self._may_call)
        finally:
            # NaN before the abort: once the kernels have ended, the program's copy must not deliver plausible numbers.
            self._gpu.end(self._gpu.order.unfinished())
            self.close()


def _serve(watch_of: weakref.ref[DeviceWatch], closed: threading.Event, period: float) -> None:
    """Look at a watched communicator until it is closed or dropped: the body of the watchdog thread."""
    while not closed.wait(period) and (watch := watch_of()) is not None:
        try:
            # Relaxed capture mode: otherwise an event query of this thread breaks a capture in another thread.
            with watch._gpu.device.relaxed:
                watch.look()
        except Exception:  # for example CUDA refuses during a capture: the next look may succeed
            log.debug("a look at the calls on a GPU has failed", exc_info=True)
        del watch
