"""Messages between nodes: the ranks to be greeted, and a comparison as an instruction of a plan.

The engine sends and receives by a wire (kernels/engine/wire.h). A call is compared by greetings of the first ranks of
all nodes (kernels/engine/agreement.h), or with `check="deferred"` by an instruction of Python. Short data of such a
rank's first round travel with the greeting. The receiving rank must know this beforehand: both ranks look at the
sender's schedule (`opened` in `instructions`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from gpucoll.core.signature import is_refusal
from gpucoll.errors import MismatchError, is_settled
from gpucoll.progress.operations import Operation, Pending

if TYPE_CHECKING:
    from gpucoll.executors.engine import NodeEngine


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
