"""The handle of a call under way, and the delivery of results at the end of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gpucoll.progress.waits
from gpucoll.errors import CollectiveTimeout, GpucollError
from gpucoll.progress.pauses import SHORTEST_SLEEP
from gpucoll.transport.rendezvous import becomes


class DistributedWork:
    """torch's handle of a call under way, returned with ``async_op=True`` and by `isend` and `irecv`.

    Results may be read once `wait` has returned or `is_completed` has returned True. `outputs` are the arrays of the
    call. A given `deliver` receives the result of `work` at the end and writes the outputs.
    """

    def __init__(self, work: gpucoll.progress.waits.Work | None, outputs: Sequence[Any],
                 deliver: Callable[[Any], None] | None = None) -> None:
        self._work = work
        self._outputs = list(outputs)
        self._deliver = deliver
        self._error: GpucollError | None = None

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or badly; never waits."""
        if self._work is None or not self._work.is_completed():
            return False
        self._finish(self._work)
        return True

    def _finish(self, work: gpucoll.progress.waits.Work) -> None:
        """Note the error of `work`, or deliver the result into the arrays of the call; only the first time."""
        self._error = self._error or work.error
        deliver, self._deliver = self._deliver, None
        if deliver is not None and self._error is None:
            try:
                deliver(work.result)
            except GpucollError as error:
                self._error = error

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> GpucollError | None:
        """Return the error of the call; None without an error or before the end."""
        return self._error if self.is_completed() else None

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the call and return True; on a GPU the current stream waits instead of the host.

        With a `timeout`, a timedelta, the host waits, and CollectiveTimeout is raised at the deadline; the call goes
        on. Raises the call's error.
        """
        if timeout or self._work is None:
            if not becomes(self.is_completed, timeout.total_seconds() if timeout else math.inf, SHORTEST_SLEEP):
                raise CollectiveTimeout(f"wait: not completed within {timeout}; the call continues")
        else:
            try:
                self._work.wait()
            except GpucollError as error:  # raised below
                self._error = self._error or error
            self._finish(self._work)
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Block until the call has ended; raise its error."""
        self.wait()

    def result(self) -> list[Any]:
        """Return the list of arrays written by the call; the contents are valid after `wait`."""
        return self._outputs


def conclude(done: Any, outputs: Sequence[Any], async_op: bool, deliver: Callable[[Any], None] | None = None) -> Any:
    """Return the handle of a call under way; without `async_op`, `deliver` the result `done` and return None."""
    if async_op:
        return DistributedWork(done, outputs, deliver)
    if deliver is not None:
        deliver(done)
    return None
