"""The communicator: one method for each collective, all with the same options.

    methods        the public class; its methods delegate to the parts below
    overloads      types of the methods
    core           what calls run on: the link, GPUs and streams; `gpucoll.call` has the calls
    gpu            executors and streams of a GPU, made by all ranks together, at the first call
    lifecycle      guards, refusals, aborts; the end at exit or in a fork's child
    leaving        the end by `close`, compared with the calls of the other ranks; the end of a process
    metadata       host messages: shapes and errors exchanged before data is sent
    scatter        the collective with shapes known to the root only; extrema: `maxloc` and `minloc`
    ragged         the v-variants: blocks of different lengths
    objects        Python objects, pickled
    points         messages between two ranks, any rank and any tag; groups of calls, splits
    cycles         ranks that wait for each other's messages for ever
    persistent     calls planned once and made many times
    symmetric      memory mapped by all ranks of a node; windows: memory registered with NCCL
    advice         explanations of the choices of "auto"; a check for NaN and infinity
    elastic        `shrink`, `grow` and `replace`: communicators after a failure or with newcomers
    transports     what joins ranks: the base class of links, and of transports of a program
    links          connections between ranks: MPI or a key-value store for processes, memory for threads
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, Unpack

from gpucoll.communicator.elastic import NEWCOMER_TIMEOUT, joined, same_options
from gpucoll.communicator.lifecycle import tell_meeting
from gpucoll.communicator.links import LocalLink, MpiLink, StoreLink
from gpucoll.communicator.methods import Communicator
from gpucoll.communicator.transports import Transport
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, RevokedError, UsageError
from gpucoll.launch import bootstrap
from gpucoll.launch.places import StorePlace, named_place

__all__ = ["Communicator", "Transport", "init", "init_local", "join", "new_world", "run_local"]

T = TypeVar("T")


_world: Communicator | None = None


def new_world(wanted: bootstrap.Options, job: Any = None) -> Communicator:
    """Return a new communicator of all ranks, connected as by `init`. A collective call.

    `job` is where the ranks meet, as returned by `gpucoll.launch.bootstrap.job`; None: found by that function.
    """
    if not isinstance(job, Transport):
        job = bootstrap.job(wanted.timeout, job)
    if isinstance(job, Transport):
        return Communicator(job if job.mpi is None else same_options(job, wanted), wanted)
    if not isinstance(job, StorePlace):
        tell_meeting(job)
        return Communicator(same_options(MpiLink(job, wanted.timeout), wanted), wanted)
    if wanted.executor == "native":
        raise ArgumentError("init: without MPI there is no native executor on the host; omit executor=, or "
                            "launch with mpiexec", code="GC-EXECUTOR")
    if job.size > 1:
        bootstrap.end_together()
    link = StoreLink.world(job, wanted.timeout, by_ucx=wanted.executor == "ucx")
    return Communicator(same_options(link, wanted), wanted)


def init(*, store: str | None = None, rank: int | None = None, size: int | None = None,
         transport: Transport | None = None,
         **options: Unpack[bootstrap.GivenOptions]) -> Communicator:
    """Return the communicator of all ranks; a second call returns the same object.

    A collective call. Ranks started by an MPI launcher (`mpiexec`, `srun`, ``gpucoll run``) are the ranks of MPI's
    COMM_WORLD, which is duplicated. A single process is a world of one rank.

    Ranks can also start without MPI; ``mpi`` is then None, and MPI need not be installed. The environment variables
    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set by `torchrun`, ``gpucoll run --standalone`` and ``gpucoll run
    --nnodes``; `gpucoll.launch.rank_variables` returns them for processes started by hand. Ranks on several hosts prove
    themselves by GPUCOLL_SECRET, and UCX carries their messages.

    The options, by name: `timeout`: seconds, the deadline of every wait (default 300). `executor`: a name, or None for
    any. `check`: "full" compares the ranks' calls before data is sent, "deferred" compares calls while data is sent,
    "off" compares nothing; None means "full" on host arrays and "deferred" on devices. `deterministic`: True reduces in
    rank order only, so that the bits of an element depend only on the same elements of the inputs; "exact" computes
    sums and means exactly and rounds once, so that not even the number of ranks matters. `device`: "emulated", or the
    CUDA ordinal of this rank's GPU (default: the rank's number on its host). `nccl`: a dict, the configuration of
    NCCL's communicators by the names of NCCL's fields, such as ``{"max_ctas": 8, "name": "tp"}``. GPUCOLL_TIMEOUT,
    GPUCOLL_EXECUTOR, GPUCOLL_CHECK, GPUCOLL_DETERMINISTIC and GPUCOLL_DEVICE set the defaults.

    Parameters
    ----------
    store : str or None, optional
        "tcp://host:port", the address where rank 0 listens.
    rank : int or None, optional
        With `store`: this rank; None takes RANK, or the launcher's number.
    size : int or None, optional
        With `store`: the number of ranks; None takes WORLD_SIZE, or the launcher's number.
    transport : Transport or None, optional
        The way to the other ranks, for ranks of another kind.
    **options : object
        The options above, by name.

    Returns
    -------
    Communicator
        The communicator of all ranks.

    Raises
    ------
    ArgumentError
        A wrong option (GC-OPTION, GC-EXECUTOR, GC-TIMEOUT, GC-DEVICE).
    UsageError
        The options differ from an earlier call or between ranks (`timeout` and the CUDA ordinal may differ between
        ranks), or the launcher belongs to another MPI (GC-INIT, GC-LAUNCHER, GC-STORE).

    See Also
    --------
    run_local : Threads as ranks, for tests and notebooks.
    Communicator.from_mpi : The ranks of a communicator of mpi4py.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> with gc.init() as comm:  # without a launcher: one rank
    ...     total = comm.all_reduce(numpy.arange(3))
    >>> total
    array([0, 1, 2])
    """
    global _world
    wanted = bootstrap.options(options)
    if store is None and (rank, size) != (None, None):
        raise UsageError("init: rank= and size= need store=", code="GC-STORE")
    if store is not None and transport is not None:
        raise UsageError("init: pass store= or transport=, not both", code="GC-INIT")
    place = None if store is None else named_place(store, rank, size)
    if _world is None or _world.closed:
        _world = new_world(wanted, place if transport is None else transport)
    elif transport is not None and transport is not _world._core.link:
        raise UsageError("init was called before, with another transport; close that world first", code="GC-INIT")
    elif place is not None and place[:2] != (_world.rank, _world.size):
        raise UsageError(f"init was called before, for rank {_world.rank} of {_world.size}; close that world first",
                         code="GC-INIT")
    elif any(options.get(name) is not None and getattr(_world.options, name) != getattr(wanted, name)
             for name in bootstrap.GivenOptions.__annotations__):
        raise UsageError(f"init was called before with {_world.options}, now with {wanted}; close that world first, "
                         "or use Communicator.from_mpi for a second communicator", code="GC-INIT")
    return _world


def join(store: str, timeout: float = NEWCOMER_TIMEOUT) -> Communicator:
    """Return a newcomer's communicator: this process becomes a rank when the ranks at `store` call `grow`.

    The ranks call `Communicator.grow` or `Communicator.replace`. Ranks and newcomers prove themselves by
    GPUCOLL_SECRET, or without a secret by the store's address. The options are those of the ranks. `init` then returns
    the same object.

    Parameters
    ----------
    store : str
        The ``address`` of the ranks' communicator, "tcp://host:port": the store given to `init`, if there is one.
    timeout : float, optional
        Seconds to wait for the ranks to grow.

    Returns
    -------
    Communicator
        The communicator of members and newcomers.

    Raises
    ------
    CollectiveTimeout
        The ranks do not grow within `timeout` seconds (GC-TIMEOUT).
    UsageError
        `store` is not a "tcp://host:port" (GC-STORE).
    BackendError
        A wrong secret or another version of gpucoll (GC-STORE).

    See Also
    --------
    Communicator.grow : The call of the members.

    Examples
    --------
    >>> import gpucoll as gc
    >>> gc.join("somewhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    gpucoll.errors.UsageError: [GC-STORE] ...
    """
    global _world
    comm = joined(store, timeout, Communicator)
    if _world is None or _world.closed:
        _world = comm
    return comm


def run_local(f: Callable[[Communicator], T], n: int, **options: Unpack[bootstrap.GivenOptions]) -> list[T]:
    """Call ``f(comm)`` on each of `n` threads and return the results in rank order.

    If a thread raises an exception, the other threads stop waiting, and `run_local` raises the first error.

    Parameters
    ----------
    f : callable
        The program of a rank; its argument is the rank's `Communicator`.
    n : int
        The number of ranks.
    **options : object
        The options of `init`: `timeout`, `executor`, `check`, `deterministic`, `device`, `nccl`.

    Returns
    -------
    list
        The results, in rank order.

    Raises
    ------
    ArgumentError
        A wrong option (GC-OPTION, GC-EXECUTOR, GC-TIMEOUT, GC-DEVICE).
    Exception
        The first error of `f`, with a note of its rank.

    See Also
    --------
    init_local : The communicators alone.
    precheck : The same, without sending data.

    Examples
    --------
    >>> import numpy
    >>> import gpucoll as gc
    >>> gc.run_local(lambda comm: comm.all_reduce(numpy.array([comm.rank, 1])).tolist(), 4)
    [[6, 4], [6, 4], [6, 4], [6, 4]]
    """
    comms, errors = init_local(n, **options), list[BaseException]()
    code = getattr(f, "__code__", None)
    place = "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"  # where the ranks' program ends

    def end_wait() -> None:
        raise RevokedError("another thread of run_local has failed")

    def run(comm: Communicator) -> Any:
        try:
            with comm:
                result = f(comm)
                comm._core.life.leaving.place = place
                return result
        except BaseException as error:
            error.add_note(f"on rank {comm.rank} of {n}")
            errors.append(error)
            for other in comms:
                other._core.waits.hooks.append(end_wait)
        return None

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(n, "rank") as pool:
        results = list(pool.map(run, comms))
    if errors:
        raise errors[0]
    return results


def init_local(n: int, **options: Unpack[bootstrap.GivenOptions]) -> list[Communicator]:
    """Return `n` communicators of one process, one for each of `n` threads; no MPI is started.

    Each thread uses its own communicator, as a rank would. `close` completes the operations of its rank and waits for
    no other rank, so one thread may close all communicators in turn. The last `close` frees the memory of all.

    Parameters
    ----------
    n : int
        The number of ranks.
    **options : object
        The options of `init`: `timeout`, `executor`, `check`, `deterministic`, `device`, `nccl`.

    Returns
    -------
    list of Communicator
        Communicator i is that of rank i.

    Raises
    ------
    ArgumentError
        `n` is not a positive integer (GC-SIZE), or `executor` is "native" (GC-EXECUTOR).

    See Also
    --------
    run_local : A call on each rank.

    Examples
    --------
    >>> import gpucoll as gc
    >>> comms = gc.init_local(2)
    >>> [(comm.rank, comm.size) for comm in comms]
    [(0, 2), (1, 2)]
    >>> for comm in comms:
    ...     comm.close()
    """
    if not is_whole(n) or n < 1:
        raise ArgumentError(f"init_local: n={n!r} is not a positive number of ranks", code="GC-SIZE")
    wanted = bootstrap.options(options)
    if wanted.executor == "native":
        raise ArgumentError("init_local: threads have no native executor; executor='mpi' runs schedules "
                            "over memory", code="GC-EXECUTOR")
    comms = [Communicator(link, wanted) for link in LocalLink.all(n, wanted.timeout)]
    # One thread may make the first calls of all ranks, so ranks meet here: advance all meetings in turn, step by step.
    meetings = [comm._core.host.meeting() for comm in comms]
    while meetings:
        meetings = [one for one in meetings if next(one, None) is not None]
    return comms
