"""Ranks on the workers of a Dask cluster: `Workers`. Needs the package ``distributed`` (extra ``dask``).

Each worker's process has a communicator. The workers need no MPI: they connect to a store in the process of rank 0, and
UCX or the store carries messages between hosts.
"""

from __future__ import annotations

import contextlib
import secrets
import time
import urllib.parse
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from distributed import Client, Future, wait

from gpucoll.communicator import Communicator, new_world
from gpucoll.errors import ArgumentError, BackendError, CollectiveTimeout, RankFailedError
from gpucoll.launch import bootstrap
from gpucoll.launch.launchers import free_port
from gpucoll.launch.places import StorePlace

T = TypeVar("T")
WORKER_INTERVAL = 1.0  # seconds between two looks for workers that are gone
_comms: dict[str, Communicator] = {}  # in a worker's process: the communicators, by the key of the `Workers`


class Workers:
    """One rank for each worker of a Dask cluster, for a ``with`` block.

    Each worker must be a process of its own, with a free thread.

    Parameters
    ----------
    client : distributed.Client
        The client of the cluster.
    workers : sequence of str or None, optional
        The addresses of the workers in rank order; None: those of all workers, sorted.
    **options : object
        Those of `gpucoll.init`; ``timeout`` also limits the time to meet.

    Raises
    ------
    ArgumentError
        There are no workers, or workers share a process (GC-DASK).
    CollectiveTimeout
        The workers do not meet (GC-TIMEOUT).
    RankFailedError
        A worker is gone (GC-RANK).

    Examples
    --------
    >>> import gpucoll.dask
    >>> def totals(client, x):  # a distributed.Client whose workers are processes
    ...     with gpucoll.dask.Workers(client) as ranks:
    ...         return ranks.run(lambda comm, x: comm.all_reduce(x), x)
    """

    def __init__(self, client: Client, workers: Sequence[str] | None = None, **options: Any) -> None:
        self._client = client
        self._addresses = sorted(client.nthreads()) if workers is None else list(workers)
        self._options = options
        self._timeout = bootstrap.options(options).timeout  # checked here, before any worker is asked
        self._key = secrets.token_hex(8)
        if not self._addresses:
            raise ArgumentError("Workers: the cluster has no workers; start some first", code="GC-DASK")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._addresses)

    def __enter__(self) -> Workers:
        host = urllib.parse.urlsplit(self._addresses[0]).hostname
        if host is None:
            raise ArgumentError(f"Workers: worker {self._addresses[0]} is a thread of this process; make the cluster "
                                "with processes=True", code="GC-DASK")
        port, = self._results([self._submit(0, free_port)])
        secret = secrets.token_hex(16)
        self._results([self._submit(rank, _begin, self._key, StorePlace(rank, self.size, secret, (host, port)),
                                    self._options) for rank in range(self.size)], self._timeout)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        there = self._client.nthreads()
        ends = [self._submit(rank, _end, self._key, kind is not None)
                for rank, address in enumerate(self._addresses) if address in there]
        wait(ends, timeout=self._timeout)

    def run(self, f: Callable[..., T], *args: Any) -> list[T]:
        """Return ``[f(comm, *args) on each rank]``, in rank order.

        If `f` raises on a rank, the waits of the other ranks end, and the first error is raised here; the ranks take no
        further calls.

        Parameters
        ----------
        f : callable
            The program of a rank; the first argument is the rank's `Communicator`.
        *args : object
            Further arguments.

        Returns
        -------
        list
            The results, in rank order.

        Raises
        ------
        Exception
            The first error of `f`.
        RankFailedError
            A worker is gone (GC-RANK).

        Examples
        --------
        >>> import gpucoll.dask
        >>> def totals(client, x):  # a distributed.Client whose workers are processes
        ...     with gpucoll.dask.Workers(client) as ranks:
        ...         return ranks.run(lambda comm, x: comm.all_reduce(x), x)
        """
        return self._results([self._submit(rank, _call, self._key, f, args) for rank in range(self.size)])

    def _submit(self, rank: int, f: Callable[..., Any], *args: Any) -> Future:
        """Start a task on the worker of a rank, and nowhere else."""
        return self._client.submit(f, *args, workers=[self._addresses[rank]], allow_other_workers=False, pure=False,
                                   retries=0)

    def _results(self, futures: Sequence[Future], timeout: float = float("inf")) -> list[Any]:
        """Return the results of tasks; raise the first error, RankFailedError if a worker is gone."""
        deadline = time.monotonic() + timeout
        left = list(futures)
        while left:
            try:
                wait(left, timeout=WORKER_INTERVAL, return_when="FIRST_COMPLETED")
            except TimeoutError:
                self._check_workers(futures, time.monotonic() > deadline)
            if any(one.status in ("error", "cancelled") for one in left):
                self._raise(futures)
            left = [one for one in left if one.status == "pending"]
        return list(self._client.gather(list(futures)))

    def _raise(self, futures: Sequence[Future]) -> None:
        """Raise the error of a task: the program's own, rather than the errors of ranks that waited for its rank."""
        with contextlib.suppress(TimeoutError):
            wait(list(futures), timeout=WORKER_INTERVAL)
        self._check_workers(futures, is_late=False)
        failed = [one for one in futures if one.status in ("error", "cancelled")]
        own = [one for one in failed if one.status == "error" and not isinstance(one.exception(), RankFailedError)]
        (own or failed)[0].result()

    def _check_workers(self, futures: Sequence[Future], is_late: bool) -> None:
        """Raise the error of workers that are gone, or late; a task of a lost worker would wait for ever."""
        there = self._client.nthreads()
        gone = tuple(rank for rank, address in enumerate(self._addresses) if address not in there)
        if gone:
            self._client.cancel(list(futures), force=True)
            raise RankFailedError(f"the workers of ranks {', '.join(map(str, gone))} have ended; leave the block and "
                                  "make new Workers", ranks=gone)
        if is_late:
            late = tuple(rank for rank, one in enumerate(futures) if one.status == "pending")
            self._client.cancel(list(futures), force=True)
            raise CollectiveTimeout(f"Workers: waited {self._timeout:g} s for the workers of ranks "
                                    f"{', '.join(map(str, late))}; does each worker have a free thread?", ranks=late)


def _begin(key: str, place: StorePlace, options: dict[str, Any]) -> None:
    """Make the communicator of this worker."""
    if any(not comm.closed for comm in _comms.values()):
        raise BackendError("Workers: this worker's process has a communicator of other Workers; leave their block "
                           "first, and give each worker its own process", code="GC-DASK")
    _comms.clear()
    _comms[key] = new_world(bootstrap.options(options), place)


def _call(key: str, f: Callable[..., T], args: Sequence[Any]) -> T:
    """Call `f` with this worker's communicator; an error ends the waits of the other ranks."""
    comm = _comms.get(key)
    if comm is None:
        raise BackendError("Workers: this worker's process was restarted; leave the block and make new Workers",
                           code="GC-DASK")
    try:
        return f(comm, *args)
    except BaseException as error:
        comm.__exit__(type(error), error, error.__traceback__)
        raise


def _end(key: str, has_failed: bool) -> None:
    """Close this worker's communicator; after a failure without waiting for the other ranks."""
    comm = _comms.pop(key, None)
    if comm is not None and not comm.closed:
        error = BackendError("the block of the Workers has failed") if has_failed else None
        comm.__exit__(None if error is None else type(error), error, None)
