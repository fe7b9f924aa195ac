"""The protocol of executors: compile a `CallRequest` into a `Call`. Also the errors for ranks with different calls.

An executor runs schedules over one transport. `Call.run` returns an operation of `gpucoll.progress.waits`: a generator
that yields a predicate at each wait. A call on a device enqueues work on a stream and yields nothing. The ranks compare
`CallRequest.description` before data is sent.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias

from gpucoll.arrays import Cut
from gpucoll.core.dtypes import Dtype
from gpucoll.core.ops import LOGICAL, Op, Order
from gpucoll.core.signature import COUNTS, Signature, code_of_difference, described, is_refusal
from gpucoll.errors import MismatchError, PeerError, with_noun
from gpucoll.plan import Plan
from gpucoll.progress.operations import Operation

NO_DATA = Cut(0)
# Code skipped in the search for the user's line: this package; threading and thread pools, which run the package's own
# threads; functools, which makes cached plans; and contextlib, which runs the end of `with comm.group():`.
INSIDE = [os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep, threading.__file__, functools.__file__,
          contextlib.__file__, os.path.join(os.path.dirname(threading.__file__), "concurrent", "futures") + os.sep]


@dataclass(frozen=True)
class CallRequest:
    """One collective on one rank, with all options resolved, but without arrays: equal requests share a compiled call.

    `algorithm` is the algorithm asked for, and after the choice the chosen algorithm, with its `plan` ("native" has
    none). `nbytes` is the size of the larger of input and output over all ranks, `sizes` the bytes of input and output
    on this rank, None for a side without an array here. With `in_place` both sides are the same memory here. `shape` is
    the shape of an array, or of a block where each rank has a block; if blocks differ in the first axis, only the other
    axes. `header` names the call whose shapes this call announces. `order` is the order of combination that the result
    needs. `device` is the location of the arrays. On the host `symmetric` says whether all lie in symmetric memory. On
    a device with an executor that minds, `captured` says whether the stream is being captured, and `blocking` whether
    the default stream waits for the stream.
    """

    # Whatever the compiled call depends on must be a field: calls with equal fields share it.
    collective: str
    algorithm: str
    dtype: Dtype
    op: Op | None = None
    root: int = 0
    nbytes: int = 0
    sizes: tuple[int | None, int | None] = (None, None)
    in_place: bool = False
    cut: Cut = NO_DATA
    shape: tuple[int, ...] = ()
    header: str = ""
    order: Order = "any"
    device: str = "cpu"
    symmetric: bool = False
    captured: bool = False
    blocking: bool = False
    plan: Plan | None = None

    @functools.cached_property
    def description(self) -> str:
        """The signature of the call, compared with the other ranks' signatures."""
        algorithm = self.algorithm
        # A user's algorithm: ranks may have different code under one name.
        if self.plan is not None and self.plan.digest:
            algorithm += f" #{self.plan.digest}"
        op = "" if self.op is None else self.op.expression or self.op.name
        where = "" if self.device == "cpu" else "on devices"
        return Signature(self.collective, self.nbytes, self.dtype.name, self.root, where, self.header, self.cut.digest,
                         self.shape, algorithm, op).encode()

    @property
    def has_input(self) -> bool:
        """Whether this rank has an input."""
        return self.sizes[0] is not None

    @property
    def has_output(self) -> bool:
        """Whether this rank has a result."""
        return self.sizes[1] is not None


# Bits for the ways in which all ranks can make a call of MPI: by MPI's blocking function, and in place. MPI demands
# that either all ranks use a way, or none does.
WAITS, IN_PLACE = 1, 2
# A function that makes a call, given the addresses of result and input (0 for none) and the common ways. The engine
# calls the function until the result is True, or a function of no arguments that blocks until the call has ended. The
# engine keeps the blocking function, and calls only that as long as addresses and ways stay the same.
Called: TypeAlias = Callable[[int, int, int], bool | Callable[[], object]]
# Enqueues a call on a stream. On the emulated device, where the host waits for each call, it may return an operation
# that ends with the call.
CallLauncher: TypeAlias = Callable[[Any], Any]


class Call:
    """A request compiled by `executor`, to be carried out any number of times, on any arrays of the request's sizes.

    Arrays are flat rows, None for a side without an array on this rank. On a device a row is anything with an address.
    """

    completes = False  # whether the executor also does an op's last step, such as the division of an average

    def __init__(self, executor: Executor, request: CallRequest) -> None:
        self.executor: Executor = executor
        self.request: CallRequest = request

    @property
    def engine_plan(self) -> Any:
        """The plan for the communicator's engine to repeat the whole call; None if the engine cannot."""
        return None

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether no last step remains after `run`."""
        collective, op = self.request.collective, self.request.op
        if op is None or not self.request.has_output:
            return True
        if op.name == "avg" and op.factor is not None:
            return False
        return self.completes or (collective != "exscan" and op.name not in ("avg", *LOGICAL))

    def run(self, source: Any, target: Any, stream: Any = None, *, repeated: bool = False) -> Operation:
        """Carry out the call; yield a predicate whenever the call must wait.

        A `repeated` call was made before on the same arrays, all given by the user, and is likely to come again.
        """
        return self.executor.run(self, source, target, stream, repeated=repeated)

    def launcher(self, source: Any, target: Any) -> CallLauncher | None:
        """Return a function that enqueues the call on these arrays and never waits; None if there is none."""
        return self.executor.launcher(self, source, target)


class ReadyCall(NamedTuple):
    """A compiled call and its arrays, as `Call.run` takes them."""

    call: Call
    source: Any
    target: Any


class Refusal(NamedTuple):
    """The reason why an executor cannot compile a request; the same on all ranks."""

    reason: str


class Executor:
    """A compiler of requests, made for a communicator and closed with it; by default apart from the engine."""

    name: str
    on_engine = False  # whether the communicator's engine runs the calls: compares, records and completes each call
    captures = True  # whether calls can become part of a CUDA graph
    minds_blocking = False  # whether calls on blocking streams are refused
    chooses = False  # whether the executor itself chooses how to carry out a call, so that the call gets no schedule
    binds = True  # whether a call on a device may be bound to the addresses of its arrays

    @property
    def shows_calls(self) -> Any:
        """The executor with the engine that shows each rank's call to all others before data is sent, or None."""
        return self

    def serves(self, request: CallRequest) -> str | None:
        """Return None if this executor can serve `request` by some algorithm, else the reason why not.

        The request has no plan yet: the choice of an algorithm considers the executors that serve.
        """
        return None

    def compile(self, request: CallRequest) -> Call | Refusal:
        """Return the call for `request`, with all kernels loaded; sends no data."""
        return Call(self, request)

    def run(self, call: Any, source: Any, target: Any, stream: Any, *, repeated: bool) -> Operation:
        """Carry out a compiled call; see `Call.run`."""
        raise NotImplementedError

    def launcher(self, call: Any, source: Any, target: Any) -> CallLauncher | None:
        """Return a function that enqueues a compiled call; see `Call.launcher`."""
        return None

    def compare(self, description: str) -> Operation:
        """Show a call without data, such as a refusal, to the other ranks; by default do nothing."""
        return iter(())

    def awaited(self) -> set[int] | None:
        """Return the ranks awaited by the call under way; None if unknown, or if no call is under way."""
        return None

    def close(self) -> None:
        """Release all resources; idempotent."""


@functools.lru_cache(1024)
def fingerprint(text: str) -> int:
    """Return a hash of the text, below 2**60: 56 bits, then four zeros."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little") << 4


def shortened(text: str, nbytes: int) -> str:
    """Return `text` cut to at most `nbytes` bytes; a fingerprint of the first line replaces the end that is cut off.

    A second line, the call site, is kept, of a long one the end.
    """
    if len(text.encode()) <= nbytes:
        return text
    call, newline, site = text.partition("\n")
    site = site.encode()[-(nbytes // 2):].decode(errors="ignore")
    end = f"... {fingerprint(call):x}{newline}{site}"
    return call.encode()[:max(0, nbytes - len(end.encode()))].decode(errors="ignore") + end


def call_site() -> str:
    """Return ``file:line`` of the user's code running in this thread, or ""."""
    frame, inside = sys._getframe(1), (*INSIDE,)
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back  # type: ignore[assignment] # None ends the walk
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def inner_site(trace: TracebackType | None) -> str:
    """Return ``file:line`` of the innermost place of the user's code in a traceback, or ""."""
    place, inside = "", (*INSIDE,)
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(inside):
            place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


class LengthsDiffer(MismatchError):
    """The ranks are in one v-variant, but not all know the lengths of all blocks: the ranks exchange lengths again."""

    settled = True  # no data was sent, and the communicator goes on


def lack_lengths(calls: Sequence[str]) -> bool:
    """Return whether the ranks are in one v-variant, and some use the lengths of an earlier call.

    The other ranks exchange lengths, or use the lengths of yet another call.
    """
    found = [*map(Signature.decode, calls)]
    # An exchange of lengths has a header and no lengths. Calls with the same lengths differ in another way. Lengths
    # given by a caller are the caller's fault.
    return len({call.header or call.collective for call in found}) == 1 < len({call.lengths for call in found}) \
        and all((call.header or call.lengths) and not call.lengths.startswith(COUNTS) for call in found)


def disagreement(ranks: Sequence[int], calls: Sequence[str], *, moved: bool = False) -> MismatchError | PeerError:
    """Return the error raised on all `ranks`, given the `calls` they show; the second line of a call is a call site.

    The culprits are the ranks that refuse their arguments; else all ranks outside the largest group of equal calls (of
    equally large groups, the group of the lowest rank is right). If data have `moved`, the communicator has failed.
    """
    groups: dict[str, list[int]] = collections.defaultdict(list)
    sites: dict[str, dict[str, None]] = collections.defaultdict(dict)
    for rank, text in zip(ranks, calls, strict=True):
        call, _, site = text.partition("\n")
        groups[call].append(rank)
        sites[call].update({site: None} if site else {})
    table = "; ".join(f"{with_noun(members)}: {described(call)}"
                      + (f" ({', '.join(sites[call])})" if sites[call] else "") for call, members in groups.items())
    refused = tuple(rank for call, members in groups.items() if is_refusal(call) for rank in members)
    nothing = "" if moved else ", and no data was sent"
    if refused:
        return PeerError(f"{with_noun(refused)} refused arguments{nothing}: {table}", ranks=refused, settled=not moved)
    most = max(groups.values(), key=len)
    return MismatchError(f"ranks make different calls{nothing}: {table}",
                         code=code_of_difference([*map(Signature.decode, groups)]),
                         ranks=tuple(sorted({*ranks} - {*most})), settled=not moved)
