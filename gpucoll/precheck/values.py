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
    first, row = calls[0].call.request, COLLECTIVES[calls[0].call.request.collective]
    if first.nbytes * len(calls) > MOST_BYTES:
        for call in calls:
            if call.target is not None and not call.call.request.in_place and row.name != "broadcast" \
                    and call.target.nbytes <= MOST_ZEROS:
                call.target[...] = 0
    elif row.reduces:
        _reduce(row.name, calls, blocks=row.input.blocks)
    elif row.name != "barrier":
        _move(calls, blocks=row.input.blocks, source=first.root if row.input.where == "root" else None)


def _move(calls: Sequence[ReadyCall], *, blocks: bool, source: int | None) -> None:
    """Carry out a call that moves data, from rank `source` or from all ranks."""
    givers = calls if source is None else [calls[source]]
    copies = [numpy.array(call.source) for call in givers]  # input and result may be the same memory
    rows = [_blocks(ready.call.request, row, len(calls)) for ready, row in zip(givers, copies, strict=True)] \
        if blocks else []
    everything = None if blocks else numpy.concatenate(copies)
    for rank, call in enumerate(calls):
        if call.target is not None:
            call.target[...] = numpy.concatenate([one[rank] for one in rows]) if everything is None else everything


def _blocks(request: CallRequest, row: Array, ranks: int) -> list[Array]:
    """Return the blocks of a row for each rank, as views."""
    return numpy.split(row, ranks if request.cut.lengths is None else numpy.cumsum(request.cut.lengths[0])[:-1])


def _reduce(name: str, calls: Sequence[ReadyCall], *, blocks: bool) -> None:
    """Carry out a reduction: in rank order, as `combiner` rounds."""
    request, inputs, ranks = calls[0].call.request, [call.source for call in calls], len(calls)
    results: Sequence[Array | None]
    if name in ("scan", "exscan"):
        results = [_total(request, inputs[:rank + (name == "scan")]) for rank in range(ranks)]
    else:
        total = _total(request, inputs)
        assert total is not None
        results = _blocks(request, total, ranks) if blocks else [total] * ranks
    for call, result in zip(calls, results, strict=True):
        if call.target is not None and result is not None:
            call.target[...] = result


def _total(request: CallRequest, rows: Sequence[Array]) -> Array | None:
    assert request.op is not None
    if not rows:
        return None
    total = numpy.array(rows[0])
    combiner(request.op, request.dtype)(total, rows[0], rows[1:])
    return total
