"""gpucoll calls under way as requests of MPI."""

from __future__ import annotations

import contextlib
import ctypes
import functools
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


class _Ending:
    """The end of a gpucoll call under way, reported to MPI by a waiting thread or by `_Watcher`.

    MPI's part is a generalized request, since its status gives source, tag and length of a message. MPICH's Waitall
    aborts on one under way beside REQUEST_NULL, unless it is of MPICH's extension, with functions that poll and wait.
    """

    def __init__(self, work: Work[Any], deliver: Callable[[Any], Any] | None, received: tuple[int, int, int]) -> None:
        self.work, self.received = work, received
        self.error: BaseException | None = None
        self._deliver = deliver
        self._lock, self.is_told = threading.Lock(), False
        library = ctypes.CDLL(MPI.__file__)
        if hasattr(library, "MPIX_Grequest_start"):
            _under_way[id(self)], handle = self, ctypes.c_uint64()
            library.MPIX_Grequest_start(*_CALLBACKS, ctypes.c_void_p(id(self)), ctypes.byref(handle))
            self.request = MPI.Request.fromhandle(handle.value)
            self._complete: Callable[[], Any] = functools.partial(library.MPI_Grequest_complete, handle)
        else:
            self.request = request = MPI.Grequest.Start(self.answer)
            self._complete = request.Complete

    def answer(self, status: MPI.Status) -> None:
        """Fill the status for MPI; after an error, let MPI's waits raise an exception."""
        fill_status(status, *self.received)
        if self.error is not None:
            status.Set_error(MPI.ERR_OTHER)

    def tell(self) -> None:
        """Wait until the result is in the buffer, and let MPI complete the request; once, also after an error."""
        with self._lock:
            if self.is_told:
                return
            try:
                self.work.synchronize()
                if self._deliver is not None:
                    self._deliver(self.work.wait())
            except BaseException as error:  # a thread that waits in MPI must go on
                self.error = error
            self._complete()
            self.is_told, self._deliver = True, None


_under_way: dict[int, _Ending] = {}  # MPICH's requests by id, until MPI frees them


def _query(key: int, status: int) -> int:
    filled, ending = MPI.Status(), _under_way[key]
    fill_status(filled, *ending.received)
    ctypes.memmove(status, MPI._addressof(filled), MPI._sizeof(filled))
    return MPI.ERR_OTHER if ending.error is not None else MPI.SUCCESS


def _poll(key: int, status: int) -> int:
    if _under_way[key].work.is_completed():
        _under_way[key].tell()
    else:
        MPI.COMM_SELF.Iprobe()  # the messages of MPI go on
        time.sleep(20e-6)
    return MPI.SUCCESS


def _wait(count: int, keys: Any, timeout: float, status: int) -> int:
    for key in keys[:count]:
        while not _under_way[key].is_told:
            _poll(key, status)
    return MPI.SUCCESS


_CALLBACKS = [ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *kinds)(call) for call, *kinds in (
    (_query, ctypes.c_void_p), (lambda key: MPI.SUCCESS if _under_way.pop(key).is_told else MPI.ERR_OTHER,),
    (lambda key, is_completed: MPI.SUCCESS, ctypes.c_int), (_poll, ctypes.c_void_p))]  # query, free, cancel, poll, wait
_CALLBACKS.append(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_double,
                                   ctypes.c_void_p)(_wait))


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

    All waits and tests of mpi4py take it, also among other requests, and fill a status. The waits of this class raise
    gpucoll's errors. The waits of `MPI.Request`, such as ``MPI.Request.Waitall``, raise MPI.Exception, and need
    MPI_THREAD_MULTIPLE with Open MPI, mpi4py's default. A program does not call the class.

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

    def __new__(cls, work: Work[Any], deliver: Callable[[Any], Any] | None = None,
                received: tuple[int, int, int] = (MPI.ANY_SOURCE, MPI.ANY_TAG, 0)) -> Request:
        ending = _Ending(work, deliver, received)
        self = super().__new__(cls, ending.request)
        self._ending = ending
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
            with contextlib.suppress(MPI.Exception):
                super().Wait()
            raise self._ending.error
        super().Wait()
        if status is not None:
            fill_status(status, *self._ending.received)
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
