"""The default group, further groups, the variables of torchrun, and the barrier that says who is missing."""

from __future__ import annotations

import contextlib
import datetime
import numbers
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy

from gpucoll.communicator import Communicator, internal, new_world
from gpucoll.core.dtypes import is_whole
from gpucoll.distributed.groups import GroupMember, ProcessGroup, _get_default_group, groups, member
from gpucoll.errors import ArgumentError, CollectiveTimeout, MismatchError, UsageError, nearest
from gpucoll.launch import bootstrap
from gpucoll.transport.rendezvous import becomes
from gpucoll.transport.tags import BYTES, TAGS

BACKENDS = ("nccl", "mpi", "gloo")
DEVICES = ("cpu", "cuda")
METHODS = ("env", "tcp", "file")
variables: list[str] = []  # what `init_process_group` has added to the environment


def init_process_group(backend: str | None = None, init_method: str | None = None, timeout: Any = None,
                       world_size: int = -1, rank: int = -1, store: Any = None, group_name: str = "",
                       pg_options: Any = None, device_id: Any = None) -> None:
    """Make the default group of all ranks, as `gpucoll.init` finds them; a collective call.

    `backend` is None, "nccl", "mpi", "gloo" or pairs such as "cpu:gloo,cuda:nccl": the arrays decide where work runs.
    `timeout` is a timedelta or a number of seconds, the deadline of every wait. `world_size` and `rank` are MPI's, -1
    for unsaid. The launcher has done the rendezvous: `init_method` is checked, and it, `store`, `group_name`,
    `pg_options` and `device_id` have no effect. RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT are set in the environment where they are missing.

    Raises ArgumentError, and UsageError for the second call, and for a rank or a world size that is not MPI's.
    """
    if groups:
        raise UsageError("init_process_group was called before; destroy_process_group() comes first", code="GC-INIT")
    check_backend("init_process_group", backend)
    if init_method is not None and (not isinstance(init_method, str) or "://" not in init_method
                                    or init_method.partition("://")[0] not in METHODS):
        raise ArgumentError(f"init_process_group: init_method {init_method!r} does not begin with env://, tcp:// or "
                            "file://; None is enough, since MPI knows all ranks", code="GC-INIT")
    seconds = seconds_of("init_process_group", timeout)
    wanted = bootstrap.options({"timeout": seconds})
    job = bootstrap.job(wanted.timeout)
    _check_place(job.rank, job.size, {"rank": rank, "world_size": world_size}, "the call")
    given = {"rank": os.environ.get("RANK", -1), "world_size": os.environ.get("WORLD_SIZE", -1)}
    _check_place(job.rank, job.size, given, "the environment")
    _init_from(new_world(wanted))


def _init_from(communicator: Communicator) -> None:
    groups.append(ProcessGroup(communicator, range(communicator.size)))
    try:
        variables.extend(bootstrap.set_variables(internal.link_of(communicator).place, communicator.broadcast_object))
    except BaseException:
        destroy_process_group()
        raise


def check_backend(name: str, backend: Any) -> None:
    """Raise ArgumentError where `backend` is none of torch's that there is something for here.

    >>> check_backend("new_group", "cpu:gloo,cuda:nccl")
    """
    pairs = [] if backend is None else str(backend).lower().split(",")
    for device, _, known in (pair.rpartition(":") for pair in pairs):
        if known.strip() not in BACKENDS or device.strip() not in ("", *DEVICES):
            raise ArgumentError(f"{name}: backend {backend!r} is not known{nearest(known, BACKENDS)}, or pairs such as "
                                "cpu:gloo,cuda:nccl", code="GC-BACKEND")


def seconds_of(name: str, timeout: Any) -> float | None:
    """Return a timedelta or a number as seconds, None as it is; ArgumentError for anything else.

    >>> seconds_of("barrier", datetime.timedelta(minutes=1))
    60.0
    """
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not float(seconds) > 0:
        raise ArgumentError(f"{name}: timeout {timeout!r} is neither a timedelta nor a positive number of seconds",
                            code="GC-TIMEOUT")
    return float(seconds)


def _check_place(rank: int, size: int, given: Mapping[str, Any], where: str) -> None:
    """Raise UsageError where `given` has another rank or size than MPI; -1 is unsaid."""
    for what, own in (("rank", rank), ("world_size", size)):
        if str(given[what]) not in ("-1", str(own)):
            raise UsageError(f"init_process_group: {where} says {what} {given[what]!r}, MPI says {own}; launch with "
                             f"mpiexec or `gpucoll run`, and let {where} say nothing", code="GC-INIT")


def new_group(ranks: Iterable[int] | None = None, timeout: Any = None, backend: str | None = None,
              pg_options: Any = None, use_local_synchronization: bool = False, group_desc: str | None = None,
              device_id: Any = None, sort_ranks: bool = True) -> Any:
    """Return a group of `ranks` of the world (any iterable; None: all), `GroupMember.NON_GROUP_MEMBER` elsewhere.

    Every rank of the world calls it, with the same arguments. Ranks are numbered in ascending order, or with
    ``sort_ranks=False`` in the order given. `timeout` as in `init_process_group`; None is the default group's.
    Raises ArgumentError for what is no rank of the world, and for a rank that comes twice.
    """
    world = _get_default_group()
    check_backend("new_group", backend)
    seconds = seconds_of("new_group", timeout)
    if use_local_synchronization:
        raise ArgumentError("new_group: every rank of the world takes part; use_local_synchronization=True is not to "
                            "be had over MPI", code="GC-GROUP")
    members = _check_ranks(ranks, world.size(), sort_ranks)
    _check_agreed(world, members)
    here = world.rank() in members
    part = world.communicator.split(0 if here else None, members.index(world.rank()) if here else 0)
    if part is None:
        return GroupMember.NON_GROUP_MEMBER
    if seconds not in (None, part.timeout):
        with part:
            options = part.options._replace(timeout=seconds)
            part = Communicator(part._link.split(0, part.rank), options)
    groups.append(ProcessGroup(part, members))
    return groups[-1]


def _check_ranks(ranks: Any, size: int, sort: bool) -> list[int]:
    try:
        members = list(range(size)) if ranks is None else list(ranks)
    except TypeError:
        raise ArgumentError(f"new_group: ranks is a {type(ranks).__name__}, not an iterable of ranks",
                            code="GC-GROUP") from None
    for rank in members:
        if not is_whole(rank) or not 0 <= rank < size:
            raise ArgumentError(f"new_group: rank {rank!r} is not in 0..{size - 1}", code="GC-GROUP")
    if len(set(members)) < len(members):
        raise ArgumentError(f"new_group: ranks {members} has a rank twice", code="GC-GROUP")
    return sorted(map(int, members)) if sort else [int(rank) for rank in members]


def _check_agreed(world: ProcessGroup, members: list[int]) -> None:
    mark = zlib.crc32(repr(members).encode())
    least, most = -world.communicator.all_reduce(numpy.array([-mark, mark]), op="max") * [1, -1]
    if least != most:
        raise MismatchError(f"new_group: this rank was told of ranks {members}, another one of others; every rank of "
                            "the world must pass the same", code="GC-GROUP")


def destroy_process_group(group: Any = None) -> None:
    """Close `group`, or with None or the default group all groups; a collective call of its ranks.

    After that `init_process_group` may be called again. Raises UsageError before initialization, ArgumentError for
    what is no group, or not any more.
    """
    world = _get_default_group()
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    if group is not None and group not in groups:
        raise ArgumentError(f"destroy_process_group: {group!r} is no group of this process, or was destroyed before",
                            code="GC-GROUP")
    ending = groups if group is None or group is world else [group]
    with contextlib.ExitStack() as closing:  # of all, also where one raises an error
        for one in ending.copy():  # backwards, and in the same order on all ranks: closing is a collective call
            closing.callback(one.communicator.close)
        for one in ending.copy():
            groups.remove(one)
        if not groups:
            _clear_variables()


def _clear_variables() -> None:
    while variables:
        os.environ.pop(variables.pop(), None)


# ---------------------------------------------------------------- the barrier that says who is missing
# Rank 0 of the group gathers who has come and answers everybody, by small messages that have nothing to do with
# collectives: whatever state those are in, the answer is right. A rank that comes late finds the verdict waiting.

COME, GONE, VERDICT = range(3)
GRACE = 10.0  # seconds for rank 0's verdict to arrive, on a crowded host too


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Return when every rank of `group` has called it; raise CollectiveTimeout, its `ranks` being who did not come.

    `timeout` is a timedelta or a number of seconds, counted from when rank 0 of the group has come; None is the
    group's. Every missing rank is always named, with or without `wait_all_ranks`. The group can still be used.
    """
    name, pg = "monitored_barrier", member("monitored_barrier", group)
    if pg is None:
        return
    seconds = seconds_of(name, timeout) or pg.communicator.timeout
    number = next(pg.barriers)
    if pg.size() > 1:
        missing = _collect(pg, number, seconds) if pg.rank() == 0 else _report(pg, number, seconds)
        if missing:
            ranks = tuple(pg.ranks[rank] for rank in missing)
            raise CollectiveTimeout(f"{name}: rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} did not come "
                                    f"within {seconds:g} s", ranks=ranks)


def _collect(pg: ProcessGroup, number: int, seconds: float) -> list[int]:
    """Rank 0: say that it is here, gather who else is, send everybody who is missing, and return that."""
    others = range(1, pg.size())
    missing = set(others)
    for rank in others:
        _send(pg, rank, number, COME)

    def everybody_here() -> bool:
        for rank, word, _ in _messages(pg, number):
            (missing.discard if word == COME else missing.add)(rank)
        return not missing

    becomes(everybody_here, seconds)
    for rank in others:
        _send(pg, rank, number, VERDICT, sorted(missing))
    return sorted(missing)


def _report(pg: ProcessGroup, number: int, seconds: float) -> list[int]:
    """Another rank: send rank 0 that it is here, and return whom rank 0 calls missing, or rank 0 itself."""
    verdicts: list[list[int] | None] = []

    def receive() -> None:
        verdicts.extend(missing if word == VERDICT else None for _, word, missing in _messages(pg, number))

    def rank_0_here() -> bool:
        receive()
        return bool(verdicts)

    def verdict_here() -> bool:
        receive()
        return verdicts[-1] is not None

    _send(pg, 0, number, COME)
    if becomes(rank_0_here, seconds) and becomes(verdict_here, seconds + GRACE):
        return verdicts[-1] or []
    _send(pg, 0, number, GONE)  # gone again, if rank 0 should still come
    return [0]


def _send(pg: ProcessGroup, rank: int, number: int, word: int, missing: Sequence[int] = ()) -> None:
    """Send a few bytes, by the first tag that is not the user's; the request is kept while the other may still come."""
    row = numpy.zeros(2 + pg.size(), numpy.int64)
    row[:2] = number, word
    row[2:][list(missing)] = 1
    pg.sending = [(request, kept) for request, kept in pg.sending if not request.Test()]
    points = internal.link_of(pg.communicator).points
    pg.sending.append((points.Isend([row.view(numpy.uint8), BYTES], rank, TAGS), row))


def _messages(pg: ProcessGroup, number: int) -> list[tuple[int, int, list[int]]]:
    """Return what has come for barrier `number`: who sent it, a word, and who is missing; waits for no rank.

    Older messages are of a barrier that is over; newer ones are kept: their ranks are a barrier ahead.
    """
    link = internal.link_of(pg.communicator)
    in_vain = 0
    while in_vain < 2:  # Open MPI looks first, and takes what has come since then out of its queues after that
        seen = link.seen(None, TAGS)
        if seen is None:
            in_vain += 1
            continue
        row = numpy.zeros(2 + pg.size(), numpy.int64)
        request = link.points.Irecv([row.view(numpy.uint8), BYTES], seen.source, TAGS)
        while not request.Test():  # it has come
            pass
        pg.early.append((int(row[0]), seen.source, int(row[1]), numpy.flatnonzero(row[2:]).tolist()))
        in_vain = 0
    now = [message[1:] for message in pg.early if message[0] == number]
    pg.early = [message for message in pg.early if message[0] > number]
    return now
