"""The communicator: one method per collective, all of one shape.

    core           what a call goes through: checked, resolved, run at once or behind a `Work`
    calls          the table of compiled calls
    lifecycle      what guards a communicator, and how it ends
    methods        the calls whose shapes are alike on all ranks
    ragged         the v-variants
    objects        Python objects, pickled
    wildcards      any rank and any tag, the status of a message, messages between GPU arrays
    points         messages between two ranks, groups of calls, splits
    links          what joins the ranks: MPI or a store between processes, memory between threads
    cartesian      ranks on a grid, exchanges with neighbours
    advice         what a call would do, and why
    persistent     calls to be made again and again
    symmetric      memory that all ranks of a node map; windows: of NCCL's
    internal       what training, torch, distributed and mpi use beside the public methods
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, Unpack

from gpucoll.communicator.advice import Advice
from gpucoll.communicator.cartesian import RankGrid, checked_grid
from gpucoll.communicator.links import Link, LocalLink, MpiLink, StoreLink
from gpucoll.communicator.metadata import check_alike
from gpucoll.communicator.objects import Objects
from gpucoll.communicator.persistent import Persistent
from gpucoll.communicator.symmetric import Symmetric
from gpucoll.core.dtypes import is_whole
from gpucoll.errors import ArgumentError, GpucollError, RankFailedError, RevokedError, UsageError
from gpucoll.health.guard import FAILED_BY
from gpucoll.launch import bootstrap
from gpucoll.progress.operations import beside
from gpucoll.progress.waits import Waits
from gpucoll.transport.control import abort

T = TypeVar("T")


class Communicator(Objects, Persistent, Advice, Symmetric):
    """A group of ranks and what they do together; made by `gpucoll.init`, `from_mpi`, `init_local` or `split`.

    ``rank size local_rank local_size node nodes`` are numbers, ``device`` is the CUDA ordinal or
    None, ``mpi`` the duplicated mpi4py communicator, or None, ``timeout check executor`` the options.
    """

    def __init__(self, link: Link, options: bootstrap.Options) -> None:
        try:
            super().__init__(link, options)
        except BaseException as error:  # others may wait for this rank, as where it has no memory left
            if link.mpi is not None:
                culprit = error.ranks[0] if isinstance(error, RankFailedError) and error.ranks else link.place.rank
                others = {*range(link.place.size)} - {link.place.rank, culprit, *link.processes.ended()}
                abort(link.wire, others, FAILED_BY + culprit)
            raise

    @classmethod
    def from_mpi(cls, mpi: Any, **options: Unpack[bootstrap.GivenOptions]) -> Communicator:
        """Return a communicator of the ranks of an mpi4py intracommunicator, which is duplicated.

        A collective call. Options as in `gpucoll.init`. Raises ArgumentError for anything else.
        """
        wanted = bootstrap.options(options)
        return cls(_link(MpiLink(mpi, wanted.timeout), wanted), wanted)

    def cart(self, dims: Sequence[int], periods: Any = None, reorder: bool = False) -> Cartesian | None:
        """Return a communicator of the first ranks as a grid of these lengths; None on ranks that it has no place for.

        A collective call; it inherits the options. `periods` says of each dimension, or of all, whether it is a ring.
        Ranks keep their order, whatever `reorder` is. Raises ArgumentError, and on the others PeerError; MismatchError
        where ranks pass different grids. MPI-5.0, 8.5.1.
        """
        self._check_usable()
        mine: ArgumentError | None = None
        lengths: tuple[int, ...] = ()
        wraps: tuple[bool, ...] = ()
        try:
            lengths, wraps = checked_grid(dims, periods, self.size)
        except ArgumentError as error:
            mine = error
        told: Any = {"error": str(mine)} if mine else {"dims": lengths, "periods": wraps}
        everyone = self._all_gather_metadata(told, "cart", mine)
        for what in ("dims", "periods"):
            check_alike("cart", everyone, what, "GC-CART")
        self._all_gather_metadata({}, "cart")  # nobody was taken out of that wait
        link, halo = (self._part(0 if self.rank < math.prod(lengths) else None, 0) for _ in range(2))
        return None if link is None or halo is None else Cartesian(link, halo, self.options, lengths, wraps)

    def shrink(self) -> Communicator:
        """Return a communicator of the ranks that are still there, in their order; this one has failed, and is closed.

        A collective call of all that live, which must have seen this one fail or are woken by it. It takes an MPI that
        outlives its processes: Open MPI under ``mpiexec --with-ft ulfm``; UsageError where there is none. Raises
        CollectiveTimeout. MPI forum's User Level Failure Mitigation: revoke, then shrink.
        """
        if self.mpi is None:
            raise UsageError("shrink: only ranks that MPI has started outlive each other", code="GC-SHRINK")

        def shrunk() -> Any:
            self.mpi.Revoke()
            return self.mpi.Shrink()

        try:
            rest = beside(Waits(self.timeout).run, shrunk, "shrink")
        except GpucollError:
            raise
        except Exception as error:  # MPI's, or that it has no such call
            raise UsageError("shrink: this MPI does not go on after a process has failed; Open MPI does under mpiexec "
                             f"--with-ft ulfm ({error!r})", code="GC-SHRINK") from error
        self._waits.failure = self._waits.failure or RankFailedError("it was shrunk")
        with contextlib.suppress(GpucollError):  # of a call on a GPU whose result is not complete
            self.close()
        link = MpiLink(rest, self.timeout)  # which is not freed: Open MPI would not come to its end then
        link.gpu_index = self._link.gpu_index
        return self._over(_link(link, self.options))


class Cartesian(RankGrid, Communicator):
    """Ranks on a grid; made by `Communicator.cart`.

    ``dims`` are its lengths, ``periods`` says which dimensions are rings, ``coords`` is where this rank is. What is
    split off is an ordinary `Communicator`.
    """

    def __init__(self, link: Link, halo: Link, options: bootstrap.Options, dims: tuple[int, ...],
                 periods: tuple[bool, ...]) -> None:
        super().__init__(link, options)
        self.dims, self.periods, self._halo = dims, periods, Communicator(halo, options)

    def _over(self, link: Link) -> Communicator:
        return Communicator(link, self.options)

    def close(self) -> None:
        """Leave in order, the messages between neighbours first; see `Communicator.close`."""
        try:
            self._halo.close()
        finally:
            super().close()


def _link(link: Link, wanted: bootstrap.Options) -> Link:
    """Return the link once all ranks are known to want the same; UsageError."""
    try:
        bootstrap.meet(link.mpi, wanted.timeout, lambda: bootstrap.check_alike(link.mpi, wanted))
    except UsageError:
        link.free()  # as all ranks do
        raise
    return link


_world: Communicator | None = None


def new_world(wanted: bootstrap.Options) -> Communicator:
    """Return another communicator of all ranks. A collective call; `init` says how they meet."""
    job = bootstrap.job(wanted.timeout)
    if not isinstance(job, bootstrap.StorePlace):
        return Communicator(_link(MpiLink(job, wanted.timeout), wanted), wanted)
    if wanted.executor == "native":
        raise ArgumentError("init: without MPI there is no native executor on the host; leave executor= open, or "
                            "launch with mpiexec", code="GC-EXECUTOR")
    if job.size > 1:
        bootstrap.end_together()
    return Communicator(_link(StoreLink.world(*job, wanted.timeout), wanted), wanted)


def init(**options: Unpack[bootstrap.GivenOptions]) -> Communicator:
    """Return the communicator of all ranks; again, the same object.

    Ranks that an MPI's launcher has started, as `mpiexec`, `srun` and ``gpucoll run`` do, are those of MPI's
    COMM_WORLD, which is duplicated. Ranks of one host that have RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their
    environment, as `torchrun` and ``gpucoll run --standalone`` have it, or `gpucoll.launch.rank_variables` for
    processes that one starts by oneself, meet without MPI, which need not be installed; ``mpi`` is None then. A lone
    process is a world of one.

    Options: `timeout` in seconds, the deadline of every wait (default 300); `executor` a name or None; `check` "full",
    "deferred", "off" or None: whether ranks compare their calls before data move (the default), as they go, or not;
    `deterministic`: reductions in rank order only, so that their bits depend on the inputs alone; `device` the CUDA
    ordinal of this rank's GPU, by default its number on its host, or "emulated". GPUCOLL_TIMEOUT, GPUCOLL_EXECUTOR,
    GPUCOLL_CHECK and GPUCOLL_DEVICE say what is left open. UsageError for other options than before, ones that differ
    between ranks, and a launcher of another MPI.
    """
    global _world
    wanted = bootstrap.options(options)
    if _world is None or _world.closed:
        _world = new_world(wanted)
    elif any(options.get(name) is not None and getattr(_world.options, name) != getattr(wanted, name)
             for name in bootstrap.GivenOptions.__annotations__):
        raise UsageError(f"init was called before with {_world.options}, now with {wanted}; close it first, "
                         "or use Communicator.from_mpi for a second communicator", code="GC-INIT")
    return _world


def run_local(f: Callable[[Communicator], T], n: int, **options: Unpack[bootstrap.GivenOptions]) -> list[T]:
    """Return what ``f(comm)`` returns on each of `n` threads, in the order of their ranks; options as in `init`.

    Where threads raise, the others' waits end, and the first error is raised.
    """
    comms, errors = init_local(n, **options), list[BaseException]()

    def check() -> None:
        if errors:
            raise RevokedError("another thread of run_local has failed")

    def run(comm: Communicator) -> Any:
        try:
            comm._waits.hooks.append(check)
            with comm:
                return f(comm)
        except BaseException as error:
            error.add_note(f"on rank {comm.rank} of {n}")
            errors.append(error)
        return None

    with ThreadPoolExecutor(n, "rank") as pool:
        results = list(pool.map(run, comms))
    if errors:
        raise errors[0]
    return results


def init_local(n: int, **options: Unpack[bootstrap.GivenOptions]) -> list[Communicator]:
    """Return `n` communicators of one process, one for each of `n` threads; no MPI is started.

    Options as in `init`. Every thread uses its own as a rank would. `close` completes what this rank has under way and
    waits for nobody else, so that one thread may close all of them, one after another; their memory is freed when the
    last one is closed. Raises ArgumentError.
    """
    if not is_whole(n) or n < 1:
        raise ArgumentError(f"init_local: n={n!r} is not a positive number of ranks", code="GC-COMM")
    wanted = bootstrap.options(options)
    if wanted.executor == "native":
        raise ArgumentError("init_local: threads have no native executor; executor='mpi' runs the same schedules "
                            "over memory", code="GC-EXECUTOR")
    comms = [Communicator(link, wanted) for link in LocalLink.all(n, wanted.timeout)]
    meetings = [comm._host.meeting() for comm in comms]  # here, as one thread may make all ranks' first calls
    while meetings:
        meetings = [one for one in meetings if next(one, None) is not None]
    return comms
