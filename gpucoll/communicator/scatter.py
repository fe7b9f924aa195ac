"""Scatter: the ranks without input learn shape and dtype from the root.

The root shows both in its call descriptor in shared memory, or sends one host message. The descriptor replaces the
message only if all ranks look there.
"""

from __future__ import annotations

from typing import Any

from gpucoll.arrays import Prepared, RankInfo, block_shape, check_input, prepare_scatter
from gpucoll.call.table import CallOptions, Key, reports_refusals
from gpucoll.communicator.core import Core
from gpucoll.communicator.metadata import Metadata, metadata_of
from gpucoll.core.collectives import COLLECTIVES
from gpucoll.core.dtypes import numpy_dtype
from gpucoll.core.signature import Signature
from gpucoll.errors import GpucollError
from gpucoll.executors import ReadyCall
from gpucoll.executors.engine.tables import TEXT
from gpucoll.progress.operations import Operation


def scatter(core: Core, _: Key, name: str, op: Any, root: Any, x: Any, out: Any, dtype: Any, options: CallOptions
            ) -> Any:
    """Scatter the root's `x`; a plain call is kept for repetition, also by a root that does not compare by value."""
    is_plain = options.stream is None and not options.async_op and core.calls.group is None
    cache_key = (name, op, root, options.algorithm) if is_plain else ()
    rank_info, shows = core.metadata.sizes("scatter", root), core.host.shows_calls if cache_key else None
    if core.rank != rank_info.root:
        metadata = _shown_by(core, rank_info, out, options) or core.metadata.broadcast(rank_info.root, {}, "scatter")
        return _scatter_known(core, None, None, out, rank_info, options, metadata, cache_key if shows else ())
    made, metadata = None, {}
    try:
        with core.current(options.stream, [x]):
            source = check_input("scatter", x)
        metadata = metadata_of(source, (core.size, *block_shape("scatter", source, core.size)))
        if shows and not metadata["gpu"] and not core.emulated:
            made = _prepared(core, x, source, out, rank_info, options, metadata)
    except (GpucollError, MemoryError) as error:
        # Without call descriptors the other ranks wait for this message.
        if shows is None:
            core.metadata.broadcast(core.rank, {}, "scatter", error)
        known = {"dtype": metadata["dtype"], "shape": (*metadata["shape"][1:],)} if metadata else {}
        core.life.refuse(error, Signature("scatter" if known else "", root=rank_info.root, **known))
        raise
    # The call descriptor replaces the message only if the executor shows it, and its text fits.
    if made and made[0].call.executor.shows_calls is shows and len(made[0].call.request.description) < TEXT:
        return core.calls.begin(*made, options, cache_key, source, out)
    core.metadata.broadcast(core.rank, metadata, "scatter")
    # Without a key: each call needs the message.
    return _scatter_known(core, x, source, out, rank_info, options, metadata, ())


@reports_refusals
def _scatter_known(core: Core, x: Any, source: Any, out: Any, rank_info: RankInfo, options: CallOptions,
                   metadata: Metadata, cache_key: Key) -> Any:
    made = _prepared(core, x, source, out, rank_info, options, metadata)
    return core.calls.begin(*made, options, cache_key, source, out)


def _prepared(core: Core, x: Any, source: Any, out: Any, rank_info: RankInfo, options: CallOptions,
              metadata: Metadata) -> tuple[ReadyCall, Prepared]:
    space = core.metadata.space_of("scatter", metadata, x, out, options.stream)
    call = prepare_scatter(source, out, tuple(metadata["shape"]), numpy_dtype(metadata["dtype"]), rank_info, space)
    return core.calls.resolve(COLLECTIVES["scatter"], call, options, core.options.executor, root=rank_info.root)


def _shown_by(core: Core, rank_info: RankInfo, out: Any, options: CallOptions) -> Metadata | None:
    """Return the metadata in the root's call descriptor; None if the root sends a message or makes another call.

    If the root refuses its arguments, an error in this rank's own arguments comes first, else PeerError.
    """
    shows, description = core.host.shows_calls, ""
    if shows is None:
        return None

    def shown() -> bool:
        nonlocal description
        core.waits.check_usable()
        description = shows.next_call(rank_info.root)
        return description is not None

    # `look` polls the root's call descriptor.
    def look() -> Operation:
        try:
            yield shown
        except BaseException as error:
            if not core.life.closed:
                # The root may run ahead of this rank: only this note ends the root's wait for this rank later.
                core.host.fail(error)
            raise

    core.waits.run(look(), "scatter")
    call = Signature.decode(description)
    metadata: Metadata | None = None
    if (call.collective, call.root, call.where, call.header) == ("scatter", rank_info.root, "", "") and call.dtype:
        metadata = {"shape": [core.size, *call.shape], "dtype": call.dtype, "gpu": False}
    if not call.refusal:
        return metadata
    if metadata is not None:
        reports_refusals(_prepared)(core, None, None, out, rank_info, options, metadata)
    core.waits.run(shows.compare(Signature("scatter", root=rank_info.root).encode()), "scatter")
    return None
