"""The v-variants: blocks of different lengths along the first axis.

Where the caller gives the counts of all ranks, nothing is exchanged: the counts are part of the description that the
ranks compare before data move. Otherwise one host message exchanges the lengths. An error on one rank is raised on
every rank: the host message carries the refusal. The engine repeats calls with known lengths, as all other calls: its
table has them under their name and a digest of the lengths of all ranks. It has a call under its name alone, too, and
then a rank with the lengths of an earlier call takes the lengths of all ranks from that call, see `LengthCache`.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy

from gpucoll.arrays import HOST, Array, RankInfo, flat, joined, kind_of, on_gpu
from gpucoll.arrays.blocks import check_blocks, check_rows, form_blocks, prepare_blocks, room_for
from gpucoll.call.table import CallOptions, Key, reports_refusals
from gpucoll.communicator.core import Core
from gpucoll.communicator.metadata import CACHED_HEADERS, Metadata, check_alike, checked_rows, row_with
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import are_whole, numpy_dtype, row_of
from gpucoll.core.signature import COUNTS, counts_text
from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.executors import LengthsDiffer, ReadyCall
from gpucoll.executors.engine.plans import shown

T = TypeVar("T")
MOST_EXCHANGES = 64  # of lengths that have changed, before they are taken from an earlier call again
# Calls with counts given by the caller, by their names in the engine's table.
GIVEN_V = {f"{name} {COUNTS}": name for name in ("all_gather_v", "gather_v", "reduce_scatter_v")}
Counts = tuple[int, ...]


class Blocks(NamedTuple):
    """A call with all ranks' block lengths known; `cache_key` is the key for repetition, () if not repeatable."""

    name: str
    tail: tuple[int, ...]
    dtype: numpy.dtype
    given: Counts  # lengths along the first axis of this rank's input blocks
    taken: Counts  # and of its output blocks
    most: int      # the longest input or output of all ranks: the choice by size must agree
    digest: str    # of the lengths of all ranks
    cache_key: Key
    rooms: Counts = ()  # lengths of the blocks in an `out` on a rank without output


class LengthCache:
    """The lengths that ranks exchanged in earlier calls, and whether a call may take its lengths from these.

    Each name of a v-variant is in one of two states. A rank in the state KNOWN shows the digest of the lengths that it
    takes from an earlier call. If the digests of the ranks differ, no data move and all ranks exchange lengths. All
    ranks exchange, and find differences, in the same calls: they are always in the same state.

    ================== ================================= ==================================================
    state              after an exchange                 after a difference
    ================== ================================= ==================================================
    EXCHANGING n       EXCHANGING n - 1, for n = 1 KNOWN EXCHANGING m, with m twice as large as the last m
    KNOWN (n = 0)      KNOWN                             EXCHANGING m: frequent differences cost more time
    ================== ================================= ==================================================

    At first n = m = 1; m is at most `MOST_EXCHANGES`.
    """

    def __init__(self) -> None:
        # This rank's host messages in earlier calls, by `_key_of` their inputs.
        self.messages: dict[Key, Array] = {}
        # The counts of all ranks in earlier calls, and a digest, by call and by the bytes of the ranks' host messages.
        self.agreed: dict[tuple[str, bytes], tuple[tuple[Counts, ...], str]] = {}
        # Calls whose plans form the result in one array, and not in the arrays of a list.
        self.joined: set[Key] = set()
        self._exchanging: dict[str, int] = {}
        self._patience: dict[str, int] = {}

    def is_known(self, name: str) -> bool:
        """Return whether a call may take the lengths of an earlier call."""
        return self._exchanging.get(name) == 0

    def exchanged(self, name: str) -> None:
        """Count an exchange of lengths."""
        self._exchanging[name] = max(0, self._exchanging.get(name, 1) - 1)

    def differed(self, name: str) -> None:
        """Let the next calls exchange lengths, as the ranks took theirs from different calls."""
        self._exchanging[name] = self._patience[name] = min(2 * self._patience.get(name, 1), MOST_EXCHANGES)

    def keep(self, key: tuple[str, bytes], agreed: tuple[Counts, ...]) -> tuple[tuple[Counts, ...], str]:
        """Keep the counts of all ranks by the host messages that told them; return them with their digest."""
        if len(self.agreed) >= CACHED_HEADERS or len(self.messages) >= CACHED_HEADERS:
            for known in (self.agreed, self.messages, self.joined):
                known.clear()
        return self.agreed.setdefault(key, (agreed, _digest_of(key[1])))


class VectorVariants:
    """The v-variants of a communicator, with the calls known to the engine."""

    def __init__(self, core: Core) -> None:
        self._core, self._lengths = core, LengthCache()
        core.calls.others |= dict.fromkeys((*GIVEN_V, "all_gather_v", "gather_v", "scatter_v", "all_to_all_v"),
                                           self._do)

    def known(self, name: str, root: Any, algorithm: Any, x: Any, out: Any, stream: Any, async_op: bool) -> Any:
        """Run a call without counts, by the engine if it knows the lengths of an earlier call."""
        try:
            return self._core.calls.do(name, "", root, algorithm, x, out, None, stream, async_op)
        except LengthsDiffer:
            self._differed(name)
            return self._do((), name, "", root, x, out, None, CallOptions(algorithm, async_op, stream))

    def _do(self, _: Key, name: str, op: Any, root: Any, x: Any, out: Any, dtype: Any, options: CallOptions) -> Any:
        """Run a call unknown to the engine. With counts of the caller, these are `root`, and `op` is op or root."""
        if name in GIVEN_V:
            how = {"op": op, "kind": dtype} if COLLECTIVES[GIVEN_V[name]].reduces else {"root": op}
            return self._counted(GIVEN_V[name], x, root, out, options, **how)
        if name == "scatter_v":
            return self._scatter(x, out, root, options)
        if name == "all_to_all_v":
            return self._all_to_all(x, out, options)
        return self._gather(name, x, out, root, options)

    def _gather(self, name: str, x: Any, out: Any, root: Any, options: CallOptions) -> Any:
        found, rows = self._exchange_and_repeat(name, self._how(root, options), x, out)
        if found is not NotImplemented:
            return found
        rank_info = self._core.metadata.sizes(name, root)
        source, everyone, digest = self._agree(name, lambda: self._opened(check_rows, name, x, options.stream),
                                               lambda row: (len(row),), rows)
        lengths = tuple(one for one, in everyone)
        taken = () if COLLECTIVES[name].rooted and self._core.rank != rank_info.root else lengths
        blocks = Blocks(name, source.shape[1:], source.dtype, (len(source),), taken, sum(lengths), digest,
                        _same(name, digest, source, self._how(rank_info.root, options)), lengths)
        return self._run_blocks(blocks, source, source, options, x, out=out, root=rank_info.root)

    @reports_refusals
    def _counted(self, name: str, x: Any, counts: Any, out: Any, options: CallOptions, *, op: Any = "", root: Any = 0,
                 kind: Any = None) -> Any:
        """Run a call whose caller knows the counts of all ranks: a gathering call, or a reduction of dtype `kind`."""
        core, row = self._core, COLLECTIVES[name]
        rank_info = core.calls.sizes(name, root)
        source = self._opened(check_rows, name, x, options.stream)
        lengths = _checked_counts(name, counts, None if row.reduces else core.rank, core.size, len(source))
        # No engine for arrays of other libraries and for calls with options that do not compare by value.
        is_repeatable = type(source) is numpy.ndarray and kind is None and type(op) is str and self._how(0, options)
        how = (op if row.reduces else rank_info.root), lengths, options.algorithm
        mine: Counts = (lengths[core.rank],)
        taken = () if row.rooted and core.rank != rank_info.root else lengths
        given, taken, rooms = (lengths, mine, ()) if row.reduces else (mine, taken, lengths)
        blocks = Blocks(name, source.shape[1:], source.dtype, given, taken, sum(lengths), counts_text(lengths),
                        (f"{name} {COUNTS}", *how) if is_repeatable else (), rooms)
        return self._run_blocks(blocks, source, source, options, x, out=out, op=op, root=rank_info.root, kind=kind)

    def _scatter(self, xs: Any, out: Any, root: Any, options: CallOptions) -> Any:
        core = self._core
        rank_info, arrays, mine = core.metadata.sizes("scatter_v", root), None, None
        if core.rank == rank_info.root:
            arrays, mine = _attempt(lambda: self._opened(check_blocks, "scatter_v", xs, options.stream, core.size))
        metadata = {} if arrays is None else _metadata_of(*_like(arrays), tuple(map(len, arrays)))
        everyone = self._exchanged(
            "scatter_v", lambda: core.metadata.broadcast(rank_info.root, metadata, "scatter_v", mine))
        return self._scatter_known(arrays, xs, out, everyone, rank_info, options)

    @reports_refusals
    def _scatter_known(self, arrays: list[Array] | None, xs: Any, out: Any, metadata: Metadata, rank_info: RankInfo,
                       options: CallOptions) -> Any:
        counts, tail, dtype = tuple(metadata["counts"]), tuple(metadata["tail"]), numpy_dtype(metadata["dtype"])
        space = self._core.metadata.space_of("scatter_v", metadata, arrays and xs[0], out, options.stream)
        digest = _digest_of(repr(metadata).encode())
        like = numpy.empty((0, *tail), dtype) if not metadata["gpu"] else None
        cache_key = _same("scatter_v", digest, like, self._how(rank_info.root, options))
        found = self._repeat_known("scatter_v", cache_key, xs, out) if cache_key else NotImplemented
        if found is not NotImplemented:
            return found
        blocks = Blocks("scatter_v", tail, dtype, () if arrays is None else counts, (counts[self._core.rank],),
                        sum(counts), digest, cache_key)
        return self._run_blocks(blocks, arrays, arrays, options, xs, space=space, out=out, root=rank_info.root)

    def _all_to_all(self, xs: Any, out: Any, options: CallOptions) -> Any:
        name, how = "all_to_all_v", self._how(0, options)
        found, rows = self._exchange_and_repeat(name, how, xs, out)
        if found is not NotImplemented:
            return found
        self._core.waits.check_usable()
        rank, size = self._core.rank, self._core.size
        arrays, everyone, digest = self._agree(name,
                                               lambda: self._opened(check_blocks, name, xs, options.stream, size),
                                               lambda arrays: tuple(map(len, arrays)), rows)
        most = max(sum(side) for side in (*everyone, *zip(*everyone, strict=True)))
        blocks = Blocks(name, arrays[0].shape[1:], arrays[0].dtype, everyone[rank],
                        tuple(row[rank] for row in everyone), most, digest,
                        _same(name, digest, arrays[0], how))
        return self._run_blocks(blocks, arrays, arrays, options, xs, out=out)

    def _exchange_and_repeat(self, name: str, how: Key, x: Any, out: Any) -> tuple[Any, Array | None]:
        """Exchange lengths, and repeat a call by the engine if the lengths are those of an earlier call.

        Return the result, or NotImplemented. The second value is the host messages of all ranks if they were exchanged,
        else None: a call that cannot be repeated goes on with them. A rank that does not repeat the call exchanges
        alike.
        """
        # A wrong root is refused before the exchange, on every rank.
        is_known = bool(how) and 0 <= how[1] < self._core.size
        if not is_known or (mine := self._lengths.messages.get(_key_of(name, x))) is None:
            return NotImplemented, None
        rows = self._exchanged(name, lambda: self._core.metadata.exchange("all_gather", mine, name))
        found = self._lengths.agreed.get((name, rows.tobytes()))
        return NotImplemented if found is None else self._repeat_known(name, (f"{name} {found[1]}", *how), x, out), rows

    def _repeat_known(self, name: str, cache_key: Key, x: Any, out: Any) -> Any:
        """Repeat a call with lengths known to be those of an earlier call; return the result, or NotImplemented."""
        found = self._core.calls.fast_path(*cache_key, x, out)
        if found is not NotImplemented:
            self._know(name, cache_key, x, out)
        return found

    def _know(self, name: str, cache_key: Key, x: Any, out: Any) -> None:
        """Let the engine repeat a known call without an exchange, if it can.

        Lengths of an earlier call need a comparison before data move. Neither v-variants nor their exchanges are eager,
        so all ranks meet in each call. A record of calls would show calls that were given up.
        """
        core = self._core
        if self._lengths.is_known(name) and core.options.check in (None, "full") and core.host.compares_first \
                and not core.life.records_calls:
            core.calls.engine.cache_renamed(cache_key[0], name, *cache_key[1:], x, out)

    def _exchanged(self, name: str, exchange: Callable[[], T]) -> T:
        """Return the result of an exchange of lengths; exchange again if a rank took other lengths from a call."""
        while True:
            try:
                found = exchange()
            except LengthsDiffer:
                self._differed(name)
                continue
            self._lengths.exchanged(name)
            return found

    def _differed(self, name: str) -> None:
        self._lengths.differed(name)
        if self._core.calls.engine is not None:
            self._core.calls.engine.forget(name)

    def _how(self, root: Any, options: CallOptions) -> Key:
        """Return op, root and algorithm of a call that the engine can do as a whole, else ().

        Such a call is blocking, and has options that compare by value.
        """
        is_plain = not options.async_op and options.stream is None and self._core.calls.group is None \
            and type(options.algorithm) is str and type(root) is int
        return ("", root, options.algorithm) if is_plain else ()

    @reports_refusals
    def _run_blocks(self, blocks: Blocks, source: Any, given: Any, options: CallOptions, x: Any, *, space: Any = None,
                    out: Any = None, op: Any = None, root: int = 0, kind: Any = None) -> Any:
        """Run a call on `source`: an array, a list of arrays to join, or None; `given` stays alive until the end.

        `x` is the user's argument: the library of its arrays decides the current stream.
        """
        core, row, is_counted = self._core, COLLECTIVES[blocks.name], blocks.digest.startswith(COUNTS)
        sources = given if isinstance(given, list) else [] if given is None else [given]
        if space is None:
            space = core.space(blocks.name, *x, stream=options.stream) if isinstance(given, list) \
                else core.calls.space(blocks.name, x, options.stream)
        kind = kind_of(blocks.name, sources[0], kind) if sources else row_of(blocks.dtype)
        room = None if out is None else room_for(row, out, blocks.rooms or blocks.taken, blocks.tail, blocks.dtype,
                                                 sources, core.rank, space)
        is_apart = False
        if source is not None:
            # Only host plans of a gather know that the input may be this rank's block of `out`: else copy the input.
            is_known = space is HOST and row.output.blocks and not row.input.blocks
            is_apart = isinstance(source, list) or (room is not None and room.is_input and not is_known)
            source = joined(sources, space) if is_apart else flat(source, space)
        formed, result = form_blocks(row, blocks.taken, blocks.tail, blocks.dtype, kind, space, room)
        target = None if formed is None else formed.row
        # The engine works on the caller's arrays, if it can, else on the flat rows made here.
        is_joined = room is not None and room.is_list and (room.is_input or blocks.cache_key in self._lengths.joined)
        theirs = _arrays_of(x, out) and (isinstance(x, list | tuple) or not is_apart) and not is_joined
        ends = (x, out) if theirs else (source, target)
        if blocks.cache_key and not theirs and core.calls.fast_path(*blocks.cache_key, *ends) is not NotImplemented:
            if formed is not None:
                formed.deliver(space)
            return result
        call = prepare_blocks(source, (blocks.given, blocks.taken), blocks.most, blocks.tail, kind, space, formed,
                              result, given)
        if is_counted:  # compared before data move; lengths that were exchanged are known to be equal
            call = call._replace(cut=call.cut._replace(digest=blocks.digest))
        checked = core.calls.check_op(blocks.name, op, call) if row.reduces else None
        ready, call = core.calls.resolve(row, call, options, core.options.executor, checked, root)
        # The engine takes no copy scaled by an op.
        if ready.source is call.input and self._learn(blocks, ready, *ends) and not is_counted:
            self._know(blocks.name, blocks.cache_key, x, out)
        return core.calls.begin(ready, call, options, (), None, None)

    def _learn(self, blocks: Blocks, ready: ReadyCall, x: Any, out: Any) -> bool:
        """Add a call on the arrays `x` and `out` to the engine's table; return whether the engine can do the call."""
        core, cache_key, result = self._core, blocks.cache_key, ready.target
        plan = core.calls.engine_plan(ready.call) if cache_key else None
        if plan is None:
            return False
        is_list = out is None and COLLECTIVES[blocks.name].output.blocks and result is not None
        if result is not None and out is not result:
            result = out if isinstance(out, list | tuple) else \
                result.view(blocks.dtype).reshape(sum(blocks.taken), *blocks.tail)
        request = ready.call.request
        shown_call = replace(request, cut=request.cut._replace(digest=blocks.digest)).description
        if not core.calls.engine.cache_call(
                *cache_key, x, result, out, plan, core.calls.seconds_of(ready.call), request.nbytes,
                blocks.taken if is_list else None, *shown(shown_call)):
            if len(self._lengths.joined) >= CACHED_HEADERS:  # counts of callers may change with every call
                self._lengths.joined.clear()
            self._lengths.joined.add(cache_key)
        return cache_key not in self._lengths.joined

    def _opened(self, check: Callable[..., T], name: str, x: Any, stream: Any, *more: int) -> T:
        if type(x) is numpy.ndarray:
            return check(name, x, *more)
        with self._core.current(stream, x if isinstance(x, list | tuple) else [x]):
            return check(name, x, *more)

    def _agree(self, name: str, check: Callable[[], Any], counts: Callable[[Any], Counts],
               rows: Array | None = None) -> tuple[Any, tuple[Counts, ...], str]:
        """Return this rank's checked argument, all ranks' counts and a digest; raise an error of any rank on all ranks.

        `rows` are the host messages if the ranks have exchanged them already.
        """
        checked, mine = _attempt(check)
        lengths = () if mine else counts(checked)
        if self._core.link.exchange is not None:
            facts = {} if mine else _metadata_of(*_like(checked), lengths)
            return checked, _counts_of(name, self._core.metadata.all_gather(facts, name, mine)), ""
        size = self._core.size
        mine_row = row_with({}, size, mine) if mine else _row_of(*_like(checked), lengths, size)
        if rows is None:
            rows = self._exchanged(name, lambda: self._core.metadata.exchange("all_gather", mine_row, name))
        key = (name, rows.tobytes())
        # The same messages were checked before: take the counts from there.
        found = self._lengths.agreed.get(key) if mine is None else None
        if found is None:
            found = self._lengths.keep(key, _counts_of(name, checked_rows(rows, name, mine)))
        if (place := _key_of(name, checked)):
            self._lengths.messages[place] = mine_row
        return checked, *found


def _checked_counts(name: str, counts: Any, rank: int | None, size: int, rows: int) -> Counts:
    """Return counts given by the caller; `rows` is the length of x: the count of `rank`, or the sum without `rank`."""
    if not are_whole(counts) or any(one < 0 for one in counts) or len(counts) != size or \
            rows != (sum(counts) if rank is None else counts[rank]):
        what = f"with the sum {rows}" if rank is None else f"and number {rank} must be {rows}"
        raise ArgumentError(f"{name}: counts {counts!r} must be {size} numbers {what}, the length of x's first axis",
                            code="GC-COUNTS")
    return tuple(map(int, counts))


def _counts_of(name: str, everyone: Sequence[Metadata]) -> tuple[Counts, ...]:
    """Return all ranks' counts; raise MismatchError if the ranks' blocks differ in more."""
    for what, code in [("dtype", "GC-DTYPE"), ("tail", "GC-SHAPE"), ("gpu", "GC-DEVICE")]:
        check_alike(name, everyone, what, code)
    return tuple(tuple(one["counts"]) for one in everyone)


def _arrays_of(x: Any, out: Any) -> bool:
    """Return whether the engine can work on these arguments: contiguous arrays of NumPy, or lists of these."""
    arrays = [one for side in (x, out) for one in (side if isinstance(side, list | tuple) else [side])]
    return all(one is None or (type(one) is numpy.ndarray and one.flags.c_contiguous) for one in arrays)


def _key_of(name: str, x: Any) -> Key:
    """Return the key of a call's input, equal for inputs with the same host message; () for inputs to be copied."""
    if type(x) is numpy.ndarray:
        return (name, x.dtype, x.shape) if x.flags.c_contiguous else ()
    if type(x) is list and x and all(type(one) is numpy.ndarray and one.dtype == x[0].dtype for one in x):
        return name, x[0].dtype, *[one.shape for one in x]
    return ()


def _same(name: str, digest: str, x: Any, how: Key) -> Key:
    """Return the engine's key for a call with known lengths; () if the engine cannot do the whole call."""
    return (f"{name} {digest}", *how) if how and type(x) is numpy.ndarray else ()


def _digest_of(messages: bytes) -> str:
    return hashlib.blake2b(messages, digest_size=8).hexdigest()


def _attempt(check: Callable[[], Any]) -> tuple[Any, GpucollError | None]:
    try:
        return check(), None
    except GpucollError as error:
        return None, error


def _like(checked: Any) -> tuple[numpy.dtype, tuple[int, ...], bool]:
    some = checked[0] if isinstance(checked, list) else checked
    return some.dtype, some.shape[1:], on_gpu(some)


def _metadata_of(dtype: numpy.dtype, tail: tuple[int, ...], gpu: bool, counts: Counts) -> Metadata:
    return {"dtype": dtype.name, "tail": tail, "gpu": gpu, "counts": counts}


@functools.lru_cache(CACHED_HEADERS)
def _row_of(dtype: numpy.dtype, tail: tuple[int, ...], gpu: bool, counts: Counts, ranks: int) -> Array:
    return row_with(_metadata_of(dtype, tail, gpu, counts), ranks)
