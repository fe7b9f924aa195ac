"""Messages between two ranks."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy

from gpucoll import internal
from gpucoll.arrays import on_gpu
from gpucoll.communicator.links import LocalLink
from gpucoll.communicator.points import NO_WILDCARD, check_tag
from gpucoll.distributed.groups import ProcessGroup, _get_default_group, member
from gpucoll.distributed.shapes import check_list
from gpucoll.distributed.work import DistributedWork
from gpucoll.errors import ArgumentError, CollectiveTimeout, UsageError


def isend(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0,
          group_dst: int | None = None) -> DistributedWork | None:
    """Begin to send `tensor` to rank `dst`.

    `tensor` must not change until `wait` has returned.

    Parameters
    ----------
    tensor : array of shape s
        NumPy's array, PyTorch's tensor, or another with DLPack.
    dst : int or None, optional
        The receiving rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    tag : int, optional
        The number of the message, 0 to 32767.
    group_dst : int or None, optional
        The receiving rank, by its number in the group, in place of `dst`.

    Returns
    -------
    Work or None
        The handle of the message; None on a rank outside `group`, with a warning.

    Raises
    ------
    ArgumentError
        A wrong rank or tag (GC-ROOT, GC-TAG).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    irecv : The other end.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = numpy.zeros(1)
    >>> works = [dist.isend(numpy.array([5.0]), 0), dist.irecv(out, 0)]  # a message to the rank itself
    >>> [work.wait() for work in works]
    [True, True]
    >>> out
    array([5.])
    >>> dist.destroy_process_group()
    """
    if (pg := member("isend", group, tensor)) is None:
        return None
    number = pg.number_of("isend", "dst", dst, group_dst)
    return DistributedWork(pg.communicator.send(tensor, number, tag, async_op=True), [tensor])


def irecv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0,
          group_src: int | None = None) -> DistributedWork | None:
    """Begin to receive into `tensor` from rank `src`.

    Parameters
    ----------
    tensor : array of shape s
        The place of the message.
    src : int or None, optional
        The sending rank, by its number in the world; None means the first rank to send.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    tag : int, optional
        The number of the message, 0 to 32767.
    group_src : int or None, optional
        The sending rank, by its number in the group, in place of `src`.

    Returns
    -------
    Work or None
        The handle of the message; None on a rank outside `group`, with a warning.

    Raises
    ------
    UsageError
        A receive from any rank where there is none: between threads, and on GPUs (GC-WILDCARD, GC-USAGE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    isend : The other end.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = numpy.zeros(1)
    >>> works = [dist.isend(numpy.array([5.0]), 0), dist.irecv(out, 0)]  # a message to the rank itself
    >>> [work.wait() for work in works]
    [True, True]
    >>> out
    array([5.])
    >>> dist.destroy_process_group()
    """
    if (pg := member("irecv", group, tensor)) is None:
        return None
    return _receive(pg, tensor, src, tag, group_src)


def _receive(pg: ProcessGroup, tensor: Any, src: int | None, tag: int, group_src: int | None) -> _Receive:
    if src is None and group_src is None:
        if isinstance(internal.link_of(pg.communicator), LocalLink):
            raise UsageError("recv: between threads pass a source", code="GC-USAGE")
        if pg.communicator.options.emulated or on_gpu(tensor):
            raise UsageError(f"recv: {NO_WILDCARD}", code="GC-WILDCARD")
        return _Receive(pg, tensor, None, None, tag)
    number = pg.number_of("recv", "src", src, group_src)
    return _Receive(pg, tensor, pg.communicator.recv(tensor, number, check_tag("recv", tag), async_op=True), number)


class _Receive(DistributedWork):
    """The handle of a message from `source`, a rank of the group; None means the first rank to send.

    Without a source, `is_completed` looks for a message and then posts the receive from the message's sender. The
    communicator's timeout bounds this search.
    """

    def __init__(self, pg: ProcessGroup, tensor: Any, work: Any, source: int | None, tag: int = 0) -> None:
        super().__init__(work, [tensor])
        self._pg, self._source, self._tag = pg, source, tag
        self._late = time.monotonic() + pg.communicator.timeout

    def source_rank(self) -> int:
        """Return the rank of the world sending the message; valid after completion."""
        return self._pg.ranks[self._source]  # type: ignore[index] # it has come

    def is_completed(self) -> bool:
        """Return whether the message has arrived; never waits."""
        if self._work is None:
            communicator, (tensor,) = self._pg.communicator, self._outputs
            self._source = internal.sender_of(communicator, self._tag)
            if self._source is not None:
                self._work = communicator.recv(tensor, self._source, self._tag, async_op=True)
            elif time.monotonic() > self._late:
                raise CollectiveTimeout(f"recv: no rank sent a message within {communicator.timeout:g} s")
        return super().is_completed()


def send(tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None) -> None:
    """Send `tensor` to another rank, `dst`; `tensor` may change after the return.

    Parameters
    ----------
    tensor : array of shape s
        NumPy's array, PyTorch's tensor, or another with DLPack.
    dst : int or None, optional
        The receiving rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    tag : int, optional
        The number of the message, 0 to 32767.
    group_dst : int or None, optional
        The receiving rank, by its number in the group, in place of `dst`.

    Raises
    ------
    ArgumentError
        `dst` is this rank, or a wrong rank or tag (GC-ROOT, GC-TAG).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    recv : The other end.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> try:
    ...     dist.send(numpy.zeros(1), dst=0)  # this rank itself
    ... except ValueError as error:
    ...     print(error.code)
    GC-ROOT
    >>> dist.destroy_process_group()
    """
    if (pg := member("send", group, tensor)) is not None:
        number = pg.number_of("send", "dst", dst, group_dst)
        if number == pg.rank():
            raise ArgumentError(f"send: rank {pg.ranks[number]} is this rank; use isend and irecv within a rank",
                                code="GC-ROOT")
        pg.communicator.send(tensor, number, tag)


def recv(tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None) -> int:
    """Receive into `tensor` from rank `src`.

    Parameters
    ----------
    tensor : array of shape s
        The place of the message.
    src : int or None, optional
        The sending rank, by its number in the world; None means the first rank to send.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    tag : int, optional
        The number of the message, 0 to 32767.
    group_src : int or None, optional
        The sending rank, by its number in the group, in place of `src`.

    Returns
    -------
    int
        The sender's rank in the world, -1 on a rank outside `group`.

    Raises
    ------
    MismatchError
        The message has another length or dtype than `tensor` (GC-SHAPE, GC-DTYPE).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    send : The other end.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> work = dist.isend(numpy.array([5.0]), 0)
    >>> out = numpy.zeros(1)
    >>> dist.recv(out, src=0)
    0
    >>> dist.destroy_process_group()
    """
    if (pg := member("recv", group, tensor)) is None:
        return -1
    work = _receive(pg, tensor, src, tag, group_src)
    work.wait()
    return work.source_rank()


def send_object_list(object_list: list[Any], dst: int | None = None, group: Any = None, device: Any = None,
                     group_dst: int | None = None, use_batch: bool = False) -> None:
    """Send the objects of a list, pickled, to rank `dst`; `device` and `use_batch` have no effect.

    Parameters
    ----------
    object_list : list
        The objects, which are pickled.
    dst : int or None, optional
        The receiving rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    device : object, optional
        Has no effect.
    group_dst : int or None, optional
        The receiving rank, by its number in the group, in place of `dst`.
    use_batch : bool, optional
        Has no effect.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.send_object_list([1], 1) if dist.get_world_size() > 1 else None
    >>> dist.destroy_process_group()
    """
    row = numpy.frombuffer(pickle.dumps(check_list("send_object_list", "object_list", object_list, 0)), numpy.uint8)
    for part in (numpy.array([row.size]), row) if member("send_object_list", group) is not None else ():
        send(part, dst, group, 0, group_dst)


def recv_object_list(object_list: list[Any], src: int | None = None, group: Any = None, device: Any = None,
                     group_src: int | None = None, use_batch: bool = False) -> int:
    """Overwrite the objects of a list with those sent by rank `src`; None means the first rank to send.

    Returns the sender's rank in the world, -1 on a rank outside `group`. Raises ArgumentError, with the list unchanged,
    if the sender's list has another length.

    Parameters
    ----------
    object_list : list
        The objects, which are pickled.
    src : int or None, optional
        The sending rank, by its number in the world; None: the first rank to send.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    device : object, optional
        Has no effect.
    group_src : int or None, optional
        The sending rank, by its number in the group, in place of `src`.
    use_batch : bool, optional
        Has no effect.

    Returns
    -------
    int
        The sender's rank in the world, -1 outside the group.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.recv_object_list([None], 1) if dist.get_world_size() > 1 else None
    >>> dist.destroy_process_group()
    """
    if member("recv_object_list", group) is None:
        return -1
    sender = recv(count := numpy.zeros(1, int), src, group, 0, group_src)
    recv(row := numpy.empty(int(count[0]), numpy.uint8), sender, group)
    came = pickle.loads(row.data)
    if len(check_list("recv_object_list", "object_list", object_list, len(came))) != len(came):
        raise ArgumentError(f"recv_object_list: object_list has {len(object_list)} objects, rank {sender} sent "
                            f"{len(came)}", code="GC-COUNTS")
    object_list[:] = came
    return sender


class P2POp:
    """A message for `batch_isend_irecv`.

    Parameters
    ----------
    op : callable
        `isend` or `irecv`.
    tensor : array
        The message, or its place.
    peer : int or None, optional
        The other rank, by its number in the world.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    tag : int, optional
        The number of the message, 0 to 32767.
    group_peer : int or None, optional
        The other rank, by its number in the group, in place of `peer`.

    Raises
    ------
    ArgumentError
        `op` is neither `isend` nor `irecv` (GC-OP), or the rank is not in the group (GC-ROOT).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    batch_isend_irecv : Begins messages.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.P2POp(dist.isend, numpy.zeros(1), 0)
    P2POp(isend, peer=0, tag=0)
    >>> dist.destroy_process_group()
    """

    def __init__(self, op: Callable[..., Any], tensor: Any, peer: int | None = None, group: Any = None, tag: int = 0,
                 group_peer: int | None = None) -> None:
        if op not in (isend, irecv):
            raise ArgumentError(f"P2POp: op {op!r} is neither isend nor irecv", code="GC-OP")
        self.op: Callable[..., Any] = op
        self.tensor: Any = tensor
        self.tag: int = tag
        self.group: ProcessGroup | None = _get_default_group() if group is None else group
        self.peer, self.group_peer = peer, group_peer
        if isinstance(self.group, ProcessGroup):
            self.group_peer = self.group.number_of("P2POp", "peer", peer, group_peer)
            self.peer = self.group.ranks[self.group_peer]

    def __repr__(self) -> str:
        return f"P2POp({self.op.__name__}, peer={self.peer}, tag={self.tag})"


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[DistributedWork]:
    """Begin all messages of the list; no message waits for another.

    Messages between the same two ranks are matched in the order of the list.

    Parameters
    ----------
    p2p_op_list : list of P2POp
        The messages.

    Returns
    -------
    list of Work
        A handle for each message.

    Raises
    ------
    ArgumentError
        An item is no `P2POp` (GC-OP), or items belong to several groups (GC-GROUP).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.group : The same on a communicator.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> out = numpy.zeros(1)
    >>> pair = [dist.P2POp(dist.isend, numpy.array([5.0]), 0), dist.P2POp(dist.irecv, out, 0)]
    >>> for work in dist.batch_isend_irecv(pair):
    ...     _ = work.wait()
    >>> out
    array([5.])
    >>> dist.destroy_process_group()
    """
    if not isinstance(p2p_op_list, list | tuple) or not all(isinstance(one, P2POp) for one in p2p_op_list):
        raise ArgumentError("batch_isend_irecv: expected a list of P2POp", code="GC-OP")
    if any(one.group is not p2p_op_list[0].group for one in p2p_op_list):
        raise ArgumentError("batch_isend_irecv: all messages must belong to the same group", code="GC-GROUP")
    mine = [one for one in p2p_op_list if member(one.op.__name__, one.group, one.tensor) is not None]
    if not mine:
        return []
    communicator = mine[0].group.communicator
    messages = [internal.checked_message(communicator, name, one.tag, **{what: one.tensor, other: one.group_peer})
                for one in mine for name, what, other in [_SIDES[one.op]]]
    works = internal.start_together(communicator, messages)
    return [_Receive(mine[0].group, one.tensor, work, one.group_peer) if one.op is irecv
            else DistributedWork(work, [one.tensor])
            for work, one in zip(works, mine, strict=True)]


_SIDES = {isend: ("send", "x", "dst"), irecv: ("recv", "out", "src")}
