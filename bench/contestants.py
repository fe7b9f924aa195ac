"""The contestants: gpucoll's algorithms, and the libraries compared with gpucoll (peers)."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from gpucoll import ArgumentError, Communicator, GpucollError, algorithms, internal
from gpucoll.calibration.measure import ranks_of
from gpucoll.core.dtypes import DTYPES, EXTENDED
from gpucoll.core.ops import op_of
from gpucoll.device.gpus import nccl_id

from .arguments import ANY, POINT_TESTS, Settings
from .cases import BenchCase, Contestant
from .data import BenchTurn, Data
from .devices import BenchDevice

ContestantCall: TypeAlias = Callable[..., Any]
Peer: TypeAlias = Callable[[BenchCase], ContestantCall]
MPI_CALLS = {"all_reduce": "Allreduce", "reduce": "Reduce", "broadcast": "Bcast", "all_gather": "Allgather",
             "hypercube": "Allgather", "gather": "Gather", "scatter": "Scatter", "all_to_all": "Alltoall",
             "reduce_scatter": "Reduce_scatter_block", "scan": "Scan", "exscan": "Exscan", "barrier": "Barrier",
             "sendrecv": "Sendrecv"}
NCCL_TESTS = ("all_reduce", "reduce", "broadcast", "all_gather", "hypercube", "reduce_scatter", "sendrecv")
GLOO_TESTS = ("all_reduce", "reduce", "broadcast", "all_gather", "hypercube", "barrier")
GLOO_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "band": "BAND", "bor": "BOR", "bxor": "BXOR"}
POINT_ALGORITHMS = dict(zip(POINT_TESTS, ("sendrecv", "recursive_doubling"), strict=True))  # of each test


class LeftOutPeer(Exception):
    """A peer cannot take part; the text is the reason."""


class Left(NamedTuple):
    """Anything left out of the measurement, and the reason."""

    what: str
    reason: str


def field(comm: Communicator, case: BenchCase, options: Settings, device: BenchDevice,
          peers: Mapping[str, Peer | str]) -> tuple[list[Contestant], list[Left]]:
    """Return the contestants for a case, peers last, and the contestants left out.

    Every returned contestant has done the test once. If one of gpucoll's algorithms cannot do the test, raise
    ArgumentError or DtypeError, the same on every rank.
    """
    if case.test == "hypercube" and case.ranks & (case.ranks - 1):
        return [], [Left("hypercube", f"nRanks {case.ranks} is not a power of 2, skipping")]
    data, contestants, left_out = Data(case, comm.rank, count=1, device=device), list[Contestant](), list[Left]()
    for name in _names(case, options):
        contestant = Contestant(name, ours_by(comm, case, name, device))
        try:
            contestant.call(*data.arguments(BenchTurn(0)))
            contestants.append(contestant)
        except ArgumentError as error:  # the same on every rank, before any data move
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


def _names(case: BenchCase, options: Settings) -> Iterable[str]:
    """Return the algorithms to measure, "all" expanded; with several tests, only algorithms known to this test."""
    if case.test in POINT_TESTS:
        return [POINT_ALGORITHMS[case.test]] if {"auto", "all"} & set(options.algorithms) else []
    scheduled = algorithms(case.test, size=case.ranks, op=case.op if case.row.reduces else None, dtype=case.dtype,
                           device=options.flags.device)
    every = {None: (*scheduled, "native"), "native": ("native",)}.get(options.flags.executor, scheduled)
    known = (*algorithms(case.test), *ANY)
    asked = [name for name in options.algorithms if len(options.tests) == 1 or name.partition("(")[0] in known]
    return dict.fromkeys(name for one in asked for name in (every if one == "all" else (one,)))


def ours_by(comm: Communicator, case: BenchCase, algorithm: str, device: BenchDevice) -> Callable[..., Any]:
    """Return gpucoll's call of the test by `algorithm`."""
    if case.test in POINT_TESTS:
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
    """Send to the right neighbour and receive from the left neighbour, as nccl-tests does."""
    return comm.sendrecv(x, out, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size)


def _hypercube(comm: Communicator, x: Any, out: Any) -> Any:
    """Gather all blocks by recursive doubling, message by message, as in nccl-tests. Needs a power of two of ranks."""
    out[comm.rank] = x
    mask = 1
    while mask < comm.size:
        mine, peer = comm.rank & ~(mask - 1), comm.rank ^ mask
        theirs = mine ^ mask
        comm.sendrecv(out[mine:mine + mask], out[theirs:theirs + mask], peer, peer)
        mask *= 2
    return out


def meet(comm: Communicator, device: BenchDevice, names: Iterable[str]) -> dict[str, Peer | str]:
    """Return each peer, ready to start, or the reason for leaving the peer out; collective, the same on every rank."""
    return {name: agreed(comm, functools.partial(PEERS_BY_NAME[name], comm, device)) for name in names}


def agreed(comm: Communicator, make: Callable[[], Any]) -> Any:
    """Return the result of `make`; if any rank raises LeftOut, return the first rank's reason on all ranks."""
    made, reason = None, None
    try:
        made = make()
    except LeftOutPeer as left:
        reason = str(left)
    return next(filter(None, ranks_of(comm).allgather(reason)), made)


def _rehearsed(peer: Peer, data: Data) -> Callable[..., Any]:
    """Return a peer's call after a first successful call; raise LeftOut if the library refuses.

    Some libraries hang if only some ranks refuse; here all ranks refuse the same calls.
    """
    call = peer(data.case)
    try:
        call(*data.arguments(BenchTurn(0)))
    except (GpucollError, KeyboardInterrupt) as error:
        if getattr(error, "code", "") == "GC-DETERMINISTIC":  # the same on every rank, before any data move
            raise LeftOutPeer(str(error)) from error
        raise
    except Exception as error:  # any error of a foreign library is a reason
        raise LeftOutPeer(f"{data.case.test} by {data.case.op} of {data.case.dtype}: {error}") from error
    return call


def every_case(options: Settings, ranks: int) -> Iterator[BenchCase]:
    """Yield all requested cases, in nccl-tests' order; raise ArgumentError for an invalid root."""
    for test in options.tests:
        for dtype in options.dtypes:
            yield from (BenchCase(test, dtype, op, root, ranks)
                        for op in options.ops_of(test, dtype) for root in options.roots_of(test, ranks))


# Peers: each peer is created once per run and then asked for a call for each case: the blocking call of a program
# without gpucoll. If a peer lacks a feature, LeftOut is raised with the reason, and the run goes on without the peer.


def _require(name: str, case: BenchCase, tests: Any, *, reduces: bool, moves: bool = True) -> None:
    """Raise LeftOut if the peer lacks the test, the reduction or the dtype."""
    if case.row.ragged:
        raise LeftOutPeer(f"{case.test}: its call is told the counts that gpucoll's finds out by itself")
    if case.test not in tests:
        raise LeftOutPeer(f"{name} has no {case.test}")
    if case.row.reduces and not reduces:
        raise LeftOutPeer(f"{name} has no reduction by {case.op} of {case.dtype}")
    if not moves:
        raise LeftOutPeer(f"{name} is not called with arrays of {case.dtype}")


def _mpi(comm: Communicator, device: BenchDevice) -> Peer:
    if comm.mpi is None:
        raise LeftOutPeer("these ranks have met without MPI")
    from mpi4py import MPI

    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def peer(case: BenchCase) -> ContestantCall:
        in_bytes = DTYPES[case.dtype].mpi is None  # dtypes unknown to MPI, such as bfloat16
        _require("MPI itself", case, MPI_CALLS, reduces=case.op != "avg" and not in_bytes)
        options: dict[str, Any] = {"op": getattr(MPI, op_of(case.op).mpi or "")} if case.row.reduces else {}
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
            """Copy to the host and back, as needed by an MPI without GPU support."""
            held = {id(array): device.read(array, case.dtype).copy() for array in arrays if array is not None}
            on_host(*(None if array is None else held[id(array)] for array in arrays))
            if arrays and arrays[-1] is not None:
                device.write(arrays[-1], held[id(arrays[-1])])

        return through_host if device.name == "cuda" else on_host

    return peer


def _nccl(comm: Communicator, device: Any) -> Peer:
    if device.name != "cuda":
        raise LeftOutPeer("NCCL works on GPU memory: needs --device cuda")
    try:
        from cupy.cuda import nccl

        library = nccl.NcclCommunicator(comm.size, nccl_id(ranks_of(comm)), comm.rank)
    except (ImportError, RuntimeError) as error:  # CuPy's NCCL errors are RuntimeErrors
        raise LeftOutPeer(f"NCCL: {error}") from error

    def constant(name: str | None) -> Any:
        return getattr(nccl, f"NCCL_{name.removeprefix('nccl').upper()}", None) if name else None

    def peer(case: BenchCase) -> ContestantCall:
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
    """Return torch.distributed, initialised over Gloo; raise LeftOut without PyTorch. A collective call."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise LeftOutPeer("PyTorch is not installed: pip install torch") from error
    if not dist.is_initialized():
        host = "127.0.0.1" if comm.nodes == 1 else socket.gethostname()
        with socket.socket() as probe:  # a free port of rank 0's host
            probe.bind((host, 0))
            where = ranks_of(comm).bcast(f"{host}:{probe.getsockname()[1]}")
        dist.init_process_group("gloo", init_method=f"tcp://{where}", rank=comm.rank, world_size=comm.size)
    return dist


def _gloo(comm: Communicator, device: BenchDevice) -> Peer:
    if device.name == "cuda":
        raise LeftOutPeer("Gloo is measured on host memory: needs --device cpu")
    dist = gloo(comm)
    import torch

    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the newer name first

    def peer(case: BenchCase) -> ContestantCall:
        _require("Gloo", case, GLOO_TESTS, reduces=case.op in GLOO_OPS, moves=case.dtype not in EXTENDED and (
            case.dtype == "uint8" or not case.dtype.startswith("uint")))
        op = getattr(dist.ReduceOp, GLOO_OPS.get(case.op, "SUM"))

        def call(*arrays: Any) -> None:
            """Call PyTorch; reductions are in place, so copy the input first if the result goes elsewhere."""
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


def _cupyx(comm: Communicator, device: BenchDevice) -> Peer:
    if device.name != "cuda":
        raise LeftOutPeer("cupyx.distributed works on CuPy arrays: needs --device cuda")
    try:
        import cupyx.distributed

        library = cupyx.distributed.init_process_group(comm.size, comm.rank, use_mpi=True)
    except Exception as error:  # NCCL, MPI and sockets each have their own errors
        raise LeftOutPeer(f"cupyx.distributed: {error}") from error
    calls: dict[str, Callable[..., ContestantCall]] = {  # by test and case: a function of the arrays
        "barrier": lambda case: library.barrier, "all_to_all": lambda case: library.all_to_all,
        "broadcast": lambda case: lambda x: library.broadcast(x, case.root),
        "all_reduce": lambda case: lambda x, out: library.all_reduce(x, out, case.op),
        "reduce": lambda case: lambda x, out: library.reduce(x, x if out is None else out, case.root, case.op),
        "reduce_scatter": lambda case: lambda x, out: library.reduce_scatter(x, out, out.size, case.op),
        **dict.fromkeys(("all_gather", "hypercube"), lambda case: lambda x, out: library.all_gather(x, out, x.size)),
    }

    def peer(case: BenchCase) -> ContestantCall:
        _require("cupyx.distributed", case, calls, reduces=case.op in ("sum", "prod", "min", "max"),
                 moves=case.dtype not in EXTENDED)
        return calls[case.test](case)

    return peer


def _with(comm: Communicator, device: BenchDevice, **options: Any) -> Peer:
    """Return gpucoll by "auto" with these options of the communicator, whatever GPUCOLL_DETERMINISTIC says."""
    wanted = comm.options._replace(**{"deterministic": False, **options})
    other = Communicator(internal.link_of(comm).part(f"bench {sorted(options)}", range(comm.size)), wanted)
    return lambda case: ours_by(other, case, "auto", device)


PEERS_BY_NAME: dict[str, Callable[[Communicator, BenchDevice], Peer]] = {
    "mpi": _mpi, "nccl": _nccl, "gloo": _gloo, "cupyx": _cupyx,
    "unchecked": functools.partial(_with, check="off"), "deterministic": functools.partial(_with, deterministic=True),
    "exact": functools.partial(_with, deterministic="exact"),
}
