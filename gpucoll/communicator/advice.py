"""Explanations of the choices of "auto", and a check of arrays for NaN and infinity."""

from __future__ import annotations

import statistics
from typing import Any

import numpy

from gpucoll.algorithms import own_names
from gpucoll.arrays import check_input, module_of
from gpucoll.arrays.space import promised
from gpucoll.communicator.backends import able
from gpucoll.communicator.core import LAST
from gpucoll.communicator.metadata import MetadataExchange
from gpucoll.core.collectives import collective as collective_row
from gpucoll.core.dtypes import is_whole, row_of
from gpucoll.core.ops import Order, op_of
from gpucoll.errors import ArgumentError
from gpucoll.executors import CallRequest
from gpucoll.tuner.explanation import Explanation, explained

DEVICES = ("cpu", "cuda", "emulated")
ON_A_GPU = ("nccl", "native")  # executors for GPU arrays, assumed before the first such array


class Advice(MetadataExchange):
    """Methods of `Communicator`: `explain` and `check_numerics`."""

    def explain(self, collective: str, nbytes: int, dtype: Any = "float32", device: str | None = None) -> Explanation:
        """Return why ``algorithm="auto"`` chooses its algorithm for `nbytes` bytes, the larger of input and output.

        `dtype` is the dtype of the elements; a reduction is a sum. `device` is "cpu", "cuda" or "emulated", by default
        the device of NumPy arrays. The `gpucoll.tuner.explanation.Explanation` prints as a table and is a dictionary.
        After calls of about this size on host arrays it has measured seconds beside the predicted ones. The user's own
        algorithms come last: "auto" never takes any of these. No rank waits for another. Raises ArgumentError and
        DtypeError.
        """
        row = collective_row(collective)
        where = ("emulated" if self.options.emulated else "cpu") if device is None else device
        if not is_whole(nbytes) or nbytes < 0:
            raise ArgumentError(f"explain: nbytes={nbytes!r} is no number of bytes", code="GC-SIZE")
        if where not in DEVICES:
            raise ArgumentError(f"explain: device {device!r} is none of {', '.join(DEVICES)}", code="GC-DEVICE")
        nbytes = int(nbytes)  # JSON has no NumPy integers
        op, kind = op_of("sum") if row.reduces else None, row_of(dtype)
        order: Order = "any"
        if op is not None:
            op, order = promised("explain", op, kind, self.options.deterministic)
        executors = self._able(CallRequest(row.name, "auto", kind, op, nbytes=nbytes, device=where, order=order), where)
        found = self._tuner.candidates(row.name, nbytes, executors, where, order=order)
        if not found:
            raise ArgumentError(f"explain: nothing is known of {row.name} on {', '.join(executors)}", code="GC-ALGO")
        considered, others = len(found), [one for one in executors if one != "native"]
        for name in own_names(row.name, self.size):
            found += self._tuner.candidates(row.name, nbytes, others, where, name)
        times = [self._known(row.name, one.executor, one.algorithm, nbytes) for one in found]
        return explained(row.name, nbytes, self.size, f"the table {self._tuner.source(where)}", found, times,
                         considered)

    def check_numerics(self, x: Any, name: str = "x") -> None:
        """Raise ArgumentError on every rank if a rank's `x` (any shape) has a NaN or an infinity.

        A collective call. The error has `name` for the array, the first such rank, and the first index and value on
        that rank; ``ranks`` lists all such ranks. Cost: one host message.
        """
        self._check_usable()
        with self._refusing():
            array = check_input("check_numerics", x)
        with self._current(None, [array]):
            wrong = ~module_of(array).isfinite(array.reshape(-1))
            first = int(wrong.argmax()) if wrong.any() else None
            value = None if first is None else str(array.reshape(-1)[first])
        index = None if first is None else [int(i) for i in numpy.unravel_index(first, array.shape)]
        everyone = self._all_gather_metadata({"index": index, "value": value}, "check_numerics")
        ranks = tuple(rank for rank, one in enumerate(everyone) if one["index"] is not None)
        if ranks:
            one = everyone[ranks[0]]
            raise ArgumentError(f"check_numerics: {name}{one['index']} is {one['value']} on rank {ranks[0]}, and not "
                                f"finite on ranks {', '.join(map(str, ranks))}", code="GC-NUMERICS", ranks=ranks)

    def _known(self, collective: str, executor: str, algorithm: str, nbytes: int) -> tuple[int, float | None]:
        """Return the number of timed calls, and their median seconds, None without calls."""
        noted, *seconds = self._times[collective, executor, algorithm, nbytes.bit_length()].tolist()
        known = seconds[:min(int(noted), LAST)]
        return len(known), statistics.median(known) if known else None

    def _able(self, request: CallRequest, where: str) -> tuple[str, ...]:
        # Making the peer executor is a collective call, so its share is unknown until the first call has made it.
        if where != "cpu" and (where not in self._gpus or self._gpus[where].make_peer is not None):
            return ON_A_GPU if where == "cuda" else ON_A_GPU[:1]
        return able(self._host if where == "cpu" else self._gpus[where], request, self.executor)
