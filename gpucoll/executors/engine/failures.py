"""The state of a rank as shown to the ranks of the node, beside the progress: a failure, and the end of the last call.

The numbers stand in the head of the control segment (kernels/engine/node.h). Other ranks read the numbers for error
messages, and in waits for a rank that has failed.
"""

from __future__ import annotations

from typing import Any

from gpucoll.core.signature import LastCall
from gpucoll.errors import BackendError, CollectiveTimeout, MismatchError, PeerError, RankFailedError, is_settled
from gpucoll.executors.engine.neighbours import NodeRanks
from gpucoll.executors.engine.tables import ARRIVED, BEGUN, COUNTER, ENDED, FAILURE, LEFT, ROUNDS

# Failures shown next to the counter, for ranks that wait for this rank; farewells tell the reasons `Why`. EXPIRED: the
# deadline has passed. ASTRAY: calls differ. DOWN - r: rank r has failed. EXPIRED_FOR - r: the deadline has passed in a
# wait for rank r. The counter stays: peers may still read data shown before the failure.
EXPIRED, ASTRAY, DOWN, EXPIRED_FOR = -1, -2, -3, -1 << 32


def show_failure(node_ranks: NodeRanks, error: BaseException) -> None:
    """Show the other ranks of the node that this rank has failed, unless the error has settled the call."""
    if is_settled(error):
        return
    # The rank named by an error is the one to look at: this rank only reports.
    named = error.ranks[:1] if isinstance(error, RankFailedError | CollectiveTimeout | BackendError) else ()
    if isinstance(error, MismatchError | PeerError):
        failure = ASTRAY
    elif isinstance(error, CollectiveTimeout):
        failure = EXPIRED_FOR - named[0] if named else EXPIRED
    else:
        failure = DOWN - (*named, node_ranks.rank)[0]
    node_ranks.words[node_ranks.rank][FAILURE] = failure


def culprit_of(node_ranks: NodeRanks, rank: int) -> int | None:
    """Return the other rank to which a rank of the node has shown its failure to be due; None without one."""
    words = node_ranks.words.get(rank)
    failure = 0 if words is None else words[FAILURE]
    culprit = EXPIRED_FOR - failure if failure <= EXPIRED_FOR else DOWN - failure if failure <= DOWN else rank
    return None if culprit in (rank, node_ranks.rank) else culprit


def last_call(node_ranks: NodeRanks, engine: Any, rank: int) -> LastCall:
    """Return the last call of a rank of the node."""
    words = node_ranks.words[rank]
    shown, begun, ended = words[COUNTER] >> ROUNDS, words[BEGUN], words[ENDED]
    # A rank that has begun a call, and has not shown it yet, waits until it may overwrite an earlier one.
    number = max(shown, begun)
    when = words[LEFT] if ended >= number else words[ARRIVED + (number & 1)] if shown == number else 0
    text = engine.description(rank, number) if 0 < number == shown else ""
    # The work of a deferred call goes on, on a GPU.
    return LastCall(number, text, None if ended == -number < 0 else ended >= number, 1e-9 * when)
