"""gpucoll calls under way as requests of MPI."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from gpucoll.progress.operations import Work


def fill_status(status: MPI.Status, source: int, tag: int, nbytes: int) -> None:
    """Write source, tag and length of a received message to a status of MPI."""
    status.Set_source(source)
    status.Set_tag(tag)
    status.Set_elements(MPI.BYTE, nbytes)


@functools.cache
def _alone() -> MPI.Intracomm:
    """Return a communicator of this process alone, for the messages that end requests."""
    return MPI.COMM_SELF.Dup()


class _Ending:
    """The end of a gpucoll call under way, reported to MPI by a waiting thread or by `_Watcher`.

    MPI's part of the request is the receipt of an empty message from this process to this process. A generalized
    request would serve too, but MPICH 5.0 aborts on a list with a generalized request beside REQUEST_NULL. After an
    error the message is too long, so MPI's waits raise an exception.
    """

    _numbers = itertools.count()

    def __init__(self, work: Work[Any], deliver: Callable[[Any], Any] | None) -> None:
        self.work = work
        self.error: BaseException | None = None
        self._deliver, self._tag = deliver, next(self._numbers) % 0x7FFF
        self._lock, self._is_told = threading.Lock(), False
        self.receipt = _alone().Irecv([bytearray(), MPI.BYTE], 0, self._tag)

    def tell(self) -> None:
        """Wait until the result is in the buffer, and let MPI complete the request; once, also after an error."""
        with self._lock:
            if self._is_told:
                return
            try:
                self.work.synchronize()
                if self._deliver is not None:
                    self._deliver(self.work.wait())
            except BaseException as error:  # a thread that waits in MPI must go on
                self.error = error
            self._is_told, self._deliver = True, None
            _alone().Send([bytes(self.error is not None), MPI.BYTE], 0, self._tag)


class _Watcher:
    """A thread that reports the end of calls to MPI, for programs waiting by `MPI.Request.Waitall`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: list[_Ending] = []

    def add(self, ending: _Ending) -> None:
        if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
            return
        with self._lock:
            self._pending.append(ending)
            if len(self._pending) == 1:  # the thread ends with the last pending call
                threading.Thread(target=self._watch, name="gpucoll requests", daemon=True).start()

    def _watch(self) -> None:
        while self._pending:
            for ending in [one for one in self._pending if one.work.is_completed()]:
                ending.tell()
                with self._lock:
                    self._pending.remove(ending)
                    if not self._pending:
                        return
            time.sleep(100e-6)


_watcher = _Watcher()


class Request(MPI.Request):
    """A gpucoll call under way, as a request of MPI.

    All waits and tests of mpi4py take it, also among other requests. The waits of this class raise gpucoll's errors,
    and fill a status. The waits of `MPI.Request`, such as ``MPI.Request.Waitall``, raise MPI.Exception, and need
    MPI_THREAD_MULTIPLE, mpi4py's default. A program does not call the class.

    Parameters
    ----------
    work : gpucoll.Work
        The handle of the communicator.
    deliver : callable or None, optional
        Receives the result at the end, and writes the buffers.
    received : tuple of int, optional
        Source, tag and bytes of a message to receive.

    Examples
    --------
    >>> import numpy
    >>> from mpi4py import MPI
    >>> import gpucoll.mpi
    >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF, deterministic=True)
    >>> out = numpy.zeros(2)
    >>> request = comm.Iallreduce(numpy.array([1.0, 2.0]), out)  # gpucoll's own, with deterministic=
    >>> type(request).__name__, request.Wait()
    ('Request', True)
    >>> comm.comm.close()
    """

    _ending: _Ending
    _received: tuple[int, int, int]  # source, tag and bytes

    def __new__(cls, work: Work[Any], deliver: Callable[[Any], Any] | None = None,
                received: tuple[int, int, int] = (MPI.ANY_SOURCE, MPI.ANY_TAG, 0)) -> Request:
        ending = _Ending(work, deliver)
        self = super().__new__(cls, ending.receipt)
        self._ending, self._received = ending, received
        _watcher.add(ending)
        return self

    def Wait(self, status: MPI.Status | None = None) -> Any:
        """Return True once the result is in its buffer.

        Parameters
        ----------
        status : mpi4py.MPI.Status or None, optional
            Is set to source, tag and bytes of a message received.

        Returns
        -------
        bool
            True.

        Raises
        ------
        GpucollError
            The call's error.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF, deterministic=True)
        >>> out = numpy.zeros(2)
        >>> request = comm.Iallreduce(numpy.array([1.0, 2.0]), out)  # gpucoll's own, with deterministic=
        >>> request.Wait()
        True
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._ending.tell()
        if self._ending.error is not None:
            with contextlib.suppress(MPI.Exception):  # the message that is too long
                super().Wait()
            raise self._ending.error
        super().Wait()
        if status is not None:
            fill_status(status, *self._received)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the result is in its buffer; never wait.

        Parameters
        ----------
        status : mpi4py.MPI.Status or None, optional
            Is set to source, tag and bytes of a message received.

        Returns
        -------
        bool
            True after the end.

        Raises
        ------
        GpucollError
            The call's error.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF, deterministic=True)
        >>> out = numpy.zeros(2)
        >>> request = comm.Iallreduce(numpy.array([1.0, 2.0]), out)  # gpucoll's own, with deterministic=
        >>> _ = request.Wait()
        >>> request.Test()
        True
        >>> comm.comm.close()
        """
        return self._ending.work.is_completed() and bool(self.Wait(status))

    def wait(self, status: MPI.Status | None = None) -> None:
        """Wait like `Wait`, returning None.

        Parameters
        ----------
        status : mpi4py.MPI.Status or None, optional
            Is set to source, tag and bytes of a message received.

        Raises
        ------
        GpucollError
            The call's error.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF, deterministic=True)
        >>> out = numpy.zeros(2)
        >>> request = comm.Iallreduce(numpy.array([1.0, 2.0]), out)  # gpucoll's own, with deterministic=
        >>> request.wait()
        >>> comm.comm.close()
        """
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, None]:
        """Return the result of `Test`, and None in place of a received object.

        Parameters
        ----------
        status : mpi4py.MPI.Status or None, optional
            Is set to source, tag and bytes of a message received.

        Returns
        -------
        flag : bool
            True after the end.
        value : None
            In place of a received object.

        Raises
        ------
        GpucollError
            The call's error.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF, deterministic=True)
        >>> out = numpy.zeros(2)
        >>> request = comm.Iallreduce(numpy.array([1.0, 2.0]), out)  # gpucoll's own, with deterministic=
        >>> _ = request.Wait()
        >>> request.test()
        (True, None)
        >>> comm.comm.close()
        """
        return self.Test(status), None
