"""The results of collectives among virtual ranks, computed by NumPy and without a schedule."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from gpucoll.internal import COLLECTIVES, Array, CallRequest, ReadyCall, combiner

MOST_BYTES = 128 << 20  # bytes of a call over all ranks: larger calls are matched, and their results are not computed
# Bytes of a result that is not computed and set to zero: the memory of a longer one may never be touched, so that
# programs larger than this machine's memory can be checked.
MOST_ZEROS = 1 << 20


def compute(calls: Sequence[ReadyCall]) -> None:
    """Write the results of a call, given the calls of all ranks in rank order.

    Above MOST_BYTES no result is computed: a result apart from the input is zero up to MOST_ZEROS bytes, any other
    array keeps its values.
    """
    first, row = calls[0].request, COLLECTIVES[calls[0].request.collective]
    if first.nbytes * len(calls) > MOST_BYTES:
        for call in calls:
            if call.target is not None and not call.request.in_place and row.name != "broadcast" \
                    and call.target.nbytes <= MOST_ZEROS:
                call.target[...] = 0
    elif row.reduces:
        _reduce(row.name, calls, blocks=row.input.blocks)
    elif row.name != "barrier":
        _move(calls, blocks=row.input.blocks, source=first.root if row.input.where == "root" else None)


def _move(calls: Sequence[ReadyCall], *, blocks: bool, source: int | None) -> None:
    """Carry out a call that moves data, from rank `source` or from all ranks."""
    givers = calls if source is None else [calls[source]]
    # A copy of the inputs, because input and result may be the same memory.
    parts = [_blocks(call, len(calls)) if blocks else [call.source] for call in givers]
    everything = None if blocks else numpy.concatenate([one for (one,) in parts])
    copies = [[numpy.array(block) for block in one] for one in parts] if blocks else []
    for rank, call in enumerate(calls):
        if call.target is not None:
            call.target[...] = numpy.concatenate([one[rank] for one in copies]) if everything is None else everything


def _blocks(call: ReadyCall, ranks: int) -> list[Array]:
    row = call.source
    if call.request.lengths is None:
        return list(row.reshape(ranks, -1)) if len(row) else [row] * ranks
    stops = numpy.cumsum(call.request.lengths[0])
    return [row[stop - length:stop] for stop, length in zip(stops, call.request.lengths[0], strict=True)]


def _reduce(name: str, calls: Sequence[ReadyCall], *, blocks: bool) -> None:
    """Carry out a reduction: in rank order, as `combiner` rounds."""
    inputs = [call.source for call in calls]
    if name in ("scan", "exscan"):
        totals = [_total(calls[0].request, inputs[:rank + (name == "scan")]) for rank in range(len(calls))]
        for call, total in zip(calls, totals, strict=True):
            if total is not None:
                call.target[...] = total
        return
    total = _total(calls[0].request, inputs)
    assert total is not None
    for rank, call in enumerate(calls):
        if call.target is not None:
            call.target[...] = _block(call.request, total, rank, len(calls)) if blocks else total


def _total(request: CallRequest, rows: Sequence[Array]) -> Array | None:
    assert request.op is not None
    if not rows:
        return None
    total = numpy.array(rows[0])
    combiner(request.op, request.dtype)(total, rows[0], rows[1:])
    return total


def _block(request: CallRequest, total: Array, rank: int, ranks: int) -> Array:
    if request.lengths is None:
        each = len(total) // ranks
        return total[rank * each:(rank + 1) * each]
    start = sum(request.lengths[0][:rank])
    return total[start:start + request.lengths[0][rank]]
