"""What joins the ranks of a communicator: the base class of gpucoll's own links and of a program's transports."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy

from gpucoll.executors import Executor
from gpucoll.health.farewell import Farewell, Sent, Why
from gpucoll.health.processes import Processes
from gpucoll.launch.bootstrap import RankTopology
from gpucoll.launch.regroup import Membership
from gpucoll.progress.operations import Operation
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import WireError
from gpucoll.transport.tags import BYTES, FAREWELL_BYTES, Tag
from gpucoll.tuner import Table, built_in


class Transport:
    """One rank's way to the other ranks of a communicator; ``gpucoll.init(transport=...)`` takes one.

    gpucoll has transports of its own: MPI, a key-value store, and the memory of threads. A program whose ranks reach
    each other in another way derives a class with `part`, and makes one object on each rank.

    The library uses `wire`, and `points` carries the program's messages: a message of one must never match one of the
    other. Both carry messages as mpi4py's communicators do: ``Isend([row, "B"], rank, tag, dtype)`` and ``Irecv([row,
    "B"], rank, tag, dtype)`` with a row of bytes, and a number `dtype` (0 if omitted) sent with the message, return a
    request. Its ``Test()`` advances and returns whether the message has ended, ``Cancel()`` gives up a receive. A
    receive also has ``length``, the bytes of the message sent, or None before the end, which reading advances as
    ``Test()`` does; and ``came``, the number sent with the message. A message with another number is received without
    its bytes, unless one number is 0. The k-th send with a tag meets the k-th receive. ``seen(rank, tag)`` returns
    (rank, tag, bytes) of a message that a receive would take at once, or None; None in place of a number means any.

    Parameters
    ----------
    rank : int
        This rank.
    hosts : sequence
        A name of the host of each rank, in rank order; the length is the number of ranks.
    ranks : object
        Its ``allgather(value)`` returns the values of all ranks (numbers, strings, bytes, lists, tuples, dicts) in rank
        order, and ``bcast(value, root=0)`` the root's. Collective calls.
    wire : object
        Carries the library's messages.
    points : object
        Carries the program's messages.

    See Also
    --------
    gpucoll.init : Takes a transport.

    Examples
    --------
    >>> import gpucoll as gc
    >>> class Alone(gc.Transport):
    ...     def part(self, name, ranks):
    ...         return self
    >>> transport = Alone(0, ["here"], None, None, None)
    >>> transport.rank, transport.size
    (0, 1)
    """

    mpi: Any  # gathers objects as mpi4py's communicators do; None between threads
    threads = False  # whether several threads may call the transport at a time
    asks_store = False  # whether a wait sends requests to a store
    has_collectives = False  # whether `wire` is a communicator of mpi4py, with MPI's own collectives
    shares_memory = False  # whether the ranks of a host may read each other's memory
    meets_to_close = True  # whether ranks tell each other that they close, and wait for each other
    # The transport's own exceptions, reported as BackendError.
    foreign: tuple[type[Exception], ...] = (WireError,)
    carrier = "mpi"  # the name of the executor by messages of `wire`
    members: Membership | None = None  # by which processes regroup; None if they cannot
    gpu_index: int | None = None  # number for dealing out a host's GPUs; None: threads use the current GPU
    device: int | None = None  # the CUDA ordinal, once a call has asked for it
    # Of a transport with devices of its own: ``gpu(name)`` returns one for calls on GPU arrays, ``own_gpu(ordinal)`` is
    # the number of the rank's, given the ordinal in the options.
    gpu: Callable[[str], Any] | None = None
    own_gpu: Callable[[int | None], int | None] | None = None
    # An executor that carries out, and compares, all calls in a way of its own: without schedules and shared memory.
    executor: Executor | None = None
    # ``exchange(name, root, value, found)`` appends to `found` the list of all ranks' values, in a call `name` of the
    # transport's own; None: gpucoll exchanges small objects, such as shapes, by its schedules.
    exchange: Callable[[str, int, Any, list[Any]], Operation] | None = None
    enter: Callable[[], None] | None = None  # called when the program begins a call, perhaps on a closed communicator
    has_ended: Callable[[], bool] = bool  # whether the layer below has ended, so that nothing can be sent: False
    _splits = 0

    def __init__(self, rank: int, hosts: Sequence[Hashable], ranks: Any, wire: Any, points: Any) -> None:
        self.place: RankTopology = RankTopology.of(rank, hosts)
        self.mpi = ranks
        self.wire: Any = wire
        self.points: Any = points
        self._ranks = ranks  # gathers the colors of a split
        self.processes: Processes = Processes({})  # of the ranks of this host, if their ends can be seen
        self.table: Table = built_in()  # tuning table for "auto", the same on every rank
        self._farewells: dict[int, Farewell] = {}
        # Memory of a GPU that threads offer each other, in calls of the library and in messages of the program.
        self.offers: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.place.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.place.size

    def part(self, name: str, ranks: Sequence[int]) -> Transport:
        """Return the transport of this rank in a part of the ranks, in their new order.

        Parameters
        ----------
        name : str
            A name that only this part has.
        ranks : sequence of int
            The ranks of the part, in their new order.

        Returns
        -------
        Transport
            The transport of this rank in the part.

        See Also
        --------
        split : Called by `Communicator.split`.

        Examples
        --------
        >>> import gpucoll as gc
        >>> class Alone(gc.Transport):
        ...     def part(self, name, ranks):
        ...         return self
        >>> transport = Alone(0, ["here"], None, None, None)
        >>> transport.part("half", [0]) is transport
        True
        """
        raise NotImplementedError

    def split(self, color: int | None, key: int) -> Transport | None:
        """Return the part of the ranks of `color`, ordered by `key`.

        A collective call.

        Parameters
        ----------
        color : int or None
            The number of the part; None: in no part.
        key : int
            The place among the ranks of the part.

        Returns
        -------
        Transport or None
            The transport of the part; None if `color` is None.

        See Also
        --------
        part : What a program's transport defines.

        Examples
        --------
        >>> import gpucoll as gc
        >>> class Alone(gc.Transport):
        ...     def part(self, name, ranks):
        ...         return self
        >>> transport = Alone(0, ["here"], None, None, None)
        >>> transport.rank, transport.size
        (0, 1)
        """
        # All ranks count alike: a part gets the same new name on each of its ranks.
        self._splits += 1
        everyone = self._ranks.allgather((color, key))
        if color is None:
            return None
        ranks = [rank for _, rank in sorted((other, rank) for rank, (shade, other) in enumerate(everyone)
                                            if shade == color)]
        part = self.part(f"split {self._splits} {color}", ranks)
        part.gpu_index, part.device = self.gpu_index, self.device
        return part

    def new_waits(self, timeout: float) -> Progress:
        """Return what drives the operations of a communicator and waits for them; by default by polls."""
        return Progress(timeout, foreign=self.foreign, threads=self.threads, asks_store=self.asks_store,
                        crowd=self.place.local_size / (os.cpu_count() or 1))

    def tell(self, others: Collection[int], farewell: Farewell) -> Sent | None:
        """Begin to tell other ranks that this rank makes no further call, as after a failure."""
        return Sent(self.wire, others, farewell)

    def farewells(self) -> Mapping[int, Farewell]:
        """Return the ranks that have left the communicator, in the order in which this rank has learnt of it."""
        while (seen := self.wire.seen(None, Tag.FAREWELL)) is not None:
            row = numpy.zeros(FAREWELL_BYTES, numpy.uint8)
            if not self.wire.Irecv([row, BYTES], seen[0], Tag.FAREWELL).Test():
                break
            self._farewells[seen[0]] = Farewell.decode(row)
        return self._farewells

    def has_left(self, rank: int) -> bool:
        """Return whether another rank takes part in no further call: it has ended, failed, or waits in `close`."""
        farewell = self.farewells().get(rank)
        return rank in self.processes.ended() or (farewell is not None and farewell.why != Why.AWAY)

    def leave(self) -> None:
        """Tell the ranks that regroup after a failure that this rank does not."""
        if self.members is not None:
            self.members.leave()

    def close(self, release: Callable[[bool], None], farewell: Farewell, *, failed: bool) -> None:
        """Leave, if ranks do not meet to close; ``release(has_failed)`` frees what no rank uses any more."""
        release(failed)

    def forget(self) -> None:
        """Forget how ranks regroup and who watches them: this transport was given up, or closed by all ranks."""
        if self.members is not None:
            self.members.free()
        if self.processes.watch is not None:
            self.processes.watch.close()

    def free(self) -> None:
        """Release the resources of the transport.

        A collective call.

        Examples
        --------
        >>> import gpucoll as gc
        >>> class Alone(gc.Transport):
        ...     def part(self, name, ranks):
        ...         return self
        >>> transport = Alone(0, ["here"], None, None, None)
        >>> transport.free()
        """
        self.forget()
