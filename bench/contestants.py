"""Who is measured: gpucoll's algorithms, and the peers that they are measured against."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from mpi4py import MPI

from gpucoll import ArgumentError, Communicator, GpucollError, algorithms
from gpucoll.core.dtypes import DTYPES, EXTENDED
from gpucoll.core.ops import op_of
from gpucoll.device.gpus import nccl_id

from .arguments import ANY, POINTS, Options
from .cases import Case, Contestant
from .data import Data, Turn
from .devices import Device

Call: TypeAlias = Callable[..., Any]
Peer: TypeAlias = Callable[[Case], Call]
MPI_CALLS = {"all_reduce": "Allreduce", "reduce": "Reduce", "broadcast": "Bcast", "all_gather": "Allgather",
             "hypercube": "Allgather", "gather": "Gather", "scatter": "Scatter", "all_to_all": "Alltoall",
             "reduce_scatter": "Reduce_scatter_block", "scan": "Scan", "exscan": "Exscan", "barrier": "Barrier",
             "sendrecv": "Sendrecv"}
NCCL_TESTS = ("all_reduce", "reduce", "broadcast", "all_gather", "hypercube", "reduce_scatter", "sendrecv")
GLOO_TESTS = ("all_reduce", "reduce", "broadcast", "all_gather", "hypercube", "barrier")
GLOO_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
NAMES = dict(zip(POINTS, ("sendrecv", "recursive_doubling"), strict=True))  # of the one way to do each


class LeftOut(Exception):
    """A peer does not take part; the text says why."""


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


# Peers: each is made once for a run and then asked for its call of each case, the blocking call that a program without
# gpucoll would use. What a peer lacks raises LeftOut with the reason, and the run goes on without it.


def _require(name: str, case: Case, tests: Any, *, reduces: bool, moves: bool = True) -> None:
    """Raise LeftOut for a test, a reduction or a dtype that the peer does not have."""
    if case.row.ragged:
        raise LeftOut(f"{case.test}: its call is told the counts that gpucoll's finds out by itself")
    if case.test not in tests:
        raise LeftOut(f"{name} has no {case.test}")
    if case.row.reduces and not reduces:
        raise LeftOut(f"{name} has no reduction by {case.op} of {case.dtype}")
    if not moves:
        raise LeftOut(f"{name} is not called with arrays of {case.dtype}")


def _mpi(comm: Communicator, device: Device) -> Peer:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def peer(case: Case) -> Call:
        in_bytes = DTYPES[case.dtype].mpi is None  # what MPI has no name for, such as bfloat16
        _require("MPI itself", case, MPI_CALLS, reduces=case.op != "avg" and not in_bytes)
        options: dict[str, Any] = {"op": getattr(MPI, op_of(case.op).mpi)} if case.row.reduces else {}
        if case.row.rooted:
            options["root"] = case.root

        def on_host(*arrays: Any) -> None:
            given = [array.view("u1") if in_bytes and array is not None else array for array in arrays]
            if len(arrays) == 2 and arrays[0] is arrays[1] and arrays[0] is not None:
                given[0] = MPI.IN_PLACE
            if case.test == "sendrecv":
                comm.mpi.Sendrecv(given[0], right, recvbuf=given[1], source=left)
            else:
                getattr(comm.mpi, MPI_CALLS[case.test])(*given, **options)

        def through_host(*arrays: Any) -> None:
            """What an MPI that knows nothing of GPUs needs: copies to the host and back."""
            held = {id(array): device.read(array, case.dtype).copy() for array in arrays if array is not None}
            on_host(*(None if array is None else held[id(array)] for array in arrays))
            if arrays and arrays[-1] is not None:
                device.write(arrays[-1], held[id(arrays[-1])])

        return through_host if device.name == "cuda" else on_host

    return peer


def _nccl(comm: Communicator, device: Any) -> Peer:
    if device.name != "cuda":
        raise LeftOut("NCCL works on GPU memory: needs --device cuda")
    try:
        from cupy.cuda import nccl

        library = nccl.NcclCommunicator(comm.size, nccl_id(comm.mpi), comm.rank)
    except (ImportError, RuntimeError) as error:  # CuPy's NCCL errors are RuntimeErrors
        raise LeftOut(f"NCCL: {error}") from error

    def constant(name: str | None) -> Any:
        return getattr(nccl, f"NCCL_{name.removeprefix('nccl').upper()}", None) if name else None

    def peer(case: Case) -> Call:
        kind, op = constant(DTYPES[case.dtype].nccl), constant(op_of(case.op).nccl)
        _require("NCCL", case, NCCL_TESTS, reduces=kind is not None and op is not None, moves=kind is not None)

        def call(x: Any, out: Any = None) -> None:
            source, target = (0 if array is None else array.data.ptr for array in (x, out))
            stream, count = device.stream.ptr, x.size
            match case.test:
                case "all_reduce":
                    library.allReduce(source, target, count, kind, op, stream)
                case "reduce":
                    library.reduce(source, target or source, count, kind, op, case.root, stream)
                case "broadcast":
                    library.broadcast(source, source, count, kind, case.root, stream)
                case "reduce_scatter":
                    library.reduceScatter(source, target, out.size, kind, op, stream)
                case "sendrecv":
                    nccl.groupStart()
                    library.send(source, count, kind, (comm.rank + 1) % comm.size, stream)
                    library.recv(target, count, kind, (comm.rank - 1) % comm.size, stream)
                    nccl.groupEnd()
                case _:
                    library.allGather(source, target, count, kind, stream)

        return call

    return peer


def gloo(comm: Communicator) -> Any:
    """Return torch.distributed with its processes joined over Gloo; LeftOut without PyTorch. A collective call."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise LeftOut("PyTorch is not installed: pip install torch") from error
    if not dist.is_initialized():
        host = "127.0.0.1" if comm.nodes == 1 else socket.gethostname()
        with socket.socket() as probe:  # an address of rank 0's host where nobody listens yet
            probe.bind((host, 0))
            where = comm.mpi.bcast(f"{host}:{probe.getsockname()[1]}")
        dist.init_process_group("gloo", init_method=f"tcp://{where}", rank=comm.rank, world_size=comm.size)
    return dist


def _gloo(comm: Communicator, device: Device) -> Peer:
    if device.name == "cuda":
        raise LeftOut("Gloo is measured on host memory: needs --device cpu")
    dist = gloo(comm)
    import torch

    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name

    def peer(case: Case) -> Call:
        _require("Gloo", case, GLOO_TESTS, reduces=case.op in GLOO_OPS, moves=case.dtype not in EXTENDED and (
            case.dtype == "uint8" or not case.dtype.startswith("uint")))
        op = getattr(dist.ReduceOp, GLOO_OPS.get(case.op, "SUM"))

        def call(*arrays: Any) -> None:
            """PyTorch reduces in place: where the result goes elsewhere, a program copies its input there first."""
            if case.test == "barrier":
                dist.barrier()
                return
            x, out = arrays[0], arrays[-1] if arrays[-1] is not None else arrays[0].copy()
            if case.test in ("all_gather", "hypercube"):
                all_gather(torch.from_numpy(out).view(-1), torch.from_numpy(x))
                return
            if out is not x:
                out[...] = x
            given = {"broadcast": (case.root,), "reduce": (case.root, op), "all_reduce": (op,)}[case.test]
            getattr(dist, case.test)(torch.from_numpy(out), *given)

        return call

    return peer


def _cupyx(comm: Communicator, device: Device) -> Peer:
    if device.name != "cuda":
        raise LeftOut("cupyx.distributed works on CuPy arrays: needs --device cuda")
    try:
        import cupyx.distributed

        library = cupyx.distributed.init_process_group(comm.size, comm.rank, use_mpi=True)
    except Exception as error:  # NCCL, MPI and sockets each have errors of their own
        raise LeftOut(f"cupyx.distributed: {error}") from error
    calls: dict[str, Callable[..., Call]] = {  # of the case, then of the arrays
        "barrier": lambda case: library.barrier, "all_to_all": lambda case: library.all_to_all,
        "broadcast": lambda case: lambda x: library.broadcast(x, case.root),
        "all_reduce": lambda case: lambda x, out: library.all_reduce(x, out, case.op),
        "reduce": lambda case: lambda x, out: library.reduce(x, x if out is None else out, case.root, case.op),
        "reduce_scatter": lambda case: lambda x, out: library.reduce_scatter(x, out, out.size, case.op),
        **dict.fromkeys(("all_gather", "hypercube"), lambda case: lambda x, out: library.all_gather(x, out, x.size)),
    }

    def peer(case: Case) -> Call:
        _require("cupyx.distributed", case, calls, reduces=case.op in ("sum", "prod", "min", "max"),
                 moves=case.dtype not in EXTENDED)
        return calls[case.test](case)

    return peer


def _unchecked(comm: Communicator, device: Device) -> Peer:
    """Ourselves by "auto", without the comparison of calls: what it costs."""
    options = {} if comm.executor is None else {"executor": comm.executor}
    unchecked = Communicator.from_mpi(comm.mpi, check="off", timeout=comm.timeout, **options)
    return lambda case: ours_by(unchecked, case, "auto", device)


PEERS: dict[str, Callable[[Communicator, Device], Peer]] = {
    "mpi": _mpi, "nccl": _nccl, "gloo": _gloo, "cupyx": _cupyx, "unchecked": _unchecked,
}
