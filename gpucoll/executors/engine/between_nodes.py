"""Messages between nodes: their wires, the ranks to be greeted, and a comparison as an instruction of a plan.

The engine sends and receives by a wire (kernels/engine/wire.h). A call is compared by greetings of the first ranks of
all nodes (kernels/engine/agreement.h), or with `check="deferred"` by an instruction of Python. Short data of such a
rank's first round travel with the greeting. The receiving rank must know this beforehand: both ranks look at the
sender's schedule (`opened` in `instructions`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from gpucoll.core.signature import is_refusal
from gpucoll.errors import MismatchError, is_settled
from gpucoll.executors.engine.extension import library
from gpucoll.executors.messages import overruns
from gpucoll.progress.operations import Operation, Pending
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import exchange
from gpucoll.transport.mailbox import Mailbox, ThreadMessages
from gpucoll.transport.tags import MAX_MESSAGE

if TYPE_CHECKING:
    from gpucoll.executors.engine import NodeEngine

MOST_CONNECTED = 256  # ranks of a job whose processes are all connected from the start
_posts = weakref.WeakKeyDictionary[Mailbox, Any]()  # the messages of the engines of threads with the same mailbox


class WireRoles(NamedTuple):
    """This rank's part in messages by the engine: whether greetings compare calls, and the leaders to be greeted."""

    compares: bool
    leader: int
    partners: tuple[int, ...]

    @classmethod
    def of(cls, rank: int, nodes: tuple[int, ...], *, compares: bool) -> WireRoles:
        """Return the roles of a rank; `nodes` is the node of each rank.

        >>> WireRoles.of(1, (0, 0, 1, 1), compares=True)
        WireRoles(compares=True, leader=0, partners=())
        >>> WireRoles.of(2, (0, 0, 1, 1), compares=True).partners
        (0,)
        """
        leader = nodes.index(nodes[rank])
        leads = compares and rank == leader
        others = sorted({nodes.index(node) for node in nodes} - {leader})
        return cls(compares, leader, (*others,) if leads else ())


class Comparing:
    """The comparison of a call by messages between nodes, as an instruction of the call's plan.

    Without a `description` the call is described as in the engine's descriptor: a plan may serve under two names.
    """

    def __init__(self, executor: NodeEngine, description: str) -> None:
        self._executor, self._description = executor, description
        self._operation: Operation | None = None  # of the call under way
        self._pending: Pending | None = None

    def go_on(self) -> bool:
        """Return whether all ranks are known to make this call.

        Raises MismatchError or PeerError if they do not; the engine then leaves the call, and no data was sent.
        """
        comparison = self._executor.comparison
        if self._operation is None:
            description = self._description or self._executor.described or self._executor.under_way()
            self._operation = comparison.compare(description)
        try:
            while self._pending is None or self._pending():
                self._pending = next(self._operation, None)
                if self._pending is None:
                    self._operation = None
                    return True
        except BaseException as error:
            self._operation = self._pending = None
            if is_settled(error):
                self._executor.engine.settle()
            raise
        return False

    def explain(self) -> None:
        """Raise the error of unlike calls once the comparison has ended; the engine asks again until then.

        If every rank refuses the arguments, the call ends without an error: each rank raises its own refusal.
        """
        if self.go_on():
            if not is_refusal(self._executor.described):
                raise MismatchError("ranks make different calls, or have made different calls before")
            self._executor.engine.settle()


def wire_of(link: Any, timeout: float, check: str | None) -> Any:
    """Return a capsule with the wire of a link. A collective call."""
    rank, nodes = link.place.rank, link.place.nodes
    if isinstance(link.wire, ThreadMessages):
        # The first thread's post is for all, found or added in one step.
        post = _posts.setdefault(link.wire.mail, library().post(int(link.place.size)))
        return library().thread_wire(post, link.rank)
    if link.has_collectives:
        return _by_mpi(link.wire, matches=check not in (None, "full"))
    if link.carrier != "ucx":  # a store without UCX, or a transport of the program's
        return library().python_wire(link.wire, MAX_MESSAGE)
    # Connect all pairs of ranks now: the abort message to a rank of a lost host would wait in UCX for a connection.
    # Larger jobs connect at the first message, because the connections of a process would be too many.
    if link.place.size <= MOST_CONNECTED:
        away = [rank, *(other for other, node in enumerate(nodes) if node != nodes[rank])]
        Progress(timeout, foreign=link.foreign).run(exchange(link.wire, rank, away, ()), "the first messages of hosts")
    return link.wire.engine_wire()


def _by_mpi(comm: Any, *, matches: bool) -> Any:
    """Return a wire over a communicator of mpi4py; with `matches` a message may be longer than the awaited one."""
    from mpi4py import MPI

    return library().mpi_wire(MPI.__file__, MPI._handleof(comm), MPI._handleof(MPI.BYTE), MPI._sizeof(comm),
                              MPI._sizeof(MPI.Status), MAX_MESSAGE, matches and overruns())
