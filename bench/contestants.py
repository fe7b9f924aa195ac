"""Who is measured: algorithms of gpucoll, and the peers that they are measured against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from mpi4py import MPI

from gpucoll import ArgumentError, Communicator, algorithms
from gpucoll.dtypes import DTYPES
from gpucoll.ops import op_of

from .arguments import Options
from .cases import Case, Contestant
from .data import Data

# The blocking calls of mpi4py: what a program without gpucoll would use.
MPI_CALLS = {"all_reduce": "Allreduce", "reduce": "Reduce", "broadcast": "Bcast", "all_gather": "Allgather",
             "reduce_scatter": "Reduce_scatter_block"}


def contestants(comm: Communicator, case: Case, options: Options) -> list[Contestant]:
    """Return all that was asked for, the peers last; each has done the collective once.

    Raises ArgumentError or DtypeError, alike on every rank, where one of them cannot do it.
    """
    found = [Contestant(name, _ours(comm, case, name)) for name in _names(case, options)]
    found += [Contestant(peer, PEERS[peer](comm, case), peer=True) for peer in options.against]
    data = Data(case, comm.rank, count=1)
    for contestant in found:
        _rehearse(contestant, data)
    return found


def _names(case: Case, options: Options) -> Iterable[str]:
    """Return the algorithms, "all" replaced by those that the executor can run."""
    scheduled = algorithms(case.collective, size=case.ranks, op=case.op if case.row.reduces else None, dtype=case.dtype)
    every = {None: (*scheduled, "native"), "native": ("native",)}.get(options.executor, scheduled)
    asked = ((name,) if name != "all" else every for name in options.algorithms)
    return dict.fromkeys(name for several in asked for name in several)


def _ours(comm: Communicator, case: Case, algorithm: str) -> Callable[..., Any]:
    options: dict[str, Any] = {"algorithm": algorithm}
    if case.row.reduces:
        options["op"] = case.op
    if case.row.rooted:
        options["root"] = case.root
    return functools.partial(getattr(comm, case.collective), **options)


def _mpi(comm: Communicator, case: Case) -> Callable[..., Any]:
    options: dict[str, Any] = {}
    if case.row.reduces:
        options["op"] = getattr(MPI, op_of(case.op).mpi)
    if case.row.rooted:
        options["root"] = case.root
    call = functools.partial(getattr(comm.mpi, MPI_CALLS[case.collective]), **options)
    return call if DTYPES[case.dtype].mpi else functools.partial(_as_bytes, call)


def _as_bytes(call: Callable[..., Any], *arrays: Any) -> None:
    """Move what MPI has no name for, such as bfloat16."""
    call(*(array if array is None else array.view("u1") for array in arrays))


PEERS: dict[str, Callable[[Communicator, Case], Callable[..., Any]]] = {"mpi": _mpi}


def _rehearse(contestant: Contestant, data: Data) -> None:
    try:
        contestant.call(*data.arguments(0))
    except MPI.Exception as error:
        case, reason = data.case, MPI.Get_error_string(error.Get_error_class())
        raise ArgumentError(f"{contestant.name} does not do {case.collective} by {case.op} of {case.dtype}: {reason}",
                            code="GC-PEER-OP") from error
