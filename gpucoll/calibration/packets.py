"""A check of the peer kernels before `auto` may choose them: every kind of packet, between all pairs of ranks at once.

A link may lose or delay parts of a packet under load only. So all pairs are busy, and each call brings other data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpucoll import internal
from gpucoll.algorithms import registry
from gpucoll.calibration.measure import ranks_of
from gpucoll.communicator import Communicator

PACKET_CHECKS = 50  # calls of each kind
FIELD = 4  # bits of a rank in a sum: 16 ranks share 64 bits
# The ways of the peer kernels from rank to rank: a call that takes the way between all pairs (collective, kernel as in
# `Traits.kernel`, bytes), the property of the links that it needs, or "", and the kernels that cannot do without.
PACKET_KINDS = {
    "packets of 16 bytes": ("all_reduce", "fold_all", 1 << 13, "", {"fold_all"}),
    "packets of 128 bytes": ("all_reduce", "fold_all", 3 << 15, "packets_of_128_bytes", {"fold_all"}),
    "reads of other ranks": ("all_reduce", "fold_all", 1 << 18, "", {"fold_all", "fold_share"}),
    "the switch": ("all_reduce", "fold_share", 1 << 18, "reductions_by_switch", {"fold_share", "multimem_gather"}),
    "pieces": ("all_to_all", "", 1 << 18, "", {""})}


def check(comms: dict[str, Communicator], say: Callable[[str], None]) -> tuple[str, ...]:
    """Return the peer kernels that bring wrong data; remove `peer` from `comms` if it can run no schedule.

    Names by `say` each kind of packet that fails, with the ranks. A collective call; raises CollectiveTimeout if a
    kernel waits in vain.
    """
    excluded = set[str]()
    if peer := "peer" in comms and internal.gpu_of(comms["peer"], "cuda").peer:
        for kind, (collective, kernel, nbytes, link, kernels) in PACKET_KINDS.items():
            there = peer.links.get(link, True)
            wrong = _wrong(comms["peer"], collective, kernel, nbytes) if there else []
            if pairs := [pair for some in ranks_of(comms["peer"]).allgather(wrong) for pair in some]:
                excluded |= kernels
                say(f"peer: wrong data by {kind}, from rank {', '.join(pairs)}: auto does without")
    if "" in excluded:
        del comms["peer"]
    return tuple(sorted(excluded))


def _wrong(comm: Communicator, collective: str, kernel: str, nbytes: int) -> list[str]:
    """Return the pairs of ranks, in words, whose data have come to this rank wrong."""
    import cupy as xp

    algorithm = next(name for (kind, name), row in registry().items()
                     if kind == collective and row.traits.at_source and row.traits.kernel == kernel)
    sums = collective == "all_reduce"
    index: Any = xp.arange(nbytes // 8 // (1 if sums else comm.size), dtype="uint64")
    spoilt: Any = xp.zeros(comm.size, "bool")
    for turn in range(PACKET_CHECKS):
        # Neighbouring words differ, and those of one place in two calls.
        fields = [(5 * index + index // 16 + turn + 3 * rank) & 15 for rank in range(comm.size)]
        given = fields[comm.rank] << FIELD * comm.rank if sums else xp.stack([fields[comm.rank]] * comm.size)
        came = getattr(comm, collective)(given, algorithm=algorithm)
        for rank, field in enumerate(fields):
            spoilt[rank] |= ((came >> FIELD * rank & 15 if sums else came[rank]) != field).any()
    return [f"{rank} to {comm.rank}" for rank, one in enumerate(spoilt.get().tolist()) if one]
