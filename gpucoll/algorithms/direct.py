"""Direct: every rank exchanges with every other rank in a single round.

Each rank sends P - 1 blocks and receives P - 1 blocks at the same time: 1 round of N / P bytes per link, (P - 1) N / P
bytes per rank. No byte moves twice. Good where links join all pairs; with many ranks the messages of a round may flood
a receiver, see `pairwise`. Blocks may have unequal lengths, so the v-variants run on this algorithm.

    rank 0 ⇄ rank 1
       ⇅ and both diagonals ⇅      each rank: P - 1 sends and P - 1 receives at once
    rank 2 ⇄ rank 3

Source: folklore.
"""

from collections.abc import Iterable
from typing import Any

from gpucoll.algorithms import Traits, algorithm, find, phase
from gpucoll.core.schedule import Copy, Recv, Rounds, Send, Slice, in_rank_order

# A single round of P - 1 messages of N / P bytes, sent and received.
EXCHANGE: dict[str, Any] = {
    "chunks": "P", "vectorised": "1", "rounds": "min(1, P - 1)", "path": "min(1, P - 1) * N / P",
    "sent": "(P - 1) * N / P", "gaps": "max(0, P - 2)", "traits": Traits(at_source=True)}
ALIKE = EXCHANGE | {"traits": Traits(at_source=True, barriers=1)}  # for blocks of equal length


def _others(rank: int, size: int) -> Iterable[int]:
    """Return the other ranks, the right neighbour first: ranks starting with the same peer would flood that peer."""
    return [(rank + distance) % size for distance in range(1, size)]


@algorithm("all_gather_v", **EXCHANGE)
@algorithm("all_gather", **(ALIKE | {"traits": Traits(at_source=True, barriers=1, probes=(8,),
                                                        kernel="multimem_gather")}))
def direct_all_gather(rank: int, size: int) -> Rounds:
    own, others = Slice("input", 0), _others(rank, size)
    yield (Copy(own, Slice("output", rank)), *(Send(own, peer) for peer in others),
           *(Recv(Slice("output", peer), peer) for peer in others))


@algorithm("gather_v", **(EXCHANGE | {"vectorised": "0", "sent": EXCHANGE["path"], "received": EXCHANGE["sent"]}))
def direct_gather(rank: int, size: int, root: int = 0) -> Rounds:
    return find("gather", "linear").make(rank, size, root)


@algorithm("scatter_v", **(EXCHANGE | {"vectorised": "0", "received": EXCHANGE["path"]}))
def direct_scatter(rank: int, size: int, root: int = 0) -> Rounds:
    return find("scatter", "linear").make(rank, size, root)


@algorithm("all_to_all_v", **EXCHANGE)
@algorithm("all_to_all", **ALIKE)
def direct_all_to_all(rank: int, size: int) -> Rounds:
    others = _others(rank, size)
    yield (Copy(Slice("input", rank), Slice("output", rank)), *(Send(Slice("input", peer), peer) for peer in others),
           *(Recv(Slice("output", peer), peer) for peer in others))


@algorithm("reduce_scatter_v", in_rank_order="1", **(EXCHANGE | {"reduced": EXCHANGE["sent"]}))
@algorithm("reduce_scatter", in_rank_order="1", **(ALIKE | {"reduced": EXCHANGE["sent"]}))
def direct_reduce_scatter(rank: int, size: int) -> Rounds:
    """Leave block `rank`, reduced over all inputs in rank order, on every rank."""
    yield (*(Send(Slice("input", peer), peer) for peer in _others(rank, size)),
           *in_rank_order(Slice("input", rank), Slice("output", 0), rank, size))


@phase("reduce_scatter")
def collect(rank: int, size: int) -> Rounds:
    yield (*(Send(Slice("input", peer), peer) for peer in _others(rank, size)),
           *in_rank_order(Slice("input", rank), Slice("output", rank), rank, size))


@phase("all_gather")
def distribute(rank: int, size: int) -> Rounds:
    own, others = Slice("output", rank), _others(rank, size)
    yield (*(Send(own, peer) for peer in others), *(Recv(Slice("output", peer), peer) for peer in others))
