"""Who is measured: gpucoll's algorithms, and the peers that they are measured against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from gpucoll import ArgumentError, Communicator, GpucollError, algorithms
from gpucoll.dtypes import EXTENDED

from .arguments import ANY, POINTS, Options
from .cases import Case, Contestant
from .data import Data, Turn
from .devices import Device
from .peers import PEERS, LeftOut, Peer

NAMES = dict(zip(POINTS, ("sendrecv", "recursive_doubling"), strict=True))  # of the one way to do each


class Left(NamedTuple):
    """Something that is not measured, and why."""

    what: str
    reason: str


def field(comm: Communicator, case: Case, options: Options, device: Device,
          peers: Mapping[str, Peer | str]) -> tuple[list[Contestant], list[Left]]:
    """Return all that was asked for, the peers last, each having done the test once; and what was left out of it.

    Raises ArgumentError or DtypeError, alike on every rank, where an algorithm of ours cannot do it.
    """
    if case.test == "hypercube" and case.ranks & (case.ranks - 1):
        return [], [Left("hypercube", f"nRanks {case.ranks} is not a power of 2, skipping")]
    data, contestants, left_out = Data(case, comm.rank, count=1, device=device), list[Contestant](), list[Left]()
    for name in _names(case, options):
        contestant = Contestant(name, ours_by(comm, case, name, device))
        try:
            contestant.call(*data.arguments(Turn(0)))
            contestants.append(contestant)
        except ArgumentError as error:  # alike on every rank, before data move
            if len(options.tests) == 1 and name in options.algorithms:
                raise
            left_out.append(Left(f"{case.test} by {name}", str(error)))
    if not contestants:
        return [], [*left_out, Left(case.test, f"it has no algorithm {', '.join(options.algorithms)}")]
    for name in options.against:
        peer = peers[name]
        call = peer if isinstance(peer, str) else agreed(comm, functools.partial(_rehearsed, peer, data))
        if isinstance(call, str):
            left_out.append(Left(f"against {name}", call))
        else:
            contestants.append(Contestant(name, call, peer=True))
    return contestants, left_out


def _names(case: Case, options: Options) -> Iterable[str]:
    """Return the algorithms, "all" replaced by those that can run here; of several tests each takes those it has."""
    if case.test in POINTS:
        return [NAMES[case.test]] if {"auto", "all"} & set(options.algorithms) else []
    scheduled = algorithms(case.test, size=case.ranks, op=case.op if case.row.reduces else None, dtype=case.dtype,
                           device=options.flags.device)
    every = {None: (*scheduled, "native"), "native": ("native",)}.get(options.flags.executor, scheduled)
    known = (*algorithms(case.test), *ANY)
    asked = [name for name in options.algorithms if len(options.tests) == 1 or name.partition("(")[0] in known]
    return dict.fromkeys(name for one in asked for name in (every if one == "all" else (one,)))


def ours_by(comm: Communicator, case: Case, algorithm: str, device: Device) -> Callable[..., Any]:
    """Return the call of gpucoll that does the test by `algorithm`."""
    if case.test in POINTS:
        return functools.partial({"sendrecv": _sendrecv, "hypercube": _hypercube}[case.test], comm)
    options: dict[str, Any] = {"algorithm": algorithm}
    if case.row.reduces:
        options["op"] = case.op
        if device.name == "cuda" and case.dtype in EXTENDED:
            options["dtype"] = case.dtype  # the arrays are unsigned carriers
    if case.row.rooted:
        options["root"] = case.root
    return functools.partial(getattr(comm, case.test), **options)


def _sendrecv(comm: Communicator, x: Any, out: Any) -> Any:
    """Send to the right neighbour, receive from the left one, as nccl-tests does."""
    return comm.sendrecv(x, out, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)


def _hypercube(comm: Communicator, x: Any, out: Any) -> Any:
    """Gather all blocks by recursive doubling, message by message, as nccl-tests does. The ranks are a power of 2."""
    out[comm.rank] = x
    mask = 1
    while mask < comm.size:
        mine, peer = comm.rank & ~(mask - 1), comm.rank ^ mask
        theirs = mine ^ mask
        comm.sendrecv(out[mine:mine + mask], out[theirs:theirs + mask], peer, peer)
        mask *= 2
    return out


def meet(comm: Communicator, device: Device, names: Iterable[str]) -> dict[str, Peer | str]:
    """Return each peer, ready to start, or the reason why it is left out; a collective call, alike on every rank."""
    return {name: agreed(comm, functools.partial(PEERS[name], comm, device)) for name in names}


def agreed(comm: Communicator, make: Callable[[], Any]) -> Any:
    """Return what `make` returns, or, on every rank, the reason of the first rank where it is left out."""
    made, reason = None, None
    try:
        made = make()
    except LeftOut as left:
        reason = str(left)
    return next(filter(None, comm.mpi.allgather(reason)), made)


def _rehearsed(peer: Peer, data: Data) -> Callable[..., Any]:
    """Return a peer's call after making it once; LeftOut where its library refuses.

    Some hang on what they refuse on other ranks: what they refuse is alike everywhere.
    """
    call = peer(data.case)
    try:
        call(*data.arguments(Turn(0)))
    except (GpucollError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever a foreign library raises is its reason
        raise LeftOut(f"{data.case.test} by {data.case.op} of {data.case.dtype}: {error}") from error
    return call


def every_case(options: Options, ranks: int) -> Iterator[Case]:
    """Return all cases that were asked for, in nccl-tests' order; raise ArgumentError for a root that is none."""
    for test in options.tests:
        for dtype in options.dtypes:
            yield from (Case(test, dtype, op, root, ranks)
                        for op in options.ops_of(test, dtype) for root in options.roots_of(test, ranks))
