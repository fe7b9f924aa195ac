"""Persistent calls: resolved once, made many times."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpucoll.call.table import CallOptions, known_call, not_known, reports_refusals
from gpucoll.communicator.points import POINTS
from gpucoll.core.collectives import Collective
from gpucoll.core.collectives import collective as collective_row
from gpucoll.errors import BackendError

if TYPE_CHECKING:
    from gpucoll.communicator.methods import Communicator

MESSAGE_ENDS: dict[str, tuple[str, ...]] = {
    "send": ("x", "dst"), "recv": ("out", "src", "status"), "sendrecv": ("x", "out", "dst", "src")}
WITH_METADATA = ("scatter",)  # collectives with an exchange of shapes in every call


class PersistentCall:
    """A collective on fixed arrays: calling the object repeats the collective and returns the result.

    ``executor`` and ``algorithm`` tell how; the result is the same object in every call then. Both are None if each
    call decides anew: for the v-variants, scatter, barrier, messages, and arrays that are not contiguous.
    """

    def __init__(self, call: Callable[[], Any], result: Any, executor: str | None, algorithm: str | None,
                 fast_path: Callable[[], Any] = not_known, *, keep: object = None) -> None:
        self._call, self._fast_path, self._kept = call, fast_path, keep
        self.result: Any = result
        self.executor: str | None = executor
        self.algorithm: str | None = algorithm

    def __call__(self) -> Any:
        """Repeat the collective and return the result; a collective call."""
        if self._fast_path() is not NotImplemented:
            return self.result
        found = self._call()
        return self.result if self.executor else found


def planned(comm: Communicator, collective: str, x: Any, out: Any, **options: Any) -> PersistentCall:
    if collective in POINTS:
        return _planned_message(comm, collective, x, out, **options)
    row = collective_row(collective)
    if row.ragged or row.name in WITH_METADATA or row.input.where == "nowhere" or comm._core.calls.group is not None:
        given = [] if row.input.where == "nowhere" else [x]
        return PersistentCall(functools.partial(getattr(comm, row.name), *given, **_outs(row, out), **options),
                              None, None, None)
    foreign = set(options) - {"algorithm", "stream"} - ({"op", "dtype"} if row.reduces else set()) \
        - ({"root"} if row.rooted else set())
    if foreign:
        raise TypeError(f"plan: {row.name} has no option {sorted(foreign)[0]!r}")
    return _planned(comm, row, x, out, **options)


def _planned_message(comm: Communicator, name: str, x: Any, out: Any, *, dst: Any = None, src: Any = None, tag: Any = 0,
                     status: Any = None) -> PersistentCall:
    """Return a message to send or receive repeatedly, after a check of its arguments."""
    given = {"x": x, "dst": dst, "out": out, "src": src, "status": status}
    foreign = [what for what, value in given.items() if value is not None and what not in MESSAGE_ENDS[name]]
    if foreign:
        raise TypeError(f"plan: {name} has no {foreign[0]}, only {', '.join(MESSAGE_ENDS[name])} and tag")
    ends = {what: given[what] for what in MESSAGE_ENDS[name] if what != "status"}
    comm._points.message(name, tag, **ends, wildcards=name == "recv")
    options = {} if status is None else {"status": status}
    return PersistentCall(functools.partial(getattr(comm, name), **ends, tag=tag, **options), None, None, None)


@reports_refusals
def _planned(comm: Communicator, row: Collective, x: Any, out: Any, *, op: Any = "sum", root: Any = 0,
             dtype: Any = None, algorithm: str = "auto", stream: Any = None) -> PersistentCall:
    core = comm._core
    ready, call = core.calls.prepared(row, op, root, x, out, dtype, CallOptions(algorithm, False, stream))
    try:
        plan = core.calls.engine_plan(ready.call)
    except OSError as error:
        raise BackendError(f"plan: the system refuses memory to this rank: {error}", code="GC-MEMORY") from error
    known = known_call(x, call.result, ready, core.calls.seconds_of(ready.call))
    if known is None or (row.name == "exscan" and plan is None):
        more = {"root": root} if row.rooted else {}
        more |= {"op": op, "dtype": dtype} if row.reduces else {}
        again = functools.partial(getattr(comm, row.name), x, **_outs(row, call.result), **more,
                                  algorithm=algorithm, stream=stream)
        return PersistentCall(again, None, None, None)
    # On a device the arrays themselves must live until the end of a call.
    source, target = (ready.source, ready.target) if ready.call.request.device == "cpu" else (x, call.result)
    again = functools.partial(core.calls.repeat, known, source, target, stream)
    fast_path: Callable[[], Any] = not_known
    if plan is not None:
        fast_path = core.calls.engine.bind(row.name, x, call.result, plan, known.seconds, ready.call.request.nbytes)
    made = PersistentCall(again, call.result, ready.call.executor.name, ready.call.request.algorithm, fast_path, keep=x)
    weakref.finalize(made, core.calls.drop, ready.call.request.device, ready.call).atexit = False
    return made


def _outs(row: Collective, out: Any) -> dict[str, Any]:
    """Return `out` as an option, if the collective has this option and `out` is not None."""
    return {} if out is None or row.name == "broadcast" else {"out": out}
