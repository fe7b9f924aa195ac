"""The interface of mpi4py: `Comm` is an mpi4py communicator whose upper-case collectives gpucoll carries out.

    comm = gpucoll.mpi.Comm(MPI.COMM_WORLD)      # the only line of a program that changes
    comm.Allreduce(x, y, op=MPI.MAX)

Buffers are passed as in mpi4py. mpi4py itself handles user-defined datatypes and ops, point-to-point messages and
nonblocking calls of host arrays, lower-case calls, windows, files, and all other methods. Where a rank passes a derived
datatype to a blocking call that moves data, mpi4py carries out the call on all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Unpack, cast

from mpi4py import MPI

from gpucoll import internal
from gpucoll.communicator import Communicator
from gpucoll.device.gpus import package
from gpucoll.errors import ArgumentError, GpucollError, MismatchError
from gpucoll.launch import bootstrap
from gpucoll.launch.bootstrap import GivenOptions
from gpucoll.mpi.buffers import MPI_OPS, Derived, NotOurs, blocks_of, fill, gpu_array, op_name, parts, plain, row
from gpucoll.mpi.requests import Request, fill_status

__all__ = ["Comm", "Request"]

PreparedCall = tuple[Callable[..., Any], Callable[[Any], Any] | None]  # the function, and a consumer of the result


@functools.cache
def _attribute() -> int:
    """Return the key of the MPI attribute holding the `Comm` objects of an mpi4py communicator.

    `Free` deletes the attribute, and so closes the `Comm` objects. `Dup` does not copy the attribute.
    """
    def close(mpi: MPI.Comm, key: int, kept: dict[Any, Comm]) -> None:
        for one in kept.values():
            with contextlib.suppress(GpucollError):  # an MPI callback must not raise
                one.comm.close()

    return MPI.Comm.Create_keyval(delete_fn=close)


def _kind_of(cls: Any, base: Any) -> Any:
    """Return `cls` with the methods of `base`, the class of the given communicator, such as MPI.Cartcomm."""
    if issubclass(base, cls):
        return base
    if issubclass(cls, base):
        return cls
    own = {name: _derived(name) for name in MADE if hasattr(base, name) and not hasattr(cls, name)}
    return type(base.__name__, (cls, base), own)


_kind: Any = functools.cache(_kind_of)  # one class for each


class Comm(MPI.Intracomm):
    """The mpi4py intracommunicator `comm` with upper-case collectives run by a gpucoll communicator, ``comm.comm``.

    It has the handle of the given communicator, and so is equal to it; of a Cartcomm, or of a subclass of a program, it
    has the methods, too. The first `Comm` of a communicator is a collective call. A later ``Comm(comm)`` with the same
    options returns the same object, until the object is closed or the communicator freed. Errors of these calls are
    gpucoll's. Calls on CuPy arrays run in the order of the current stream. A blocking call, and `Wait`, return when the
    call has ended for every stream; inside ``comm.comm.group()`` and the capture of a CUDA graph a call only enqueues.
    `Split`, `Dup`, `Create_cart` and all other methods that return a communicator return a `Comm` too, or COMM_NULL as
    in mpi4py.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None, optional
        The communicator of mpi4py.
    **options : object
        Those of `gpucoll.init`, equal on all ranks.

    Raises
    ------
    ArgumentError
        `comm` is not an intracommunicator (GC-ARGUMENT).

    See Also
    --------
    gpucoll.Communicator : The spelling of gpucoll.

    Examples
    --------
    >>> import numpy
    >>> from mpi4py import MPI
    >>> import gpucoll.mpi
    >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
    >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
    >>> comm.Allreduce(x, out, op=MPI.SUM)
    >>> out
    array([1., 2.])
    >>> comm.comm.close()
    """

    _options: dict[str, Any]  # of a copy whose gpucoll communicator is still to be made
    _request: Callable[..., Any] = Request

    def __new__(cls, comm: MPI.Intracomm | None = None, **options: Unpack[GivenOptions]) -> Comm:
        if comm is None:
            return cls._bare()  # mpi4py's own Dup and Clone fill in the handle later
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            Communicator.from_mpi(comm, **options)  # raises the error for a wrong communicator
        # Making a gpucoll communicator takes milliseconds and memory, and programs wrap MPI.COMM_WORLD in many places.
        kept: Any = comm.Get_attr(_attribute())
        if kept is None:
            kept = {}
            comm.Set_attr(_attribute(), kept)
        wanted = _kind(cls, type(comm)), bootstrap.options(options)
        if wanted not in kept or kept[wanted].comm.closed:
            made = cls._bare(comm)
            made.comm = Communicator.from_mpi(comm, **options)
            kept[wanted] = made
        return cast("Comm", kept[wanted])

    def __init__(self, comm: MPI.Intracomm | None = None, **options: Unpack[GivenOptions]) -> None:
        """Leave all to `__new__`: the constructor of the given communicator's class has run for that object."""

    @classmethod
    def _bare(cls, mpi: MPI.Intracomm | None = None) -> Comm:
        """Return a `Comm` of the handle and the state of `mpi`, whose gpucoll communicator is made at the first use."""
        kind = cls if mpi is None else _kind(cls, type(mpi))
        own: Any = kind
        while own.__module__ != "mpi4py.MPI":
            own = own.__base__  # Python calls no constructor but that of the first base in C
        made = own.__new__(kind, mpi)
        for name, value in getattr(mpi, "__dict__", {}).items():
            if name != "comm":
                setattr(made, name, value)
        return cast("Comm", made)

    @functools.cached_property
    def comm(self) -> Communicator:
        """The gpucoll communicator; a copy by `Idup`, or from a pickle, makes it at the first use, on all ranks."""
        return Comm(self, **vars(self).get("_options", {})).comm

    def Free(self) -> None:
        """Close the gpucoll communicator and free the MPI communicator.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.close : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> copy = comm.Dup()
        >>> copy.Free()
        >>> copy == MPI.COMM_NULL
        True
        >>> comm.comm.close()
        """
        try:
            if "comm" in vars(self):
                self.comm.close()
        finally:
            super().Free()

    def Idup(self, info: MPI.Info | None = None) -> tuple[Comm, MPI.Request]:
        """Begin to duplicate; the copy's first collective call must be made by all ranks together.

        Parameters
        ----------
        info : mpi4py.MPI.Info or None, optional
            Passed on to MPI.

        Returns
        -------
        copy : Comm
            The copy, usable after the wait.
        request : mpi4py.MPI.Request
            The handle of the call.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.from_mpi : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> copy, request = comm.Idup()
        >>> _ = request.Wait()
        >>> copy.Free()
        >>> comm.comm.close()
        """
        copy, request = super().Idup(info)
        copy._options = self._given()
        return copy, request

    def _given(self) -> dict[str, Any]:
        return {name: getattr(self.comm.options, name) for name in GivenOptions.__annotations__}

    def _wrapped(self, mpi: Any) -> Any:
        return mpi if mpi == MPI.COMM_NULL else Comm(mpi, **self._given())

    # ------------------------------------------------------------ fast path: NumPy arrays and predefined datatypes

    def Barrier(self) -> None:
        """Return when every rank has called `Barrier`.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.barrier : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> comm.Barrier()
        >>> comm.comm.close()
        """
        self.comm.barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Overwrite every rank's buffer with the root's buffer.

        Parameters
        ----------
        buf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype.
        root : int, optional
            The rank of the root.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.broadcast : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x = numpy.array([7])
        >>> comm.Bcast(x)
        >>> x
        array([7])
        >>> comm.comm.close()
        """
        x = plain(buf)
        if x is None:
            self._do("Bcast", buf, root)
        else:
            try:
                self.comm.broadcast(x, root)
            except MismatchError as error:
                self._settle("Bcast", (buf, root), error)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction of all ranks' `sendbuf` to every rank's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        op : mpi4py.MPI.Op, optional
            The reduction.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.all_reduce : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Allreduce(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._reduce_all("Allreduce", self.comm.all_reduce, sendbuf, recvbuf, op)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction over ranks 0 to this rank, inclusive, to `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        op : mpi4py.MPI.Op, optional
            The reduction.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.scan : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Scan(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._reduce_all("Scan", self.comm.scan, sendbuf, recvbuf, op)

    # Each method tries `plain` first, a cheap test for frequent kinds of buffers. Other buffers and ops take the
    # general path, which also reports errors.

    def _reduce_all(self, name: str, call: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> None:
        out, ours = plain(recvbuf), MPI_OPS.get(id(op))
        x = out if sendbuf is MPI.IN_PLACE else plain(sendbuf)
        if x is None or out is None or ours is None or x.shape != out.shape:
            self._do(name, sendbuf, recvbuf, op)
        else:
            call(x, out, ours)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction over the ranks before this rank to `recvbuf`.

        Rank 0's `recvbuf` is unchanged.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        op : mpi4py.MPI.Op, optional
            The reduction.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.exscan : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Exscan(x, out)
        >>> out
        array([0., 0.])
        >>> comm.comm.close()
        """
        self._do("Exscan", sendbuf, recvbuf, op)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """Write the reduction of all ranks' `sendbuf` to the root's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        op : mpi4py.MPI.Op, optional
            The reduction.
        root : int, optional
            The rank of the root.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.reduce : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Reduce(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        is_root = root == self.rank
        out = plain(recvbuf) if is_root else None
        x = out if is_root and sendbuf is MPI.IN_PLACE else plain(sendbuf)
        name = MPI_OPS.get(id(op))
        if x is None or name is None or (is_root and (out is None or x.shape != out.shape)):
            self._do("Reduce", sendbuf, recvbuf, op, root)
        else:
            self.comm.reduce(x, out, name, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write all ranks' `sendbuf` to every rank's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.all_gather : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Allgather(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        x, out = plain(sendbuf), plain(recvbuf, self.size)
        if x is None or out is None or self.size * x.size != out.size:
            self._do("Allgather", sendbuf, recvbuf)
        else:
            try:
                self.comm.all_gather(x, out)
            except MismatchError as error:
                self._settle("Allgather", (sendbuf, recvbuf), error)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write all ranks' `sendbuf` to the root's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        root : int, optional
            The rank of the root.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.gather : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Gather(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        is_root = root == self.rank
        x, out = plain(sendbuf), plain(recvbuf, self.size) if is_root else None
        if x is None or (is_root and (out is None or self.size * x.size != out.size)):
            self._do("Gather", sendbuf, recvbuf, root)
        else:
            try:
                self.comm.gather(x, out, root)
            except MismatchError as error:
                self._settle("Gather", (sendbuf, recvbuf, root), error)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write block i of the root's `sendbuf` to the `recvbuf` of rank i.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        root : int, optional
            The rank of the root.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.scatter : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Scatter(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        is_root = root == self.rank
        x, out = plain(sendbuf, self.size) if is_root else None, plain(recvbuf)
        if out is None or (is_root and (x is None or x.size != self.size * out.size)):
            self._do("Scatter", sendbuf, recvbuf, root)
        else:
            try:
                self.comm.scatter(x, out, root)
            except MismatchError as error:
                self._settle("Scatter", (sendbuf, recvbuf, root), error)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write block i of rank j's `sendbuf` to block j of rank i's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.all_to_all : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Alltoall(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        x, out = plain(sendbuf, self.size), plain(recvbuf, self.size)
        if x is None or out is None or x.shape != out.shape or x.size % self.size:
            self._do("Alltoall", sendbuf, recvbuf)
        else:
            try:
                self.comm.all_to_all(x, out)
            except MismatchError as error:
                self._settle("Alltoall", (sendbuf, recvbuf), error)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write block i of the reduction of all ranks' `sendbuf` to the `recvbuf` of rank i.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        op : mpi4py.MPI.Op, optional
            The reduction.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.reduce_scatter : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Reduce_scatter_block(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        x, out, name = plain(sendbuf, self.size), plain(recvbuf), MPI_OPS.get(id(op))
        if x is None or out is None or name is None or x.size != self.size * out.size:
            self._do("Reduce_scatter_block", sendbuf, recvbuf, op)
        else:
            self.comm.reduce_scatter(x, out, name)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM) -> None:
        """Write part i, of ``recvcounts[i]`` elements, of the reduction to the `recvbuf` of rank i.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        recvcounts : sequence of int or None, optional
            The number of elements of each rank; None: exchanged.
        op : mpi4py.MPI.Op, optional
            The reduction.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.reduce_scatter_v : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Reduce_scatter(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._do("Reduce_scatter", sendbuf, recvbuf, recvcounts, op)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write all ranks' `sendbuf`, of any lengths, at the displacements in every rank's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.all_gather_v : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Allgatherv(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._do("Allgatherv", sendbuf, recvbuf)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write all ranks' `sendbuf`, of any lengths, at the displacements in the root's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        root : int, optional
            The rank of the root.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.gather_v : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Gatherv(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._do("Gatherv", sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write part i of the root's `sendbuf` to the `recvbuf` of rank i.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        root : int, optional
            The rank of the root.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.scatter_v : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Scatterv(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._do("Scatterv", sendbuf, recvbuf, root)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write part i of rank j's `sendbuf` to part j of rank i's `recvbuf`.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.all_to_all_v : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> x, out = numpy.array([1.0, 2.0]), numpy.zeros(2)
        >>> comm.Alltoallv(x, out)
        >>> out
        array([1., 2.])
        >>> comm.comm.close()
        """
        self._do("Alltoallv", sendbuf, recvbuf)

    # ------------------------------------------------------------ general path: `_name` prepares the call of `Name`

    def _do(self, name: str, *arguments: Any) -> None:
        try:
            # An ArgumentError here is reported to the other ranks, which may already wait in the collective.
            with internal.refusing(self.comm):
                call, deliver = getattr(self, "_" + name.lower())(*arguments)
        except Derived:
            return self._settle(name, arguments)
        except NotOurs:
            return getattr(super(), name)(*arguments)
        try:
            done = call()
        except MismatchError as error:
            return self._settle(name, arguments, error)
        if deliver is not None:
            deliver(done)
        self._finish(name, *arguments)

    def _settle(self, name: str, arguments: tuple[Any, ...], error: MismatchError | None = None) -> None:
        """Let mpi4py carry out a call on all ranks if one of them passes a derived datatype; else raise `error`.

        A rank with a derived datatype, without `error`, tells the others. If they are in the call of gpucoll, all ranks
        get a MismatchError, and ask each other again.
        """
        if self.comm.check == "off":  # calls are not compared
            return getattr(super(), name)(*arguments)
        last: GpucollError | None = error
        for _ in range(1 if error else 2):
            try:
                found = internal.all_gather_metadata(self.comm, {"derived": error is None}, name)
            except GpucollError as failed:  # a rank that called something else may have ended meanwhile
                last = error or failed
                if not isinstance(failed, MismatchError):
                    break
            else:
                last = None if any(one["derived"] for one in found) else error
                break
        if last is not None:
            raise last
        return getattr(super(), name)(*arguments)

    def _deliver(self, name: str, deliver: Callable[[Any], Any], places: Any, came: Any) -> None:
        with contextlib.ExitStack() as entered:
            for place in places:
                entered.enter_context(place)
            deliver(came)
            self._finish(name, came)

    def _finish(self, name: str, *buffers: Any) -> None:
        """Wait until a call on GPU arrays has ended, so that every stream finds the result, as MPI promises."""
        internal.finish(self.comm, name, gpu_array(*buffers))

    def _start(self, name: str, *given: Any, **named: Any) -> Any:
        """Begin a nonblocking call on GPU arrays; return a `Request`. mpi4py begins those on host arrays.

        With ``deterministic=`` calls on host arrays are gpucoll's as well, but for those that exchange shapes first.
        """
        bound = STARTED[name] | dict(zip(STARTED[name], given, strict=False)) | named
        asks = name.endswith("v") or name in ("Scatter", "Reduce_scatter")
        is_mpis = self._request is Request and (asks or not self.comm.options.deterministic)
        on_gpu = gpu_array(*bound.values()) is not None
        try:
            if is_mpis and not on_gpu:
                raise NotOurs
            call, deliver = getattr(self, "_" + name.lower())(**bound)
        except NotOurs:
            return getattr(super(), "I" + name.lower())(*given, **named)
        if deliver is not None:
            # Another thread may deliver the result: on the device and the stream that are this thread's now.
            cuda = package("cupy").cuda if on_gpu else None
            places = (cuda.Device(), cuda.get_current_stream()) if cuda is not None else ()
            deliver = functools.partial(self._deliver, name, deliver, places)
        return self._request(call(async_op=True), deliver)

    def _barrier(self) -> PreparedCall:
        return self.comm.barrier, None

    def _bcast(self, buf: Any, root: int) -> PreparedCall:
        return functools.partial(self.comm.broadcast, row(buf), root), None

    def _both(self, sendbuf: Any, recvbuf: Any) -> tuple[Any, Any]:
        """Return input and output of a reduction. mpi4py reports the error if shapes or dtypes differ."""
        out = row(recvbuf)
        x = out if _is_in_place(sendbuf) else row(sendbuf)
        if x.shape != out.shape or x.dtype != out.dtype:
            raise NotOurs
        return x, out

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> PreparedCall:
        return functools.partial(self.comm.all_reduce, *self._both(sendbuf, recvbuf), op_name(op)), None

    def _scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> PreparedCall:
        return functools.partial(self.comm.scan, *self._both(sendbuf, recvbuf), op_name(op)), None

    def _exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> PreparedCall:
        x, out = self._both(sendbuf, recvbuf)
        return functools.partial(self.comm.exscan, x, out if self.rank else None, op_name(op)), None

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: int) -> PreparedCall:
        x, out = self._both(sendbuf, recvbuf) if root == self.rank else (row(sendbuf), None)
        return functools.partial(self.comm.reduce, x, out, op_name(op), root), None

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> PreparedCall:
        return functools.partial(self.comm.all_gather, *self._gathered(sendbuf, recvbuf)), None

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedCall:
        x, out = self._gathered(sendbuf, recvbuf) if root == self.rank else (row(sendbuf), None)
        return functools.partial(self.comm.gather, x, out, root), None

    def _gathered(self, sendbuf: Any, recvbuf: Any) -> tuple[Any, Any]:
        out = row(recvbuf, self.size)
        each = len(out) // self.size
        # In place, the input is this rank's block of the result.
        x = out[self.rank * each:(self.rank + 1) * each] if _is_in_place(sendbuf) else row(sendbuf)
        return x, blocks_of(out, len(x), each, self.size)

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedCall:
        out = None if _is_in_place(recvbuf) and root == self.rank else row(recvbuf)
        x = row(sendbuf, self.size) if root == self.rank else None
        if x is not None and out is not None:
            out = out[:len(x) // self.size]
        return functools.partial(self.comm.scatter, x, out, root), None

    def _alltoall(self, sendbuf: Any, recvbuf: Any) -> PreparedCall:
        out = row(recvbuf, self.size)
        if _is_in_place(sendbuf):
            return functools.partial(self.comm.all_to_all, out, out), None
        x = row(sendbuf, self.size)
        out = blocks_of(out, len(x) // self.size, len(out) // self.size, self.size)
        return functools.partial(self.comm.all_to_all, x, out), None

    def _reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> PreparedCall:
        if not _is_in_place(sendbuf):
            return functools.partial(self.comm.reduce_scatter, row(sendbuf, self.size), row(recvbuf), op_name(op)), None
        x = row(recvbuf, self.size)
        return (functools.partial(self.comm.reduce_scatter, x, op=op_name(op)),
                lambda came: fill([x], [came.reshape(-1)]))

    def _reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: MPI.Op) -> PreparedCall:
        out, name = row(recvbuf), op_name(op)
        x = out if _is_in_place(sendbuf) else row(sendbuf)
        if recvcounts is None:
            lengths = internal.all_gather_metadata(self.comm, {"length": len(out)}, "Reduce_scatter")
            recvcounts = [one["length"] for one in lengths]
        return functools.partial(self.comm.reduce_scatter_v, x, [*recvcounts], name), lambda came: fill([out], [came])

    def _allgatherv(self, sendbuf: Any, recvbuf: Any) -> PreparedCall:
        places = parts(recvbuf, self.size)
        x = places[self.rank] if _is_in_place(sendbuf) else row(sendbuf)
        return functools.partial(self.comm.all_gather_v, x), functools.partial(fill, places)

    def _gatherv(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedCall:
        if root != self.rank:
            return functools.partial(self.comm.gather_v, row(sendbuf), root), None
        places = parts(recvbuf, self.size)
        x = places[root] if _is_in_place(sendbuf) else row(sendbuf)
        return functools.partial(self.comm.gather_v, x, root), functools.partial(fill, places)

    def _scatterv(self, sendbuf: Any, recvbuf: Any, root: int) -> PreparedCall:
        xs = parts(sendbuf, self.size) if root == self.rank else None
        call = functools.partial(self.comm.scatter_v, xs, root)
        if root == self.rank and _is_in_place(recvbuf):
            return call, None
        out = row(recvbuf)
        return call, lambda came: fill([out], [came])

    def _alltoallv(self, sendbuf: Any, recvbuf: Any) -> PreparedCall:
        places = parts(recvbuf, self.size)
        xs = places if _is_in_place(sendbuf) else parts(sendbuf, self.size)
        return functools.partial(self.comm.all_to_all_v, xs), functools.partial(fill, places)

    # ------------------------------------------------------------ messages: gpucoll's for GPU arrays, else mpi4py's

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer to rank `dest`.

        Parameters
        ----------
        buf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype.
        dest : int
            The rank that receives.
        tag : int, optional
            The number of the message.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.send : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> out = numpy.zeros(1)
        >>> request = comm.Irecv(out, 0)
        >>> comm.Send(numpy.array([5.0]), 0)
        >>> _ = request.Wait()
        >>> out
        array([5.])
        >>> comm.comm.close()
        """
        if dest != MPI.PROC_NULL and gpu_array(buf) is not None:
            self.comm.send(row(buf), dest, tag)
            self._finish("Send", buf)
        else:
            super().Send(buf, dest, tag)

    def Recv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> None:
        """Receive into a buffer from rank `source`.

        Parameters
        ----------
        buf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype.
        source : int, optional
            The rank that sends.
        tag : int, optional
            The number of the message.
        status : mpi4py.MPI.Status or None, optional
            Is set to source, tag and bytes of the message.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.recv : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> request = comm.Isend(numpy.array([5.0]), 0)
        >>> out = numpy.zeros(1)
        >>> comm.Recv(out, 0)
        >>> _ = request.Wait()
        >>> out
        array([5.])
        >>> comm.comm.close()
        """
        if source != MPI.PROC_NULL and gpu_array(buf) is not None:
            self._received(row(buf), source, tag, status)
            self._finish("Recv", buf)
        else:
            super().Recv(buf, source, tag, status)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
                 source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG, status: Any = None) -> None:
        """Send a buffer while receiving another buffer.

        Parameters
        ----------
        sendbuf : buffer or IN_PLACE
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype; MPI.IN_PLACE takes the
            input from `recvbuf`.
        dest : int
            The rank that receives.
        sendtag : int, optional
            The number of the message sent.
        recvbuf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype: the place of the result.
        source : int, optional
            The rank that sends.
        recvtag : int, optional
            The number of the message received.
        status : mpi4py.MPI.Status or None, optional
            Is set to source, tag and bytes of the message.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.sendrecv : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> out = numpy.zeros(1)
        >>> comm.Sendrecv(numpy.array([5.0]), 0, recvbuf=out, source=0)
        >>> out
        array([5.])
        >>> comm.comm.close()
        """
        if gpu_array(sendbuf, recvbuf) is None or dest == source == MPI.PROC_NULL:
            super().Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)
            return
        with self.comm.group():
            if dest != MPI.PROC_NULL:
                self.comm.send(row(sendbuf), dest, sendtag)
            if source != MPI.PROC_NULL:
                self._received(row(recvbuf), source, recvtag, status)
            elif status is not None:
                fill_status(status, source, MPI.ANY_TAG, 0)
        self._finish("Sendrecv", sendbuf, recvbuf)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Begin to send a buffer.

        Parameters
        ----------
        buf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype.
        dest : int
            The rank that receives.
        tag : int, optional
            The number of the message.

        Returns
        -------
        Request or mpi4py.MPI.Request
            The handle of the message: gpucoll's for GPU arrays.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.send : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> out = numpy.zeros(1)
        >>> requests = [comm.Irecv(out, 0), comm.Isend(numpy.array([5.0]), 0)]  # a message to the rank itself
        >>> _ = [request.Wait() for request in requests]
        >>> out
        array([5.])
        >>> comm.comm.close()
        """
        if dest != MPI.PROC_NULL and gpu_array(buf) is not None:
            return Request(self.comm.send(row(buf), dest, tag, async_op=True))
        return super().Isend(buf, dest, tag)

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        """Begin to receive a buffer.

        Parameters
        ----------
        buf : buffer
            An array, or as in mpi4py a list of an array, counts, displacements and a datatype.
        source : int, optional
            The rank that sends.
        tag : int, optional
            The number of the message.

        Returns
        -------
        Request or mpi4py.MPI.Request
            The handle of the message: gpucoll's for GPU arrays.

        Raises
        ------
        GpucollError
            The errors of the method underneath, such as MismatchError (GC-MISMATCH); mpi4py's where mpi4py carries out
            the call.

        See Also
        --------
        gpucoll.Communicator.recv : The method underneath.

        References
        ----------
        MPI-5.0 and mpi4py, the method of this name.

        Examples
        --------
        >>> import numpy
        >>> from mpi4py import MPI
        >>> import gpucoll.mpi
        >>> comm = gpucoll.mpi.Comm(MPI.COMM_SELF)
        >>> out = numpy.zeros(1)
        >>> requests = [comm.Irecv(out, 0), comm.Isend(numpy.array([5.0]), 0)]  # a message to the rank itself
        >>> _ = [request.Wait() for request in requests]
        >>> out
        array([5.])
        >>> comm.comm.close()
        """
        if source != MPI.PROC_NULL and gpu_array(buf) is not None:
            out = row(buf)
            work = self.comm.recv(out, source, max(tag, 0), async_op=True)
            return Request(work, None, (source, max(tag, 0), out.nbytes))
        return super().Irecv(buf, source, tag)

    def _received(self, out: Any, source: int, tag: int, status: Any) -> None:
        if source == MPI.ANY_SOURCE:
            raise ArgumentError("Recv: an array on a GPU needs a source rank; pass source=", code="GC-ROOT")
        self.comm.recv(out, source, max(tag, 0))
        if status is not None:
            fill_status(status, source, max(tag, 0), out.nbytes)


def _is_in_place(buffer: Any) -> bool:
    return buffer is None or buffer is MPI.IN_PLACE


# The collectives with a nonblocking variant, and the defaults of their arguments.
STARTED = {name: {one.name: one.default for one in inspect.signature(method).parameters.values() if one.name != "self"}
           for name, method in vars(Comm).items() if f"_{name.lower()}" in vars(Comm)}
# The methods that return a communicator, made by all ranks together, and those that make one of a handle.
MADE = ("Clone", "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent", "Create_graph",
        "Create_group", "Dup", "Dup_with_info", "Split", "Split_type", "Sub")  # `Sub` of a Cartcomm
FOUND = ("f2py", "fromhandle", "fromint")


def _derived(name: str) -> Callable[..., Any]:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return self._wrapped(getattr(super(Comm, self), name)(*given, **named))

    return functools.wraps(getattr(MPI.Cartcomm, name))(method)


def _found(name: str) -> Any:
    def method(cls: Any, handle: Any) -> Any:
        mpi = getattr(MPI.Comm, name)(handle)
        return cls._bare(mpi) if isinstance(mpi, MPI.Intracomm) and mpi != MPI.COMM_NULL else mpi

    return classmethod(functools.wraps(getattr(MPI.Comm, name))(method))


def _begun(name: str) -> Callable[..., Any]:
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return self._start(name, *given, **named)

    return functools.wraps(getattr(MPI.Intracomm, "I" + name.lower()))(method)


for _name in MADE:
    if hasattr(MPI.Intracomm, _name):
        setattr(Comm, _name, _derived(_name))
for _name in FOUND:
    setattr(Comm, _name, _found(_name))
for _name in STARTED:
    setattr(Comm, "I" + _name.lower(), _begun(_name))
