"""The v-variants: blocks of different lengths along the first axis. One host message exchanges the lengths.

An error on one rank is raised on every rank: the host message carries the refusal. The engine repeats calls with known
lengths, as all other calls. Inside a node a rank with the lengths of an earlier call takes the lengths of all ranks
from that call, and sends no host message: the lengths are foretold. A digest of foretold lengths is part of the
description that the ranks compare before data move. If the descriptions differ, all ranks exchange host messages.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy

from gpucoll.arrays import (
    HOST,
    Array,
    RankInfo,
    check_blocks,
    check_rows,
    flat,
    form_blocks,
    joined,
    kind_of,
    on_gpu,
    prepare_blocks,
    room_for,
)
from gpucoll.communicator.backends import Key
from gpucoll.communicator.calls import CallOptions
from gpucoll.communicator.core import Core, reports_refusals
from gpucoll.communicator.gpu import on_side_stream
from gpucoll.communicator.metadata import KEPT, Metadata, check_alike, checked_rows, row_with
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import are_whole, numpy_dtype, row_of
from gpucoll.errors import ArgumentError, GpucollError
from gpucoll.executors import Call, LengthsDiffer, ReadyCall, Refusal

T = TypeVar("T")
MOST_EXCHANGES = 64  # of lengths that have changed, before they are taken from an earlier call again
Counts = tuple[int, ...]


class Blocks(NamedTuple):
    """A call with all ranks' block lengths known; `cache_key` is the key for repetition, () if not repeatable."""

    name: str
    tail: tuple[int, ...]
    dtype: numpy.dtype
    given: Counts  # lengths along the first axis of this rank's input blocks
    taken: Counts  # and of its output blocks
    most: int      # the longest input or output of all ranks: the choice by size must agree
    cache_key: Key
    rooms: Counts = ()  # lengths of the blocks in an `out` on a rank without output
    messages: HostMessages | None = None  # exchanged by the ranks before the call; None where the root alone sends


class HostMessages(NamedTuple):
    """The host messages of a call: of this rank, and the bytes of all; `key` identifies the input of this rank."""

    key: Key
    mine: Array
    all: bytes


class KnownBlocks(NamedTuple):
    """A call that the engine repeats, with the lengths of all ranks: a new result and its blocks."""

    cache_key: Key
    foretold_key: Key  # the key of the call with foretold lengths
    call: Call
    digest: str  # of the lengths of all ranks
    elements: int  # of the result, 0 on a rank without a result
    shape: tuple[int, ...]  # of a single array `out`
    dtype: numpy.dtype
    blocks: tuple[tuple[slice, tuple[int, ...]], ...]  # the elements and the shape of each block of the result
    is_list: bool  # whether the result is the list of the blocks

    @classmethod
    def of(cls, blocks: Blocks, call: Call, digest: str) -> KnownBlocks:
        width, stops = math.prod(blocks.tail), list(itertools.accumulate(blocks.taken))
        parts = tuple((slice((stop - length) * width, stop * width), (length, *blocks.tail))
                      for length, stop in zip(blocks.taken, stops, strict=True))
        rows, (name, *how) = sum(blocks.taken), blocks.cache_key
        return cls(blocks.cache_key, (f"{name} {digest}", *how), call, digest, rows * width, (rows, *blocks.tail),
                   blocks.dtype, parts, COLLECTIVES[blocks.name].output.blocks)

    def takes(self, out: Any, x: Any) -> bool:
        """Return whether the result may be formed in the memory of `out`, as far as the engine does not check.

        The engine checks its own arrays, but sees a copy of the blocks of a list `x`.
        """
        return type(out) is numpy.ndarray and out.shape == self.shape and out.dtype == self.dtype \
            and out.flags.c_contiguous \
            and not (isinstance(x, list) and any(numpy.may_share_memory(one, out) for one in x))


class VectorVariants:
    """The v-variants of a communicator, with the calls known to the engine."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # This rank's host messages in earlier calls, by `_key_of` their inputs.
        self._messages: dict[Key, Array] = {}
        # Calls known to the engine, by name, op, root, algorithm and the bytes of all ranks' host messages.
        self._known_blocks: dict[Key, KnownBlocks] = {}
        # The counts of all ranks in earlier calls, by call and by the bytes of the ranks' host messages.
        self._agreed: dict[tuple[str, bytes], tuple[Counts, ...]] = {}
        # The last known call, by name, op, root, algorithm and this rank's input: its lengths are foretold.
        self._last: dict[Key, KnownBlocks] = {}
        self._foretold: set[Key] = set()  # keys of calls that the engine knows with foretold lengths
        # By name: the number of exchanges still to come before lengths are foretold, and that number after a change.
        self._exchanges: dict[str, int] = {}
        self._patience: dict[str, int] = {}

    def gather(self, name: str, x: Any, out: Any, root: Any, options: CallOptions) -> Any:
        """Gather blocks on the root, or on every rank; see `Communicator.gather_v`."""
        found, rows = self._repeat(name, x, out, options, root=root)
        if found is not NotImplemented:
            return found
        rank_info = self._core.metadata.sizes(name, root)
        source, everyone, messages = self._agree(name, lambda: self._opened(check_rows, name, x, options.stream),
                                                 lambda row: (len(row),), rows)
        counts = tuple(one for one, in everyone)
        taken = counts if COLLECTIVES[name].output.exists(self._core.rank, rank_info.root) else ()
        blocks = Blocks(name, source.shape[1:], source.dtype, (len(source),), taken, sum(counts),
                        self._same(name, counts, source, options, root=rank_info.root), counts, messages)
        return self._run_blocks(blocks, source, source, options, x, out=out, root=rank_info.root)

    def scatter(self, xs: Any, out: Any, root: Any, options: CallOptions) -> Any:
        """Scatter the root's blocks; see `Communicator.scatter_v`."""
        core, rank_info = self._core, self._core.metadata.sizes("scatter_v", root)
        arrays, mine = None, None
        if core.rank == rank_info.root:
            arrays, mine = _attempt(lambda: self._opened(check_blocks, "scatter_v", xs, options.stream, core.size))
        given = {} if arrays is None else _metadata_of(arrays, tuple(map(len, arrays)))
        metadata = {"error": str(mine)} if mine else given
        metadata = core.metadata.broadcast(rank_info.root, metadata, "scatter_v", mine)
        return self._scatter_known(arrays, xs, out, metadata, rank_info, options)

    @reports_refusals
    def _scatter_known(self, arrays: list[Array] | None, xs: Any, out: Any, metadata: Metadata, rank_info: RankInfo,
                       options: CallOptions) -> Any:
        counts, tail, dtype = tuple(metadata["counts"]), tuple(metadata["tail"]), numpy_dtype(metadata["dtype"])
        space = self._core.metadata.space_of("scatter_v", metadata, arrays and xs[0], out, options.stream)
        like = numpy.empty((0, *tail), dtype) if not metadata["gpu"] else None
        blocks = Blocks("scatter_v", tail, dtype, () if arrays is None else counts, (counts[self._core.rank],),
                        sum(counts), self._same("scatter_v", counts, like, options, root=rank_info.root))
        return self._run_blocks(blocks, arrays, arrays, options, xs, space=space, out=out, root=rank_info.root)

    def all_to_all(self, xs: Any, out: Any, options: CallOptions) -> Any:
        """Exchange blocks of all pairs of ranks; see `Communicator.all_to_all_v`."""
        name = "all_to_all_v"
        found, rows = self._repeat(name, xs, out, options)
        if found is not NotImplemented:
            return found
        self._core.life.check_usable()
        rank, size = self._core.rank, self._core.size
        arrays, everyone, messages = self._agree(name,
                                                 lambda: self._opened(check_blocks, name, xs, options.stream, size),
                                                 lambda arrays: tuple(map(len, arrays)), rows)
        most = max(sum(side) for side in (*everyone, *zip(*everyone, strict=True)))
        blocks = Blocks(name, arrays[0].shape[1:], arrays[0].dtype, everyone[rank],
                        tuple(row[rank] for row in everyone), most,
                        self._same(name, everyone, arrays[0], options), (), messages)
        return self._run_blocks(blocks, arrays, arrays, options, xs, out=out)

    def reduce_scatter(self, x: Any, counts: Any, op: Any, out: Any, dtype: Any, options: CallOptions) -> Any:
        """Reduce rows to blocks of `counts` rows; see `Communicator.reduce_scatter_v`."""
        name = "reduce_scatter_v"
        found, rows = (NotImplemented, None) if dtype is not None else \
            self._repeat(name, x, out, options, op, counts=counts)
        if found is not NotImplemented:
            return found
        self._core.life.check_usable()
        lengths: Counts = ()

        def check() -> Array:
            nonlocal lengths
            rows = self._opened(check_rows, name, x, options.stream)
            lengths = self._check_counts(name, counts, len(rows))
            return rows

        source, _, messages = self._agree(name, check, lambda _: lengths, rows, alike=True)
        cache_key = self._same(name, lengths, source, options, op) if dtype is None else ()
        blocks = Blocks(name, source.shape[1:], source.dtype, lengths, (lengths[self._core.rank],), sum(lengths),
                        cache_key, (), messages)
        return self._run_blocks(blocks, source, source, options, x, out=out, op=op, kind=dtype)

    def _repeat(self, name: str, x: Any, out: Any, options: CallOptions, op: Any = "", root: Any = 0,
                counts: Any = ()) -> tuple[Any, Array | None]:
        """Repeat a call by the engine if the lengths on all ranks are those of an earlier call.

        Return the result, or NotImplemented. The second value is the host messages of all ranks if they were exchanged,
        else None: a call that cannot be repeated goes on with them.
        """
        core, plain = self._core, type(root) is int and type(options.algorithm) is type(op) is str
        if not plain or options.async_op or options.stream is not None or core.group is not None:
            return NotImplemented, None
        key, how = _key_of(name, x, counts), (name, op, root, options.algorithm)
        mine = self._messages.get(key)
        if mine is None:
            return NotImplemented, None
        try:
            last = self._last.get((*how, *key)) if self._exchanges.get(name) == 0 else None
            found = NotImplemented if last is None else self._repeat_known(last, last.foretold_key, x, out)
            if found is not NotImplemented:
                return found, None
            if last is not None:  # perhaps the engine's table was full, and has forgotten the call
                self._foretold.discard(last.foretold_key)
            # The same exchange as that of a rank which does not repeat the call.
            rows = core.fast_path(f"all_gather of a header of {name}", "", 0, "auto", mine, None)
        except LengthsDiffer:
            # Lengths that change often cost more than their exchange.
            self._patience[name] = min(2 * self._patience.get(name, 1), MOST_EXCHANGES)
            self._exchanges[name] = self._patience[name]
            return NotImplemented, None
        if rows is NotImplemented:
            return NotImplemented, None
        known = self._known_blocks.get((*how, rows.tobytes()))
        if known is None:
            return NotImplemented, rows
        found = self._repeat_known(known, known.cache_key, x, out)
        if found is not NotImplemented and self._foretells(known, x):
            self._last[*how, *key] = known
            self._exchanges[name] = max(0, self._exchanges.get(name, 1) - 1)
        return found, rows

    def _foretells(self, known: KnownBlocks, x: Any) -> bool:
        """Return whether the engine can repeat a call without an exchange; let the engine know that form of the call.

        Foretold lengths need a comparison before data move. No v-variant is eager, so all ranks meet in each call. A
        record of calls would show calls that were given up.
        """
        core = self._core
        if known.foretold_key in self._foretold:
            return True
        if core.options.compares not in (None, "full") or not core.host.compares_calls or core.life.records_calls:
            return False
        request = known.call.request
        call = known.call.executor.compile(replace(request, cut=request.cut._replace(digest=known.digest)))
        if isinstance(call, Refusal) or (plan := core.engine_plan(call)) is None:
            return False
        source = numpy.concatenate(x, axis=None) if isinstance(x, list) else x.reshape(-1)
        row = numpy.empty(known.elements, known.dtype) if known.blocks else None
        core.engine.cache_call(*known.foretold_key, source, row, row, plan, core.seconds_of(call), request.nbytes)
        self._foretold.add(known.foretold_key)
        return True

    @reports_refusals
    def _repeat_known(self, known: KnownBlocks, cache_key: Key, x: Any, out: Any) -> Any:
        source = numpy.concatenate(x, axis=None) if isinstance(x, list) else x.reshape(-1)
        if out is None:
            row = numpy.empty(known.elements, known.dtype) if known.blocks else None
        elif known.blocks and known.takes(out, x):
            row = out.reshape(-1)
        else:
            return NotImplemented
        if self._core.fast_path(*cache_key, source, row) is NotImplemented:
            return NotImplemented
        if out is not None or row is None:
            return out
        blocks = [row[part].reshape(shape) for part, shape in known.blocks]
        return blocks if known.is_list else blocks[0]

    def _same(self, name: str, counts: Any, x: Any, options: CallOptions, op: Any = "", root: int = 0) -> Key:
        """Return the engine's key for a call; () if the engine cannot run the whole call."""
        is_plain = type(x) is numpy.ndarray and not options.async_op and options.stream is None \
            and self._core.group is None
        return (f"{name} {counts} {x.shape[1:]}", op, root, options.algorithm) if is_plain else ()

    @reports_refusals
    def _run_blocks(self, blocks: Blocks, source: Any, given: Any, options: CallOptions, x: Any, *, space: Any = None,
                    out: Any = None, op: Any = None, root: int = 0, kind: Any = None) -> Any:
        """Run a call on `source`: an array, a list of arrays to join, or None; `given` stays alive until the end.

        `x` is the user's argument: the library of its arrays decides the current stream.
        """
        row, sources = COLLECTIVES[blocks.name], given if isinstance(given, list) else [] if given is None else [given]
        if space is None:
            space = self._core.space(blocks.name, *(x if isinstance(given, list) else [x]), stream=options.stream)
        kind = kind_of(blocks.name, sources[0], kind) if row.reduces else row_of(blocks.dtype)
        room = None if out is None else room_for(row, out, blocks.rooms or blocks.taken, blocks.tail, blocks.dtype,
                                                 sources, self._core.rank, space)
        if source is not None:
            # Only host plans of a gather know that the input may be this rank's block of `out`: else copy the input.
            is_known = space is HOST and row.output.blocks and not row.input.blocks
            is_apart = isinstance(source, list) or (room is not None and room.is_input and not is_known)
            source = joined(sources, space) if is_apart else flat(source, space)
        formed, result = form_blocks(row, blocks.taken, blocks.tail, blocks.dtype, kind, space, room)
        row_of_result = None if formed is None else formed.row
        # Known counts and known rows: the engine does the whole call.
        if blocks.cache_key and self._core.fast_path(*blocks.cache_key, source, row_of_result) is not NotImplemented:
            if formed is not None:
                formed.deliver(space)
            return result
        call = prepare_blocks(source, (blocks.given, blocks.taken), blocks.most, blocks.tail, kind, space, formed,
                              result, given)
        call = on_side_stream(call) if options.async_op else call
        checked = self._core.check_op(blocks.name, op, call) if row.reduces else None
        ready = self._core.resolve(row, call, options, self._core.options.executor, checked, root)
        if ready.source is call.input:  # no copy scaled by an op
            self._learn_rows(blocks, ready)
        return self._core.begin(ready, call, options, (), None, None)

    def _learn_rows(self, blocks: Blocks, ready: ReadyCall) -> None:
        """Add a call to the engine's table, with its flat rows, if the engine can run it."""
        cache_key, messages = blocks.cache_key, blocks.messages
        plan = self._core.engine_plan(ready.call) if cache_key else None
        if plan is None:
            return
        self._core.engine.cache_call(*cache_key, ready.source, ready.target, ready.target, plan,
                                     self._core.seconds_of(ready.call), ready.request.nbytes)
        if messages is not None and messages.key:
            if len(self._messages) >= KEPT or len(self._known_blocks) >= KEPT:
                self._messages.clear()
                self._known_blocks.clear()
                self._last.clear()
                self._foretold.clear()
            self._messages[messages.key] = messages.mine
            known = KnownBlocks.of(blocks, ready.call, hashlib.blake2b(messages.all, digest_size=8).hexdigest())
            self._known_blocks[blocks.name, *cache_key[1:], messages.all] = known

    def _check_counts(self, name: str, counts: Any, rows: int) -> Counts:
        whole = are_whole(counts) and all(one >= 0 for one in counts)
        if not whole or len(counts) != self._core.size or sum(counts) != rows:
            raise ArgumentError(f"{name}: counts {counts!r} must be {self._core.size} numbers with the sum {rows}, the "
                                "length of x's first axis", code="GC-COUNTS")
        return tuple(int(count) for count in counts)

    def _opened(self, check: Callable[..., T], name: str, x: Any, stream: Any, *more: int) -> T:
        """Return the result of `check`, called with the call's stream as the current stream."""
        with self._core.current(stream, x if isinstance(x, list | tuple) else [x]):
            return check(name, x, *more)

    def _agree(self, name: str, check: Callable[[], Any], counts: Callable[[Any], Counts], rows: Array | None = None, *,
               alike: bool = False) -> tuple[Any, tuple[Counts, ...], HostMessages]:
        """Return this rank's checked argument, all ranks' counts and messages; raise an error of any rank on all ranks.

        `rows` are the messages if the ranks have exchanged them already.
        """
        checked, mine = _attempt(check)
        lengths = () if mine else counts(checked)
        size = self._core.size
        mine_row = row_with({"error": str(mine)}, size) if mine else _row_of(*_like(checked), lengths, size)
        if rows is None:
            rows = self._core.metadata.exchange("all_gather", mine_row, name)
        key = (name, rows.tobytes())
        # The same messages were checked before: take the counts from there.
        found = self._agreed.get(key) if mine is None else None
        if found is None:
            everyone = checked_rows(rows, name, mine)
            for what, code in [("dtype", "GC-DTYPE"), ("tail", "GC-SHAPE"), ("gpu", "GC-DEVICE"),
                               *([("counts", "GC-COUNTS")] if alike else [])]:
                check_alike(name, everyone, what, code)
            if len(self._agreed) == KEPT:
                self._agreed.clear()
            found = self._agreed[key] = tuple(tuple(one["counts"]) for one in everyone)
        return checked, found, HostMessages(_key_of(name, checked, lengths if alike else ()), mine_row, key[1])


def _key_of(name: str, x: Any, counts: Any) -> Key:
    """Return the key of a call's input, equal for inputs with the same host message; () for inputs to be copied."""
    if type(x) is numpy.ndarray and type(counts) in (tuple, list) and all(type(one) is int for one in counts):
        return (name, x.dtype, x.shape, *counts) if x.flags.c_contiguous else ()
    if type(x) is list and x and all(type(one) is numpy.ndarray and one.dtype == x[0].dtype for one in x):
        return name, x[0].dtype, *[one.shape for one in x]
    return ()


def _attempt(check: Callable[[], Any]) -> tuple[Any, GpucollError | None]:
    try:
        return check(), None
    except GpucollError as error:
        return None, error


def _like(checked: Any) -> tuple[numpy.dtype, tuple[int, ...], bool]:
    some = checked[0] if isinstance(checked, list) else checked
    return some.dtype, some.shape[1:], on_gpu(some)


def _metadata_of(checked: Any, counts: Counts) -> Metadata:
    dtype, tail, gpu = _like(checked)
    return {"dtype": row_of(dtype).name, "tail": tail, "gpu": gpu, "counts": counts}


@functools.lru_cache(KEPT)
def _row_of(dtype: numpy.dtype, tail: tuple[int, ...], gpu: bool, counts: Counts, ranks: int) -> Array:
    return row_with({"dtype": row_of(dtype).name, "tail": tail, "gpu": gpu, "counts": counts}, ranks)
