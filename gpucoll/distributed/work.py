"""The handle of a call under way, and the delivery of results at the end of a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gpucoll.progress.waits
from gpucoll.errors import CollectiveTimeout, GpucollError
from gpucoll.progress.waits import SHORTEST_SLEEP
from gpucoll.transport.rendezvous import becomes


class DistributedWork:
    """The handle, as in torch, of a call under way, returned with ``async_op=True`` and by `isend` and `irecv`.

    Results may be read once `wait` has returned or `is_completed` has returned True. A program does not call the class.

    Parameters
    ----------
    work : gpucoll.Work or None
        The handle of the communicator; None before a sender is known.
    outputs : sequence of arrays
        The arrays of the call.
    deliver : callable or None, optional
        Receives the result of `work` at the end, and writes the outputs.

    See Also
    --------
    gpucoll.Work : The handle of a communicator.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> work = dist.all_reduce(numpy.array([1.0]), async_op=True)
    >>> work.wait()
    True
    >>> dist.destroy_process_group()
    """

    def __init__(self, work: gpucoll.progress.waits.Work[Any] | None, outputs: Sequence[Any],
                 deliver: Callable[[Any], None] | None = None) -> None:
        self._work = work
        self._outputs = list(outputs)
        self._deliver = deliver
        self._error: GpucollError | None = None

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or badly; never waits.

        Returns
        -------
        bool
            True after the end.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> work = dist.all_reduce(numpy.array([1.0]), async_op=True)
        >>> _ = work.wait()
        >>> work.is_completed()
        True
        >>> dist.destroy_process_group()
        """
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
        """Return whether the call has ended without an error.

        Returns
        -------
        bool
            True after an end without an error.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> work = dist.all_reduce(numpy.array([1.0]), async_op=True)
        >>> _ = work.wait()
        >>> work.is_success()
        True
        >>> dist.destroy_process_group()
        """
        return self.is_completed() and self._error is None

    def exception(self) -> GpucollError | None:
        """Return the error of the call; None without an error or before the end.

        Returns
        -------
        GpucollError or None
            The error.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> work = dist.all_reduce(numpy.array([1.0]), async_op=True)
        >>> _ = work.wait()
        >>> print(work.exception())
        None
        >>> dist.destroy_process_group()
        """
        return self._error if self.is_completed() else None

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the call and return True; on a GPU the current stream waits instead of the host.

        Parameters
        ----------
        timeout : timedelta or None, optional
            The host waits, at most so long; the call goes on then.

        Returns
        -------
        bool
            True.

        Raises
        ------
        CollectiveTimeout
            The call has not ended within `timeout` (GC-TIMEOUT).
        GpucollError
            The call's error.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> work = dist.all_reduce(numpy.array([1.0]), async_op=True)
        >>> work.wait()
        True
        >>> dist.destroy_process_group()
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
        """Block until the call has ended; raise its error.

        Raises
        ------
        GpucollError
            The call's error.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> work = dist.all_reduce(numpy.array([1.0]), async_op=True)
        >>> work.synchronize()
        >>> dist.destroy_process_group()
        """
        self.wait()

    def result(self) -> list[Any]:
        """Return the list of arrays written by the call; the contents are valid after `wait`.

        Returns
        -------
        list of arrays
            The arrays passed to the call.

        Examples
        --------
        >>> import numpy
        >>> import gpucoll.distributed as dist
        >>> dist.init_process_group()  # without a launcher: one rank
        >>> work = dist.all_reduce(numpy.array([1.0]), async_op=True)
        >>> _ = work.wait()
        >>> work.result()
        [array([1.])]
        >>> dist.destroy_process_group()
        """
        return self._outputs


def conclude(done: Any, outputs: Sequence[Any], async_op: bool, deliver: Callable[[Any], None] | None = None) -> Any:
    """Return the handle of a call under way; without `async_op`, `deliver` the result `done` and return None."""
    if async_op:
        return DistributedWork(done, outputs, deliver)
    if deliver is not None:
        deliver(done)
    return None
