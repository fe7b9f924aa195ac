"""Persistent calls: resolved once, made many times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gpucoll.arrays import prepare
from gpucoll.communicator.backends import not_known
from gpucoll.communicator.calls import known_call
from gpucoll.communicator.core import CallOptions, counted
from gpucoll.communicator.methods import Collectives
from gpucoll.communicator.points import POINTS, PointToPoint
from gpucoll.core.collectives import Collective
from gpucoll.core.collectives import collective as collective_row
from gpucoll.errors import BackendError

ENDS = {"send": ("x", "dst"), "recv": ("out", "src", "status"), "sendrecv": ("x", "out", "dst", "src")}
WITH_METADATA = ("scatter",)  # collectives with an exchange of shapes in every call


class PersistentCall:
    """A collective on fixed arrays: calling the object repeats the collective and returns the result.

    ``executor`` and ``algorithm`` tell how; the result is the same object in every call then. Both are None if each
    call decides anew: for the v-variants, scatter, barrier, messages, and arrays that are not contiguous.
    """

    def __init__(self, call: Callable[[], Any], result: Any, executor: str | None, algorithm: str | None,
                 fast_path: Callable[[], Any] = not_known, *, keep: object = None) -> None:
        self._call, self._fast_path, self._kept = call, fast_path, keep
        self.result, self.executor, self.algorithm = result, executor, algorithm

    def __call__(self) -> Any:
        """Repeat the collective and return the result; a collective call."""
        if self._fast_path() is not NotImplemented:
            return self.result
        found = self._call()
        return self.result if self.executor else found


class Persistent(Collectives, PointToPoint):
    """Methods of `Communicator`: `plan`."""

    def plan(self, collective: str, x: Any = None, out: Any = None, **options: Any) -> PersistentCall:
        """Return a callable that repeats `collective` on `x` and `out`, resolved once: shapes, executor, algorithm.

        `options` are those of the collective: op, root, dtype, algorithm, stream. If `out` is None, the result is
        allocated once. The callable keeps the arrays; their content may change between calls. No data move here. On a
        GPU a call enqueues in `stream` (None: CuPy's current stream), and can be captured in a CUDA graph. All ranks
        plan and call alike. Raises ArgumentError and DtypeError as the collective does, TypeError for an unknown
        option.

        Messages between two ranks can be planned too, by these ranks only: ``plan("send", x, dst=, tag=0)``,
        ``plan("recv", out=, src=, tag=0, status=None)`` and ``plan("sendrecv", x, out, dst=, src=, tag=0)``.
        """
        if collective in POINTS:
            return self._planned_message(collective, x, out, **options)
        row = collective_row(collective)
        if row.ragged or row.name in WITH_METADATA or row.input.where == "nowhere" or self._group is not None:
            given = [] if row.input.where == "nowhere" else [x]
            return PersistentCall(functools.partial(getattr(self, row.name), *given, **_outs(row, out), **options),
                                  None, None, None)
        foreign = set(options) - {"algorithm", "stream"} - ({"op", "dtype"} if row.reduces else set()) \
            - ({"root"} if row.rooted else set())
        if foreign:
            raise TypeError(f"plan: {row.name} has no option {sorted(foreign)[0]!r}")
        return self._planned(row, x, out, **options)

    def _planned_message(self, name: str, x: Any, out: Any, *, dst: Any = None, src: Any = None, tag: Any = 0,
                         status: Any = None) -> PersistentCall:
        """Return a message to send or receive repeatedly, after a check of its arguments."""
        given = {"x": x, "dst": dst, "out": out, "src": src, "status": status}
        foreign = [what for what, value in given.items() if value is not None and what not in ENDS[name]]
        if foreign:
            raise TypeError(f"plan: {name} has no {foreign[0]}, only {', '.join(ENDS[name])} and tag")
        ends = {what: given[what] for what in ENDS[name] if what != "status"}
        self._message(name, tag, **ends, wildcards=name == "recv")
        options = {} if status is None else {"status": status}
        return PersistentCall(functools.partial(getattr(self, name), **ends, tag=tag, **options), None, None, None)

    @counted
    def _planned(self, row: Collective, x: Any, out: Any, *, op: Any = "sum", root: Any = 0, dtype: Any = None,
                 algorithm: str = "auto", stream: Any = None) -> PersistentCall:
        rank_info, space = self._sizes(row.name, root), self._space(row.name, x, stream=stream)
        call = prepare(row, x, out, rank_info, dtype, space)
        checked = self._check_op(row.name, op, call) if row.reduces else None
        options = CallOptions(algorithm, False, stream)
        ready = self._resolve(row, call, options, self.executor, checked, rank_info.root)
        try:
            plan = self._engine_plan(ready.call)
        except OSError as error:
            raise BackendError(f"plan: the system gives this rank no memory: {error}", code="GC-MEMORY") from error
        known = known_call(x, call.result, ready, self._seconds(ready.call))
        if known is None or (row.name == "exscan" and plan is None):
            more = {"root": root} if row.rooted else {}
            more |= {"op": op, "dtype": dtype} if row.reduces else {}
            again = functools.partial(getattr(self, row.name), x, **_outs(row, call.result), **more,
                                      algorithm=algorithm, stream=stream)
            return PersistentCall(again, None, None, None)
        # On a device the known call has the addresses itself.
        source, target = (None, None) if known.rows is not None else (ready.source, ready.target)
        again = functools.partial(self._calls.repeat, known, source, target, stream)
        fast_path: Callable[[], Any] = not_known
        if plan is not None:
            fast_path = self._engine.bind(row.name, x, call.result, plan, known.seconds, ready.request.nbytes)
        return PersistentCall(again, call.result, ready.call.executor.name, ready.request.algorithm, fast_path, keep=x)


def _outs(row: Collective, out: Any) -> dict[str, Any]:
    """Return `out` as an option, if the collective has this option and `out` is not None."""
    return {} if out is None or row.name == "broadcast" else {"out": out}
