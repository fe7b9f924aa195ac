"""The default group, further groups, torchrun's variables, and a barrier reporting the missing ranks."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import numbers
import os
import urllib.parse
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy

from gpucoll import internal
from gpucoll.communicator import Communicator, Transport, new_world
from gpucoll.core.dtypes import is_whole
from gpucoll.distributed.groups import (
    GroupMember,
    ProcessGroup,
    _get_default_group,
    get_process_group_ranks,
    groups,
    member,
)
from gpucoll.errors import ArgumentError, CollectiveTimeout, MismatchError, UsageError, minority, nearest, with_noun
from gpucoll.launch import bootstrap, places
from gpucoll.launch.launchers import RUN
from gpucoll.transport.rendezvous import becomes
from gpucoll.transport.tags import BYTES, TAGS

BACKENDS = ("nccl", "mpi", "gloo")
DEVICE_TYPES = ("cpu", "cuda")
INIT_METHODS = ("env", "tcp", "file")
meetings: itertools.count[int] = itertools.count()  # of this process by a `store`, each with a key of its own
variables: list[str] = []  # names of the environment variables set by `init_process_group`


def init_process_group(backend: str | None = None, init_method: str | None = None, timeout: Any = None,
                       world_size: int = -1, rank: int = -1, store: Any = None, group_name: str = "",
                       pg_options: Any = None, device_id: Any = None) -> None:
    """Make the default group of all ranks, found as in `gpucoll.init`.

    A collective call. Processes started without a launcher, as by ``multiprocessing``, pass `rank` and `world_size`,
    and meet without MPI as `init_method` says. A launcher has already done the rendezvous: `init_method` is then only
    checked. The call sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the
    environment if missing.

    Parameters
    ----------
    backend : str or None, optional
        "nccl", "mpi", "gloo" or pairs such as "cpu:gloo,cuda:nccl"; the arrays decide where work runs.
    init_method : str or None, optional
        "env://" (None): at MASTER_ADDR and MASTER_PORT; "tcp://host:port": at this address of rank 0;
        "file:///path": ranks of one host, with the path as a name.
    timeout : timedelta, float or None, optional
        The deadline of every wait, in seconds if a number; None is the default.
    world_size : int, optional
        The number of ranks; -1: as the launcher or the environment says.
    rank : int, optional
        The number of this rank; -1: as the launcher or the environment says.
    store : object, optional
        A `TCPStore`, or a store of PyTorch, through which the ranks meet; without a launcher.
    group_name : str, optional
        Has no effect.
    pg_options : object, optional
        Has no effect.
    device_id : object, optional
        Has no effect.

    Raises
    ------
    ArgumentError
        A wrong argument (GC-BACKEND, GC-INIT, GC-TIMEOUT).
    UsageError
        A second call, or a rank or a world size other than the launcher's (GC-INIT).

    See Also
    --------
    destroy_process_group : The end.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.get_rank(), dist.get_world_size()
    (0, 1)
    >>> dist.destroy_process_group()
    """
    if groups:
        raise UsageError("init_process_group was called before; call destroy_process_group() first", code="GC-INIT")
    check_backend("init_process_group", backend)
    if init_method is not None and (not isinstance(init_method, str) or "://" not in init_method
                                    or init_method.partition("://")[0] not in INIT_METHODS):
        raise ArgumentError(f"init_process_group: init_method {init_method!r} does not begin with env://, tcp:// or "
                            "file://; None is sufficient below a launcher, and means env:// otherwise", code="GC-INIT")
    seconds = seconds_of("init_process_group", timeout)
    wanted = bootstrap.options({"timeout": seconds})
    own = _given_place(init_method, store, {"RANK": rank, "WORLD_SIZE": world_size}, wanted.timeout)
    job = bootstrap.job(wanted.timeout, own)
    _check_place(job.rank, job.size, {"rank": rank, "world_size": world_size}, "the call")
    if own is None and not isinstance(job, Transport):  # else the launcher's numbers are not those of the ranks
        given = {"rank": os.environ.get("RANK", -1), "world_size": os.environ.get("WORLD_SIZE", -1)}
        _check_place(job.rank, job.size, given, "the environment")
    _init_from(new_world(wanted, job))


def _given_place(method: str | None, store: Any, numbers: Mapping[str, Any],
                 timeout: float) -> places.StorePlace | None:
    """Return this rank's place, if the caller gives the rank, and no launcher does; else None.

    `numbers` are RANK and WORLD_SIZE, -1 for unknown ones; an address may end in ``?rank=0&world_size=4``.
    """
    scheme, _, where = (method or "env://").partition("://")
    where, _, query = where.partition("?")
    told = {name.upper(): text for name, text in urllib.parse.parse_qsl(query)}
    told |= {name: str(number) for name, number in numbers.items() if str(number) != "-1"}
    if not told or RUN in os.environ or places.is_by_mpi(os.environ, has_address=bool(where or store)):
        return None
    environment = {**os.environ, **told}
    if store is not None:
        # torch's other stores, a file for example, have no host: they serve ranks of one host.
        own = places.named_place(f"tcp://{getattr(store, 'host', '127.0.0.1')}:0", None, None, environment)
        return places.through(lambda patience: store, own, timeout, f"gpucoll {next(meetings)}")
    if scheme == "tcp":
        return places.named_place(f"tcp://{where}", None, None, environment)
    if scheme == "file":
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": os.path.abspath(where), "LOCAL_WORLD_SIZE": ""}
    return places.store_place(environment)


def _init_from(communicator: Communicator) -> None:
    groups.append(ProcessGroup(communicator, range(communicator.size)))
    try:
        variables.extend(bootstrap.set_variables(internal.link_of(communicator).place, communicator.broadcast_object))
    except BaseException:
        destroy_process_group()
        raise


def check_backend(name: str, backend: Any) -> None:
    """Raise ArgumentError unless `backend` is None or names torch backends known here.

    >>> check_backend("new_group", "cpu:gloo,cuda:nccl")
    """
    pairs = [] if backend is None else str(backend).lower().split(",")
    for device, _, known in (pair.rpartition(":") for pair in pairs):
        if known.strip() not in BACKENDS or device.strip() not in ("", *DEVICE_TYPES):
            raise ArgumentError(f"{name}: backend {backend!r} is not known{nearest(known, BACKENDS)}, or pairs such as "
                                "cpu:gloo,cuda:nccl", code="GC-BACKEND")


def seconds_of(name: str, timeout: Any) -> float | None:
    """Return a timedelta or a number as seconds, None unchanged; raise ArgumentError for other values.

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
    """Raise UsageError if `given` has another rank or size than the launcher; -1 is accepted."""
    for what, own in (("rank", rank), ("world_size", size)):
        if str(given[what]) != "-1" and str(given[what]) != str(own):
            raise UsageError(f"init_process_group: {where} says {what} {given[what]!r}, MPI says {own}; launch with "
                             f"mpiexec or `gpucoll run`, without {where}", code="GC-INIT")


def new_group(ranks: Iterable[int] | None = None, timeout: Any = None, backend: str | None = None,
              pg_options: Any = None, use_local_synchronization: bool = False, group_desc: str | None = None,
              device_id: Any = None, sort_ranks: bool = True) -> Any:
    """Return a group of `ranks` of the world.

    Every rank of the world calls `new_group` with the same arguments, or the members alone.

    Parameters
    ----------
    ranks : iterable of int or None, optional
        The members, by their numbers in the world; None: all.
    timeout : timedelta, float or None, optional
        The deadline of every wait, in seconds if a number; None is the default.
    backend : str or None, optional
        "nccl", "mpi", "gloo" or pairs such as "cpu:gloo,cuda:nccl"; the arrays decide where work runs.
    pg_options : object, optional
        Has no effect.
    use_local_synchronization : bool, optional
        The call is one of the members alone.
    group_desc : str or None, optional
        Has no effect.
    device_id : object, optional
        Has no effect.
    sort_ranks : bool, optional
        Number the ranks in ascending order; False: in the order given.

    Returns
    -------
    ProcessGroup or GroupMember.NON_GROUP_MEMBER
        The group, and the latter on ranks outside the group.

    Raises
    ------
    ArgumentError
        A rank is outside the world or listed twice (GC-GROUP).
    MismatchError
        Ranks pass different lists (GC-GROUP).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    gpucoll.Communicator.split : The call underneath.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.new_group([0])
    <gpucoll.distributed.ProcessGroup rank=0 ranks=[0]>
    >>> dist.destroy_process_group()
    """
    world = _get_default_group()
    check_backend("new_group", backend)
    seconds = seconds_of("new_group", timeout)
    members = _check_ranks(ranks, world.size(), sort_ranks)
    here, comm = world.rank() in members, world.communicator
    options = comm.options if seconds is None else comm.options._replace(timeout=seconds)
    part: Communicator | None = None
    if not use_local_synchronization:
        _check_agreed(world, members)
        part = comm.split(0 if here else None, members.index(world.rank()) if here else 0)
    elif here:
        world.made[tuple(members)] += 1
        part = type(comm)(internal.link_of(comm).part(f"group {world.made[tuple(members)]} of {members}", members),
                          options)
    if part is None:
        return GroupMember.NON_GROUP_MEMBER
    # A communicator's timeout is fixed at creation: another timeout needs a second split with other options.
    if part.options != options:
        with part:
            part = type(comm)(internal.link_of(part).part("with options", range(part.size)), options)
    groups.append(ProcessGroup(part, members))
    return groups[-1]


def new_subgroups(group_size: int | None = None, group: Any = None, timeout: Any = None, backend: str | None = None,
                  pg_options: Any = None, group_desc: str | None = None) -> tuple[Any, list[Any]]:
    """Return this rank's group and all groups of `group_size` consecutive ranks of `group`; None: the ranks of a node.

    A collective call of the world. Raises ArgumentError unless `group_size` divides the number of ranks.

    Parameters
    ----------
    group_size : int or None, optional
        The ranks of each group; None: as many as this node has.
    group : ProcessGroup or None, optional
        The group; None is the default group.
    timeout : timedelta, float or None, optional
        The deadline of every wait, in seconds if a number; None is the default.
    backend : str or None, optional
        A name of `Backend`; the arrays decide where work runs.
    pg_options : object, optional
        Has no effect.
    group_desc : str or None, optional
        Has no effect.

    Returns
    -------
    tuple
        This rank's group, and all groups.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.new_subgroups(1)
    (<gpucoll.distributed.ProcessGroup rank=0 ranks=[0]>, [<gpucoll.distributed.ProcessGroup rank=0 ranks=[0]>])
    >>> dist.destroy_process_group()
    """
    ranks = get_process_group_ranks(group)
    each = _get_default_group().communicator.local_size if group_size is None else group_size
    if not is_whole(each) or each < 1 or len(ranks) % each:
        raise ArgumentError(f"new_subgroups: group_size {each!r} does not divide {len(ranks)} ranks", code="GC-GROUP")
    return new_subgroups_by_enumeration([ranks[first:first + each] for first in range(0, len(ranks), each)], timeout,
                                        backend)


def new_subgroups_by_enumeration(ranks_per_subgroup_list: Sequence[Sequence[int]], timeout: Any = None,
                                 backend: str | None = None, pg_options: Any = None,
                                 group_desc: str | None = None) -> tuple[Any, list[Any]]:
    """Return this rank's group, None in no group, and the groups of all lists of ranks, which have no rank in common.

    A collective call of the world. On other ranks than a group's, the group is `GroupMember.NON_GROUP_MEMBER`.

    Parameters
    ----------
    ranks_per_subgroup_list : list of lists of int
        The ranks of each group, without a rank in common.
    timeout : timedelta, float or None, optional
        The deadline of every wait, in seconds if a number; None is the default.
    backend : str or None, optional
        A name of `Backend`; the arrays decide where work runs.
    pg_options : object, optional
        Has no effect.
    group_desc : str or None, optional
        Has no effect.

    Returns
    -------
    tuple
        This rank's group, None in no group, and all groups.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.new_subgroups_by_enumeration([[0]])[0]
    <gpucoll.distributed.ProcessGroup rank=0 ranks=[0]>
    >>> dist.destroy_process_group()
    """
    every = list(itertools.chain(*ranks_per_subgroup_list))
    if not every or len({*every}) < len(every):
        raise ArgumentError(f"new_subgroups_by_enumeration: {ranks_per_subgroup_list!r} is empty or has a rank twice",
                            code="GC-GROUP")
    made = [new_group(ranks, timeout, backend) for ranks in ranks_per_subgroup_list]
    return next((one for one in made if isinstance(one, ProcessGroup)), None), made


def split_group(parent_pg: Any = None, split_ranks: Sequence[Sequence[int]] | None = None, timeout: Any = None,
                pg_options: Any = None, group_desc: str | None = None, backend: str | None = None) -> Any:
    """Return the group of this rank's list in `split_ranks`, ranks of `parent_pg`; None for a rank in no list.

    A collective call of the parent's ranks.

    Parameters
    ----------
    parent_pg : ProcessGroup or None, optional
        The group to split; None is the default group.
    split_ranks : list of lists of int
        Ranks of the parent, by their numbers there.
    timeout : timedelta, float or None, optional
        The deadline of every wait, in seconds if a number; None is the default.
    pg_options : object, optional
        Has no effect.
    group_desc : str or None, optional
        Has no effect.
    backend : str or None, optional
        A name of `Backend`; the arrays decide where work runs.

    Returns
    -------
    ProcessGroup or None
        The group of this rank.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.split_group(split_ranks=[[0]])
    <gpucoll.distributed.ProcessGroup rank=0 ranks=[0]>
    >>> dist.destroy_process_group()
    """
    parent = parent_pg or _get_default_group()
    mine = next((list(ranks) for ranks in split_ranks or () if parent.rank() in ranks), None)
    if not split_ranks:
        raise ArgumentError("split_group: split_ranks is empty", code="GC-GROUP")
    return mine and new_group([parent.ranks[rank] for rank in sorted(mine)], timeout, backend,
                              use_local_synchronization=True, sort_ranks=False)


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
    differ = minority(world.communicator.all_gather(numpy.array([zlib.crc32(repr(members).encode())])).ravel().tolist())
    if differ:
        raise MismatchError(f"new_group: {with_noun(differ)} passed other ranks than the other ranks, and this rank "
                            f"{members}; every rank of the world must pass the same ranks", code="GC-GROUP",
                            ranks=differ)


def destroy_process_group(group: Any = None) -> None:
    """Close `group`; None or the default group means all groups.

    A collective call of the group's ranks. After closing all groups `init_process_group` may be called again.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.

    Raises
    ------
    UsageError
        There is no group yet (GC-INIT).
    ArgumentError
        `group` is no group, or already destroyed (GC-GROUP).

    See Also
    --------
    init_process_group : The beginning.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.destroy_process_group()
    >>> dist.is_initialized()
    False
    """
    world = _get_default_group()
    if group is GroupMember.NON_GROUP_MEMBER:
        return
    if group is not None and group not in groups:
        raise ArgumentError(f"destroy_process_group: {group!r} is not a group of this process, or was already "
                            "destroyed",
                            code="GC-GROUP")
    ending = groups if group is None or group is world else [group]
    # The exit stack closes every group even if closing one group raises. Closing is a collective call, so all ranks
    # need one order: newest group first.
    with contextlib.ExitStack() as closing:
        for one in ending.copy():
            closing.callback(one.communicator.close)
        for one in ending.copy():
            groups.remove(one)
        if not groups:
            _clear_variables()


def _clear_variables() -> None:
    while variables:
        os.environ.pop(variables.pop(), None)


# ---------------------------------------------------------------- the barrier reporting the missing ranks
# Rank 0 of the group collects arrivals and sends every rank a verdict, the list of missing ranks. These small messages
# are independent of the collectives, so the answer is right even if a collective hangs. A late rank finds the verdict
# waiting.

COME, GONE, VERDICT = range(3)  # words of a message: arrived, gave up waiting, list of missing ranks
VERDICT_TIMEOUT = 10.0  # seconds for rank 0's verdict to arrive, enough for an oversubscribed host


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Wait until every rank of `group` has arrived; name the missing ranks.

    The group remains usable after a timeout.

    Parameters
    ----------
    group : ProcessGroup or None, optional
        The group; None is the default group.
    timeout : timedelta, float or None, optional
        Counted from the arrival of the group's rank 0, in seconds if a number; None means the group's.
    wait_all_ranks : bool, optional
        Has no effect: all missing ranks are named.

    Raises
    ------
    CollectiveTimeout
        Ranks are missing: its `ranks` (GC-TIMEOUT).
    UsageError
        There is no group yet: call `init_process_group` first (GC-INIT).

    See Also
    --------
    barrier : The plain barrier.

    Examples
    --------
    >>> import gpucoll.distributed as dist
    >>> dist.init_process_group()  # without a launcher: one rank
    >>> dist.monitored_barrier(timeout=5)
    >>> dist.destroy_process_group()
    """
    if (pg := member(name := "monitored_barrier", group)) is None:
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
    """On rank 0: announce the arrival, collect the others' arrivals, send the verdict, return the missing ranks."""
    others = range(1, pg.size())
    missing = set(others)
    # The others' deadline for the verdict begins with this message.
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
    """On other ranks: report the arrival to rank 0, return the verdict, or [0] if rank 0 does not answer."""
    messages: list[tuple[int, int, list[int]]] = []

    def heard(word: int) -> bool:
        messages.extend(_messages(pg, number))
        return any(said == word for _, said, _ in messages)

    _send(pg, 0, number, COME)
    # The deadline counts from rank 0's arrival: allow `seconds` for the arrival and as long again for the verdict.
    if becomes(lambda: heard(COME), seconds) and becomes(lambda: heard(VERDICT), seconds + VERDICT_TIMEOUT):
        return messages[-1][2]
    _send(pg, 0, number, GONE)  # withdraws COME: a late rank 0 must not count this rank as present
    return [0]


def _send(pg: ProcessGroup, rank: int, number: int, word: int, missing: Sequence[int] = ()) -> None:
    """Send a message to `rank` with the first tag beyond the user's, without waiting.

    The message is (number of the barrier, word, one flag per rank: missing). The request and the buffer are kept in
    ``pg.sending`` until the send has completed, because a missing rank may receive late or never.
    """
    row = numpy.zeros(2 + pg.size(), numpy.int64)
    row[:2] = number, word
    row[2:][list(missing)] = 1
    # Testing also completes earlier sends; drop the completed sends with their buffers.
    pg.sending = [(request, kept) for request, kept in pg.sending if not request.Test()]
    points = internal.link_of(pg.communicator).points
    pg.sending.append((points.Isend([row.view(numpy.uint8), BYTES], rank, TAGS), row))


def _messages(pg: ProcessGroup, number: int) -> list[tuple[int, int, list[int]]]:
    """Return the messages received for barrier `number` as (sender, word, missing ranks); waits for no rank.

    Messages of earlier barriers are dropped. Messages of later barriers, from ranks already ahead, are kept.
    """
    link = internal.link_of(pg.communicator)
    in_vain = 0
    # Open MPI's probe searches its queue first and makes progress afterwards: only a second failed probe proves that
    # no message has arrived.
    while in_vain < 2:
        seen = link.points.seen(None, TAGS)
        if seen is None:
            in_vain += 1
            continue
        row = numpy.zeros(2 + pg.size(), numpy.int64)
        request = link.points.Irecv([row.view(numpy.uint8), BYTES], seen.source, TAGS)
        while not request.Test():  # short: the message has already arrived
            pass
        pg.early.append((int(row[0]), seen.source, int(row[1]), numpy.flatnonzero(row[2:]).tolist()))
        in_vain = 0
    now = [message[1:] for message in pg.early if message[0] == number]
    pg.early = [message for message in pg.early if message[0] > number]
    return now
