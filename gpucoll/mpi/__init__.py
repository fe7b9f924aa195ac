"""The interface of mpi4py: `Comm` wraps an mpi4py communicator, and gpucoll carries out its upper-case collectives.

    comm = gpucoll.mpi.Comm(MPI.COMM_WORLD)      # the only line of a program that changes
    comm.Allreduce(x, y, op=MPI.MAX)

Buffers are passed as in mpi4py. mpi4py itself handles user-defined datatypes and ops, point-to-point messages of host
arrays, lower-case calls, and all other methods. All ranks must pass buffers of the same kind, so that all use the same
library.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from mpi4py import MPI

from gpucoll import internal
from gpucoll.communicator import Communicator
from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.launch import bootstrap
from gpucoll.launch.bootstrap import GivenOptions
from gpucoll.mpi.buffers import OPS as NAMES
from gpucoll.mpi.buffers import NotOurs, blocks_of, fill, gpu_array, op_name, parts, plain, row
from gpucoll.progress.operations import Work

__all__ = ["Comm", "Request"]

Call = tuple[Callable[..., Any], Callable[[Any], Any] | None]  # the function to call, and a consumer of the result


class Request:
    """A gpucoll call under way, with the methods of mpi4py's requests."""

    def __init__(self, work: Work, deliver: Callable[[Any], Any] | None) -> None:
        self._work, self._deliver = work, deliver

    def Wait(self, status: Any = None) -> bool:
        """Return True once the result is in its buffer."""
        self._work.synchronize()
        # Deliver once: a program may wait again after it has changed the buffer.
        if self._deliver is not None:
            deliver, self._deliver = self._deliver, None
            deliver(self._work.wait())
        return True

    def Test(self, status: Any = None) -> bool:
        """Return whether the result is in its buffer; never waits."""
        return self._work.is_completed() and self.Wait()

    def wait(self, status: Any = None) -> None:
        """Wait like `Wait`, returning None."""
        self.Wait()

    def test(self, status: Any = None) -> tuple[bool, None]:
        """Return the result of `Test`, and None in place of a received object."""
        return self.Test(), None

    @classmethod
    def Waitall(cls, requests: Iterable[Any], statuses: Any = None) -> bool:
        """Wait for all requests, gpucoll's or mpi4py's; return True."""
        for request in requests:
            request.Wait()
        return True


@functools.cache
def _attribute() -> int:
    """Return the key of the MPI attribute holding the `Comm` objects of an mpi4py communicator.

    `Free` of the mpi4py communicator deletes the attribute, and so closes the `Comm` objects. `Dup` does not copy the
    attribute.
    """
    def close(mpi: MPI.Comm, key: int, kept: dict[Any, Comm]) -> None:
        for one in kept.values():
            with contextlib.suppress(GpucollError):  # an MPI callback must not raise
                one.comm.close()

    return MPI.Comm.Create_keyval(delete_fn=close)


class _Kept(type):
    """The metaclass of `Comm`: keeps one open `Comm` for each mpi4py communicator and set of options.

    Making a `Comm` takes milliseconds and memory, and programs wrap MPI.COMM_WORLD in many places.
    """

    def __call__(cls, mpi: MPI.Intracomm, **options: Any) -> Any:
        if not isinstance(mpi, MPI.Intracomm) or mpi == MPI.COMM_NULL:
            return super().__call__(mpi, **options)  # raises the error for a wrong communicator
        wanted = cls, bootstrap.options(options)
        kept: Any = mpi.Get_attr(_attribute())
        if kept is None:
            kept = {}
            mpi.Set_attr(_attribute(), kept)
        if wanted not in kept or kept[wanted].comm.closed:
            kept[wanted] = super().__call__(mpi, **options)
        return kept[wanted]


class Comm(metaclass=_Kept):
    """An mpi4py intracommunicator `mpi` with upper-case collectives run by a gpucoll communicator, `comm`.

    The first `Comm` of a communicator is a collective call. A later `Comm(mpi)` with the same options returns the same
    object, until the object is closed or the communicator freed. `options` are those of `gpucoll.init`, equal on
    all ranks. Errors are gpucoll's. Calls on CuPy arrays run in the order of the current stream. A blocking call, and
    `Wait`, return when the call has ended for every stream; inside ``comm.comm.group()`` and the capture of a CUDA
    graph a call only enqueues. `Split`, `Dup`, `Create_cart` and similar methods return a `Comm` too, or COMM_NULL as
    in mpi4py.
    """

    def __init__(self, mpi: MPI.Intracomm, **options: Unpack[GivenOptions]) -> None:
        self.mpi, self.comm = mpi, Communicator.from_mpi(mpi, **options)
        self.rank, self.size = self.comm.rank, self.comm.size

    def __getattr__(self, name: str) -> Any:
        if name == "mpi":  # not set yet, for example during unpickling: prevent endless recursion
            raise AttributeError(name)
        found = getattr(self.mpi, name)
        if name in MADE:
            return lambda *given, **named: self._wrapped(found(*given, **named))
        started = name[1:].capitalize() if name[:1] == "I" else ""
        return functools.partial(self._start, started) if started in STARTED else found

    def Free(self) -> None:
        """Close the gpucoll communicator and free the mpi4py communicator."""
        try:
            self.comm.close()
        finally:
            self.mpi.Free()

    def _wrapped(self, mpi: Any) -> Any:
        options = {name: getattr(self.comm.options, name) for name in GivenOptions.__annotations__}
        return mpi if mpi == MPI.COMM_NULL else Comm(mpi, **options)

    # ------------------------------------------------------------ fast path: NumPy arrays and predefined datatypes

    def Barrier(self) -> None:
        """Return when every rank has called `Barrier`."""
        self.comm.barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Overwrite every rank's buffer with the root's buffer."""
        x = plain(buf)
        if x is None:
            self._do("Bcast", buf, root)
        else:
            self.comm.broadcast(x, root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction of all ranks' `sendbuf` to every rank's `recvbuf`."""
        self._reduce_all("Allreduce", self.comm.all_reduce, sendbuf, recvbuf, op)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction over ranks 0 to this rank, inclusive, to `recvbuf`."""
        self._reduce_all("Scan", self.comm.scan, sendbuf, recvbuf, op)

    # Each method tries `plain` first, a cheap test for frequent kinds of buffers. Other buffers and ops take the
    # general path, which also reports errors.

    def _reduce_all(self, name: str, call: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> None:
        out, ours = plain(recvbuf), NAMES.get(id(op))
        x = out if sendbuf is MPI.IN_PLACE else plain(sendbuf)
        if x is None or out is None or ours is None or x.shape != out.shape:
            self._do(name, sendbuf, recvbuf, op)
        else:
            call(x, out, ours)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction over the ranks before this rank to `recvbuf`; rank 0's `recvbuf` is unchanged."""
        self._do("Exscan", sendbuf, recvbuf, op)

    def Reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, root: int = 0) -> None:
        """Write the reduction of all ranks' `sendbuf` to the root's `recvbuf`."""
        is_root = root == self.rank
        out = plain(recvbuf) if is_root else None
        x = out if is_root and sendbuf is MPI.IN_PLACE else plain(sendbuf)
        name = NAMES.get(id(op))
        if x is None or name is None or (is_root and (out is None or x.shape != out.shape)):
            self._do("Reduce", sendbuf, recvbuf, op, root)
        else:
            self.comm.reduce(x, out, name, root)

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write all ranks' `sendbuf` to every rank's `recvbuf`."""
        x, out = plain(sendbuf), plain(recvbuf, self.size)
        if x is None or out is None or self.size * x.size != out.size:
            self._do("Allgather", sendbuf, recvbuf)
        else:
            self.comm.all_gather(x, out)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write all ranks' `sendbuf` to the root's `recvbuf`."""
        is_root = root == self.rank
        x, out = plain(sendbuf), plain(recvbuf, self.size) if is_root else None
        if x is None or (is_root and (out is None or self.size * x.size != out.size)):
            self._do("Gather", sendbuf, recvbuf, root)
        else:
            self.comm.gather(x, out, root)

    def Scatter(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write block i of the root's `sendbuf` to the `recvbuf` of rank i."""
        is_root = root == self.rank
        x, out = plain(sendbuf, self.size) if is_root else None, plain(recvbuf)
        if out is None or (is_root and (x is None or x.size != self.size * out.size)):
            self._do("Scatter", sendbuf, recvbuf, root)
        else:
            self.comm.scatter(x, out, root)

    def Alltoall(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write block i of rank j's `sendbuf` to block j of rank i's `recvbuf`."""
        x, out = plain(sendbuf, self.size), plain(recvbuf, self.size)
        if x is None or out is None or x.shape != out.shape or x.size % self.size:
            self._do("Alltoall", sendbuf, recvbuf)
        else:
            self.comm.all_to_all(x, out)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write block i of the reduction of all ranks' `sendbuf` to the `recvbuf` of rank i."""
        x, out, name = plain(sendbuf, self.size), plain(recvbuf), NAMES.get(id(op))
        if x is None or out is None or name is None or x.size != self.size * out.size:
            self._do("Reduce_scatter_block", sendbuf, recvbuf, op)
        else:
            self.comm.reduce_scatter(x, out, name)

    def Reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: MPI.Op = MPI.SUM) -> None:
        """Write part i, of ``recvcounts[i]`` elements, of the reduction to the `recvbuf` of rank i."""
        self._do("Reduce_scatter", sendbuf, recvbuf, recvcounts, op)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write all ranks' `sendbuf`, of any lengths, at the displacements in every rank's `recvbuf`."""
        self._do("Allgatherv", sendbuf, recvbuf)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write all ranks' `sendbuf`, of any lengths, at the displacements in the root's `recvbuf`."""
        self._do("Gatherv", sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write part i of the root's `sendbuf` to the `recvbuf` of rank i."""
        self._do("Scatterv", sendbuf, recvbuf, root)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write part i of rank j's `sendbuf` to part j of rank i's `recvbuf`."""
        self._do("Alltoallv", sendbuf, recvbuf)

    # ------------------------------------------------------------ general path: `_name` prepares the call of `Name`

    def _do(self, name: str, *arguments: Any) -> None:
        try:
            # An ArgumentError here is reported to the other ranks, which may already wait in the collective.
            with internal.refusing(self.comm):
                call, deliver = getattr(self, "_" + name.lower())(*arguments)
        except NotOurs:
            getattr(self.mpi, name)(*arguments)
            return
        done = call()
        if deliver is not None:
            deliver(done)
        self._finish(name, *arguments)

    def _deliver(self, name: str, deliver: Callable[[Any], Any], came: Any) -> None:
        deliver(came)
        self._finish(name, came)

    def _finish(self, name: str, *buffers: Any) -> None:
        """Wait until a call on GPU arrays has ended, so that every stream finds the result, as MPI promises."""
        internal.finish(self.comm, name, gpu_array(*buffers))

    def _start(self, name: str, *given: Any, **named: Any) -> Any:
        """Begin a nonblocking call; return a `Request`, or mpi4py's request.

        Some calls exchange shapes between the ranks first, and would block. mpi4py serves these calls on host arrays.
        """
        bound = STARTED[name] | dict(zip(STARTED[name], given, strict=False)) | named
        asks = name.endswith("v") or name in ("Scatter", "Reduce_scatter")
        try:
            if asks and gpu_array(*bound.values()) is None:
                raise NotOurs
            call, deliver = getattr(self, "_" + name.lower())(**bound)
        except NotOurs:
            return getattr(self.mpi, "I" + name.lower())(*given, **named)
        return Request(call(async_op=True), deliver and functools.partial(self._deliver, name, deliver))

    def _barrier(self) -> Call:
        return self.comm.barrier, None

    def _bcast(self, buf: Any, root: int) -> Call:
        return functools.partial(self.comm.broadcast, row(buf), root), None

    def _both(self, sendbuf: Any, recvbuf: Any) -> tuple[Any, Any]:
        """Return input and output of a reduction. mpi4py reports the error if shapes or dtypes differ."""
        out = row(recvbuf)
        x = out if _is_in_place(sendbuf) else row(sendbuf)
        if x.shape != out.shape or x.dtype != out.dtype:
            raise NotOurs
        return x, out

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Call:
        return functools.partial(self.comm.all_reduce, *self._both(sendbuf, recvbuf), op_name(op)), None

    def _scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Call:
        return functools.partial(self.comm.scan, *self._both(sendbuf, recvbuf), op_name(op)), None

    def _exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Call:
        x, out = self._both(sendbuf, recvbuf)
        return functools.partial(self.comm.exscan, x, out if self.rank else None, op_name(op)), None

    def _reduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op, root: int) -> Call:
        x, out = self._both(sendbuf, recvbuf) if root == self.rank else (row(sendbuf), None)
        return functools.partial(self.comm.reduce, x, out, op_name(op), root), None

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> Call:
        return functools.partial(self.comm.all_gather, *self._gathered(sendbuf, recvbuf)), None

    def _gather(self, sendbuf: Any, recvbuf: Any, root: int) -> Call:
        x, out = self._gathered(sendbuf, recvbuf) if root == self.rank else (row(sendbuf), None)
        return functools.partial(self.comm.gather, x, out, root), None

    def _gathered(self, sendbuf: Any, recvbuf: Any) -> tuple[Any, Any]:
        out = row(recvbuf, self.size)
        each = len(out) // self.size
        # In place, the input is this rank's block of the result.
        x = out[self.rank * each:(self.rank + 1) * each] if _is_in_place(sendbuf) else row(sendbuf)
        return x, blocks_of(out, len(x), each, self.size)

    def _scatter(self, sendbuf: Any, recvbuf: Any, root: int) -> Call:
        out = None if _is_in_place(recvbuf) and root == self.rank else row(recvbuf)
        x = row(sendbuf, self.size) if root == self.rank else None
        if x is not None and out is not None:
            out = out[:len(x) // self.size]
        return functools.partial(self.comm.scatter, x, out, root), None

    def _alltoall(self, sendbuf: Any, recvbuf: Any) -> Call:
        out = row(recvbuf, self.size)
        if _is_in_place(sendbuf):
            return functools.partial(self.comm.all_to_all, out, out), None
        x = row(sendbuf, self.size)
        out = blocks_of(out, len(x) // self.size, len(out) // self.size, self.size)
        return functools.partial(self.comm.all_to_all, x, out), None

    def _reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> Call:
        if not _is_in_place(sendbuf):
            return functools.partial(self.comm.reduce_scatter, row(sendbuf, self.size), row(recvbuf), op_name(op)), None
        x = row(recvbuf, self.size)
        return (functools.partial(self.comm.reduce_scatter, x, op=op_name(op)),
                lambda came: fill([x], [came.reshape(-1)]))

    def _reduce_scatter(self, sendbuf: Any, recvbuf: Any, recvcounts: Any, op: MPI.Op) -> Call:
        out, name = row(recvbuf), op_name(op)
        x = out if _is_in_place(sendbuf) else row(sendbuf)
        if recvcounts is None:
            lengths = internal.all_gather_metadata(self.comm, {"length": len(out)}, "Reduce_scatter")
            recvcounts = [one["length"] for one in lengths]
        return functools.partial(self.comm.reduce_scatter_v, x, [*recvcounts], name), lambda came: fill([out], [came])

    def _allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        places = parts(recvbuf, self.size)
        x = places[self.rank] if _is_in_place(sendbuf) else row(sendbuf)
        return functools.partial(self.comm.all_gather_v, x), functools.partial(fill, places)

    def _gatherv(self, sendbuf: Any, recvbuf: Any, root: int) -> Call:
        if root != self.rank:
            return functools.partial(self.comm.gather_v, row(sendbuf), root), None
        places = parts(recvbuf, self.size)
        x = places[root] if _is_in_place(sendbuf) else row(sendbuf)
        return functools.partial(self.comm.gather_v, x, root), functools.partial(fill, places)

    def _scatterv(self, sendbuf: Any, recvbuf: Any, root: int) -> Call:
        xs = parts(sendbuf, self.size) if root == self.rank else None
        call = functools.partial(self.comm.scatter_v, xs, root)
        if root == self.rank and _is_in_place(recvbuf):
            return call, None
        out = row(recvbuf)
        return call, lambda came: fill([out], [came])

    def _alltoallv(self, sendbuf: Any, recvbuf: Any) -> Call:
        places = parts(recvbuf, self.size)
        xs = places if _is_in_place(sendbuf) else parts(sendbuf, self.size)
        return functools.partial(self.comm.all_to_all_v, xs), functools.partial(fill, places)

    # ------------------------------------------------------------ messages: gpucoll's for GPU arrays, else mpi4py's

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer to rank `dest`."""
        if gpu_array(buf) is not None:
            self.comm.send(row(buf), dest, tag)
            self._finish("Send", buf)
        else:
            self.mpi.Send(buf, dest, tag)

    def Recv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> None:
        """Receive a buffer from rank `source`; for GPU arrays `source` must be given."""
        if gpu_array(buf) is not None:
            self._received(row(buf), source, tag, status)
            self._finish("Recv", buf)
        else:
            self.mpi.Recv(buf, source, tag, status)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
                 source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG, status: Any = None) -> None:
        """Send a buffer while receiving another buffer."""
        if gpu_array(sendbuf, recvbuf) is not None:
            with self.comm.group():
                self.comm.send(row(sendbuf), dest, sendtag)
                self._received(row(recvbuf), source, recvtag, status)
            self._finish("Sendrecv", sendbuf, recvbuf)
        else:
            self.mpi.Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Begin to send a buffer."""
        if gpu_array(buf) is not None:
            return Request(self.comm.send(row(buf), dest, tag, async_op=True), None)
        return self.mpi.Isend(buf, dest, tag)

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        """Begin to receive a buffer."""
        if gpu_array(buf) is not None:
            return Request(self.comm.recv(row(buf), source, max(tag, 0), async_op=True), None)
        return self.mpi.Irecv(buf, source, tag)

    def _received(self, out: Any, source: int, tag: int, status: Any) -> None:
        if source == MPI.ANY_SOURCE:
            raise ArgumentError("Recv: an array on a GPU needs a source rank; pass source=", code="GC-ROOT")
        self.comm.recv(out, source, max(tag, 0))
        if status is not None:
            status.Set_source(source)
            status.Set_tag(max(tag, 0))
            status.Set_elements(MPI.BYTE, out.nbytes)


def _is_in_place(buffer: Any) -> bool:
    return buffer is None or buffer is MPI.IN_PLACE


MADE = {"Clone", "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent", "Create_graph",
        "Create_group", "Dup", "Split", "Split_type", "Sub"}  # methods returning a communicator to wrap
# The collectives with a nonblocking variant, and the defaults of their arguments.
STARTED = {name: {one.name: one.default for one in inspect.signature(method).parameters.values() if one.name != "self"}
           for name, method in vars(Comm).items() if f"_{name.lower()}" in vars(Comm)}
