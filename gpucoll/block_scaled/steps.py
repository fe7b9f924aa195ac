"""The two steps of a mean or a sum in a block-scaled format.

Every rank sends each other rank the quantised share of that rank, adds the received shares in full precision, and
sends the quantised result of its own share to all ranks. So each value is rounded twice for any number of ranks.
Source: Wang et al., arXiv 2306.10209.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy

from gpucoll import Communicator
from gpucoll.block_scaled.conversion import dequantise, keep_finite, quantise
from gpucoll.internal import Array, Format, Quantised

# Return an array of this name, shape and dtype, reused from call to call: new pages cost more than the computation.
MakeWorkspace = Callable[[str, tuple[int, ...], Any], Array]


class ScaledMessages(NamedTuple):
    """The messages of a call: rows for each rank, rows from each rank, and the row of this rank's result."""

    form: Quantised
    packed: Array
    came: Array
    row: Array


def messages(row: Format, size: int, count: int, workspace: MakeWorkspace) -> ScaledMessages:
    """Return the messages of a call on `count` elements; each rank's share has whole blocks."""
    form = Quantised(size, -(-count // (size * row.block)) * row.block, row)
    packed, came = (workspace(name, (size, form.stride), "u1") for name in ("packed", "came"))
    return ScaledMessages(form, packed, came, workspace("row", (form.stride,), "u1"))


def two_steps(comm: Communicator, sent: ScaledMessages, x: Array, before: Array | None, after: Array | None, out: Array,
              workspace: MakeWorkspace, divisor: int) -> Iterator[Callable[..., Any]]:
    """Write to `out` the sum over ranks of x + before, divided by `divisor`; yield the two collectives to call.

    All arrays have one axis and the length of `x`; `out` may be `x`. `after` gets the residuals, if given: their sum
    over ranks is divisor * (exact result - out).
    """
    form, packed, came, row = sent
    quantise(form, x, before, after, packed.reshape(-1))
    yield functools.partial(comm.all_to_all, packed, out=came)
    wide = x.dtype if x.dtype.itemsize >= 4 else numpy.dtype("f4")
    result = workspace("result", (form.share,), wide)
    lost = None if after is None else workspace("lost", (form.share,), wide)
    dequantise(form, came, result, comm.size, divisor)
    quantise(form._replace(rows=1), result, None, lost, row)
    if after is not None and lost is not None:
        # `lost` is an error of the result. The sum of the residuals counts `divisor` times: multiply.
        own = after[comm.rank * form.share:(comm.rank + 1) * form.share]
        with numpy.errstate(over="ignore"):  # float16 may have no room for `divisor` times a large residual
            own += (lost[:own.size] * divisor).astype(own.dtype)
        keep_finite(own, own)
    yield functools.partial(comm.all_gather, row, out=came)
    dequantise(form, came, out)
