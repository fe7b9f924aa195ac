"""Explanations of the choices of "auto", and a check of arrays for NaN and infinity."""

from __future__ import annotations

from typing import Any

import numpy

from gpucoll.algorithms import own_names
from gpucoll.arrays import check_input, module_of, promised
from gpucoll.call.compile import able
from gpucoll.communicator.core import Core
from gpucoll.core.collectives import collective as collective_row
from gpucoll.core.dtypes import is_whole, row_of
from gpucoll.core.ops import Order, op_of
from gpucoll.errors import ArgumentError
from gpucoll.executors import CallRequest
from gpucoll.health.flight import TIMED
from gpucoll.tuner.explanation import Explanation, explained

DEVICES = ("cpu", "cuda", "emulated")
ON_A_GPU = ("nccl", "native")  # executors for GPU arrays, assumed before the first such array


def explain(core: Core, collective: str, nbytes: int, dtype: Any, device: str | None) -> Explanation:
    row = collective_row(collective)
    where = ("emulated" if core.emulated else "cpu") if device is None else device
    if not is_whole(nbytes) or nbytes < 0:
        raise ArgumentError(f"explain: nbytes={nbytes!r} is not a number of bytes", code="GC-SIZE")
    if where not in DEVICES:
        raise ArgumentError(f"explain: device {device!r} is not one of {', '.join(DEVICES)}", code="GC-DEVICE")
    nbytes = int(nbytes)  # JSON has no NumPy integers
    op, kind = op_of("sum") if row.reduces else None, row_of(dtype)
    order: Order = "any"
    if op is not None:
        op, order = promised("explain", op, kind, core.options.deterministic)
    executors = _able(core, CallRequest(row.name, "auto", kind, op, nbytes=nbytes, device=where, order=order), where)
    found = core.tuner.candidates(row.name, nbytes, executors, where, order=order)
    if not found:
        raise ArgumentError(f"explain: nothing is known of {row.name} on {', '.join(executors)}", code="GC-ALGO")
    considered, others = len(found), [one for one in executors if one != "native"]
    open_to_auto = {one.algorithm for one in found}
    for name in own_names(row.name, core.size):
        if name not in open_to_auto:
            found += core.tuner.candidates(row.name, nbytes, others, where, name)
    times = [_known(core, row.name, one.executor, one.algorithm, nbytes) for one in found]
    told = explained(row.name, nbytes, core.size, f"the table {core.tuner.source(where)}", found, times, considered)
    told["advice"] = core.tuner.untried(where)
    for one in core.gpus[where].made_executors if where in core.gpus else ():
        if refused := getattr(one, "unavailable_reason", None):
            told["reason"] += f"; {one.name} can run no call: {refused}"
    return told


def check_numerics(core: Core, x: Any, name: str) -> None:
    """Raise ArgumentError on every rank for a NaN or an infinity; see `Communicator.check_numerics`."""
    core.waits.check_usable()
    with core.life.refusing():
        array = check_input("check_numerics", x)
    with core.current(None, [array]):
        wrong = ~module_of(array).isfinite(array.reshape(-1))
        first = int(wrong.argmax()) if wrong.any() else None
        value = None if first is None else str(array.reshape(-1)[first])
    index = None if first is None else [int(i) for i in numpy.unravel_index(first, array.shape)]
    everyone = core.metadata.all_gather({"index": index, "value": value}, "check_numerics")
    ranks = tuple(rank for rank, one in enumerate(everyone) if one["index"] is not None)
    if ranks:
        one = everyone[ranks[0]]
        raise ArgumentError(f"check_numerics: {name}{one['index']} is {one['value']} on rank {ranks[0]}, and not "
                            f"finite on ranks {', '.join(map(str, ranks))}", code="GC-NUMERICS", ranks=ranks)


def _known(core: Core, collective: str, executor: str, algorithm: str, nbytes: int) -> tuple[int, float | None]:
    """Return the number of timed calls, and their median seconds, None without calls."""
    noted, *seconds = core.record.times[collective, executor, algorithm, nbytes.bit_length()].tolist()
    known = seconds[:min(int(noted), TIMED)]
    return len(known), float(numpy.median(known)) if known else None


def _able(core: Core, request: CallRequest, where: str) -> tuple[str, ...]:
    # Making the peer executor is a collective call, so its share is unknown until the first call has made it.
    if where != "cpu" and (where not in core.gpus or not core.gpus[where].made_executors or core.gpus[where].make_peer):
        return ON_A_GPU if where == "cuda" else ON_A_GPU[:1]
    return able(core.host if where == "cpu" else core.gpus[where], request, core.options.executor)
