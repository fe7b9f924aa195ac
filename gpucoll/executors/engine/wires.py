"""The wires of links: by them the engine sends messages without Python (kernels/engine/wire.h)."""

from __future__ import annotations

import weakref
from typing import Any

from gpucoll.executors.engine.extension import library
from gpucoll.executors.messages import overruns
from gpucoll.progress.waits import Progress
from gpucoll.transport.control import exchange
from gpucoll.transport.mailbox import Mailbox, ThreadMessages
from gpucoll.transport.tags import ENGINE_CALLS, ENGINE_TAGS, MAX_MESSAGE

MOST_CONNECTED = 256  # ranks of a job whose processes are all connected from the start
_posts = weakref.WeakKeyDictionary[Mailbox, Any]()  # the messages of the engines of threads with the same mailbox


def agreed_wire(link: Any, timeout: float, check: str | None, *, able: bool) -> Any:
    """Return a capsule with the wire of a link, or None if some rank has none. A collective call.

    `able` is False if this rank lacks an engine, or the engine lacks memory. All ranks decide alike, because engines
    compare calls, and number messages, in another way than Python does.
    """
    rank, nodes, by_threads = link.place.rank, link.place.nodes, isinstance(link.wire, ThreadMessages)
    # Connect all pairs of ranks now: the abort message to a rank of a lost host would wait in UCX for a connection.
    # Larger jobs connect at the first message, because the connections of a process would be too many.
    if link.carrier == "ucx" and link.place.size <= MOST_CONNECTED:
        away = [rank, *(other for other, node in enumerate(nodes) if node != nodes[rank])]
        Progress(timeout, foreign=link.foreign).run(exchange(link.wire, rank, away, ()), "the first messages of hosts")
    # A store without UCX has no wire, and a transport of the program's neither.
    if not (by_threads or link.has_collectives or link.carrier == "ucx"):
        return None
    wire = None if not able else _by_threads(link) if by_threads else \
        _by_mpi(link.wire, matches=check not in (None, "full")) if link.has_collectives else link.wire.engine_wire()
    # Threads are of one process, and alike.
    return wire if by_threads or all(link.mpi.allgather(wire is not None)) else None


def _by_threads(link: Any) -> Any:
    # The first thread's post is for all, found or added in one step.
    return library().thread_wire(_posts.setdefault(link.wire.mail, library().post(int(link.place.size))), link.rank)


def _by_mpi(comm: Any, *, matches: bool) -> Any:
    """Return a wire over a communicator of mpi4py; with `matches` a message may be longer than the awaited one."""
    from mpi4py import MPI

    # MPI guarantees only the range of the tags that Python's messages have.
    if (comm.Get_attr(MPI.TAG_UB) or 0) < ENGINE_TAGS + 2 * ENGINE_CALLS:
        return None
    return library().mpi_wire(MPI.__file__, MPI._handleof(comm), MPI._handleof(MPI.BYTE), MPI._sizeof(comm),
                              MPI._sizeof(MPI.Status), MAX_MESSAGE, matches and overruns())
