"""mpi4py's spelling: `Comm` around one of its communicators does the upper-case collectives by gpucoll.

    comm = gpucoll.mpi.Comm(MPI.COMM_WORLD)      # the only line of a program that changes
    comm.Allreduce(x, y, op=MPI.MAX)

Buffers are given as mpi4py has them. What is not ours is mpi4py's own: datatypes and ops that a user has made, messages
of arrays on the host, lower-case calls, and all other methods. All ranks of a call must be alike in that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from mpi4py import MPI

from gpucoll.communicator import Communicator, internal
from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.launch import bootstrap
from gpucoll.launch.bootstrap import GivenOptions
from gpucoll.mpi.buffers import OPS as NAMES
from gpucoll.mpi.buffers import NotOurs, blocks_of, fill, is_on_gpu, op_name, parts, plain, row
from gpucoll.progress.operations import Work

__all__ = ["Comm", "Request"]

Call = tuple[Callable[..., Any], Callable[[Any], Any] | None]  # what is called, and what is done with its result


class Request:
    """A call of ours under way, with the methods of mpi4py's requests."""

    def __init__(self, work: Work, deliver: Callable[[Any], Any] | None) -> None:
        self._work, self._deliver = work, deliver

    def Wait(self, status: Any = None) -> bool:
        """Return True once the result is in its buffer."""
        self._work.synchronize()
        if self._deliver is not None:
            deliver, self._deliver = self._deliver, None
            deliver(self._work.wait())
        return True

    def Test(self, status: Any = None) -> bool:
        """Return whether the result is in its buffer; never waits."""
        return self._work.is_completed() and self.Wait()

    def wait(self, status: Any = None) -> None:
        """Wait as `Wait`."""
        self.Wait()

    def test(self, status: Any = None) -> tuple[bool, None]:
        """Return what `Test` does, and None, as there is no object."""
        return self.Test(), None

    @classmethod
    def Waitall(cls, requests: Iterable[Any], statuses: Any = None) -> bool:
        """Wait for all of them, ours or mpi4py's."""
        for request in requests:
            request.Wait()
        return True


@functools.cache
def _attribute() -> int:
    """Return the key of the attribute by which a communicator of mpi4py's keeps each `Comm` of it.

    `Free` of that communicator closes them, whoever calls it; what `Dup` makes has none of them.
    """
    def close(mpi: MPI.Comm, key: int, kept: dict[Any, Comm]) -> None:
        for one in kept.values():
            with contextlib.suppress(GpucollError):  # MPI takes no error of ours
                one.comm.close()

    return MPI.Comm.Create_keyval(delete_fn=close)


class _Kept(type):
    """Makes one `Comm` for each communicator of mpi4py's and set of options, as long as it is not closed.

    To make one takes milliseconds and memory, and programs wrap MPI.COMM_WORLD wherever they use it.
    """

    def __call__(cls, mpi: MPI.Intracomm, **options: Any) -> Any:
        if not isinstance(mpi, MPI.Intracomm) or mpi == MPI.COMM_NULL:
            return super().__call__(mpi, **options)  # which refuses it
        wanted = cls, bootstrap.options(options)
        kept: Any = mpi.Get_attr(_attribute())
        if kept is None:
            kept = {}
            mpi.Set_attr(_attribute(), kept)
        if wanted not in kept or kept[wanted].comm.closed:
            kept[wanted] = super().__call__(mpi, **options)
        return kept[wanted]


class Comm(metaclass=_Kept):
    """An mpi4py intracommunicator `mpi` whose upper-case collectives are those of a gpucoll communicator, `comm`.

    The first `Comm` of a communicator is a collective call; another one with the same options is the same object until
    it is closed, or the communicator freed. `options` are those of `gpucoll.init`, alike on all ranks. Errors are
    gpucoll's. On CuPy arrays calls enqueue in the current stream. What `Split`, `Dup`, `Create_cart` and the like
    return is a `Comm` too, COMM_NULL where mpi4py's is.
    """

    def __init__(self, mpi: MPI.Intracomm, **options: Unpack[GivenOptions]) -> None:
        self.mpi, self.comm = mpi, Communicator.from_mpi(mpi, **options)
        self.rank, self.size = self.comm.rank, self.comm.size

    def __getattr__(self, name: str) -> Any:
        if name == "mpi":  # while it is unpickled, say
            raise AttributeError(name)
        found = getattr(self.mpi, name)
        if name in MADE:
            return lambda *given, **named: self._wrapped(found(*given, **named))
        started = name[1:].capitalize() if name[:1] == "I" else ""
        return functools.partial(self._start, started) if started in STARTED else found

    def Free(self) -> None:
        """Close both communicators."""
        try:
            self.comm.close()
        finally:
            self.mpi.Free()

    def _wrapped(self, mpi: Any) -> Any:
        return mpi if mpi == MPI.COMM_NULL else Comm(mpi, **self._options())

    def _options(self) -> Any:
        return {name: getattr(self.comm.options, name) for name in GivenOptions.__annotations__}

    # ------------------------------------------------------------ arrays of NumPy that are plain, at once

    def Barrier(self) -> None:
        """Return when every rank has called it."""
        self.comm.barrier()

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """Overwrite every rank's buffer with the root's."""
        x = plain(buf)
        if x is None:
            self._do("Bcast", buf, root)
        else:
            self.comm.broadcast(x, root)

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction of all ranks' `sendbuf` to every rank's `recvbuf`."""
        self._reduce_all("Allreduce", self.comm.all_reduce, sendbuf, recvbuf, op)

    def Scan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction over ranks 0 to this one."""
        self._reduce_all("Scan", self.comm.scan, sendbuf, recvbuf, op)

    def _reduce_all(self, name: str, call: Any, sendbuf: Any, recvbuf: Any, op: MPI.Op) -> None:
        out, ours = plain(recvbuf), NAMES.get(id(op))
        x = out if sendbuf is MPI.IN_PLACE else plain(sendbuf)
        if x is None or out is None or ours is None or x.shape != out.shape:
            self._do(name, sendbuf, recvbuf, op)
        else:
            call(x, out, ours)

    def Exscan(self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM) -> None:
        """Write the reduction over the ranks before this one; rank 0's `recvbuf` stays."""
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
        """Write all ranks' `sendbuf`, of any lengths, where every rank's `recvbuf` says."""
        self._do("Allgatherv", sendbuf, recvbuf)

    def Gatherv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write all ranks' `sendbuf`, of any lengths, where the root's `recvbuf` says."""
        self._do("Gatherv", sendbuf, recvbuf, root)

    def Scatterv(self, sendbuf: Any, recvbuf: Any, root: int = 0) -> None:
        """Write part i of the root's `sendbuf` to the `recvbuf` of rank i."""
        self._do("Scatterv", sendbuf, recvbuf, root)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any) -> None:
        """Write part i of rank j's `sendbuf` to part j of rank i's `recvbuf`."""
        self._do("Alltoallv", sendbuf, recvbuf)

    # ------------------------------------------------------------ all others

    def _do(self, name: str, *arguments: Any) -> None:
        try:
            with internal.refusing(self.comm):
                call, deliver = getattr(self, "_" + name.lower())(*arguments)
        except NotOurs:
            getattr(self.mpi, name)(*arguments)
            return
        done = call()
        if deliver is not None:
            deliver(done)

    def _start(self, name: str, *given: Any, **named: Any) -> Any:
        """Begin a call; return a `Request`, or mpi4py's.

        What must first ask the other ranks for shapes is mpi4py's on the host: to begin it waits for nobody.
        """
        bound = dict(zip(STARTED[name], given, strict=False)) | named
        asks = name.endswith("v") or name in ("Scatter", "Reduce_scatter")
        try:
            if asks and not is_on_gpu(*bound.values()):
                raise NotOurs
            call, deliver = getattr(self, "_" + name.lower())(
                *(bound.get(one, DEFAULTS.get(one)) for one in STARTED[name]))
        except NotOurs:
            return getattr(self.mpi, "I" + name.lower())(*given, **named)
        return Request(call(async_op=True), deliver)

    def _barrier(self) -> Call:
        return self.comm.barrier, None

    def _bcast(self, buf: Any, root: int) -> Call:
        return functools.partial(self.comm.broadcast, row(buf), root), None

    def _both(self, sendbuf: Any, recvbuf: Any) -> tuple[Any, Any]:
        """Return input and output of a reduction; mpi4py says what is wrong where they are unlike."""
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
            recvcounts = self.mpi.allgather(len(out))
        return functools.partial(self.comm.reduce_scatter_v, x, [*recvcounts], name), lambda came: fill([out], [came])

    def _allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        places = parts(recvbuf, self.size).views
        x = places[self.rank] if _is_in_place(sendbuf) else row(sendbuf)
        return functools.partial(self.comm.all_gather_v, x), functools.partial(fill, places)

    def _gatherv(self, sendbuf: Any, recvbuf: Any, root: int) -> Call:
        if root != self.rank:
            return functools.partial(self.comm.gather_v, row(sendbuf), root), None
        places = parts(recvbuf, self.size).views
        x = places[root] if _is_in_place(sendbuf) else row(sendbuf)
        return functools.partial(self.comm.gather_v, x, root), functools.partial(fill, places)

    def _scatterv(self, sendbuf: Any, recvbuf: Any, root: int) -> Call:
        xs = parts(sendbuf, self.size).views if root == self.rank else None
        call = functools.partial(self.comm.scatter_v, xs, root)
        if root == self.rank and _is_in_place(recvbuf):
            return call, None
        out = row(recvbuf)
        return call, lambda came: fill([out], [came])

    def _alltoallv(self, sendbuf: Any, recvbuf: Any) -> Call:
        places = parts(recvbuf, self.size).views
        xs = places if _is_in_place(sendbuf) else parts(sendbuf, self.size).views
        return functools.partial(self.comm.all_to_all_v, xs), functools.partial(fill, places)

    # ------------------------------------------------------------ messages: of arrays on GPUs ours, else mpi4py's

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer to rank `dest`."""
        if is_on_gpu(buf):
            self.comm.send(row(buf), dest, tag)
        else:
            self.mpi.Send(buf, dest, tag)

    def Recv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> None:
        """Receive a buffer from rank `source`, which must be one for arrays on GPUs."""
        if is_on_gpu(buf):
            self._received(row(buf), source, tag, status)
        else:
            self.mpi.Recv(buf, source, tag, status)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None,
                 source: int = MPI.ANY_SOURCE, recvtag: int = MPI.ANY_TAG, status: Any = None) -> None:
        """Send one buffer while receiving another one."""
        if is_on_gpu(sendbuf, recvbuf):
            with self.comm.group():
                self.comm.send(row(sendbuf), dest, sendtag)
                self._received(row(recvbuf), source, recvtag, status)
        else:
            self.mpi.Sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag, status)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Begin to send a buffer."""
        if is_on_gpu(buf):
            return Request(self.comm.send(row(buf), dest, tag, async_op=True), None)
        return self.mpi.Isend(buf, dest, tag)

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        """Begin to receive a buffer."""
        if is_on_gpu(buf):
            return Request(self.comm.recv(row(buf), source, max(tag, 0), async_op=True), None)
        return self.mpi.Irecv(buf, source, tag)

    def _received(self, out: Any, source: int, tag: int, status: Any) -> None:
        if source == MPI.ANY_SOURCE:
            raise ArgumentError("Recv: an array on a GPU is received from one rank; name it", code="GC-ROOT")
        self.comm.recv(out, source, max(tag, 0))
        if status is not None:
            status.Set_source(source)
            status.Set_tag(max(tag, 0))
            status.Set_elements(MPI.BYTE, out.nbytes)


def _is_in_place(buffer: Any) -> bool:
    return buffer is None or buffer is MPI.IN_PLACE


MADE = {"Clone", "Create", "Create_cart", "Create_dist_graph", "Create_dist_graph_adjacent", "Create_graph",
        "Create_group", "Dup", "Split", "Split_type", "Sub"}  # calls that return a communicator, which is wrapped
DEFAULTS = {"op": MPI.SUM, "root": 0}
_TWO = ("sendbuf", "recvbuf")
STARTED = {  # collectives that have an I-variant, and what they are given
    "Barrier": (), "Bcast": ("buf", "root"), "Allreduce": (*_TWO, "op"), "Scan": (*_TWO, "op"),
    "Exscan": (*_TWO, "op"), "Reduce": (*_TWO, "op", "root"), "Allgather": _TWO, "Gather": (*_TWO, "root"),
    "Scatter": (*_TWO, "root"), "Alltoall": _TWO, "Reduce_scatter_block": (*_TWO, "op"),
    "Reduce_scatter": (*_TWO, "recvcounts", "op"), "Allgatherv": _TWO, "Gatherv": (*_TWO, "root"),
    "Scatterv": (*_TWO, "root"), "Alltoallv": _TWO}
