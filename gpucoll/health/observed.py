"""Executors wrapped with observers: flight recorder, log (GPUCOLL_DEBUG), faults (GPUCOLL_FAULT)."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy

from gpucoll.core.signature import described
from gpucoll.errors import ArgumentError, BackendError, nearest
from gpucoll.executors import Call, CallLauncher, CallRequest
from gpucoll.health.device_shares import TIMED_FROM, DeviceShares
from gpucoll.health.preflight import Deferring
from gpucoll.progress.operations import Operation, throw

LEVELS = ("info", "detail")
PHASES = ("before", "after_send", "after")
DEEDS = ("sigkill", "sigstop", "raise", "delay", "corrupt")
DELAY = 1.0  # seconds of the fault "delay": long enough that the other ranks have to wait


Rows: TypeAlias = tuple[Any, Any]  # the flat arrays of a call: input and output


class CallObserver(Protocol):
    """An observer of calls. A call runs `on_phase` in each of its phases."""

    # "before": the call begins; "after_send": it first waits for other ranks; then "after", unless it has failed.
    def on_phase(self, phase: str, request: CallRequest, rows: Rows) -> None: ...


class ObservedCall(Call):
    """A call that is compared, then reported to observers in each of its phases; on a GPU `shares` times long calls.

    Repeated GPU calls take a shorter path (`launcher`) without observers, if the comparison is deferred.
    """

    def __init__(self, call: Call, observers: Sequence[CallObserver], comparison: Any,
                 shares: DeviceShares | None = None) -> None:
        super().__init__(call.executor, call.request)
        self._call, self._observers, self._comparison, self._shares = call, observers, comparison, shares
        self.completes: bool = call.completes
        self._sums: Any = shares and shares.record.python[call.request.collective, call.request.nbytes.bit_length()]
        self._timed = shares if call.request.nbytes >= TIMED_FROM else None

    @property
    def engine_plan(self) -> Any:
        return self._call.engine_plan

    def launcher(self, source: Any, target: Any) -> CallLauncher | None:
        """Return the function of the call itself, to be called between the `steps`; None if the call needs `run`."""
        # Observers and a full comparison have their place in `run`.
        is_short = not self._observers and (self._comparison is None or isinstance(self._comparison, Deferring))
        return self._call.launcher(source, target) if is_short and self._shares is not None else None

    def steps(self) -> tuple[Callable[[], object], DeviceShares | None]:
        """Return what goes with a function of `launcher`: what begins the comparison, and what times the call."""
        assert self._shares is not None
        if isinstance(self._comparison, Deferring):
            return self._comparison.starter(self.request.description, self._timed), self._timed
        return self._shares.counted, self._timed

    def run(self, source: Any, target: Any, stream: Any = None, *, repeated: bool = False) -> Operation:
        """Carry out the call: compare, report, execute, report."""
        comparison, timed, rows = self._comparison, self._timed, (source, target)
        if isinstance(comparison, Deferring):
            yield from comparison.deferred(self.request.description, timed)
        elif comparison is not None:
            yield from comparison.compare(self.request.description)
        elif self._shares is not None:
            self._shares.counted()
        self._notify("before", rows)
        times: Any = timed and timed.begin(self._sums, stream)  # first: `run` may enqueue at once
        yield from self._executed(self._call.run(source, target, stream, repeated=repeated), rows)
        if timed is not None:
            timed.end(times, stream)
        self._notify("after", rows)

    def _executed(self, operation: Operation, rows: Rows) -> Operation:
        waits = False
        try:
            for pending in operation:
                if not waits:
                    waits = True
                    self._notify("after_send", rows)
                yield pending
        except BaseException as error:
            # Pass the error in: a generator that is merely dropped would not cancel its messages.
            throw(operation, error)
            raise
        # A call that never waited has all phases as well: faults and logs rely on them.
        if not waits:
            self._notify("after_send", rows)

    def _notify(self, phase: str, rows: Rows) -> None:
        for one in self._observers:
            one.on_phase(phase, self.request, rows)


class Log:
    """The observer for GPUCOLL_DEBUG: `info` logs each kind of call once, `detail` every call with the time taken."""

    def __init__(self, rank: int, level: str, logger: logging.Logger) -> None:
        self._rank, self._level, self._logger = rank, level, logger
        self._known: set[str] = set()
        self._began = 0.0

    def on_phase(self, phase: str, request: CallRequest, rows: Rows) -> None:
        description = described(request.description)
        if phase == "before":
            self._began = time.perf_counter()
            if self._level == "info" and description not in self._known:
                self._known.add(description)
                self._logger.info("rank %d: %s on %s", self._rank, description, request.device)
        elif phase == "after" and self._level == "detail":
            self._logger.info("rank %d: %s took %.1f us", self._rank, description,
                              1e6 * (time.perf_counter() - self._began))


def logger() -> logging.Logger:
    """Return the library's logger; add a handler for standard error unless the program has configured logging."""
    log = logging.getLogger("gpucoll")
    if not log.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("gpucoll: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    return log


@dataclass
class Fault:
    """The observer that triggers a fault: `do` happens on `rank`, in this phase of call number `seq`, from 1."""

    rank: int
    seq: int
    phase: str
    do: str
    calls: int = field(default=0, repr=False)  # begun so far

    @classmethod
    def of(cls, text: str) -> Fault:
        """Return the fault described by the text of GPUCOLL_FAULT.

        >>> Fault.of("rank:1,seq:3,phase:after_send,do:sigkill")
        Fault(rank=1, seq=3, phase='after_send', do='sigkill')
        """
        match {"phase": "before"} | dict(part.partition(":")[::2] for part in text.split(",")):
            case {"rank": rank, "seq": seq, "phase": phase, "do": do, **rest} if not rest and \
                    rank.isdecimal() and seq.isdecimal() and phase in PHASES and do in DEEDS:
                return cls(int(rank), int(seq), phase, do)
        raise ArgumentError(f"GPUCOLL_FAULT={text!r} is not of the form rank:1,seq:3,phase:{'|'.join(PHASES)},"
                            f"do:{'|'.join(DEEDS)}", code="GC-FAULT")

    def on_phase(self, phase: str, request: CallRequest, rows: Rows) -> None:
        self.calls += phase == "before"
        if (self.calls, phase) != (self.seq, self.phase):
            return
        match self.do:
            case "sigkill" | "sigstop":
                os.kill(os.getpid(), signal.SIGKILL if self.do == "sigkill" else signal.SIGSTOP)
            case "delay":
                time.sleep(DELAY)
            case "corrupt":
                # Flip the first byte of the input before the call, or of the output after the call.
                row = rows[phase == "after"]
                if isinstance(row, numpy.ndarray) and row.nbytes:
                    row.view(numpy.uint8)[0] ^= 0xff
            case "raise":
                raise BackendError(f"{request.collective}: the fault of GPUCOLL_FAULT", code="GC-FAULT")


def observers_of(rank: int, environment: Mapping[str, str]) -> list[CallObserver]:
    """Return the observers requested by GPUCOLL_DEBUG and GPUCOLL_FAULT; raise ArgumentError for unknown values."""
    found: list[CallObserver] = []
    level, fault = environment.get("GPUCOLL_DEBUG", ""), environment.get("GPUCOLL_FAULT", "")
    if level and level not in LEVELS:
        raise ArgumentError(f"GPUCOLL_DEBUG={level!r}{nearest(level, LEVELS)}", code="GC-OPTION")
    if level:
        found.append(Log(rank, level, logger()))
    if fault and (chosen := Fault.of(fault)).rank == rank:
        found.append(chosen)
    return found
