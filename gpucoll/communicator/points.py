"""Messages between two ranks, with any rank and any tag; groups of calls, and splits."""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy

from gpucoll.arrays import HOST, Array, Space, Target, address, check_input, check_writable, flat, overlap, target
from gpucoll.call.table import not_known
from gpucoll.communicator.core import Core
from gpucoll.communicator.cycles import Cycles
from gpucoll.communicator.gpu import Completion, DeviceSpace
from gpucoll.communicator.transports import Transport
from gpucoll.core.dtypes import CODES, code_of, is_whole
from gpucoll.device import NO_CAPTURE, GroupPart
from gpucoll.errors import ArgumentError, GpucollError, MismatchError, RevokedError, UsageError
from gpucoll.progress.operations import Operation, Pending, ProbeResult, Work, in_thread, together
from gpucoll.progress.partners import RECEIVING, SENDING, End, State
from gpucoll.transport.control import cancel
from gpucoll.transport.tags import BYTES, MAX_MESSAGE, TAGS

if TYPE_CHECKING:
    from gpucoll.communicator.methods import Communicator

POINTS = ("send", "recv", "sendrecv")
NO_WILDCARD = ("NCCL has no tags, and takes no message from anybody: a GPU array, or one on the emulated device, takes "
               "a message from a named rank; pass src= and tag=, or receive into an array on the host")
# The engine's answers to a blocking message; any other answer is STARTED: the requests of the receive and the send, and
# an error.
DONE, LEFT_TO_PYTHON = True, NotImplemented
NAME_OF = {code: name for name, code in CODES.items()}


class Special(enum.IntEnum):
    """A number in place of a rank or a tag. mpi4py's constants of the same names are accepted, too."""

    ANY_SOURCE = -32101
    ANY_TAG = -32102
    PROC_NULL = -32103

    def is_meant(self, value: Any) -> bool:
        """Return whether `value` is this constant, or mpi4py's."""
        mpi = sys.modules.get("mpi4py.MPI")
        return value is self or (mpi is not None and type(value) is int and value == getattr(mpi, self.name))


ANY_SOURCE, ANY_TAG, PROC_NULL = Special


class Status:
    """The source, the tag and the bytes of a message received or probed.

    Parameters
    ----------
    source : int, optional
        The rank that sent the message.
    tag : int, optional
        The tag of the message.
    count : int, optional
        The bytes of the message.

    See Also
    --------
    Communicator.recv : Sets a status.
    Communicator.probe : Returns a status.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.Status(source=2, tag=7, count=8)
    Status(source=2, tag=7, count=8)
    """

    def __init__(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, count: int = 0) -> None:
        self.source: int = source
        self.tag: int = tag
        self.count: int = count

    def __repr__(self) -> str:
        return f"Status(source={self.source}, tag={self.tag}, count={self.count})"


def fill_status(status: Any, seen: ProbeResult) -> None:
    """Write source, tag and bytes of a message into `status`: a `Status`, mpi4py's, or None."""
    if status is None:
        return
    status.source, status.tag = seen.source, seen.tag
    if hasattr(status, "Set_elements"):  # mpi4py's: its count is read-only
        status.Set_elements(sys.modules["mpi4py.MPI"].BYTE, seen.nbytes)
    else:
        status.count = seen.nbytes


class PointMessage(NamedTuple):
    """The checked arguments of `send`, `recv` or `sendrecv`.

    `given` is the array to send to rank `to`, `taken` the array to receive from rank `came_from`. If an array is None,
    its rank has no meaning. `came_from` None means any rank, `tag` None any tag; `status` is then set to source and
    tag.
    """

    name: str
    given: Array | None
    to: int
    taken: Array | None
    came_from: int | None
    tag: int | None
    result: Any
    space: Space
    status: Any = None


class Batch:
    """Messages between GPU arrays, under way together in one group of the transport: alone each might wait."""

    def __init__(self, space: DeviceSpace) -> None:
        self._space = space
        self.work: Any = None  # the `Work` of `run`
        self._messages: list[PointMessage] = []
        self._rows: list[Array] = []
        self._targets: list[Target] = []
        self._sends: list[GroupPart] = []
        self._receives: list[GroupPart] = []
        self.ends: list[End] = []
        self.completion: Completion | None = space.completion()

    def add(self, message: PointMessage) -> None:
        """Add a message, perhaps on another stream. Messages between two ranks match in the order of these calls."""
        self._messages.append(message)
        if message.space.stream != self._space.stream:
            DeviceSpace(self._space.gpu, message.space.stream).lead(self._space.stream)
        if message.given is not None:
            self._rows.append(flat(message.given, self._space))
            self._sends.append(_part(self._rows[-1], message.to, message.tag))
            self.ends.append(End("send", message.to, message.tag, self._rows[-1].nbytes, [None, ()]))
        if message.taken is not None:
            self._targets.append(target(message.taken, self._space))
            self._receives.append(_part(self._targets[-1].row, message.came_from, message.tag))
            self.ends.append(End("recv", message.came_from, message.tag, self._targets[-1].row.nbytes, [(), None]))

    def run(self) -> Operation:
        """Enqueue the group, then the copies into strided arrays."""
        gpu, stream = self._space.gpu, self._space.stream
        sends, receives = ([part for part in parts if part.nbytes] for parts in (self._sends, self._receives))
        try:
            self._space.begin()
            yield from gpu.points.group(sends, receives, stream)
            for one in self._targets:
                one.deliver(self._space)
            yield from self._space.end_message(self)
        except BaseException as error:
            if not isinstance(error, MismatchError):  # after one the messages have ended: nothing is left to cancel
                self._space.cancel(self)
            raise


def _part(row: Array, peer: int | None, tag: int | None) -> GroupPart:
    # Wildcards are refused for GPU arrays.
    return GroupPart(address(row), row.nbytes, cast("int", peer), cast("int", tag))


class PointToPoint:
    """Messages, groups and splits of a communicator. NCCL has no tags: GPU messages match in calling order."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._batch: Batch | None = None  # messages between GPU arrays in the open group
        cycles = Cycles(core.waits, core.rank, lambda: self.board)
        wait, core.waits.rank, core.waits.has_left = core.waits.message_wait, core.rank, core.link.has_left
        wait.look, wait.leave, wait.told = cycles.look, cycles.hide, cycles.told
        core.life.waits_for_messages = cycles.describe

    @functools.cached_property
    def carrier(self) -> Any:
        """The carrier of messages between two ranks."""
        return self._core.host.port(self._core.link.points)

    @functools.cached_property
    def exchange(self) -> Callable[..., Any]:
        """The engine's function for blocking messages: inside a node by the engine itself, else by the carrier."""
        carrier, engine = self.carrier, self._core.calls.host_engine()
        if engine is None:
            return not_known
        engine.bind_points(carrier, carrier is not self._core.link.points, MAX_MESSAGE)
        return engine.exchange

    @property
    def board(self) -> Any:
        """Where the ranks of a node show each other their waits for messages: the engine, or None."""
        is_here = self.exchange is not not_known and self.carrier is not self._core.link.points
        return self._core.calls.engine if is_here else None

    def seen(self, source: int | None, tag: int | None) -> ProbeResult | None:
        """Return a message ready to be received, or None; `source` and `tag` None mean any rank and any tag."""
        found = self.carrier.seen(source, tag)
        return None if found is None else ProbeResult(*found)

    def make(self, name: str, x: Any, dst: Any, out: Any, src: Any, tag: Any, status: Any = None, *,
             async_op: bool = False) -> Any:
        """Make a `send`, `recv` or `sendrecv`; return a `Work`, or `out`.

        The engine does most blocking messages, or starts them. Only long ones need a `Work`; arrays that the engine
        cannot take as they are go by `point`, and messages that must not overtake an earlier one.
        """
        is_plain = (x is None) == (name == "recv") and (out is None) == (name == "send") and status is None \
            and not async_op and self._core.calls.group is None
        started = self.exchange(x, dst, out, src, tag) if is_plain else LEFT_TO_PYTHON
        if started is DONE:
            return out
        if started is LEFT_TO_PYTHON:
            return self.point(name, x, dst, out, src, tag, status, async_op=async_op)
        state: State = [(one,) for one in started[:2]]
        work = self._core.waits.soon(_ends(state, started, x, out, src), name, out)
        return out if work is None else awaiting(work, *ends_of(state, x, dst, out, src, tag)).wait()

    def point(self, name: str, x: Any, dst: Any, out: Any, src: Any, tag: Any, status: Any = None, *,
              async_op: bool = False) -> Any:
        """Make a `send`, `recv` or `sendrecv` of arrays of any kind; return a `Work`, or `out`."""
        message = self.message(name, tag, x, dst, out, src, wildcards=name == "recv")._replace(status=status)
        if name == "recv" and message.taken is None:
            fill_status(status, ProbeResult(PROC_NULL, ANY_TAG, 0))
        elif message.taken is not None and message.came_from is not None and message.tag is not None:
            fill_status(status, ProbeResult(message.came_from, message.tag, message.taken.nbytes))
        if self._core.calls.group is not None:
            work = self.in_group(message, self._core.calls.group)
            return work if async_op else message.result
        (work,) = self.start_together([message], overlaps=async_op)
        return work if async_op else work.wait()

    def probe(self, src: int, tag: int, status: Any) -> Any:
        pattern = self._pattern("probe", src, tag)
        if pattern is None:
            fill_status(status, ProbeResult(PROC_NULL, ANY_TAG, 0))
            return status
        work = self._core.waits.soon(self.found(*pattern, status), "probe", status)
        return status if work is None else awaiting(work, End("probe", *pattern, 0, [(), None])).wait()

    def iprobe(self, src: int, tag: int, status: Status) -> Status | None:
        pattern = self._pattern("iprobe", src, tag)
        self._core.waits.advance()
        seen = ProbeResult(PROC_NULL, ANY_TAG, 0) if pattern is None else self.seen(*pattern)
        if seen is not None:
            fill_status(status, seen)
        return None if seen is None else status

    def _pattern(self, name: str, src: Any, tag: Any) -> tuple[int | None, int | None] | None:
        """Return the rank and tag asked for, each None for any; return None for PROC_NULL."""
        self._core.waits.check_usable()
        if self._core.emulated:
            raise UsageError(f"{name}: {NO_WILDCARD}", code="GC-WILDCARD")
        if PROC_NULL.is_meant(src):
            return None
        return None if ANY_SOURCE.is_meant(src) else self._core.calls.check_rank(name, "src", src), \
            None if ANY_TAG.is_meant(tag) else check_tag(name, tag)

    def found(self, source: int | None, tag: int | None, status: Any = None) -> Generator[Pending, None, ProbeResult]:
        """Wait for a message from `source` with `tag`, None for any; set `status` to source, tag and bytes."""
        found: ProbeResult | None = None

        def is_here() -> bool:
            nonlocal found
            found = self.seen(source, tag)
            return found is not None

        if not is_here():
            yield is_here
        assert found is not None
        fill_status(status, found)
        return found

    def message(self, name: str, tag: Any, x: Any = None, dst: Any = None, out: Any = None,
                 src: Any = None, *, wildcards: bool = False) -> PointMessage:
        """Return a checked message to send or receive; `wildcards` allows any rank and any tag."""
        self._core.waits.check_usable()
        space = self._core.space(name, x if name == "send" else out, meets=False)
        with space.current:
            given = None if name == "recv" else check_input(name, x)
            taken = None if name == "send" else check_input(name, out)
        if isinstance(space, DeviceSpace) and not space.gpu.points.capturable and space.is_captured():
            raise UsageError(f"{name}: {NO_CAPTURE}", code="GC-STREAM")
        for what, array in (("x", given), ("out", taken)):
            if array is not None:
                space.check(name, what, array)
        if taken is not None:
            check_writable(name, "out", taken)
        given = None if PROC_NULL.is_meant(dst) else given
        taken = None if PROC_NULL.is_meant(src) else taken
        to = -1 if given is None else self._core.calls.check_rank(name, "dst", dst)
        is_from_any = wildcards and ANY_SOURCE.is_meant(src)
        came = None if is_from_any else -1 if taken is None else self._core.calls.check_rank(name, "src", src)
        tagged = None if wildcards and ANY_TAG.is_meant(tag) else check_tag(name, tag)
        if taken is not None and None in (came, tagged) and isinstance(space, DeviceSpace):
            raise UsageError(f"{name}: {NO_WILDCARD}", code="GC-WILDCARD")
        if given is not None and taken is not None and overlap(given, taken):
            raise ArgumentError(f"{name}: x and out overlap; pass another array", code="GC-OVERLAP")
        return PointMessage(name, given, to, taken, came, tagged, out, space)

    def in_group(self, message: PointMessage, group: list[Work[Any]]) -> Work[Any]:
        # GPU messages of a group form one transport group: enqueued singly, one could wait for another for ever.
        if isinstance(message.space, DeviceSpace):
            if self._batch is None:
                self._batch = Batch(message.space)
                group.insert(0, Work(self._core.waits, self._batch.run(), message.name, None, self._batch.completion,
                                     ends=self._batch.ends))
                self._batch.work = group[0]
            self._batch.add(message)
            group.append(Work(self._core.waits, end_of(self._batch.work), message.name, message.result,
                              self._batch.completion, ends=self._batch.ends))
            return group[-1]
        work = self._host_work(message)
        group.append(work)
        return work

    def start_together(self, messages: Sequence[PointMessage], *, overlaps: bool = True) -> list[Work[Any]]:
        """Start messages together; if they overlap with the current stream of a GPU, in a stream of their own."""
        if not messages:
            return []
        space = messages[0].space
        if any(one.space.device != space.device for one in messages):
            raise ArgumentError("one call cannot have messages of GPU arrays and of host arrays; pass "
                                "GPU arrays in a separate call", code="GC-DEVICE")
        if not isinstance(space, DeviceSpace):
            return [self._core.waits.start(self._host_work(one)) for one in messages]
        batch = Batch(space.on_side_stream(space.gpu.device.new_stream()) if overlaps else space)
        for message in messages:
            batch.add(message)
        works = [Work(self._core.waits, iter(()), one.name, one.result, batch.completion, ends=batch.ends)
                 for one in messages]
        works[0].operation = batch.run()
        # A transport group has one end, known by the first work.
        for work in works[1:]:
            work.operation = end_of(works[0])
        return [self._core.waits.start(work) for work in works]

    def _host_work(self, message: PointMessage) -> Work[Any]:
        state: State = [(), ()]
        sent = None if message.given is None else self._send(message.given, message.to, message.tag, state)
        received = None if message.taken is None else self._recv(message, message.taken, state)
        operation = together(received, sent) if received and sent else received or sent or iter(())
        return Work(self._core.waits, operation, message.name, message.result,
                    ends=ends_of(state, message.given, message.to, message.taken, message.came_from, message.tag))

    def _send(self, x: Array, dst: int, tag: int | None, state: State) -> Generator[Pending, None, None]:
        row = flat(x, HOST)  # a copy if `x` is strided: keep it until the send has ended
        code = code_of(row.dtype)
        state[SENDING] = requests = [self.carrier.Isend([piece, BYTES], dst, tag, code) for piece in pieces_of(row)]
        try:
            yield lambda: all(request.Test() for request in requests)
            state[SENDING] = None
        except BaseException:
            cancel([], (requests, row))
            raise

    def _recv(self, message: PointMessage, out: Array, state: State) -> Generator[Pending, None, None]:
        src, tag = message.came_from, message.tag
        if src is None or tag is None:
            src, tag, _ = yield from self.found(src, tag, message.status)
        row = out.reshape(-1) if out.flags.c_contiguous else numpy.empty(out.size, out.dtype)
        pieces, code = pieces_of(row), code_of(row.dtype)
        state[RECEIVING] = requests = [self.carrier.Irecv([piece, BYTES], src, tag, code) for piece in pieces]
        try:
            for piece, request in zip(pieces, requests, strict=True):
                yield request.Test
                check_received(request, src, code, len(piece))
            state[RECEIVING] = None
        except BaseException:
            cancel(requests, (out, row))
            raise
        if not out.flags.c_contiguous:
            numpy.copyto(out, row.reshape(out.shape))

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        self._core.waits.check_usable()
        if self._core.calls.group is not None:
            raise UsageError("a group is open already; groups do not nest", code="GC-GROUP")
        works = self._core.calls.group = self._core.waits.new_group()
        self._core.calls.use_engine()
        try:
            yield
            batch = self._batch
        finally:
            self._core.calls.group = self._batch = None
            self._core.calls.use_engine()
        # Begin all messages before any wait: a message of one rank may need a later one of another rank.
        points = [self._core.waits.start(work) for work in works if work.name in POINTS]
        if batch is not None:
            # On a stream the messages of all ranks come before the collectives. Else a kernel of one rank waits for
            # ever for the kernel of another rank, enqueued after a message that waits for the first.
            with contextlib.suppress(MismatchError):  # raised below, after the collectives, which all ranks make
                batch.work.wait()
        try:
            for work in [work for work in works if work.name not in POINTS]:
                self._core.waits.submit(work)
        except RevokedError as revoked:  # an earlier call of the group failed: raise its own error
            raise next((work.error for work in works if work.error is not None), revoked) from None
        for work in (*points, *works):
            work.wait()

    def split(self, color: int | None, key: int, over: Callable[[Transport], Communicator]) -> Communicator | None:
        """Return the communicator `over` the link of the ranks of the same `color`; see `Communicator.split`."""
        core = self._core
        core.waits.check_usable()
        gpu = core.shared_gpu()
        mine = _wrong_split(color, key)
        core.metadata.all_gather({}, "split", mine)
        # A rank interrupted in the first exchange never comes to the second. All other ranks then stop here, and not in
        # a split by MPI, which nothing can interrupt.
        # NCCL splits a communicator only without work under way; the first exchange came after all calls in the queue.
        refused: list[GpucollError] = []
        if gpu is not None:
            core.waits.run(gpu.collectives_end(refused), "split")
        core.metadata.all_gather({}, "split", refused[0] if refused else None)
        color, key = None if color is None else int(color), int(key)
        link = self.part(color, key)
        part = None if link is None else over(link)
        if part is not None:
            core.life.leaving.add(part._core.life)
        if gpu is not None and gpu.split is not None:
            shared = gpu.split(color, key, link, None if part is None else part._core.waits)
            if part is not None and shared is not None:
                part._core.use_gpu("cuda", shared)
        return part

    def part(self, color: int | None, key: int) -> Transport | None:
        """Return the link of the ranks of `color`; wait with a deadline, if threads may call the link."""
        part = functools.partial(self._core.link.split, color, key)
        return in_thread(self._core.waits.run, part, "split") if self._core.link.threads else part()


def _wrong_split(color: Any, key: Any) -> ArgumentError | None:
    """Return the error in the arguments of `split`, or None; MPI's numbers have 32 bits."""
    for what, value in (("color", 0 if color is None else color), ("key", key)):
        if not is_whole(value):
            return ArgumentError(f"split: {what} {value!r} is not a whole number", code="GC-SPLIT")
        if not -1 << 31 <= value < 1 << 31:
            return ArgumentError(f"split: {what} {value} has more than 31 bits", code="GC-SPLIT")
    if color is not None and color < 0:
        return ArgumentError(f"split: color {color} is negative; pass None on ranks without a new communicator",
                             code="GC-SPLIT")
    return None


def ends_of(state: State, x: Any, dst: int, out: Any, src: int | None, tag: int | None) -> tuple[End, ...]:
    """Return the ends of a message that receives `out` and sends `x`, each unless None."""
    received = () if out is None else (End("recv", src, tag, out.nbytes, state),)
    return received if x is None else (*received, End("send", dst, tag, x.nbytes, state))


def awaiting(work: Work[Any], *ends: End) -> Work[Any]:
    """Return `work`, known from now on to wait for these messages: a message that ends soon needs no such words."""
    work.ends = ends
    return work


def _ends(state: State, started: Any, x: Any, out: Any, src: int) -> Generator[Pending, None, None]:
    """Wait for the messages that `make` has started, or raise the error met meanwhile. Note the ends in `state`."""
    came, sent, error = started
    try:
        if error is not None:
            raise error
        if came is not None:
            yield came.Test
            check_received(came, src, code_of(out.dtype), out.nbytes)
            state[RECEIVING] = None
        if sent is not None:
            yield sent.Test
    except BaseException:
        cancel([] if came is None else [came], (x, out, sent))
        raise


def check_received(request: Any, source: int, code: int, room: int) -> None:
    """Raise MismatchError if a message that has come has another dtype, or another length than `room` bytes."""
    # `settled`: the message is consumed, so the error does not make the communicator unusable.
    if request.came not in (0, code):
        raise MismatchError(f"recv: rank {source} sent {NAME_OF[request.came]}, out is {NAME_OF[code]}",
                            code="GC-DTYPE", ranks=(source,), settled=True)
    if request.length != room:
        sent = "more bytes" if request.length < 0 else f"{request.length} bytes"
        raise MismatchError(f"recv: rank {source} sent {sent}, out has {room}", code="GC-SHAPE", ranks=(source,),
                            settled=True)


def pieces_of(row: Array) -> list[Array]:
    """Return the bytes of a row in pieces, as MPI counts bytes in 31 bits. An empty row is one piece."""
    everything = row.view(numpy.uint8)
    return [everything[start:start + MAX_MESSAGE] for start in range(0, len(everything), MAX_MESSAGE)] or [everything]


def end_of(work: Work[Any]) -> Operation:
    yield work.is_enqueued
    if work.error is not None:
        raise work.error


def check_tag(name: str, tag: Any) -> int:
    """Return the tag of a message; raise ArgumentError outside of 0..32767."""
    if not is_whole(tag) or not 0 <= tag < TAGS:
        raise ArgumentError(f"{name}: tag {tag!r} is not in 0..{TAGS - 1}", code="GC-TAG")
    return int(tag)
