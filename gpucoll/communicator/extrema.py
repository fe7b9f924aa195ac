"""The extreme of all ranks' arrays, element by element, with its place: `maxloc` and `minloc`."""

from __future__ import annotations

from typing import Any

import numpy

from gpucoll.arrays import as_array, carried_dtype, check_input, module_of
from gpucoll.call.table import reports_refusals
from gpucoll.communicator.core import Core
from gpucoll.core.dtypes import row_of
from gpucoll.errors import ArgumentError, DtypeError


@reports_refusals
def located(core: Core, name: str, op: str, x: Any, index: Any) -> tuple[Any, Any]:
    """Return the extreme by `op` of all ranks' `x`, and the lowest `index` of an element with this value."""
    core.calls.check_apart(name)
    with core.current(None, [x]):
        source = check_input(name, x)
        indices = module_of(source).full(source.shape, core.rank, "int64") if index is None \
            else as_array(name, "index", index)
    core.space(name, x).check(name, "index", indices)
    if row_of(indices.dtype).kind != "int" or carried_dtype(x):
        raise DtypeError(f"{name}: x is an array of {x.dtype}, index of {indices.dtype}; index must be integers, "
                         "and x of a dtype known to CuPy, so not float8")
    if indices.shape != source.shape:
        raise ArgumentError(f"{name}: index has shape {indices.shape}, expected {source.shape}, one for each "
                            "element of x", code="GC-SHAPE")
    values = core.calls.do("all_reduce", op, 0, "auto", x, None, None, None, False)
    with core.current(None, [x]):
        is_there = (source == values) | (source != source)  # NaN equals nothing, and wins
        # Ranks without the extreme give the largest integer, which loses in "min".
        indices = module_of(source).where(is_there, indices, indices.dtype.type(numpy.iinfo(indices.dtype).max))
    return values, core.calls.do("all_reduce", "min", 0, "auto", indices, None, None, None, False)
