"""mpi4py's COMM_WORLD for virtual ranks: mpi4py's names on communicators of virtual ranks.

Served are ranks and sizes, the upper-case calls of `gpucoll.mpi.Comm`, messages of buffers and objects, collectives of
objects, `Dup` and `Split`. A method of mpi4py left out here raises UsageError.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy
from mpi4py import MPI

import gpucoll.mpi
from gpucoll import Communicator, Work, internal
from gpucoll.internal import Options
from gpucoll.mpi.buffers import row
from gpucoll.precheck.matching import VirtualGroup
from gpucoll.precheck.ranks import VirtualTransport
from gpucoll.precheck.state import replaced
from gpucoll.precheck.turns import refusal

OWN_METHODS = ("Free", "Get_attr", "Set_attr", "Get_name", "Set_name", "Is_inter", "Is_intra", "Get_rank", "Get_size")


class VirtualRequest:
    """A call of a virtual rank under way, with the methods of mpi4py's requests."""

    def __init__(self, work: Work[Any], deliver: Callable[[Any], Any] | None = None) -> None:
        self._work, self._deliver = work, deliver

    def Wait(self, status: Any = None) -> bool:
        self._work.synchronize()
        deliver, self._deliver = self._deliver, None
        if deliver is not None:
            deliver(self._work.wait())
        return True

    def Test(self, status: Any = None) -> bool:
        return self._work.is_completed() and self.Wait()

    def wait(self, status: Any = None) -> None:
        self.Wait()

    def test(self, status: Any = None) -> tuple[bool, None]:
        return self.Test(), None


class VirtualMpi(MPI.Intracomm):
    """An mpi4py communicator of virtual ranks; each rank uses the same object, by its own communicator."""

    def __new__(cls, group: VirtualGroup) -> VirtualMpi:
        return MPI.Intracomm.__new__(cls)

    def __init__(self, group: VirtualGroup) -> None:
        self._group = group
        self._comms: dict[int, Communicator] = {}
        self._attributes: dict[tuple[int, Any], Any] = {}
        self._request = VirtualRequest  # of `gpucoll.mpi.Comm`, in place of MPI's

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VirtualMpi) and other._group is self._group

    def __hash__(self) -> int:
        return id(self._group)

    @property
    def ranks(self) -> Communicator:
        """The communicator of the rank whose turn it is."""
        number = self._group.turns.current.number
        if number not in self._comms:
            self._comms[number] = Communicator(VirtualTransport(self._group, number), Options())
        return self._comms[number]

    rank = property(lambda self: self.ranks.rank, doc="This rank.")
    size = property(lambda self: self._group.size, doc="The number of ranks.")

    def __gpucoll_transport__(self) -> VirtualTransport:
        """Return a transport of these ranks for `Communicator.from_mpi`. A collective call."""
        return self._part(0, self.rank)

    def _part(self, color: int | None, key: int) -> Any:
        return internal.link_of(self.ranks).split(color, key)

    def Get_rank(self) -> int:
        return int(self.rank)

    def Get_size(self) -> int:
        return int(self.size)

    def Is_inter(self) -> bool:
        """Return False: the ranks are those of one group."""
        return False

    def Get_attr(self, keyval: int) -> Any:
        return self._attributes.get((self._group.turns.current.number, keyval))

    def Set_attr(self, keyval: int, attrval: Any) -> None:
        self._attributes[self._group.turns.current.number, keyval] = attrval

    def Split(self, color: int = 0, key: int = 0) -> Any:
        part = self._part(None if color == MPI.UNDEFINED else color, key)
        return MPI.COMM_NULL if part is None else VirtualMpi(part.group)

    def Dup(self, info: Any = None) -> VirtualMpi:
        return VirtualMpi(self._part(0, self.rank).group)

    Clone = Dup

    def Free(self) -> None:
        self.ranks.close()

    # ------------------------------------------------------------ messages

    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        self.ranks.send(row(buf), dest, tag)

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        return VirtualRequest(self.ranks.send(row(buf), dest, tag, async_op=True))

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        """Begin to receive a buffer of the length of the message."""
        return VirtualRequest(self.ranks.recv(row(buf), source, tag, async_op=True))

    def Recv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> None:
        """Receive a message into the beginning of a buffer."""
        self._receive(row(buf), source, tag, status)

    def Sendrecv(self, sendbuf: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = MPI.ANY_SOURCE,
                 recvtag: int = MPI.ANY_TAG, status: Any = None) -> None:
        sent = self.ranks.send(row(sendbuf), dest, sendtag, async_op=True)
        self._receive(row(recvbuf), source, recvtag, status)
        sent.wait()

    def _receive(self, out: Any, source: int, tag: int, status: Any) -> None:
        if source == MPI.PROC_NULL:
            return
        seen = self.ranks.probe(source, tag)
        # MPI allows a buffer longer than the message.
        fits = out[:seen.count // out.itemsize] if seen.count <= out.nbytes else out
        self.ranks.recv(fits, seen.source, seen.tag, status)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        self.ranks.send(_pickled(obj), dest, tag)

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Any:
        return VirtualRequest(self.ranks.send(_pickled(obj), dest, tag, async_op=True))

    def recv(self, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        if source == MPI.PROC_NULL:
            return None
        seen = self.ranks.probe(source, tag)
        out = numpy.empty(seen.count, numpy.uint8)
        self.ranks.recv(out, seen.source, seen.tag, status)
        return pickle.loads(out.tobytes())

    def sendrecv(self, sendobj: Any, dest: int, sendtag: int = 0, recvbuf: Any = None, source: int = MPI.ANY_SOURCE,
                 recvtag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        sent = self.ranks.send(_pickled(sendobj), dest, sendtag, async_op=True)
        found = self.recv(None, source, recvtag, status)
        sent.wait()
        return found

    # ------------------------------------------------------------ collectives of objects

    def barrier(self) -> None:
        self.ranks.barrier()

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.ranks.broadcast_object(obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        return self.ranks.gather_object(sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        return self.ranks.all_gather_object(sendobj)

    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        return self.ranks.scatter_object(sendobj, root)

    def alltoall(self, sendobj: Any) -> list[Any]:
        return [one[self.rank] for one in self.ranks.all_gather_object([*sendobj])]

    def reduce(self, sendobj: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        everyone = self.ranks.gather_object(sendobj, root)
        return None if everyone is None else functools.reduce(op, everyone)

    def allreduce(self, sendobj: Any, op: Any = MPI.SUM) -> Any:
        return functools.reduce(op, self.ranks.all_gather_object(sendobj))


def _pickled(obj: Any) -> Any:
    return numpy.frombuffer(pickle.dumps(obj, pickle.HIGHEST_PROTOCOL), numpy.uint8)


def _by_gpucoll(name: str) -> Callable[..., Any]:
    def method(self: VirtualMpi, *given: Any, **named: Any) -> Any:
        if isinstance(self, gpucoll.mpi.Comm):
            raise refusal(f"{name}: precheck does not support this buffer or op of mpi4py")
        return getattr(gpucoll.mpi.Comm(self), name)(*given, **named)

    return method


def _left_out(name: str) -> Callable[..., Any]:
    def method(self: VirtualMpi, *given: Any, **named: Any) -> Any:
        raise refusal(f"{name}: precheck does not support this method of mpi4py")

    return method


for _name in dir(MPI.Intracomm):
    if _name in gpucoll.mpi.STARTED:
        setattr(VirtualMpi, _name, _by_gpucoll(_name))
    elif callable(getattr(MPI.Intracomm, _name)) and not _name.startswith("_") and _name not in vars(VirtualMpi) \
            and _name not in OWN_METHODS:
        setattr(VirtualMpi, _name, _left_out(_name))


def as_world(group: VirtualGroup) -> contextlib.AbstractContextManager[None]:
    """Return the context in which ``mpi4py.MPI.COMM_WORLD`` is the communicator of virtual ranks."""
    return replaced([(sys.modules["mpi4py.MPI"], "COMM_WORLD", VirtualMpi(group))])
