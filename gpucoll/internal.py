"""The one door for the rooms above the core: what they use of the core beside public names.

The functions below work on a communicator; no room above uses a private name of one, and a test checks this. A room
that imports only public names and this module finds the other names that it needs here too, as this module's imports.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from gpucoll import communicator
from gpucoll.algorithms import (
    algorithms,
    all_ranks,
    evaluate,
    find,
    is_native,
    names_of,
    registry,
    schedule,
    schedules,
)
from gpucoll.arrays import (
    Array,
    Space,
    address,
    as_array,
    block_shape,
    check_input,
    check_output,
    check_writable,
    is_alike,
    module_of,
    on_gpu,
    same_memory,
)
from gpucoll.arrays.segments import Heap, Segment, on_host
from gpucoll.communicator import Communicator, Transport, leaving
from gpucoll.communicator.gpu import DeviceSpace, Gpu
from gpucoll.communicator.metadata import Failure, Metadata, check_alike
from gpucoll.communicator.points import PointMessage
from gpucoll.core import parsing, toml
from gpucoll.core.collectives import COLLECTIVES, Collective, CollectiveName, collective
from gpucoll.core.dtypes import Dtype, are_whole, code_of, is_whole, numpy_dtype, row_of
from gpucoll.core.forest import Forest, SpanningTree, turned
from gpucoll.core.formats import FORMATS, Format, Values, format_of, magnitudes, nearest_code
from gpucoll.core.ops import op_of
from gpucoll.core.schedule import Round, Rounds, Schedule, Send, Slice
from gpucoll.core.signature import Signature, code_of_difference
from gpucoll.core.topology import factors, group, in_order_tree, members_of
from gpucoll.core.transfers import PieceMessage, Transfers, backwards
from gpucoll.device.array_kernels import kernels_of
from gpucoll.device.launch import Quantised
from gpucoll.device.sources import SHORT_FLOATS
from gpucoll.executors import INSIDE, Call, CallRequest, Executor, ReadyCall, call_site
from gpucoll.executors.engine.instructions import combine
from gpucoll.health.farewell import Farewell
from gpucoll.launch import bootstrap
from gpucoll.launch.bootstrap import Options, options
from gpucoll.launch.descent import end_with
from gpucoll.launch.launchers import torchrun_variables
from gpucoll.msccl.files import is_file, loaded, named
from gpucoll.msccl.write import xml
from gpucoll.plan.proof import prove_plans
from gpucoll.progress.operations import Operation, Pending, ProbeResult, Work
from gpucoll.progress.partners import End
from gpucoll.progress.waits import Progress
from gpucoll.simulator import MANY, Prediction, Topology, load, replayed_seconds, simulate, simulate_sizes
from gpucoll.transport.mailbox import Mailbox, ThreadMessages
from gpucoll.tuner import segments
from gpucoll.verify.symbolic import Proof, SymbolicMemory, Turn, contributions, prove


def world() -> Communicator | None:
    """Return the communicator of the last `gpucoll.init`, None without one."""
    return communicator._world


def set_world(comm: Communicator | None) -> None:
    """Let `gpucoll.init` return `comm`; None: make a new communicator."""
    communicator._world = comm


@contextlib.contextmanager
def default_transport(make: Callable[[], Transport]) -> Iterator[None]:
    """Let `gpucoll.init` of this process use the transport returned by ``make()``, inside the block.

    The function is called once for each new world, by the thread of the rank that makes it.

    Parameters
    ----------
    make : callable
        Returns a `gpucoll.Transport`; has no arguments.

    Yields
    ------
    None
        For a ``with`` block.

    See Also
    --------
    gpucoll.Transport : The base class.

    Examples
    --------
    >>> from gpucoll.internal import default_transport
    >>> with default_transport(lambda: None):  # a program's own transport, in place of None
    ...     pass
    """
    before, bootstrap.default_transport = bootstrap.default_transport, make
    try:
        yield
    finally:
        bootstrap.default_transport = before


def set_device(comm: Communicator, index: int | None) -> None:
    """Let the arrays of `comm` be on GPU number `index` of the process; only before the first call on a GPU."""
    comm._core.device = index


def current_stream(comm: Communicator, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
    """Return the context for work on a program's GPU arrays: the program's stream and the rank's device."""
    return comm._core.current(None, arrays)


def all_gather_metadata(comm: Communicator, metadata: Metadata, call: str, error: Failure = None) -> list[Metadata]:
    """Return the JSON objects of all ranks on every rank, in rank order. A collective call on the host.

    A rank with an `error` raises the error, and the other ranks raise PeerError.
    """
    return comm._core.metadata.all_gather(metadata, call, error)


def broadcast_metadata(comm: Communicator, root: int, metadata: Metadata, call: str, error: Failure = None) -> Metadata:
    """Return the root's JSON object on every rank; errors as in `all_gather_metadata`."""
    return comm._core.metadata.broadcast(root, metadata, call, error)


def refusing(comm: Communicator) -> contextlib.AbstractContextManager[None]:
    """Return a context that reports a refusal of this rank's arguments to the ranks waiting for this rank."""
    return comm._core.life.refusing()


def check_apart(comm: Communicator, name: str) -> None:
    """Raise UsageError in an open group: the call `name` needs the result of its first step."""
    comm._core.calls.check_apart(name)


def close_together(comms: Sequence[Communicator]) -> None:
    """Close communicators with the same ranks: the other ranks are told of all ends before this rank waits for any."""
    leaving.close_together([comm._core.life for comm in comms])


def link_of(comm: Communicator) -> Transport:
    """Return the connection between the ranks."""
    return comm._core.link


def waits_of(comm: Communicator) -> Progress:
    """Return the waits of the communicator, with the deadline."""
    return comm._core.waits


def sender_of(comm: Communicator, tag: int) -> int | None:
    """Return a rank whose message with `tag` is ready to be received, None without a message.

    Called again and again by a receive from any rank: so, as in a wait, raise the error that ends the receive.
    """
    comm._core.waits.look("recv")
    found = comm._points.seen(None, tag)
    return None if found is None else found.source


def checked_message(comm: Communicator, name: str, tag: Any, **given: Any) -> PointMessage:
    """Return a message to send or receive, after a check of its arguments."""
    return comm._points.message(name, tag, **given)


def start_together(comm: Communicator, messages: Sequence[PointMessage]) -> list[Work[Any]]:
    """Start messages side by side, so that none waits for another; return their works."""
    return comm._points.start_together(messages)


def finish(comm: Communicator, name: str, array: Any) -> None:
    """Wait until the work on the stream of a GPU array, or None, has ended; not in a group or a capture."""
    core = comm._core
    space = core.space(name, array)
    if core.calls.group is None and isinstance(space, DeviceSpace) and not space.is_captured():
        event = space.gpu.device.mark(space.stream)
        core.waits.finish(lambda: event.done, name, core.waits.deadline())


def gpu_of(comm: Communicator, name: str) -> Gpu:
    """Return the communicator's device named "cuda" or "emulated", with its executors."""
    return comm._core.gpu(name)
