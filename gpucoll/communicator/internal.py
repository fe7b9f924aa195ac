"""The internal interface of a communicator: the few functions that the rooms above use beside its public methods.

`training`, `torch`, `distributed` and `mpi` take no private name of a communicator. A test holds that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any

from gpucoll.communicator import Communicator
from gpucoll.communicator.gpu import Gpu
from gpucoll.communicator.links import Link
from gpucoll.communicator.metadata import Failure, Metadata
from gpucoll.communicator.points import PointMessage
from gpucoll.progress.operations import Work
from gpucoll.progress.waits import Waits


def current_stream(comm: Communicator, arrays: Iterable[Any]) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a program's GPU arrays are worked on: its own stream and the rank's device."""
    return comm._current(None, arrays)


def all_gather_metadata(comm: Communicator, metadata: Metadata, call: str, error: Failure = None) -> list[Metadata]:
    """Return the JSON objects of all ranks, on every rank. A collective call on the host.

    With an `error` this rank tells the others of it, and raises it; they raise PeerError.
    """
    return comm._all_gather_metadata(metadata, call, error)


def broadcast_metadata(comm: Communicator, root: int, metadata: Metadata, call: str,
                       error: Failure = None) -> Metadata:
    """Return the root's JSON object, on every rank; as `all_gather_metadata`."""
    return comm._broadcast_metadata(root, metadata, call, error)


def refusing(comm: Communicator) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this rank's refusal of its own arguments is told to the ranks that wait for it."""
    return comm._refusing()


def link_of(comm: Communicator) -> Link:
    """Return the connection between the ranks."""
    return comm._link


def waits_of(comm: Communicator) -> Waits:
    """Return the waits of the communicator, with their deadline."""
    return comm._waits


def sender_of(comm: Communicator, tag: int) -> int | None:
    """Return a rank whose message with `tag` could be received now, None where there is none."""
    return comm._sender(tag)


def checked_message(comm: Communicator, name: str, tag: Any, **ends: Any) -> PointMessage:
    """Return a message that is to be sent or received, its arguments checked."""
    return comm._message(name, tag, **ends)


def start_together(comm: Communicator, messages: Sequence[PointMessage]) -> list[Work]:
    """Begin messages of which none waits for another."""
    return comm._start_together(messages)


def gpu_of(comm: Communicator, name: str) -> Gpu:
    """Return the communicator's device of that name, "cuda" or "emulated", with its executors."""
    return comm._gpu(name)
